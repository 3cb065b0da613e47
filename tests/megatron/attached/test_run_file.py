"""The file that says what is attached to a training is read, or refused with one clear error."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from mock_scheduler.config.instruments import AttachedRun
from mock_scheduler.errors import ConfigError, TraceError
from mock_scheduler.megatron.attached.attach import load_run
from mock_scheduler.megatron.attached.run_files import RunFiles


def test_a_run_file_that_nests_too_deep_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "attached.json"
    path.write_text("[" * 200_000)
    with pytest.raises(ConfigError, match=r"attached\.json is no run file: "):
        load_run(path)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_disk_that_fails_is_one_clear_error_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Rank 0 alone would end by an error of Python's, and the others wait for it."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    text = f"output_dir {tmp_path} cannot be written: {os.strerror(number)}"
    files = RunFiles(AttachedRun(output_dir=str(tmp_path)), is_writer=True)
    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", fail)
        with pytest.raises(ConfigError, match=text):
            files.begin()
    files.begin()
    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", fail)
        with pytest.raises(TraceError, match=text):
            files.end(status="completed", layout="tp1", world_size=1, facts={})
    assert not (tmp_path / "run.json").exists()
