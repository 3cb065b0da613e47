"""A recording's location: local folders, and what every storage must keep to."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.registry import known_implementations

from mock_scheduler.errors import CorruptRecordingError, RecordingError
from mock_scheduler.recording.storage import Storage, local, open_storage
from mock_scheduler.recording.storage.local import LocalStorage
from mock_scheduler.support.files import publish_new

PIECES = [b"abc", bytearray(b"def"), memoryview(b"ghi"), b""]


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """Each kind of storage; tests that use it state what holds for all."""
    if request.param == "local":
        yield open_storage(str(tmp_path / "rec"))
        return
    yield open_storage(f"memory://{tmp_path.name}/rec")
    memory = fsspec.filesystem("memory")
    for path in memory.find(f"/{tmp_path.name}"):
        memory.rm_file(path)


def read_all(storage: Storage, name: str) -> bytes:
    source = storage.open_source(name)
    return bytes(source.read(0, source.size_bytes))


def test_pieces_are_published_in_order_and_read_back(storage: Storage) -> None:
    assert storage.publish("train/step_000000.safetensors", PIECES) == 9
    source = storage.open_source("train/step_000000.safetensors")
    assert source.size_bytes == 9
    assert bytes(source.read(0, 9)) == b"abcdefghi"
    assert bytes(source.read(2, 5)) == b"cde"
    assert bytes(source.read(4, 4)) == b""
    assert storage.read_bytes("train/step_000000.safetensors", max_bytes=9) == b"abcdefghi"
    assert storage.size_on_disk("train/step_000000.safetensors") == 9


def test_what_is_read_may_be_written_to_and_stays_private(storage: Storage) -> None:
    storage.publish("a", [b"\0" * 8])
    tensor = torch.frombuffer(storage.open_source("a").read(0, 8), dtype=torch.int64)
    tensor.fill_(-1)
    assert read_all(storage, "a") == b"\0" * 8


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (4, 5), (2, 1), (-1, 2)])
def test_a_range_outside_the_file_is_an_error_that_names_it(storage: Storage, start: int, stop: int) -> None:
    storage.publish("a", [b"abc"])
    with pytest.raises(CorruptRecordingError) as caught:
        storage.open_source("a").read(start, stop)
    assert str(caught.value) == (
        f"{storage.path('a')}: bytes {start} to {stop} are outside the file, which has 3: truncated or changed. "
        "Restore it from a copy or record again."
    )


def test_an_empty_file_is_read_as_empty(storage: Storage) -> None:
    assert storage.publish("a", []) == 0
    assert read_all(storage, "a") == b""


def test_a_name_that_is_taken_stays_as_it_was(storage: Storage) -> None:
    storage.publish("train/a", [b"first"])
    with pytest.raises(FileExistsError) as caught:
        storage.publish("train/a", [b"second"])
    assert not isinstance(caught.value, RecordingError)
    assert read_all(storage, "train/a") == b"first"
    assert storage.list_names("train") == ["a"]


def test_replacing_writes_over_the_older_file(storage: Storage) -> None:
    storage.replace("retention.json", b"1")
    storage.replace("retention.json", b"22")
    assert storage.read_bytes("retention.json", max_bytes=2) == b"22"
    assert storage.list_names("") == ["retention.json"]


def test_names_are_listed_sorted_without_hidden_and_deeper_ones(storage: Storage) -> None:
    for name in ("b", "a", "train/step_000000/shard", "train/x", ".hidden", "train/.x.1.ab.tmp"):
        storage.publish(name, [b"x"])
    assert storage.list_names("") == ["a", "b", "train"]
    assert storage.list_names("train") == ["step_000000", "x"]
    assert storage.list_names("train/step_000000") == ["shard"]
    assert storage.list_names("absent") == []
    assert storage.list_names("a") == []


def test_files_and_folders_exist(storage: Storage) -> None:
    assert not storage.exists("")
    storage.publish("train/a", [b"x"])
    assert [storage.exists(name) for name in ("", "train", "train/a", "train/b", "val")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_a_folder_is_removed_with_its_files_and_an_absent_name_is_no_error(storage: Storage) -> None:
    for name in ("train/step_000000/commit.json", "train/step_000000/shard", "train/step_000001"):
        storage.publish(name, [b"12"])
    assert storage.size_on_disk("train/step_000000") == 4
    storage.remove("train/step_000000")
    storage.remove("train/step_000000")
    assert storage.list_names("train") == ["step_000001"]
    storage.remove("train/step_000001")
    assert storage.list_names("train") == []
    with pytest.raises(FileNotFoundError):
        storage.size_on_disk("train/step_000001")


def test_an_absent_file_is_file_not_found(storage: Storage) -> None:
    storage.publish("file", [b""])
    for name in ("absent", "absent/deeper", "file/below"):
        with pytest.raises(FileNotFoundError):
            storage.open_source(name)
        with pytest.raises(FileNotFoundError):
            storage.read_bytes(name, max_bytes=1)


def test_a_small_file_that_is_large_is_refused(storage: Storage) -> None:
    storage.publish("commit.json", [b"12345"])
    with pytest.raises(CorruptRecordingError) as caught:
        storage.read_bytes("commit.json", max_bytes=4)
    assert str(caught.value) == (f"{storage.path('commit.json')}: over the limit of 4 bytes: not a file of a recording")


@pytest.mark.parametrize("name", ["../x", "/x", "a//b", "a/./b", "a/..", "a\\b", "a\0"])
def test_names_that_lead_elsewhere_are_refused(storage: Storage, name: str) -> None:
    for ask in (storage.exists, storage.open_source, storage.remove, storage.list_names, storage.size_on_disk):
        with pytest.raises(RecordingError, match="cannot name a file of the recording"):
            ask(name)
    with pytest.raises(RecordingError, match="cannot name a file of the recording"):
        storage.publish(name, [b"x"])
    with pytest.raises(RecordingError, match="cannot name a file of the recording"):
        storage.replace(name, b"x")


def test_a_writable_place_is_made_and_left_empty(storage: Storage) -> None:
    storage.check_writable()
    assert storage.list_names("") == []


# --------------------------------------------------------------------------------------------------------------- local


@pytest.mark.parametrize("location", ["rec", "./rec", "/tmp/rec", "C://rec", "a:b", "s3:/x", "with space/é"])
def test_what_has_no_protocol_is_a_folder(location: str) -> None:
    storage = open_storage(location)
    assert isinstance(storage, LocalStorage)
    assert storage.location == location
    assert storage.path("train/a") == os.path.join(location, "train/a")


def test_a_file_url_is_a_folder(tmp_path: Path) -> None:
    storage = open_storage(f"file://{tmp_path}/a%20b")
    storage.publish("x", [b"1"])
    assert (tmp_path / "a b" / "x").read_bytes() == b"1"
    assert storage.location == f"file://{tmp_path}/a%20b"
    assert storage.path("x") == f"{tmp_path}/a b/x"
    for location in ("file://host/x", "file://"):
        with pytest.raises(RecordingError, match="names no local folder"):
            open_storage(location)


def test_opening_touches_nothing(tmp_path: Path) -> None:
    open_storage(str(tmp_path / "rec"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("ask", ["exists", "open_source", "list_names", "remove", "size_on_disk"])
def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path, ask: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("secret")
    (tmp_path / "rec").mkdir()
    os.symlink(tmp_path / "elsewhere", tmp_path / "rec" / "train")
    storage = open_storage(str(tmp_path / "rec"))
    for name in ("train", "train/file"):
        with pytest.raises(RecordingError) as caught:
            getattr(storage, ask)(name)
        target = name.replace("train", str(tmp_path / "elsewhere"))
        assert str(caught.value) == (
            f"{tmp_path}/rec/{name} is a link to {target}, outside the recording: it is not followed"
        )
    for write in (lambda: storage.publish("train/x", [b"1"]), lambda: storage.replace("train/file", b"1")):
        with pytest.raises(RecordingError, match="outside the recording"):
            write()
    assert [(p.name, p.read_text()) for p in (tmp_path / "elsewhere").iterdir()] == [("file", "secret")]


def test_a_link_inside_the_folder_is_followed_and_removing_it_leaves_its_target(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    storage.publish("a", [b"1"])
    os.symlink(tmp_path / "a", tmp_path / "b")
    assert read_all(storage, "b") == b"1"
    storage.remove("b")
    assert storage.list_names("") == ["a"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    storage = open_storage(str(tmp_path / "file" / "x"))
    with pytest.raises(RecordingError) as caught:
        storage.check_writable()
    assert str(caught.value) == (
        f"cannot record in {tmp_path}/file/x: {tmp_path}/file is not a folder. Check its permissions, or set another "
        "rollout_mock.dump_dir."
    )


def test_a_full_disk_leaves_no_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    storage = open_storage(str(tmp_path))
    storage.publish("train/a", [b"1"])
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RecordingError) as caught:
        storage.publish("train/b", [b"1", b"22"])
    assert str(caught.value) == (
        f"cannot write {tmp_path}/train/b (3 bytes): No space left on device. Nothing partial was left; earlier steps "
        "are intact. Check space and permissions of the folder, or set another rollout_mock.dump_dir."
    )
    assert os.listdir(tmp_path / "train") == ["a"]


def test_a_file_system_without_hard_links_still_never_overwrites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    storage = open_storage(str(tmp_path))
    storage.publish("sub/file", [b"first"])
    with pytest.raises(FileExistsError):
        storage.publish("sub/file", [b"second"])
    assert read_all(storage, "sub/file") == b"first"
    assert os.listdir(tmp_path / "sub") == ["file"]


def test_free_space_is_that_of_a_user_on_the_disk_of_a_folder_yet_to_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def statvfs(path: Path) -> os.statvfs_result:
        asked.append(str(path))
        return os.statvfs_result((4096, 512, 1000, 900, 700, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert open_storage(str(tmp_path / "not" / "yet")).free_bytes() == 700 * 512
    assert asked == [str(tmp_path)]


# ------------------------------------------------------------------------------------------------------------- opening


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(RecordingError) as caught:
        open_storage("s4://bucket/x")
    assert str(caught.value) == (
        "s4://bucket/x: Protocol not known: s4. Use a local folder, or a protocol of fsspec such as s3://, gs:// or "
        "abfs://"
    )


def test_a_package_that_is_absent_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        known_implementations,
        "nopkg",
        {"class": "no_such_package.FileSystem", "err": "Install no_such_package to access nopkg"},
    )
    with pytest.raises(RecordingError) as caught:
        open_storage("nopkg://bucket/x")
    assert str(caught.value) == (
        "nopkg://bucket/x needs a package that is not installed (Install no_such_package to access nopkg): "
        "pip install 'nopkg'"
    )


def test_chained_urls_are_refused() -> None:
    with pytest.raises(RecordingError, match=re.escape("chained URLs (::) are not supported")):
        open_storage("simplecache://x::s3://bucket/y")


def test_what_was_read_stays_when_the_file_is_overwritten_or_truncated(tmp_path: Path) -> None:
    """A file was mapped: what another process wrote into it in place changed batches that were verified and in the
    pipeline's hands, and its truncation ended this process with a SIGBUS."""
    storage = open_storage(str(tmp_path))
    storage.publish("a", [b"abcdef"])
    source = storage.open_source("a")
    read = source.read(1, 5)
    with open(tmp_path / "a", "r+b") as file:
        file.write(b"ghijkl")
        file.truncate(3)
    assert bytes(read) == b"bcde"
    with pytest.raises(CorruptRecordingError) as caught:
        source.read(0, 6)
    assert str(caught.value) == (
        f"{tmp_path}/a: it ended at byte 3 while it was read, of 6 when it was opened: another process truncated it. "
        "Restore it from a copy or record again."
    )


def test_a_file_that_was_removed_can_be_read_by_who_has_it_open(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    storage.publish("a", [b"abcdef"])
    source = storage.open_source("a")
    storage.remove("a")
    assert bytes(source.read(2, 6)) == b"cdef"


def test_an_opened_file_is_closed_with_its_source(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    storage.publish("a", [b"abc"])
    before = os.listdir("/proc/self/fd")
    sources = [storage.open_source("a") for _ in range(3)]
    assert len(os.listdir("/proc/self/fd")) == len(before) + 3
    sources.clear()
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A pipe where a step or a sealed file should be blocked the run for ever."""
    storage = open_storage(str(tmp_path))
    make(tmp_path / "a")
    kind = "a pipe" if make is os.mkfifo else "a folder"
    for read in (lambda: storage.open_source("a"), lambda: storage.read_bytes("a", max_bytes=9)):
        with pytest.raises(CorruptRecordingError) as caught:
            read()
        assert str(caught.value) == f"{tmp_path}/a is {kind}, where a regular file is expected: remove it"


@pytest.mark.parametrize(
    "name", ["train/step_000000.safetensors", "train/step_000000/shard_00000-of-00002.safetensors"]
)
def test_a_folder_that_becomes_a_link_after_it_was_looked_at_takes_no_file_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """While ``train`` was swapped for a link and back, 66 of 795 published steps landed outside."""
    (tmp_path / "out").mkdir()
    storage = LocalStorage(str(tmp_path / "rec"))
    storage.publish("train/step_000009.safetensors", PIECES)
    look = LocalStorage._inside

    def look_and_swap(self: LocalStorage, name: str) -> str:
        path = look(self, name)
        (tmp_path / "rec" / "train").rename(tmp_path / "rec" / "aside")
        (tmp_path / "rec" / "train").symlink_to(tmp_path / "out")
        return path

    monkeypatch.setattr(LocalStorage, "_inside", look_and_swap)
    with pytest.raises(RecordingError, match=r"train is a link to .*/out, outside the recording: it is not followed"):
        storage.publish(name, PIECES)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_is_swapped_while_a_file_is_written_keeps_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    storage = LocalStorage(str(tmp_path / "rec"))
    storage.publish("train/step_000009.safetensors", PIECES)

    def swap_and_publish(path: Path, pieces: object) -> None:
        (tmp_path / "rec" / "train").rename(tmp_path / "rec" / "aside")
        (tmp_path / "rec" / "train").symlink_to(tmp_path / "out")
        publish_new(path, pieces)  # type: ignore[arg-type]

    monkeypatch.setattr(local, "publish_new", swap_and_publish)
    storage.publish("train/step_000000.safetensors", PIECES)
    assert list((tmp_path / "out").iterdir()) == []
    assert (tmp_path / "rec" / "aside" / "step_000000.safetensors").read_bytes() == b"abcdefghi"


@pytest.mark.parametrize("location", ["rec", "./rec/", ".", ""])
def test_a_location_relative_to_the_working_directory_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str
) -> None:
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage(location)
    for name in ("recording.json", "train/step_000000/shard_00000-of-00002.safetensors"):
        storage.publish(name, PIECES)
        assert (tmp_path / location / name).read_bytes() == b"abcdefghi"
    storage.replace("recording.json", b"x")
    storage.remove("train")
    assert sorted(path.name for path in (tmp_path / location).iterdir()) == ["recording.json"]
