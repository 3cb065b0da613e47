"""Digests under this user's key: equal for equal values, of no use to anybody else."""

from __future__ import annotations

import hashlib
import hmac
import shutil
import stat
from pathlib import Path

import pytest

from mock_scheduler.support.local_key import find_key_file, is_own, keyed_digest, mark_own


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "mock-scheduler" / "key"


def test_equal_values_have_equal_digests_and_no_plain_ones(state: Path) -> None:
    assert find_key_file() == state
    digest = keyed_digest("1234")
    assert digest == keyed_digest("1234") != keyed_digest("1235")
    assert digest != hashlib.sha256(b"1234").hexdigest()
    assert len(digest) == 64


def test_the_key_is_this_users_alone(state: Path) -> None:
    keyed_digest("x")
    assert stat.S_IMODE(state.stat().st_mode) == 0o600
    assert stat.S_IMODE(state.parent.stat().st_mode) == 0o700
    assert len(state.read_bytes()) == 32
    assert [path.name for path in state.parent.iterdir()] == ["key"]


@pytest.mark.parametrize("fault", ["open", "short", "link", "folder"])
def test_a_key_that_others_may_know_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The digest then holds for this process: it equals no stored one."""
    state = tmp_path / fault / "mock-scheduler" / "key"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / fault))
    state.parent.mkdir(parents=True)
    known = b"k" * 32
    if fault == "folder":
        state.mkdir()
    else:
        target = state if fault != "link" else tmp_path / "other"
        target.write_bytes(known[: 3 if fault == "short" else 32])
        target.chmod(0o644 if fault == "open" else 0o600)
        if fault == "link":
            state.symlink_to(target)
    assert keyed_digest("1234") != hmac.new(known, b"1234", hashlib.sha256).hexdigest()
    assert keyed_digest("1234") == keyed_digest("1234")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "config.yaml"
    path.parent.mkdir()
    path.write_text("python: mine")
    mark_own(path)
    return path


def test_a_marked_file_is_ones_own_by_every_path_to_it(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_own(own)
    monkeypatch.chdir(own.parent)
    assert is_own(Path("config.yaml"))
    assert [path.name for path in sorted(own.parent.iterdir())] == [".own.config.yaml", "config.yaml"]


def test_a_file_that_was_changed_moved_or_sent_is_not(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(own.parent, tmp_path / "copy")
    assert not is_own(tmp_path / "copy" / "config.yaml")
    with monkeypatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path / "of another user"))
        assert not is_own(own)
    assert is_own(own)
    own.write_text("python: theirs")
    assert not is_own(own)
    assert not is_own(own.with_name("absent.yaml"))


def test_a_file_without_a_mark_or_with_a_guessed_one_is_not(own: Path) -> None:
    mark = own.with_name(".own.config.yaml")
    stated = mark.read_text()
    for guess in ("", stated[:-1], stated + "0", "0" * 64, hashlib.sha256(own.read_bytes()).hexdigest()):
        mark.write_text(guess)
        assert not is_own(own)
    mark.unlink()
    assert not is_own(own)


def test_a_mark_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    mark_own(tmp_path / "nowhere" / "config.yaml")
    assert not is_own(tmp_path / "nowhere" / "config.yaml")
