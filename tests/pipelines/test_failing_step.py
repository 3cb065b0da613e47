"""A step that fails in the middle of a run: what is open is closed, and no other error is lost over it."""

from __future__ import annotations

from pathlib import Path

from tests.pipelines.tiny_runs import read_json, write_tiny_config
from tests.programs import run_program


def test_a_failing_step_closes_the_real_scheduler_and_tells_of_a_step_that_was_not_recorded(tmp_path: Path) -> None:
    """The scheduler was closed only after success: environments stayed open, and a failed write was never told of."""
    configs = write_tiny_config(tmp_path)
    finished = run_program(
        "tests.faults.failing_step",
        [
            *("--config-path", str(configs), "--config-name", "tiny"),
            *("rollout_mock.enable=true", "rollout_mock.mode=dump", f"rollout_mock.dump_dir={tmp_path / 'recording'}"),
            f"output_dir={tmp_path / 'run'}",
        ],
    )
    assert finished.returncode == 5, finished.stderr
    assert finished.stdout.count("the real scheduler was closed") == 1
    error = read_json(tmp_path / "run" / "error.json")
    assert error["type"] == "RecordingError"
    assert "no space left on device" in error["message"]
    told = (
        f"[rank 0] RecordingError: {error['message']}\n  The run was ending already, with RuntimeError: the step failed"
    )
    assert finished.stderr.endswith(f"{told}\n")
    assert (tmp_path / "recording" / "train" / "step_000000.safetensors").is_file()
