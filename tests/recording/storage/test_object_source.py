"""Objects that are kept on the node: each range fetched once by all of its processes, the same bytes, or none kept."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mock_scheduler.errors import CorruptRecordingError, RecordingError
from mock_scheduler.recording.storage import open_storage
from mock_scheduler.recording.storage.remote import FsspecStorage
from mock_scheduler.support.node_cache import FOLDER_VARIABLE, LIMIT_VARIABLE, NodeCache

LARGE = bytes(range(256)) * 2**13  # 2 MiB


@pytest.fixture
def location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An object store in this process's memory, and a node that keeps nothing yet."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "node"))
    place = f"memory://{tmp_path.name}"
    yield place
    files = fsspec.filesystem("memory")
    if files.exists(place):
        files.rm(place, recursive=True)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges that were asked for of the store."""
    ranges: list[tuple[int, int]] = []
    cat_file = MemoryFileSystem.cat_file

    def noted(self: MemoryFileSystem, path: str, start: int, end: int) -> bytes:
        ranges.append((start, end))
        return bytes(cat_file(self, path, start=start, end=end))

    monkeypatch.setattr(MemoryFileSystem, "cat_file", noted)
    return ranges


def process_of(location: str) -> FsspecStorage:
    """The storage as each process of a node opens it."""
    storage = open_storage(location, is_kept=True)
    assert isinstance(storage, FsspecStorage)
    return storage


def write(location: str, name: str, content: bytes) -> None:
    fsspec.filesystem("memory").pipe_file(f"{location}/{name}", content)


def test_processes_of_a_node_fetch_each_range_once(location: str, fetched: list[tuple[int, int]]) -> None:
    write(location, "step", LARGE)
    for _ in range(3):
        source = process_of(location).open_source("step")
        assert source.size_bytes == len(LARGE)
        # The first bytes are there when it is opened; a range behind them is another one.
        assert source.read(5, 9) == LARGE[5:9]
        view = source.read(100, len(LARGE) - 3)
        assert view == LARGE[100:-3]
        view[0] = 1  # what a reader writes there, nobody else reads
    assert fetched == [(0, 2**20), (100, len(LARGE) - 3)]
    with pytest.raises(CorruptRecordingError, match="bytes 0 to 2097153 are outside the file"):
        source.read(0, len(LARGE) + 1)


@pytest.mark.parametrize("content", [b"", b"small"])
def test_a_small_object_is_one_range(location: str, fetched: list[tuple[int, int]], content: bytes) -> None:
    write(location, "step", content)
    for _ in range(2):
        source = process_of(location).open_source("step")
        assert source.read(0, source.size_bytes) == content
    assert fetched == [(0, len(content))] * bool(content)


def test_a_compressed_object_is_one_range(location: str, fetched: list[tuple[int, int]]) -> None:
    writer = process_of(location)
    size_bytes = writer.publish("step.zst", [LARGE])
    fetched.clear()
    for _ in range(2):
        source = process_of(location).open_source("step.zst")
        assert source.read(0, source.size_bytes) == LARGE
    assert fetched == [(0, size_bytes)]


def test_an_object_that_was_replaced_is_another(location: str) -> None:
    for content in (b"first", b"other"):
        write(location, "step", content)
        assert process_of(location).open_source("step").read(0, 5) == content


def test_an_absent_object_is_said_to_be(location: str) -> None:
    write(location, "step", b"first")
    storage = process_of(location)
    with pytest.raises(FileNotFoundError):
        storage.open_source("other")
    source = storage.open_source("step")
    fsspec.filesystem("memory").rm_file(f"{location}/step")
    assert source.read(0, 5) == b"first"  # it came when it was opened


def test_an_object_that_shrank_is_changed(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(location, "step", LARGE)
    source = process_of(location).open_source("step")
    write(location, "step", LARGE[: 2**20 + 7])
    with pytest.raises(CorruptRecordingError, match="/step: 7 of 16 bytes could be read: it was changed"):
        source.read(2**20, 2**20 + 16)


def full_disk(*_arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_the_node_cannot_keep_is_read_all_the_same_and_said_once(
    location: str,
    fetched: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(location, "step", LARGE)
    monkeypatch.setattr(NodeCache, "_fetch", full_disk)
    storage = process_of(location)
    with caplog.at_level(logging.WARNING, logger="mock_scheduler.rollout_mock"):
        for _ in range(2):
            assert storage.open_source("step").read(0, len(LARGE)) == LARGE
    assert fetched == [(0, 2**20), (0, len(LARGE))] * 2
    assert [record.getMessage() for record in caplog.records] == [
        f"[Rollout Mock] {location}/step is read without keeping it on this node: [Errno 28] No space left on device"
    ]


def test_where_nothing_is_to_be_kept_nothing_is(
    location: str, fetched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "0")
    write(location, "step", LARGE)
    for _ in range(2):
        assert process_of(location).open_source("step").read(0, 3) == LARGE[:3]
    assert fetched == [(0, 2**20)] * 2
    # A range over the limit is read past the node too.
    monkeypatch.setenv(LIMIT_VARIABLE, str(1.5 / 2**10))
    fetched.clear()
    for _ in range(2):
        assert process_of(location).open_source("step").read(0, len(LARGE)) == LARGE
    assert fetched == [(0, 2**20), (0, len(LARGE)), (0, len(LARGE))]


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_read(
    location: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file" / "x"))
    with pytest.raises(RecordingError) as caught:
        open_storage(location, is_kept=True)
    assert str(caught.value) == (
        f"{location} is read by way of a folder on this node: [Errno 20] Not a directory: '{tmp_path}/file/x'; name "
        f"another one by {FOLDER_VARIABLE}, or set {LIMIT_VARIABLE}=0"
    )
    assert isinstance(open_storage(location), FsspecStorage)
