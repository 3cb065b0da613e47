"""The real TransferQueue and verl's trainer V1: rows come back bit for bit, and a replay trains to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from mock_scheduler.api.compare import compare
from mock_scheduler.verdict.verdict import VerdictKind

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
VERL = ROOT / ".venv-verl" / "bin" / "python"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny checkpoint."""
    assert VERL.is_file(), f"{VERL} is not there; launch/test.sh --integrations makes it (Python 3.11)"
    place = tmp_path_factory.mktemp("v1")
    command = [sys.executable, "launch/make_tiny_qwen3.py", str(place / "model"), "--layers", "2", "--hidden", "64"]
    subprocess.run(command, cwd=ROOT, check=True)
    return place


def run(script: str, arguments: list[str], **environ: str) -> None:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        # Without one of its own a cluster takes the token of this user's home, which another may renew meanwhile.
        token = Path(folder) / "token"
        token.write_text("0123456789abcdef" * 4, encoding="utf-8")
        done = subprocess.run(
            [str(VERL), "-W", "ignore", str(HERE / script), *arguments],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(token),
                "RAY_FOLDER": f"{folder}/ray",
                **environ,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-6000:]


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def queue(root: Path) -> dict[str, Any]:
    """What came of rows and samplers over the real queue."""
    folder = root / "queue"
    folder.mkdir()
    run("transfer_queue_run.py", [str(folder), str(root / "model")])
    result: dict[str, Any] = read(folder / "result.json")
    return result


def test_rows_come_back_out_of_the_real_queue(queue: dict[str, Any]) -> None:
    found = queue["round_trip"]
    assert len(set(found["digests"])) == 1
    assert (found["rows"], found["padded"]) == (5, 8)
    assert {"jagged", "stack"} <= set(found["kinds"])
    assert found["left"] in ({}, {"train": {}})


@pytest.mark.parametrize("name", ["sync", "async"])
def test_verls_sampler_gives_recorded_rows_in_one_order(queue: dict[str, Any], name: str) -> None:
    dump, mock, again = queue[name]
    assert mock == again == dump
    assert len({step["digest"] for step in dump}) == 3
    assert [len(step["keys"]) for step in dump] == [5, 5, 5]
    assert "trainer.v1.trainer_mode=mock_" in queue["refused"][name]


def test_verls_own_skip_files_are_imported_and_replayed(queue: dict[str, Any]) -> None:
    assert queue["skip"]["files"] == ["1/0/tq_batch.pt", "2/0/tq_batch.pt", "3/0/tq_batch.pt"]
    assert [step["digest"] for step in queue["imported"]] == [step["digest"] for step in queue["skip"]["steps"]]


def test_without_our_module_verl_knows_no_such_trainer(queue: dict[str, Any]) -> None:
    assert "Unknown trainer 'mock_sync'" in queue["refused"]["no plugin"]
    assert queue["trainers"] == ["PPOTrainerSync", "PPOTrainerColocateAsync", "PPOTrainerSeparateAsync"]


def trained(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The metrics of each step, without those of the machine."""
    assert result["code"] == 0, result["output"][-6000:]
    return [
        {name: value for name, value in line["data"].items() if "timing" not in name and "perf/" not in name}
        for line in result["metrics"]
    ]


@pytest.mark.parametrize("trainer", ["mock_sync", "mock_colocate_async"])
def test_the_trainer_trains_on_a_recording_to_the_same_bits(root: Path, trainer: str) -> None:
    options = f"trainer={trainer}:dumps={trainer}:trace=1"
    names = [f"{trainer}_{name}" for name in ("dump", "mock", "again", "other", "n")]
    modes = ["dump", "mock", "mock", "mock:data=other.parquet", "mock:n=4"]
    runs = [f"{name}:{mode}:{options}" for name, mode in zip(names, modes, strict=True)]
    run("verl_v1_run.py", [str(root), *runs], PYTHONPATH=f"{HERE}:{ROOT}")
    dump, mock, again, other, n = (read(root / f"{name}.json") for name in names)
    assert trained(mock) == trained(again) == trained(dump)
    assert [line["actor/grad_norm"] > 0.1 for line in trained(dump)] == [True] * 3
    assert mock["weights"] == again["weights"] == dump["weights"]
    assert len(dump["weights"]) > 20
    assert dump["counts"]["generate"] > 0
    assert mock["counts"] == {}
    traces = [root / name / "traces" / "actor" for name in names[:2]]
    assert len(list(traces[0].iterdir())) == 6
    assert compare(*traces).kind is VerdictKind.IDENTICAL
    assert "[Rollout Mock] Loaded step 3" in mock["output"]
    assert "[Rollout Mock] Did not start or call: engine 1, reward_workers 1, rollouts " in mock["output"]
    assert "prompts are not the recorded ones" in other["output"]
    assert "n: recorded 2, current 4" in n["output"]


def test_a_replay_under_verls_own_mode_stops_before_agent_loops(root: Path) -> None:
    run("verl_v1_run.py", [str(root), "own:mock:trainer=sync:dumps=mock_sync"], PYTHONPATH=f"{HERE}:{ROOT}")
    found = read(root / "own.json")
    assert found["code"] != 0
    assert "verl makes its own agent loops in a run that only replays" in found["output"]
    assert (found["counts"], found["metrics"]) == ({}, [])


def test_a_replay_without_our_module_stops(root: Path) -> None:
    run("verl_v1_run.py", [str(root), "plain:mock:plain=1:dumps=mock_sync"], PYTHONPATH=f"{HERE}:{ROOT}")
    found = read(root / "plain.json")
    assert found["code"] != 0
    assert "Unknown trainer 'mock_sync'" in found["output"]
    assert found["counts"] == {}
