"""A folder belongs to one command at a time, also where its file system locks files and no folders, as NFS does."""

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from mock_scheduler.errors import ConfigError
from mock_scheduler.run_folder.command_folder import ALIGN_MARKER, claim_folder


@pytest.mark.parametrize("locks_folders", [True, False])
def test_a_second_command_is_kept_out_until_the_first_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks_folders: bool
) -> None:
    flock = fcntl.flock

    def flock_as_nfs(descriptor: int, operation: int) -> None:
        if not locks_folders and stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_as_nfs)
    folder = tmp_path / "align"
    with (
        claim_folder(folder, marker=ALIGN_MARKER),
        pytest.raises(ConfigError, match="another mock-scheduler align works in"),
        claim_folder(folder, marker=ALIGN_MARKER),
    ):
        pass
    with claim_folder(folder, marker=ALIGN_MARKER):
        pass
    assert list(folder.iterdir()) == []
    assert (tmp_path / ".align.lock").exists() is not locks_folders


def test_where_nothing_can_be_written_another_folder_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"file/out cannot be made: Not a directory; choose a folder .*--output-dir"),
        claim_folder(tmp_path / "file" / "out", marker=ALIGN_MARKER),
    ):
        pass
    # Root may write everywhere, so the question is answered for it.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with (
        pytest.raises(ConfigError, match=f"nothing can be written in {tmp_path}; choose a folder where you may write"),
        claim_folder(tmp_path, marker=ALIGN_MARKER),
    ):
        pass
