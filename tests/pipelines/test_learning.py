"""Real learning: a policy goes from almost no success on the fixed map to almost always, and its replay is exact."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from pipelines.config.loading import load_config
from tests.pipelines.tiny_runs import ROOT, read_json, run_command

pytestmark = [pytest.mark.all, pytest.mark.timeout(1500)]


def test_frozen_lake_is_learned_in_mode_real(tmp_path: Path) -> None:
    """512 evaluation episodes before and after; a validation after the last step is logged as a step of its own."""
    config = load_config("frozen_lake", config_path=ROOT / "configs")
    assert config.val_batch_size >= 512
    finished = run_command(
        ["-m", "mock_scheduler.cli", "launch", "frozen_lake", f"output_dir={tmp_path / 'run'}"], timeout_s=900
    )
    assert finished.returncode == 0, finished.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = {json.loads(line)["step"]: json.loads(line)["metrics"] for line in lines}
    assert metrics[0]["val/success"] <= 0.05
    assert metrics[config.max_steps]["val/success"] >= 0.95
    run = read_json(tmp_path / "run" / "run.json")
    assert (run["status"], run["mode"], run["num_steps"]) == ("completed", "real", config.max_steps)


def test_a_replayed_training_with_validation_has_the_same_parameters_to_the_bit(tmp_path: Path) -> None:
    """Three steps with validation before, between and after, recorded and replayed by ``align``."""
    overrides = ["max_steps=3", "eval_steps=2", "val_batch_size=64", "val_env_manager.num_env_groups=8"]
    finished = run_command(
        ["-m", "mock_scheduler.cli", "align", "frozen_lake", *overrides, "--output-dir", str(tmp_path / "align")],
        timeout_s=600,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (candidate,) = read_json(tmp_path / "align" / "align.json")["candidates"]
    assert candidate["verdict"] == "identical"
    parameters = candidate["tensors"]["groups"]["parameter"]
    assert parameters["num_bit_equal"] == parameters["num_compared"] == 3 * 2 * 9
    assert {"val/success", "val/reward"} <= {metric["name"] for metric in candidate["metrics"]["differences"]}
    assert read_json(tmp_path / "align" / "replay" / "ledger.json")["built"] == {
        "engine": 0,
        "environment": 0,
        "scheduler": 0,
    }


def commands_by_hand() -> list[list[str]]:
    """Configuration and overrides of each command that the README gives for a comparison by hand."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^By hand .*?```bash\n(.*?)```", text, flags=re.DOTALL | re.MULTILINE)
    assert block is not None
    lines = block[1].replace("\\\n", " ").splitlines()
    commands = [shlex.split(line) for line in lines]
    assert [command[:2] for command in commands] == [["bash", "launch/train.sh"]] * len(commands)
    return [command[2:] for command in commands]


def test_the_readmes_commands_by_hand_work(tmp_path: Path) -> None:
    """The second, under tp2, was refused: the configuration had one query group, which tp2 cannot share out.

    ``launch/train.sh`` itself only adds the virtual environment; the run is shortened to two steps.
    """
    dump, mock = commands_by_hand()
    assert "rollout_mock.mode=dump" in dump
    assert {"rollout_mock.mode=mock", "parallel.tensor_model_parallel_size=2"} <= set(mock)
    short = ["max_steps=2", "eval_steps=0", "track_with=none"]
    for arguments in (dump, mock):
        moved = [argument.replace("dumps/", f"{tmp_path}/dumps/") for argument in arguments]
        finished = run_command(
            ["-m", "mock_scheduler.cli", "launch", *moved, *short],
            environ={"MOCK_SCHEDULER_OUTPUT": str(tmp_path / "output")},
        )
        assert finished.returncode == 0, finished.stderr
    runs = {name: read_json(tmp_path / "output" / name / "run.json") for name in ("base", "tp2")}
    assert [(run["mode"], run["layout"], run["num_steps"]) for run in runs.values()] == [
        ("dump", "tp1 pp1 dp1", 2),
        ("mock", "tp2 pp1 dp1", 2),
    ]
    assert read_json(tmp_path / "output" / "tp2" / "ledger.json")["built"] == {
        "engine": 0,
        "environment": 0,
        "scheduler": 0,
    }
