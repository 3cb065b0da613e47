"""Copies of foreign folders hold what lies in them, and nothing that a link leads to elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mock_scheduler.errors import ConfigError
from mock_scheduler.support.foreign_files import copy_folder, refuse_link_out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "secret").write_text("secret")
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "deep" / "a").write_bytes(b"a")
    return tmp_path / "folder"


def test_files_and_links_within_are_copied(folder: Path, tmp_path: Path) -> None:
    (folder / "b").symlink_to("deep/a")
    (folder / "same").symlink_to("deep")
    copy_folder(folder, tmp_path / "copy", root=folder)
    copied = {path.relative_to(tmp_path / "copy").as_posix(): path for path in (tmp_path / "copy").rglob("*")}
    assert sorted(copied) == ["b", "deep", "deep/a", "same", "same/a"]
    assert not any(path.is_symlink() for path in copied.values())
    assert copied["b"].read_bytes() == b"a"


@pytest.mark.parametrize("target", ["../private", "../private/secret", "/etc", "../nowhere"])
def test_a_link_out_is_refused_by_name_and_nothing_is_copied(folder: Path, tmp_path: Path, target: str) -> None:
    (folder / "deep" / "link").symlink_to(Path("..", target) if target.startswith("..") else target)
    with pytest.raises(ConfigError, match=r"folder/deep/link leads to .*: links are not followed out of a folder"):
        copy_folder(folder, tmp_path / "copy", root=folder)
    assert not (tmp_path / "copy").exists()


def test_pipes_and_circles_are_refused(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(ConfigError, match="pipe is not a regular file: it is not copied"):
        copy_folder(folder, tmp_path / "copy", root=folder)
    (folder / "pipe").unlink()
    (folder / "deep" / "up").symlink_to("..")
    with pytest.raises(ConfigError, match="links in a circle are not followed"):
        copy_folder(folder, tmp_path / "copy", root=folder)


def test_the_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "name").symlink_to(folder)
    refuse_link_out(tmp_path / "name" / "deep", tmp_path / "name")
    with pytest.raises(ConfigError):
        refuse_link_out(tmp_path / "name" / ".." / "private", tmp_path / "name")
