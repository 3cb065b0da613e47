"""Files appear whole or not at all, and leave nothing beside them."""

import errno
import math
import os
from pathlib import Path

import pytest

from mock_scheduler.support.files import (
    encode_json,
    load_json_object,
    make_folder,
    publish_new,
    remove_leftovers,
    rename_away,
    save_json,
    written_aside,
)


def test_a_file_is_seen_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "file"
    with written_aside(path) as aside:
        aside.write_text("new")
        assert not path.exists()
        assert (aside.parent, aside.name[0]) == (path.parent, ".")
    assert path.read_text() == "new"
    assert os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    """run.json, ledger.json and run_state.json were written in place: a kill left half of one, which counts as whole.

    A checkpoint is complete when its run_state.json is there, so a torn one made its folder look like a checkpoint.
    """
    path = tmp_path / "run_state.json"
    path.write_text("old")

    def write_half() -> None:
        with written_aside(path) as aside:
            aside.write_text("ne")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["run_state.json"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    save_json(tmp_path / "x.json", {"a": 1})
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left on device"):
        save_json(tmp_path / "x.json", {"a": 2})
    assert (tmp_path / "x.json").read_bytes() == encode_json({"a": 1})
    assert os.listdir(tmp_path) == ["x.json"]


def test_two_writers_do_not_share_a_hidden_name(tmp_path: Path) -> None:
    """The name aside was fixed, so that two processes wrote into one file and renamed the mixture."""
    path = tmp_path / "align.json"
    with written_aside(path) as first, written_aside(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert first != second
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["align.json"]


@pytest.mark.parametrize("kind", ["device", "folder"])
def test_what_is_no_file_is_never_replaced(tmp_path: Path, kind: str) -> None:
    """``--json /dev/null``, run as root, replaced the device by a file."""
    path = tmp_path / kind
    if kind == "device":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(OSError, match="Not a regular file") as caught:
        save_json(path, {})
    assert caught.value.filename == str(path)
    assert os.listdir(tmp_path) == [kind]


def test_json_is_sorted_indented_ascii_and_refuses_nan(tmp_path: Path) -> None:
    path = tmp_path / "a" / "x.json"
    save_json(path, {"b": "ü\udc80", "a": 2})
    assert path.read_bytes() == b'{\n  "a": 2,\n  "b": "\\u00fc\\udc80"\n}\n'
    save_json(path, {"b": 1, "a": 2}, sort_keys=False)
    assert path.read_bytes() == b'{\n  "b": 1,\n  "a": 2\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_json(path, {"a": math.nan})
    assert path.read_bytes() == b'{\n  "b": 1,\n  "a": 2\n}\n'


def test_a_new_file_is_never_published_over_another(tmp_path: Path) -> None:
    path = tmp_path / "a" / "file"
    publish_new(path, b"first")
    with pytest.raises(FileExistsError):
        publish_new(path, b"second")
    assert path.read_bytes() == b"first"
    assert os.listdir(path.parent) == ["file"]


def test_pieces_follow_each_other_whatever_their_kind_and_shape(tmp_path: Path) -> None:
    numbers = memoryview(bytearray(b"\1\0\2\0")).cast("H", (2, 1))
    publish_new(tmp_path / "file", [b"ab", bytearray(b"c"), memoryview(b""), numbers, b"z"])
    assert (tmp_path / "file").read_bytes() == b"abc\1\0\2\0z"
    publish_new(tmp_path / "empty", [])
    assert (tmp_path / "empty").read_bytes() == b""


def test_a_disk_that_takes_a_few_bytes_at_a_time_gets_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    publish_new(tmp_path / "file", [b"0123456789", b"abc", b"d"])
    assert (tmp_path / "file").read_bytes() == b"0123456789abcd"


def test_what_is_renamed_away_is_gone_and_is_removed_with_other_leftovers(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    publish_new(folder / "a", b"1")
    publish_new(tmp_path / "file", b"2")
    aside = [rename_away(folder), rename_away(tmp_path / "file")]
    assert [path.name[0] for path in aside] == [".", "."]
    assert (aside[0] / "a").read_bytes() == b"1"
    (tmp_path / ".lock").touch()
    (tmp_path / "kept.tmp").touch()
    (tmp_path / ".link.1.ab.tmp").symlink_to(tmp_path / "kept.tmp")
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".lock", "kept.tmp"]
    with pytest.raises(FileNotFoundError):
        rename_away(folder)


def test_a_folder_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_folder(tmp_path / "file" / "folder")
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        make_folder(tmp_path / "file")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"\xff", "is not JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"[1]", "is of type list, expected an object"),
    ],
)
def test_what_is_no_json_object_is_refused_in_words_that_go_on_from_its_name(
    tmp_path: Path, data: bytes, message: str
) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(data)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is compared
        load_json_object(path)
    assert str(caught.value) == message


def test_a_json_object_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    save_json(path, {"status": "completed", "wall_s": 1.5})
    assert load_json_object(path) == {"status": "completed", "wall_s": 1.5}
    with pytest.raises(FileNotFoundError):
        load_json_object(tmp_path / "absent")
