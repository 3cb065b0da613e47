"""NeMo-RL's own script, ``examples/run_grpo.py``: its setup, data, rollouts, environments and loop, live and replayed.

What its policy gets in a replay equals what it got live, to the last bit, and so do its metrics but times; no engine,
no environment and no weight is asked for. ``NEMO_RL_SOURCE`` names a checkout of NVIDIA-NeMo/RL (tried: 7ea279abf);
NeMo-RL is no package that pip finds. Policy and engine stand for its own (``nemo_rl_run.py``): they need a GPU.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler import read_recording
from tests.adapters.bits import bits
from tests.adapters.imports.importing import imported

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("NEMO_RL_SOURCE" not in os.environ, reason="NEMO_RL_SOURCE names no checkout of NeMo-RL"),
]
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-nemo/bin/python"
#: Of a replay: nothing else is asked of the policy than what trains.
_TRAINING = {
    "policy.offload_after_refit",
    "policy.prepare_for_lp_inference",
    "policy.prepare_for_training",
    "policy.print_node_ip_and_gpu_id",
}


def start(folder: Path, mode: str, kind: str, *keys: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    # In every process: NeMo-RL is written for Python 3.13, and pydantic takes no TypedDict of an older one.
    shim = "import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict"
    (folder / "sitecustomize.py").write_text(shim, encoding="utf-8")
    script = Path(__file__).with_name("nemo_rl_run.py")
    path = os.pathsep.join(map(str, (folder, ROOT, script.parent, os.environ["NEMO_RL_SOURCE"])))
    command = [str(PYTHON), "-W", "ignore", str(script), str(folder), mode, kind, *keys]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def run(folder: Path, mode: str, kind: str) -> dict[str, Any]:
    done = start(folder, mode, kind)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = torch.load(folder / f"{mode}.pt", weights_only=True)
    found["logged"] = [one for one in found["logged"] if not one[0].startswith(("timing", "performance"))]
    return found


def check_replay(live: dict[str, Any], replay: dict[str, Any]) -> None:
    assert {"engine", "generate", "weights"} <= set(live["calls"])
    assert set(replay["calls"]) <= _TRAINING
    assert len(live["trained"]) == 3
    assert bits(replay["trained"]) == bits(live["trained"])
    assert [one[:2] for one in replay["logged"]] == [one[:2] for one in live["logged"]]
    assert bits(replay["logged"]) == bits(live["logged"])
    assert {one[0] for one in live["logged"]} == {"train", "validation"}
    assert replay["counts"]["answered"]["get_batch"] == live["counts"]["called"]["get_batch"]
    assert replay["counts"]["suppressed"]["refit_policy_generation"] >= 3


def test_a_replay_of_mathematics_trains_on_the_same_bits(tmp_path: Path) -> None:
    folder = tmp_path / "math"
    live, replay = run(folder, "dump", "math"), run(folder, "mock", "math")
    check_replay(live, replay)
    assert replay["counts"]["suppressed"]["environments"] == 1
    recording = read_recording(folder / "dump")
    assert recording.steps == {"train": [1, 2, 3], "val": [0, 1, 2000, 2001]}
    rewards = torch.cat([recording.batch(step).rewards for step in (1, 2, 3)]).tolist()
    assert set(rewards) == {0.0, 1.0}
    # What NeMo-RL logs of its training data says the same.
    logs = imported("nemo-rl", next((folder / "logs").glob("*/train_data_step1.jsonl")).parent, group_size=2)
    for step, batch in logs.items():
        for name in ("tokens", "response_mask", "rollout_logprobs", "rewards", "prompt_lengths"):
            assert bits(getattr(batch, name)) == bits(getattr(recording.batch(step), name))
    # The trainer draws other prompts: refused, with the prompt.
    train = folder / "other.jsonl"
    train.write_text((folder / "train.jsonl").read_text(encoding="utf-8").replace("mod", "by"), encoding="utf-8")
    other = start(folder, "mock", "math", f"data.train.data_path={train}")
    assert other.returncode != 0
    assert "8 of 8 prompts are not the recorded ones: row 0 is now {'content': ['train 0 by 3?']" in other.stderr
    other = start(folder, "mock", "math", "grpo.num_generations_per_prompt=4", "grpo.num_prompts_per_step=2")
    assert other.returncode != 0
    assert "nemo_rl.grpo.num_generations_per_prompt: recorded 2, current 4" in other.stderr


def test_a_replay_of_games_of_several_turns_trains_on_the_same_bits(tmp_path: Path) -> None:
    live, replay = run(tmp_path / "games", "dump", "games"), run(tmp_path / "games", "mock", "games")
    check_replay(live, replay)
    assert replay["counts"]["suppressed"]["environments"] == 2
    recording = read_recording(tmp_path / "games" / "dump")
    batches = [recording.batch(step) for step in recording.steps["train"]]
    assert {row.tag for batch in batches for row in batch.rows()} == {"games-train", "games-more"}
    assert {float(reward) for batch in batches for reward in batch.rewards} == {0.0, 0.5, 2.0}
    assert max(len(row.policy_versions) for batch in batches for row in batch.rows()) == 3
