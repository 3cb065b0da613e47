"""The entry of a run: whatever ends it, its exit code is no verdict that it does not mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.agentic import main


class ForeignFailure(BaseException):
    """As torch.distributed.checkpoint's CheckpointException: derived from BaseException itself."""


def raising(error: BaseException) -> Callable[[], None]:
    def prepare() -> None:
        raise error

    return prepare


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    (tmp_path / "run.yaml").write_text(f"exp_name: x\noutput_dir: {tmp_path / 'out'}\n", encoding="utf-8")
    return ["--config-path", str(tmp_path), "--config-name", "run"]


@pytest.mark.parametrize("error", [ForeignFailure("rank 0 could not save"), ZeroDivisionError("division by zero")])
def test_an_unforeseen_error_is_written_and_exits_with_70(
    arguments: list[str], tmp_path: Path, error: BaseException
) -> None:
    """A failed checkpoint went past ``except Exception``: no error.json, and exit code 1, which means ``diverged``."""
    assert main(arguments, prepare=raising(error)) == 70
    assert json.loads((tmp_path / "out" / "error.json").read_text(encoding="utf-8")) == {
        "type": type(error).__name__,
        "message": str(error),
        "exit_code": 70,
        "global_rank": 0,
    }


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(9), GeneratorExit()])
def test_what_asks_the_process_to_end_goes_through(arguments: list[str], tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        main(arguments, prepare=raising(error))
    assert not (tmp_path / "out").exists()
