"""TRL itself: a replay generates nothing, starts no engine, and trains to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mock_scheduler.api.compare import compare
from mock_scheduler.api.reading import read_recording
from mock_scheduler.verdict.verdict import VerdictKind

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[2]
ENGINES = ROOT / ".venv-engines" / "bin" / "python"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint, and one whose tokenizer has a further token."""
    assert ENGINES.is_file(), f"{ENGINES} is not there; launch/test.sh --integrations makes it (Python 3.11)"
    place = tmp_path_factory.mktemp("trl")
    for name in ("model", "other"):
        command = [sys.executable, "launch/make_tiny_qwen3.py", str(place / name), "--layers", "2", "--hidden", "64"]
        subprocess.run(command, cwd=ROOT, check=True)
    path = place / "other" / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    new = {**tokenizer["added_tokens"][0], "id": 259, "content": "<|new|>"}
    path.write_text(json.dumps({**tokenizer, "added_tokens": [*tokenizer["added_tokens"], new]}), encoding="utf-8")
    return place


def run(arguments: Sequence[str], folder: Path, *, path: str = str(ROOT)) -> str:
    """Run a program in ``.venv-engines``."""
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [str(ENGINES), "-W", "ignore", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2000,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def vllm_path(root: Path) -> str:
    """A path with metadata of vLLM: TRL asks for a distribution of this name, and the CPU build has another."""
    metadata = root / "metadata" / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n", encoding="utf-8")
    return os.pathsep.join([str(ROOT), str(root / "metadata")])


def results(root: Path, *names: str) -> list[dict[str, Any]]:
    return [json.loads((root / f"{name}.json").read_text(encoding="utf-8")) for name in names]


def test_grpo_trains_on_a_recording_to_the_same_bits_and_refuses_another_run(root: Path) -> None:
    runs = [
        *("dump:dump:evaluate=1:trace=1", "mock:mock:evaluate=1:trace=1", "verify:verify:evaluate=1"),
        *("prompt:mock:evaluate=1:prompt=Right now", "generations:mock:evaluate=1:generations=8"),
        f"tokenizer:mock:evaluate=1:tokenizer={root / 'other'}",
    ]
    run(["-m", "tests.integrations.trl_run", str(root), *runs], root)
    dump, mock, verify = results(root, "dump", "mock", "verify")
    assert dump["calls"] == {"engine": 0, "generate": 7, "reward": 14}
    assert mock["calls"] == {"engine": 0, "generate": 0, "reward": 0}
    assert mock["ledger"]["built"] == {"engine": 0, "environment": 0, "scheduler": 0}
    assert mock["ledger"]["answered"] == {"get_batch": 7, "late_values": 14}
    assert verify["ledger"]["recording"] == {"verified_steps": 7}
    assert mock["weights"] == verify["weights"] == dump["weights"]
    assert mock["logs"] == verify["logs"] == dump["logs"]
    assert len(dump["weights"]) > 20
    assert compare(root / "dump-trace", root / "mock-trace").kind is VerdictKind.IDENTICAL
    prompt, generations, tokenizer = (result["error"] for result in results(root, "prompt", "generations", "tokenizer"))
    assert "8 of 16 prompts are not the recorded ones: row" in prompt
    assert "is now 'Right now'" in prompt
    assert "trl.num_generations: recorded 4, current 8" in generations
    assert "trl.tokenizer: recorded" in tokenizer


def test_trls_own_vllm_samples_for_the_recording_and_is_not_there_in_the_replay(root: Path, vllm_path: str) -> None:
    run(["-m", "tests.integrations.trl_run", str(root), "vdump:dump:vllm=1"], root, path=vllm_path)
    run(["-m", "tests.integrations.trl_run", str(root), "vmock:mock:vllm=1"], root)
    dump, mock = results(root, "vdump", "vmock")
    assert dump["calls"] == {"engine": 1, "generate": 3, "reward": 6}
    assert dump["has_engine"]
    assert mock["calls"] == {"engine": 0, "generate": 0, "reward": 0}
    assert not mock["has_engine"]
    assert mock["ledger"]["suppressed"] == {"engine": 1, "sync_weights": 3, "close": 1}
    assert mock["weights"] == dump["weights"]
    assert mock["logs"] == dump["logs"]
    # Logged where TRL corrects for the engine's log-probabilities: each sync of weights reached the engine.
    differences = [line["sampling/sampling_logp_difference/max"] for line in dump["logs"][:3]]
    assert max(differences) < 1e-5


def test_two_processes_train_on_a_recording_to_the_same_bits(root: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run([*launch, "-m", "tests.integrations.trl_run", str(root), "pdump:dump", "pmock:mock", "pverify:verify"], root)
    for rank in range(2):
        dump, mock, verify = results(root, *(f"{name}-{rank}" for name in ("pdump", "pmock", "pverify")))
        assert dump["calls"] == {"engine": 0, "generate": 3, "reward": 6}
        assert mock["calls"] == {"engine": 0, "generate": 0, "reward": 0}
        assert mock["ledger"]["answered"] == {"get_batch": 3, "late_values": 6}
        assert verify["ledger"]["recording"] == {"verified_steps": 3}
        assert mock["weights"] == verify["weights"] == dump["weights"]
        assert mock["logs"] == verify["logs"] == dump["logs"]
    first, second = (result["weights"] for result in results(root, "pdump-0", "pdump-1"))
    assert first == second


def test_the_asynchronous_trainer_trains_on_a_recording_to_the_same_bits(root: Path) -> None:
    run(["-m", "tests.integrations.trl_async_run", str(root), "adump:dump", "amock:mock", "other:mock:batch=8"], root)
    dump, mock, other = results(root, "adump", "amock", "other")
    assert dump["calls"]["generate"] > 3
    assert mock["calls"] == {"engine": 0, "generate": 0, "reward": 0}
    assert mock["weights"] == dump["weights"]
    assert mock["logs"] == dump["logs"]
    assert any(line.get("sample/dropped_stale_total") for line in dump["logs"])
    assert mock["ledger"]["built"] == {"engine": 0, "environment": 0, "scheduler": 0}
    assert mock["ledger"]["suppressed"]["send_weights"] == dump["model_version"] == mock["model_version"]
    assert "trl.per_device_train_batch_size: recorded 4, current 8" in other["error"]


def test_trls_own_asynchronous_worker_is_recorded_and_not_there_in_the_replay(root: Path, vllm_path: str) -> None:
    run(["-m", "tests.integrations.trl_async_run", str(root), "odump:dump:own=1"], root, path=vllm_path)
    run(["-m", "tests.integrations.trl_async_run", str(root), "omock:mock:own=1"], root)
    dump, mock = results(root, "odump", "omock")
    assert dump["calls"]["generate"] >= 24
    assert mock["calls"]["generate"] == 0
    assert mock["weights"] == dump["weights"]
    for key in ("loss", "grad_norm"):
        assert [line.get(key) for line in mock["logs"]] == [line.get(key) for line in dump["logs"]]
    recorded = read_recording(root / "own_dumps")
    assert len(recorded) == mock["ledger"]["answered"]["get_batch"] >= 3
    assert all(batch.rewards.max() > 0 for batch in recorded)


def test_the_pages_example_runs(root: Path, tmp_path: Path) -> None:
    printed = run([str(ROOT / "docs" / "examples" / "trl" / "grpo.py"), str(root / "model")], tmp_path)
    assert "  schedulers built: 0\n" in printed
    assert "equal in every bit: " in printed
    assert compare(tmp_path / "traces" / "dump", tmp_path / "traces" / "mock").kind is VerdictKind.IDENTICAL
