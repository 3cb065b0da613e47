"""Compressed files of a recording: whole and bounded, or refused by name."""

import os
import resource
import sys
from pathlib import Path

import pytest
import torch
import zstandard

from mock_scheduler.errors import CorruptRecordingError, RecordingError
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.storage import Storage, open_storage
from mock_scheduler.recording.storage.byte_sources import CompressedSource, MemorySource
from mock_scheduler.recording.storage.byte_sources import open_compressed as open_compressed_source
from mock_scheduler.recording.writing.opening import WriterOptions
from tests.recording.recordings import record, request


def open_compressed(data: bytes, *, path: str) -> CompressedSource:
    return open_compressed_source(MemorySource(bytearray(data), path=path), path=path)


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


def unpack(data: bytes, path: str = "a.zst") -> bytes:
    source = open_compressed(data, path=path)
    return bytes(source.read(0, source.size_bytes))


def frames() -> dict[str, tuple[bytes, str]]:
    """Damaged frames, and what is said of each."""
    whole = zstandard.ZstdCompressor(write_checksum=True).compress(b"content" * 100)
    stream = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    small = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(bytes(300)))
    large = bytearray(small)
    position = small.index((300 - 256).to_bytes(2, "little"))  # a size of 256 to 65791 is stored less 256
    small[position : position + 2] = (301 - 256).to_bytes(2, "little")
    large[position : position + 2] = (299 - 256).to_bytes(2, "little")
    flipped, unused = bytearray(whole), bytearray(whole)
    flipped[12] ^= 1
    unused[4] ^= 1 << 4
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    other = "the zstd frame is damaged (its header is not one that this program writes)"
    return {
        "flipped": (bytes(flipped), "the zstd frame is damaged"),
        "trailing": (whole + b"xyz", "3 bytes follow the zstd frame"),
        "two frames": (whole + whole, f"{len(whole)} bytes follow the zstd frame"),
        "a frame to pass over": (whole + skippable, "12 bytes follow the zstd frame"),
        "no size": (stream.compress(b"x" * 10) + stream.flush(), "the zstd frame does not say how large"),
        "no checksum": (zstandard.ZstdCompressor(write_checksum=False).compress(b"content"), other),
        "an unused bit": (bytes(unused), other),
        "smaller": (bytes(small), "the zstd frame is damaged"),
        "larger": (bytes(large), "the zstd frame is damaged"),
        "no frame": (b"not zstd", "the zstd frame is damaged"),
        "empty": (b"", "the zstd frame is damaged"),
    }


@pytest.mark.parametrize("kind", list(frames()))
def test_a_damaged_frame_is_corrupt_and_named(kind: str) -> None:
    data, reason = frames()[kind]
    with pytest.raises(CorruptRecordingError) as caught:
        unpack(data, "r/step.zst")
    assert str(caught.value).startswith(f"r/step.zst: {reason}")
    assert str(caught.value).endswith("Restore it from a copy or record again.")


@pytest.mark.parametrize("content", [b"", b"content" * 100, bytes(300_000)], ids=["empty", "small", "several blocks"])
def test_every_truncation_is_found_before_anything_is_unpacked(content: bytes) -> None:
    """The decoder takes a frame without the last 1 to 4 bytes, its checksum, for whole; and so did this program."""
    data = zstandard.ZstdCompressor(level=9, write_checksum=True).compress(content)
    for size in range(len(data)):
        with pytest.raises(CorruptRecordingError, match=r"the zstd frame is (not whole|damaged)"):
            open_compressed(data[:size], path="a.zst")
    assert unpack(data) == content


def test_a_changed_checksum_is_found_with_the_last_byte() -> None:
    data = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(b"content" * 100))
    data[-1] ^= 1
    source = open_compressed(bytes(data), path="a.zst")
    assert bytes(source.read(0, 7)) == b"content"
    with pytest.raises(CorruptRecordingError, match="the zstd frame is damaged"):
        source.read(600, 700)


def test_every_flipped_bit_of_a_compressed_file_is_found_or_harmless(tmp_path: Path) -> None:
    """Content is returned only if it is the content: some bits mean nothing to the decoder."""
    storage = open_storage(str(tmp_path))
    content = bytes(range(256)) * 3
    storage.publish("a.zst", [content])
    data = (tmp_path / "a.zst").read_bytes()
    found = 0
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            assert unpack(bytes(changed)) == content
        except CorruptRecordingError:
            found += 1
    assert found >= 8 * len(data) - 8


def test_parts_are_read_in_any_order() -> None:
    content = os.urandom(1000)
    source = open_compressed(zstandard.ZstdCompressor(write_checksum=True).compress(content), path="a.zst")
    parts = [(0, 10), (500, 600), (5, 20), (990, 1000), (0, 1000), (1000, 1000)]
    assert [bytes(source.read(start, stop)) for start, stop in parts] == [content[a:b] for a, b in parts]
    with pytest.raises(CorruptRecordingError, match="bytes 0 to 1001 are outside the file, which has 1000"):
        source.read(0, 1001)


def test_a_frame_that_says_too_much_is_refused_before_memory_is_taken() -> None:
    huge = bytearray.fromhex("28b52ffde4") + (2**40).to_bytes(8, "little") + bytes.fromhex("01000000000000")
    with pytest.raises(CorruptRecordingError, match=rf"says its content has {2**40} bytes; the limit is {16 * 2**30}"):
        open_compressed(bytes(huge), path="a.zst")
    lying = huge[:5] + (15 * 2**30).to_bytes(8, "little") + huge[13:]
    with pytest.raises(CorruptRecordingError, match=rf"has {15 * 2**30} bytes; its blocks hold at most 0"):
        open_compressed(bytes(lying), path="a.zst")


def test_a_small_file_that_unpacks_to_a_gigabyte_is_refused_by_its_head(tmp_path: Path) -> None:
    """The whole content was unpacked before the step's own header, which knows its size, was looked at."""
    record(tmp_path, options=WriterOptions(compression="zstd"))
    bomb = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(bytes(2**28))
    (tmp_path / "train/step_000000.safetensors.zst").write_bytes(bomb)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorruptRecordingError, match="8215 bytes unpack to 268435456; the limit is 67108864"):
        RecordingReader(str(tmp_path)).open_step(request(0))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024


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


def test_a_hole_in_the_place_of_a_file_is_refused_by_its_first_block(tmp_path: Path) -> None:
    """20 GB of nothing were read before anything was looked at."""
    storage = open_storage(str(tmp_path))
    storage.publish("a.zst", [b"content"])
    for size in (20 * 2**30, 200 * 2**30):
        os.truncate(tmp_path / "a.zst", size)
        with pytest.raises(CorruptRecordingError, match="follow the zstd frame"):
            storage.open_source("a.zst")
    (tmp_path / "a.zst").write_bytes(bytes.fromhex("28b52ffde4") + (2**30).to_bytes(8, "little"))
    os.truncate(tmp_path / "a.zst", 20 * 2**30)
    with pytest.raises(CorruptRecordingError, match="block at byte 13"):
        storage.open_source("a.zst")


def test_a_step_of_one_value_is_refused_when_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"shrinks to .*, more than 1000 times, which no reader takes"):
        open_storage(str(tmp_path)).publish("a.zst", [bytes(70 * 2**20)])
    # Below 64 MiB, however small it gets.
    storage = open_storage(str(tmp_path))
    storage.publish("b.zst", [bytes(60 * 2**20)])
    assert storage.open_source("b.zst").size_bytes == 60 * 2**20
