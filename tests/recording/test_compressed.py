"""Compressed files of a recording: whole and bounded, or refused by name."""

import os
import resource
import sys
from pathlib import Path

import pytest
import torch
import zstandard

from mock_scheduler.errors import CorruptRecordingError, RecordingError
from mock_scheduler.recording.compressed import decompress
from mock_scheduler.recording.storage import Storage, open_storage


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "rec"))


def read_all(storage: Storage, name: str) -> bytes:
    source = storage.open_source(name)
    return bytes(source.read(0, source.size_bytes))


def test_a_compressed_file_reads_as_what_was_written(storage: Storage) -> None:
    pieces = [bytes(1000), b"tail"]
    size_bytes = storage.publish("a.zst", pieces)
    assert size_bytes == storage.size_on_disk("a.zst") < 100
    assert read_all(storage, "a.zst") == b"".join(pieces)
    torch.frombuffer(storage.open_source("a.zst").read(0, 8), dtype=torch.int64).fill_(-1)
    assert read_all(storage, "a.zst") == b"".join(pieces)
    assert storage.publish("empty.zst", []) > 0
    assert read_all(storage, "empty.zst") == b""


def test_equal_content_gives_equal_bytes_however_it_is_cut(storage: Storage) -> None:
    data = os.urandom(5000) + bytes(200_000)
    storage.publish("a.zst", [data])
    storage.publish("b.zst", [data[i : i + 777] for i in range(0, len(data), 777)])
    stored = [storage.read_bytes(name, max_bytes=10**6) for name in ("a.zst", "b.zst")]
    assert stored[0] == stored[1]
    assert zstandard.get_frame_parameters(stored[0]).content_size == len(data)


def frames() -> dict[str, tuple[bytes, str]]:
    """Damaged frames, and what is said of each."""
    whole = zstandard.ZstdCompressor(write_checksum=True).compress(b"content" * 100)
    stream = zstandard.ZstdCompressor().compressobj()
    forged = bytearray(zstandard.ZstdCompressor().compress(bytes(300)))
    position = forged.index((300 - 256).to_bytes(2, "little"))  # a size of 256 to 65791 is stored less 256
    forged[position : position + 2] = (301 - 256).to_bytes(2, "little")
    more = bytearray(zstandard.ZstdCompressor(write_checksum=False).compress(bytes(300)))
    more[position : position + 2] = (299 - 256).to_bytes(2, "little")
    flipped = bytearray(whole)
    flipped[12] ^= 1
    return {
        "truncated": (whole[:-6], "the zstd frame"),
        "flipped": (bytes(flipped), "the zstd frame is damaged"),
        "trailing": (whole + b"xyz", "the zstd frame is damaged"),
        "two frames": (whole + whole, "the zstd frame says its content has 700 bytes, but it has more"),
        "no size": (stream.compress(b"x" * 10) + stream.flush(), "the zstd frame does not say how large"),
        "smaller": (bytes(forged), "the zstd frame"),
        "larger": (bytes(more), "the zstd frame"),
        "no frame": (b"not zstd", "the zstd frame is damaged"),
        "empty": (b"", "the zstd frame is damaged"),
    }


@pytest.mark.parametrize("kind", list(frames()))
def test_a_damaged_frame_is_corrupt_and_named(storage: Storage, kind: str) -> None:
    data, reason = frames()[kind]
    storage.publish("plain", [data])
    with pytest.raises(CorruptRecordingError) as caught:
        decompress(storage.read_bytes("plain", max_bytes=10**6), path=storage.path("step.zst"))
    assert str(caught.value).startswith(f"{storage.path('step.zst')}: {reason}")
    assert str(caught.value).endswith("Restore it from a copy or record again.")


def test_every_flipped_bit_of_a_compressed_file_is_found_or_harmless(tmp_path: Path) -> None:
    """Content is returned only if it is the content: some header bits mean nothing to the decoder."""
    storage = open_storage(str(tmp_path))
    content = bytes(range(256)) * 3
    storage.publish("a.zst", [content])
    data = (tmp_path / "a.zst").read_bytes()
    found = 0
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            assert bytes(decompress(bytes(changed), path="a")) == content
        except CorruptRecordingError:
            found += 1
    assert found >= 8 * len(data) - 8


def test_a_frame_that_says_too_much_is_refused_before_memory_is_taken() -> None:
    huge = bytearray.fromhex("28b52ffde0") + (2**40).to_bytes(8, "little") + bytes.fromhex("010000")
    with pytest.raises(CorruptRecordingError, match=rf"says its content has {2**40} bytes; the limit is {16 * 2**30}"):
        decompress(bytes(huge), path="a.zst")
    lying = huge[:5] + (15 * 2**30).to_bytes(8, "little") + huge[13:]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptRecordingError, match="the zstd frame is damaged"):
        decompress(bytes(lying), path="a.zst")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_zstandard_that_is_absent_is_an_error_that_says_what_to_install(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(RecordingError) as caught:
        storage.publish("a.zst", [b"x"])
    assert str(caught.value) == (
        "compressed recordings (rollout_mock.compression: zstd, files ending in .zst) need the package zstandard, "
        "which is not installed: pip install 'mock-scheduler[zstd]'"
    )
    assert storage.list_names("") == []
