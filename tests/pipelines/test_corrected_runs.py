"""A corrected run and its replay: the same weights and kept tokens to the last bit, out of what was recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mock_scheduler.trace.full.reader import open_trace
from tests.pipelines.service.test_training_service import serving, train_there
from tests.pipelines.tiny_runs import run_command, run_several, write_tiny_config

pytestmark = pytest.mark.timeout(600)

CORRECTIONS = {
    "decoupled": "{preset: slime_mis}",
    "bypass": "{preset: bypass_pg_geo_rs_token_tis}",
}
TRACE = ("trace.level=full", "trace.kinds=[initial,score,advantage,loss,gradient,parameter]")
# The engine samples from weights rounded to bfloat16, as an inference engine does.
MISMATCH = "actor_infer.weights_precision=bfloat16"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Per correction a run that records, and its replay; all in one process."""
    root = tmp_path_factory.mktemp("corrected")
    configs = write_tiny_config(root)
    cases = [
        [
            *("--config-path", str(configs), "--config-name", "tiny", MISMATCH, *TRACE),
            *("rollout_mock.enable=true", f"rollout_mock.mode={mode}", f"rollout_mock.dump_dir={root / name}-rec"),
            *(f"output_dir={root / name}-{mode}", f"algorithm.rollout_correction={section}"),
        ]
        for name, section in CORRECTIONS.items()
        for mode in ("dump", "mock")
    ]
    codes, output = run_several(root, cases, log="log.txt")
    assert codes == [0] * len(cases), output
    return root


def metrics_of(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["metrics"] for line in lines]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_replay_has_the_weights_and_kept_tokens_of_the_recording_run_to_the_last_bit(runs: Path, name: str) -> None:
    kind = "loss" if name == "bypass" else "advantage"
    with open_trace(runs / f"{name}-dump" / "trace") as one, open_trace(runs / f"{name}-mock" / "trace") as other:
        keys = [key for step in (0, 1) for key in one.keys(step) if key.name in ("weights", "kept")]
        assert {(key.kind, key.name) for key in keys} == {(kind, "weights"), (kind, "kept")}
        for key in keys:
            dumped, replayed = one.merge(key), other.merge(key)
            assert dumped.present is not None
            assert torch.equal(dumped.tensor[dumped.present], replayed.tensor[dumped.present]), key
        weights = torch.cat([one.merge(key).tensor[one.merge(key).present] for key in keys if key.name == "weights"])
    assert len(weights.unique()) > 10
    assert (weights - 1.0).abs().max() > 1e-4


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_replay_has_the_metrics_of_the_recording_run(runs: Path, name: str) -> None:
    for dumped, replayed in zip(metrics_of(runs / f"{name}-dump"), metrics_of(runs / f"{name}-mock"), strict=True):
        names = [key for key in dumped if key.startswith(("rollout_corr/", "mismatch/")) or key in ("pg_loss",)]
        assert len(names) > 50
        assert {key: replayed[key] for key in names} == {key: dumped[key] for key in names}
        assert dumped["rollout_corr/k3_kl"] > 1e-8


def test_the_log_says_how_the_correction_was_understood(runs: Path) -> None:
    log = (runs / "log.txt").read_text(encoding="utf-8")
    assert "[Rollout Correction] algorithm.rollout_correction: decoupled (three policies)" in log
    assert "reject tokens whose ratio is outside [0.5, 2]" in log
    assert "[Rollout Correction] preset slime_mis is of slime" in log


@pytest.mark.all
@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_service_trains_the_corrected_run_of_its_client(runs: Path, tmp_path: Path, name: str) -> None:
    configs = write_tiny_config(tmp_path)
    correction = f"algorithm.rollout_correction={CORRECTIONS[name]}"
    with serving(configs, tmp_path / "remote", [MISMATCH, correction, *TRACE]) as service:
        finished = train_there(configs, tmp_path / "remote", runs / f"{name}-rec", service, MISMATCH, correction)
        assert finished.returncode == 0, finished.stderr
    compared = run_command(
        ["-m", "mock_scheduler.cli", "compare", str(runs / f"{name}-mock"), str(tmp_path / "remote")]
    )
    assert compared.returncode == 0, compared.stdout + compared.stderr
    for own, remote in zip(metrics_of(runs / f"{name}-mock"), metrics_of(tmp_path / "remote"), strict=True):
        names = [key for key in own if key.startswith(("rollout_corr/", "pg_loss", "grad_norm"))]
        assert {key: remote[key] for key in names} == {key: own[key] for key in names}
