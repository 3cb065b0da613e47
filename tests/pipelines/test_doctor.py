"""``mock-scheduler doctor`` in real processes: a clean run is identical, and every planted fault is found and named."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.conftest import TinyAlignment
from tests.pipelines.tiny_runs import read_json, run_cli, write_tiny_config

pytestmark = pytest.mark.timeout(600)  # the first test may pay for an alignment of eight runs

MLP = "policy.decoder.layers.0.mlp"
# One update of four rows, enough for every operation of a step.
ONE_UPDATE = (
    *("rollout_batch_size=4", "training.global_batch_size=4", "ppo_epochs=1"),
    *("train_env_manager.num_env_groups=1", "train_env_manager.group_size=4"),
)


def run_doctor(
    configs: Path, folder: Path, *arguments: str, entry: str = "pipelines.agentic"
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The finished command and its ``doctor.json``."""
    # A hash seed of the test's own process would be inherited where a configuration fixes none.
    finished = run_cli(
        "doctor",
        configs,
        ["--output-dir", str(folder), "--entry", entry, *arguments],
        environ={"PYTHONHASHSEED": "random"},
    )
    result = folder / "doctor" / "doctor.json"
    assert result.is_file(), finished.stdout + finished.stderr
    return finished, read_json(result)


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """The folder with ``tiny.yaml``."""
    return write_tiny_config(tmp_path)


@pytest.mark.all
def test_a_planted_operation_is_named_with_its_module_and_cause(tiny_alignment: TinyAlignment, tmp_path: Path) -> None:
    finished, result = run_doctor(
        tiny_alignment.configs,
        tmp_path,
        *("--recording", str(tiny_alignment.recording)),
        entry="tests.faults.nondeterministic_sum",
    )
    assert finished.returncode == 4, finished.stdout + finished.stderr
    origin = result["steps"][0]["origin"]
    assert origin["kind"] == "operation is not repeatable"
    assert origin["first"]["operator"] == "planted.sum_in_any_order.default"
    assert (origin["first"]["module"], origin["first"]["phase"]) == (MLP, "forward")
    assert origin["first"]["place"].startswith("tests/faults/nondeterministic_sum.py:")
    assert result["cause"]["responsible"] == []
    assert "an operation of another library, which torch's deterministic mode does not reach" in finished.stdout
    # The record before which all was equal; of those, what computes is compared and counted, and views are not.
    assert origin["first"]["number"] > 200
    assert 150 < result["num_operations"] < origin["first"]["number"]


@pytest.mark.all
@pytest.mark.parametrize(
    "layout",
    [
        (),
        ("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"),
        ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"),
        ("parallel.data_parallel_size=2", "training.micro_batch_size=2"),
    ],
    ids=["one", "tp2-pp2", "tp2-sp", "dp2"],
)
def test_a_clean_run_is_identical_and_the_operation_log_changes_no_bit(
    configs: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    finished, result = run_doctor(configs, tmp_path, *ONE_UPDATE, *layout)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert result["verdict"] == "identical"
    (step,) = result["steps"]
    world_size = {0: 1, 1: 2, 2: 4 if "pipeline" in str(layout) else 2}[len(layout)]
    assert [rank["global_rank"] for rank in step["ranks"]] == list(range(world_size))
    assert all(rank["num_operations"] > 200 and rank["num_digests"] > 400 for rank in step["ranks"])
    # The run that recorded the rollouts wrote no operation log: writing one changed no bit.
    plain, recorded = (_computed_metrics(tmp_path / "doctor" / name) for name in ("recorder", "first"))
    assert plain == recorded
    assert result["num_metrics"] == len(plain) > 10


@pytest.mark.all
def test_memory_that_is_written_past_torch_is_named_with_its_window(configs: Path, tmp_path: Path) -> None:
    finished, result = run_doctor(configs, tmp_path, *ONE_UPDATE, entry="tests.faults.nondeterministic_kernel")
    assert finished.returncode == 4, finished.stdout + finished.stderr
    origin = result["steps"][0]["origin"]
    assert origin["kind"] == "changed outside of torch's operations"
    assert origin["writer"]["module"] == f"{MLP}.linear_fc2"
    assert origin["first"]["module"] == "policy.decoder.layers.0"


@pytest.mark.all
def test_the_order_of_a_set_of_strings_is_named_with_the_hash_seed(configs: Path, tmp_path: Path) -> None:
    finished, result = run_doctor(
        configs,
        tmp_path,
        *ONE_UPDATE,
        "system_envs={DETERMINISTIC_MODE: '0'}",
        entry="tests.faults.nondeterministic_path",
    )
    assert finished.returncode == 4, finished.stdout + finished.stderr
    origin = result["steps"][0]["origin"]
    assert (origin["kind"], origin["first"]["module"]) == ("program took another path", MLP)
    assert origin["first"]["operator"] == origin["second"]["operator"] == "aten.roll.default"
    assert "PYTHONHASHSEED" in result["cause"]["responsible"]


def _computed_metrics(run_dir: Path) -> dict[str, float]:
    metrics = json.loads((run_dir / "metrics.jsonl").read_text())["metrics"]
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "rollout/", "recorded/"))}
