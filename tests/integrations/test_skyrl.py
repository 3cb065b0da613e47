"""SkyRL's own trainer on recorded rollouts: its experiment, trainer, data loader, checks and conversion to tensors.

What it would send to its workers in a replay equals what it sent live, to the last bit; no engine and no generator is
made. Its workers are not there (``skyrl_run.py``): they need a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapters.bits import bits

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(600)]
PACKAGES = Path(sys.prefix) / "rl"


def run(folder: Path, mode: str, *keys: str) -> dict[str, Any]:
    script = Path(__file__).with_name("skyrl_run.py")
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(PACKAGES), str(PACKAGES / "skyrl-gym")])
    command = [sys.executable, str(script), str(folder), mode, *keys]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = torch.load(folder / f"{mode}.pt", weights_only=True)
    return found


@pytest.mark.parametrize("keys", [(), ("generator.step_wise_trajectories=true",)], ids=["whole", "step-wise"])
def test_a_replay_gives_the_workers_the_same_tensors(tmp_path: Path, keys: tuple[str, ...]) -> None:
    live, replay = run(tmp_path, "dump", *keys), run(tmp_path, "mock", *keys)
    assert [call for call in live["calls"] if call.startswith("train")] == ["train 1", "train 2", "train 3"]
    assert live["calls"].count("eval 2") == 3
    assert replay["calls"] == []
    assert replay["counts"]["answered"]["get_batch"] == 12
    assert replay["counts"]["suppressed"] == {
        "close": 1,
        "engines": 1,
        "init_weight_sync_state": 1,
        "save_weights_for_sampler": 4,
    }
    assert len(live["trained"]) == 3
    assert "rollout_expert_indices" in live["trained"][0]
    assert bits(replay["trained"]) == bits(live["trained"])
