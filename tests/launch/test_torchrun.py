"""Another launcher, torchrun, starts the same run as ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mock_scheduler.cli import main
from mock_scheduler.comparison.walk.metrics import is_comparable
from mock_scheduler.determinism.environment import launch_environment
from pipelines.config.loading import load_config

CONFIGS = Path(__file__).parents[2] / "configs"
OVERRIDES = ["max_steps=1", "eval_steps=0", "parallel.tensor_model_parallel_size=2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pipelines.agentic"]


@pytest.mark.all
def test_torchrun_starts_the_same_run(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert main(["launch", "quickstart", "--config-path", str(CONFIGS), *OVERRIDES, f"output_dir={ours}"]) == 0
    environ = os.environ | launch_environment(load_config("quickstart", config_path=CONFIGS).system_envs)
    command = [sys.executable, *TORCHRUN, "--config_name", "quickstart", "--config_path", str(CONFIGS)]
    subprocess.run([*command, *OVERRIDES, f"output_dir={theirs}"], env=environ, check=True, timeout=300)
    assert read_metrics(theirs) == read_metrics(ours)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logs = [
        {name: value for name, value in json.loads(line)["metrics"].items() if is_comparable(name)} for line in lines
    ]
    assert len(logs) == 1
    assert logs[0]["grad_norm"] > 0
    return logs
