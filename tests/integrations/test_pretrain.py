"""Megatron-LM's own training loop, attached by one line, gets right verdicts in every layout that runs on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integrations.alignments import EXAMPLE, align, candidates, save_checkpoint

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(3600)]

CONFIG = EXAMPLE / "align.yaml"
FEWER_RUNS = ("align.proofs.num_perturbations=2", "align.proofs.consequence=false")
TP2 = ["parallel.tensor_model_parallel_size=2"]
PP2 = ["parallel.pipeline_model_parallel_size=2"]
DP2 = ["parallel.data_parallel_size=2"]
EP2 = [*DP2, "parallel.expert_model_parallel_size=2"]
PASSED = {"identical", "identical (emulated)", "rounding"}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_no_layout_is_called_wrong_and_a_repeat_is_identical(tmp_path: Path, precision: str) -> None:
    found = align(CONFIG, tmp_path, *FEWER_RUNS, f"precision={precision}")
    assert found.exit_code == 0
    assert found.verdicts["repeat"] == "identical"
    layouts = ["tp2", "pp2", "pp2-vpp2", "dp2", "dp2-distributed", "tp2-pp2"]
    assert {name: found.verdicts[name] in PASSED for name in layouts} == dict.fromkeys(layouts, True)


def test_weights_differ_between_layouts_and_are_set(tmp_path: Path) -> None:
    """Megatron draws a rank's weights by its place, so a tp rank has others than one process."""
    found = align(CONFIG, tmp_path, *FEWER_RUNS, "max_steps=1", candidates(tp2=TP2))
    assert found.verdicts["tp2"] in PASSED
    start = found.start("tp2")["kinds"]["initial"]
    assert start["num_set"] > 0


def test_recomputation_and_an_evaluation_between_steps_change_no_bit(tmp_path: Path) -> None:
    """Recomputed layers and passes that nothing is trained on are told apart from the forward passes of an update."""
    chosen = candidates(recompute=["options.recompute=true"], evaluate=["options.evaluate=true"])
    found = align(CONFIG, tmp_path, *FEWER_RUNS, chosen)
    assert found.verdicts == {"recompute": "identical", "evaluate": "identical"}
    passes = {name: json.loads((tmp_path / name / "run.json").read_text())["forward_passes"] for name in found.verdicts}
    assert passes == {"recompute": {"trained": 8, "others": 0}, "evaluate": {"trained": 8, "others": 4}}


def test_experts_on_two_ranks_are_called_right(tmp_path: Path) -> None:
    found = align(CONFIG, tmp_path, *FEWER_RUNS, "max_steps=1", "options.experts=4", candidates(dp2_ep2=EP2, pp2=PP2))
    assert {name: verdict in PASSED for name, verdict in found.verdicts.items()} == {"dp2-ep2": True, "pp2": True}


def test_all_layouts_resume_one_checkpoint_with_equal_weights_and_moments(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    save_checkpoint(checkpoint, "--tensor-model-parallel-size", "2", num_processes=2)
    chosen = candidates(tp2=TP2, dp2=DP2)
    found = align(CONFIG, tmp_path / "aligned", *FEWER_RUNS, f"options.load={checkpoint}", chosen)
    assert {name: verdict in PASSED for name, verdict in found.verdicts.items()} == {"tp2": True, "dp2": True}
    for run in ("tp2", "dp2"):
        start = found.start(run)
        assert start["num_updates"] == 3
        assert {kind: counts["num_set"] for kind, counts in start["kinds"].items()} == {"initial": 0, "optimizer": 0}
