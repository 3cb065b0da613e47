"""Torch loads compiled kernels from a folder that any user of the machine can make first."""

from __future__ import annotations

import grp
import os
import tempfile
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from mock_scheduler.errors import ConfigError
from mock_scheduler.launch.kernel_cache import claim_kernel_cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Path(default_cache_dir())


def test_the_folder_of_kernels_is_made_for_this_user_alone(folder: Path) -> None:
    claim_kernel_cache({})
    assert folder.stat().st_mode & 0o777 == 0o700
    claim_kernel_cache({})


def test_a_folder_of_kernels_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o755)
    claim_kernel_cache({})
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to the user {owner}, so others decide what code runs; remove it"):
        claim_kernel_cache({})
    claim_kernel_cache({"TORCHINDUCTOR_CACHE_DIR": "/named"})


def test_a_folder_of_kernels_that_everybody_writes_or_a_link_is_refused(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by every user"):
        claim_kernel_cache({})
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is no folder"):
        claim_kernel_cache({})


def test_a_folder_of_kernels_that_a_group_writes_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems have a group for each user, and a mask that lets it write; any other group has others in it."""
    folder.mkdir()
    folder.chmod(0o775)
    user = folder.name.removeprefix("torchinductor_")
    own = grp.struct_group((user, "x", os.getegid(), []))
    monkeypatch.setattr(grp, "getgrgid", lambda _: own)
    claim_kernel_cache({})
    for group in ((*own[:3], ["another"]), ("staff", *own[1:])):
        monkeypatch.setattr(grp, "getgrgid", lambda _, group=group: grp.struct_group(group))
        with pytest.raises(ConfigError, match="can be written by its group"):
            claim_kernel_cache({})
    folder.chmod(0o755)
    claim_kernel_cache({})


def test_a_folder_of_kernels_that_others_may_swap_is_refused(folder: Path) -> None:
    folder.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="lies where every user can put another one in its place"):
        claim_kernel_cache({})
    folder.parent.chmod(0o1777)
    claim_kernel_cache({})
