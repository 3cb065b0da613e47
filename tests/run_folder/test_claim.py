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
