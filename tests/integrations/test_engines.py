"""vLLM itself as a run's engine: in step with the trainer, replayed and aligned without it, its stale head found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[2]
ENGINES = ROOT / ".venv-engines" / "bin" / "python"
PACKAGES = ROOT / "tests" / "text_packages"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny checkpoints: embeddings and output head apart, and tied."""
    assert ENGINES.is_file(), f"{ENGINES} is not there; launch/test.sh --integrations makes it (Python 3.11)"
    place = tmp_path_factory.mktemp("vllm")
    for name, options in (("untied", ()), ("tied", ("--tied",))):
        subprocess.run([sys.executable, "launch/make_tiny_qwen3.py", str(place / name), *options], cwd=ROOT, check=True)
    return place


def settings(root: Path, checkpoint: str = "untied") -> list[str]:
    """The shipped configuration of text, small, with two steps of rollouts; its engine is vLLM."""
    return [
        *(f"model.hf_checkpoint={root / checkpoint}", "rollout_batch_size=16", "train_env_manager.num_env_groups=2"),
        *("max_steps=2", "eval_steps=0", "sft.steps=0", "actor_infer.max_new_tokens=16", "training.lr=1.0e-3"),
        *("track_with=none", "actor_infer.engine=vllm", "actor_infer.server.arguments=[--enforce-eager]"),
    ]


def python(arguments: list[str], *packages: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """``python ARGUMENTS`` with these folders of packages."""
    path = os.pathsep.join(map(str, [*packages, ROOT]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2000, check=False)


def run(root: Path, name: str, *overrides: str, checkpoint: str = "untied") -> subprocess.CompletedProcess[str]:
    """A recorded run."""
    given = [
        *("--config-path", "configs", "--config-name", "qwen3_tiny_reasoning", f"output_dir={root / name}"),
        *("save_steps=2", "rollout_mock.enable=true", "rollout_mock.mode=dump"),
        *(f"rollout_mock.dump_dir={root / name}-recording", f"actor_infer.engine_python={ENGINES}"),
    ]
    arguments = ["-m", "pipelines.agentic", *given, *settings(root, checkpoint), *overrides]
    return python(arguments, PACKAGES, VLLM_CPU_KVCACHE_SPACE="1")


def metrics(root: Path, name: str) -> list[dict[str, Any]]:
    lines = (root / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["metrics"] for line in lines]


def test_vllm_samples_by_each_steps_weights_and_a_replay_trains_to_the_same_bits(root: Path) -> None:
    done = run(root, "sampled")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[mismatch]" not in done.stdout + done.stderr
    for measured in metrics(root, "sampled"):
        # Ten times below the threshold, and so little that another step's weights would show.
        assert measured["mismatch/probe_mean"] < 2e-6
        assert measured["mismatch/probe_max"] < 5e-6
        assert measured["mismatch/engine_mean"] < 2e-6
        assert measured["mismatch/engine_tokens"] == measured["rollout/sampled_tokens"] > 100
    replay = ("rollout_mock.mode=mock", f"rollout_mock.dump_dir={root}/sampled-recording")
    done = run(root, "replayed", *replay, "actor_infer.engine_python=/nowhere/python")
    assert done.returncode == 0, done.stdout + done.stderr
    policies = [
        (root / name / "checkpoints" / "step_000002" / "policy" / "rank_00000.safetensors").read_bytes()
        for name in ("sampled", "replayed")
    ]
    assert policies[0] == policies[1]


CANDIDATES = {
    "again": ([], "identical"),
    "tp2": (["parallel.tensor_model_parallel_size=2"], "identical (emulated)"),
    "pp2": (["parallel.pipeline_model_parallel_size=2"], "identical (emulated)"),
    "dp2": (["parallel.data_parallel_size=2", "training.micro_batch_size=8"], "rounding"),
    "without-entropy": (["entropy_loss_coef=0"], "diverged"),
}


def test_layouts_are_aligned_on_what_vllm_sampled_without_it_and_without_the_packages(root: Path) -> None:
    """The recording alone is there: no engine, no tokenizer and no task can be imported or started."""
    if not (root / "sampled-recording").is_dir():
        assert run(root, "sampled").returncode == 0
    entry = "tests.pipelines.workers.gymnasium_must_not_load"  # it fails where a client of servers was imported
    named = [
        f"{{name: {name}, entry: {entry}, overrides: [{', '.join(map(repr, overrides))}]}}"
        for name, (overrides, _) in CANDIDATES.items()
    ]
    folder = root / "aligned"
    done = python(
        [
            *("-m", "mock_scheduler.cli", "align", "qwen3_tiny_reasoning", "--output-dir", str(folder)),
            *("--recording", f"{root}/sampled-recording", *settings(root), "actor_infer.engine_python=/nowhere/python"),
            f"align.candidates=[{', '.join(named)}]",
        ]
    )
    assert done.returncode == 1, done.stdout + done.stderr  # of the change that is none of layout
    found = json.loads((folder / "align.json").read_text(encoding="utf-8"))["candidates"]
    verdicts = {candidate["name"]: candidate["verdict"] for candidate in found}
    assert verdicts == {name: verdict for name, (_, verdict) in CANDIDATES.items()}, done.stdout + done.stderr
    ledgers = list(folder.rglob("ledger.json"))
    assert len(ledgers) > len(CANDIDATES)
    for ledger in ledgers:
        assert json.loads(ledger.read_text(encoding="utf-8"))["built"]["engine"] == 0
    assert not list(folder.rglob("server.log"))


def test_the_stale_output_head_of_a_tied_model_is_found_at_the_first_update(root: Path) -> None:
    done = run(root, "tied-reload", checkpoint="tied")
    assert done.returncode == 5, done.stdout + done.stderr
    assert "does not sample by the weights of version 1, which it was given" in done.stderr
    assert "with the new weights and still with the output head of version 0, which leaves" in done.stderr
    assert "set actor_infer.weights_sync=restart, or train one with untied embeddings" in done.stderr


def test_a_tied_model_is_sampled_by_its_own_weights_where_vllm_is_restarted(root: Path) -> None:
    done = run(root, "tied-restart", "actor_infer.weights_sync=restart", checkpoint="tied")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(measured["mismatch/probe_mean"] < 2e-6 for measured in metrics(root, "tied-restart"))
