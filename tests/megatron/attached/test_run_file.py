"""The file that says what is attached to a training is read, or refused with one clear error."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
import torch

from mock_scheduler.config.instruments import AttachedRun
from mock_scheduler.errors import ConfigError, TraceError
from mock_scheduler.megatron.attached.attach import attach, load_run
from mock_scheduler.megatron.attached.run_files import RunFiles


def test_a_run_file_that_nests_too_deep_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "attached.json"
    path.write_text("[" * 200_000)
    with pytest.raises(ConfigError, match=r"attached\.json is no run file: "):
        load_run(path)


def test_a_training_in_plain_torch_is_told_what_traces_it(tmp_path: Path) -> None:
    """It ended with torch's "Default process group has not been initialized", and left no ``error.json``."""
    model = torch.nn.Linear(2, 2)
    with pytest.raises(SystemExit) as ended:
        attach(model, cast(Any, torch.optim.SGD(model.parameters())), run=AttachedRun(output_dir=str(tmp_path)))
    assert ended.value.code == 5
    assert str(ended.value.__cause__) == (
        "attach was called where torch.distributed is not initialized; expected a model of Megatron-core, behind "
        "init_process_group and parallel_state.initialize_model_parallel. A training in plain torch is traced by "
        "mock_scheduler.plain_torch.tracing.trace_training instead, and its traces are compared by "
        "mock-scheduler compare (docs/any_program.md)"
    )
    assert "trace_training" in (tmp_path / "error.json").read_text()


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
