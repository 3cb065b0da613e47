"""Objects of a bucket on this node: each fetched once for all of its processes, never stale, within a limit."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mock_scheduler.errors import ConfigError, ForeignFileError
from mock_scheduler.support.node_cache import (
    FOLDER_VARIABLE,
    LIMIT_VARIABLE,
    NodeCache,
    find_folder,
    find_limit,
    open_cache,
)
from mock_scheduler.support.object_stores import StoredObject
from tests.recording.processes import run_in_child

OBJECT = StoredObject(url="s3://bucket/a", size_bytes=5, version="1")


def writes(content: bytes, fetched: list[bytes]) -> Callable[[Path], None]:
    def fetch(path: Path) -> None:
        fetched.append(content)
        path.write_bytes(content)

    return fetch


def test_an_object_is_fetched_once_for_each_version(tmp_path: Path) -> None:
    cache, fetched = NodeCache(tmp_path, limit_bytes=100), list[bytes]()
    for _ in range(2):
        assert cache.use(OBJECT, writes(b"first", fetched), Path.read_bytes) == b"first"
    other = replace(OBJECT, version="2")
    assert cache.use(other, writes(b"other", fetched), Path.read_bytes) == b"other"
    assert cache.use(OBJECT, writes(b"first", fetched), Path.read_bytes) == b"first"
    assert fetched == [b"first", b"other"]
    # Where a store says no version, nothing tells whether an object is the same.
    for _ in range(2):
        cache.use(replace(OBJECT, version=""), writes(b"no ve", fetched), Path.read_bytes)
    assert fetched[2:] == [b"no ve"] * 2


def test_others_wait_for_the_one_that_fetches(tmp_path: Path) -> None:
    cache, fetched, read = NodeCache(tmp_path, limit_bytes=100), list[bytes](), list[bytes]()
    barrier = threading.Barrier(8)

    def use() -> None:
        barrier.wait()
        read.append(cache.use(OBJECT, writes(b"first", fetched), Path.read_bytes))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (read, fetched) == ([b"first"] * 8, [b"first"])


def test_the_object_used_longest_ago_goes(tmp_path: Path) -> None:
    cache, fetched = NodeCache(tmp_path, limit_bytes=12), list[bytes]()
    first, second, third = (replace(OBJECT, url=f"s3://bucket/{name}") for name in "abc")
    for one in (first, second, first, third, first):
        cache.use(one, writes(one.url[-1:].encode() * 5, fetched), Path.read_bytes)
        for path in (tmp_path / "objects").iterdir():  # clocks of files are coarse
            status = path.stat()
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 10**9))
    assert fetched == [b"aaaaa", b"bbbbb", b"ccccc"]
    cache.use(second, writes(b"bbbbb", fetched), Path.read_bytes)
    assert fetched[3:] == [b"bbbbb"]


def test_a_tenth_of_the_limit_is_made_free_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, counted = NodeCache(tmp_path, limit_bytes=100), list[int]()
    looked = cache._make_room
    monkeypatch.setattr(cache, "_make_room", lambda size: counted.append(size) or looked(size))
    for number in range(24):
        cache.use(replace(OBJECT, url=f"s3://bucket/{number}"), writes(b"first", []), Path.read_bytes)
    assert len(list((tmp_path / "objects").iterdir())) == 20
    # The first, which knows no room, and each second one after the room for 20.
    assert len(counted) == 1 + 2
    # Under another limit, and where the note says nothing, the kept objects are looked through again.
    other = NodeCache(tmp_path, limit_bytes=50)
    other.use(OBJECT, writes(b"first", []), Path.read_bytes)
    assert len(list((tmp_path / "objects").iterdir())) == 10
    (tmp_path / "lock-room").write_text("no number")
    other.use(replace(OBJECT, version="2"), writes(b"first", []), Path.read_bytes)
    assert len(list((tmp_path / "objects").iterdir())) == 10


def test_a_range_is_read_out_of_the_whole_or_kept_by_itself(tmp_path: Path) -> None:
    cache, asked = NodeCache(tmp_path, limit_bytes=100), list[tuple[int, int]]()

    def fetch(start: int, stop: int) -> bytes:
        asked.append((start, stop))
        return b"first"[start:stop]

    for _ in range(2):
        view = cache.read(OBJECT, 1, 4, fetch)
        assert view == b"irs"
        view[0] = 0  # the reader's own
    assert cache.read(OBJECT, 1, 3, fetch) == b"ir"
    assert asked == [(1, 4), (1, 3)]
    cache.use(OBJECT, writes(b"first", []), Path.read_bytes)
    assert cache.read(OBJECT, 0, 5, fetch) == b"first"
    assert len(asked) == 2
    # Of another version nothing is known, and of no version never.
    assert cache.read(replace(OBJECT, version="2"), 0, 5, fetch) == b"first"
    for _ in range(2):
        assert cache.read(replace(OBJECT, version=""), 0, 5, fetch) == b"first"
    assert asked[2:] == [(0, 5)] * 3
    with pytest.raises(OSError, match="s3://bucket/a#3-9: 2 of 6 bytes came: it was changed meanwhile"):
        cache.read(replace(OBJECT, version="3"), 3, 9, lambda start, stop: b"first"[start:stop])


def test_a_file_that_was_removed_while_it_was_taken_is_fetched_again(tmp_path: Path) -> None:
    cache, fetched = NodeCache(tmp_path, limit_bytes=100), list[bytes]()

    def take(path: Path) -> bytes:
        if len(fetched) == 1:
            path.unlink()
        return path.read_bytes()

    assert cache.use(OBJECT, writes(b"first", fetched), take) == b"first"
    assert len(fetched) == 2


def test_a_short_object_is_refused_and_nothing_of_it_kept(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, limit_bytes=100)
    with pytest.raises(OSError, match="s3://bucket/a: 3 of 5 bytes came: it was changed meanwhile"):
        cache.use(OBJECT, writes(b"abc", []), Path.read_bytes)
    assert list((tmp_path / "objects").iterdir()) == []


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, limit_bytes=100)

    def die(path: Path) -> None:
        path.write_bytes(b"fi")
        os._exit(9)

    assert run_in_child(lambda: cache.use(OBJECT, die, Path.read_bytes)) == ""
    assert [path.name[0] for path in (tmp_path / "objects").iterdir()] == ["."]
    assert cache.use(OBJECT, writes(b"first", []), Path.read_bytes) == b"first"
    assert [path.name[0] == "." for path in (tmp_path / "objects").iterdir()] == [False]


def test_what_was_left_of_another_object_goes_after_a_day(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path, limit_bytes=100)
    (tmp_path / "objects").mkdir()
    for name, age_s in ((".old.tmp", 25 * 3600), (".new.tmp", 60)):
        (tmp_path / "objects" / name).write_bytes(b"fi")
        os.utime(tmp_path / "objects" / name, times=(time.time() - age_s, time.time() - age_s))
    cache.use(OBJECT, writes(b"first", []), Path.read_bytes)
    assert [path.name for path in (tmp_path / "objects").iterdir() if path.name[0] == "."] == [".new.tmp"]


def test_the_folder_is_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "made"))
    assert find_folder() == tmp_path / "made"
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    (tmp_path / "made").chmod(0o777)
    with pytest.raises(ForeignFileError, match="not a folder that this user alone may write to; name another one by"):
        find_folder()
    with pytest.raises(ForeignFileError, match=f"may write to; name another one by {FOLDER_VARIABLE}$"):
        open_cache()


def test_of_a_limit_of_nothing_there_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "made"))
    assert open_cache() is not None
    monkeypatch.setenv(LIMIT_VARIABLE, "0")
    assert open_cache() is None
    (tmp_path / "file").touch()
    monkeypatch.setenv(LIMIT_VARIABLE, "1")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file" / "made"))
    with pytest.raises(ConfigError, match=f"name another one by {FOLDER_VARIABLE}, or set {LIMIT_VARIABLE}=0"):
        open_cache()


@pytest.mark.parametrize("text", ["", "2.5", "0"])
def test_a_limit_is_a_number_of_gib(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, text)
    assert find_limit() == int(float(text or 16) * 2**30)


@pytest.mark.parametrize("text", ["much", "-1", "nan", "inf"])
def test_another_limit_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, text)
    with pytest.raises(ConfigError, match=f"{LIMIT_VARIABLE}='{text}': expected how many GiB"):
        find_limit()
