"""verl itself, trainer V0: a replay by configuration keys alone starts no engine, and trains to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mock_scheduler.api.compare import compare
from mock_scheduler.verdict.verdict import VerdictKind

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
VERL = ROOT / ".venv-verl" / "bin" / "python"
#: Seconds, and what is computed from them; and the memory of the whole machine.
MEASURED = ("timing_s/", "timing_per_token_ms/", "perf/time_per_step", "perf/throughput", "perf/cpu_memory_used_gb")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny checkpoints of different sizes."""
    assert VERL.is_file(), f"{VERL} is not there; launch/test.sh --integrations makes it (Python 3.11)"
    place = tmp_path_factory.mktemp("verl")
    for name, hidden in (("model", "64"), ("larger", "128")):
        command = [sys.executable, "launch/make_tiny_qwen3.py", str(place / name), "--layers", "2", "--hidden", hidden]
        subprocess.run(command, cwd=ROOT, check=True)
    return place


def run(root: Path, *runs: str) -> list[dict[str, Any]]:
    """Run verl's command once for each, and read what came of it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [str(VERL), "-W", "ignore", str(ROOT / "tests" / "integrations" / "verl_run.py"), str(root), *runs]
    subprocess.run(command, cwd=root, env=environment, check=True)
    names = [word.split(":")[0] for word in runs]
    return [json.loads((root / f"{name}.json").read_text(encoding="utf-8")) for name in names]


def lasting(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The metrics of each step, without what is measured in seconds and memory."""
    return [
        {name: value for name, value in line["data"].items() if not any(word in name for word in MEASURED)}
        for line in result["metrics"]
    ]


def test_verl_trains_on_a_recording_to_the_same_bits_and_refuses_another_run(root: Path) -> None:
    real, dump, mock = run(root, "real:real", "dump:dump", "mock:mock")
    for result in (real, dump, mock):
        assert result["code"] == 0, result["output"][-5000:]
    # Eight rollouts of each of three steps, and four of each of three evaluations; weights before each, and at first.
    assert real["counts"] == dump["counts"] == {"engine": 1, "generate": 36, "weights": 4}
    assert mock["counts"] == {}
    assert "[Rollout Mock] Loaded step 3" in mock["output"]
    assert "[Rollout Mock] Did not start or call: engine 1, reward_workers 1, sync_weights 1" in mock["output"]
    assert mock["weights"] == dump["weights"] == real["weights"]
    assert len(real["weights"]) == 25
    assert lasting(mock) == lasting(dump) == lasting(real)
    assert [len(line) for line in lasting(real)] == [6, 67, 73, 73]  # step 0, and the steps of training
    # Two mini-batches of each of three steps.
    traces = [root / name / "traces" / "actor" for name in ("dump", "mock")]
    assert sorted(path.name for path in traces[0].iterdir()) == [f"step_{step:06}" for step in range(6)]
    assert compare(*traces).kind is VerdictKind.IDENTICAL

    prompts, another, unplugged, bare, unrecorded = run(
        *(root, "prompts:mock:data=other.parquet", "another:mock:n=4:model=larger", "unplugged:mock:plugins=none"),
        *("bare:mock:bare=1", "unrecorded:dump:bare=1"),
    )
    assert "verl makes its own agent loops, and no rollout would be recorded" in unrecorded["output"]
    for result in (prompts, another, unplugged, bare, unrecorded):
        assert result["code"] != 0
        assert result["weights"] == {}
    # The other prompt is drawn for the third step.
    assert [len(result["metrics"]) for result in (prompts, another, unplugged, bare)] == [3, 0, 0, 0]
    assert "is now [{'role': 'user', 'content': 'Right now'" in prompts["output"]
    assert "verl.actor_rollout_ref.rollout.n: recorded 2, current 4" in another["output"]
    assert "verl.model.hidden_size: recorded 64, current 128" in another["output"]
    assert prompts["counts"] == another["counts"] == bare["counts"] == unplugged["counts"] == {}
    assert "rollout_mock.mode=mock needs the verl plugin of mock-scheduler" in unplugged["output"]
    assert "verl makes its own agent loops in a run that only replays" in bare["output"]
