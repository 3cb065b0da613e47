"""Megatron-LM's own training loop, attached by one line, gets right verdicts in every layout that runs on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integrations.alignments import EXAMPLE, Alignment, align, candidates, save_checkpoint

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(3600)]

CONFIG = EXAMPLE / "align.yaml"
FEWER_RUNS = ("align.proofs.num_perturbations=2", "align.proofs.consequence=false")
ALONE = ("align.matrix.layouts=[]",)
TP2 = ["parallel.tensor_model_parallel_size=2"]
PP2 = ["parallel.pipeline_model_parallel_size=2"]
DP2 = ["parallel.data_parallel_size=2"]
EMULATED, PASSED = {"identical", "identical (emulated)"}, {"identical", "identical (emulated)", "rounding"}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_no_layout_is_called_wrong_and_whatever_moves_no_bit_is_identical(tmp_path: Path, precision: str) -> None:
    found = align(CONFIG, tmp_path, *FEWER_RUNS, f"precision={precision}")
    assert found.exit_code == 0
    same = {"again", "wheel-layers", "recompute", "evaluate"}
    assert {name: found.verdicts[name] for name in same} == dict.fromkeys(same, "identical")
    layouts = {"tp2", "tp2-sp", "pp2", "pp2-vpp2", "dp2", "dp2-distributed", "tp2-pp2"}
    assert {name for name in layouts if found.verdicts[name] not in EMULATED} == set()
    further = {"cp2", "packed", "packed-tp2-sp"}
    assert {name for name in further if found.verdicts[name] not in PASSED} == set()
    assert found.verdicts.keys() == same | layouts | further
    # Megatron draws a rank's weights by its place, so a tp rank has others than one process.
    assert found.start("tp2")["kinds"]["initial"]["num_set"] > 0
    # Recomputed layers and passes that nothing is trained on are told apart from the forward passes of an update.
    assert forward_passes(found, "recompute") == {"trained": 8, "others": 0}
    assert forward_passes(found, "evaluate") == {"trained": 8, "others": 4}


def forward_passes(found: Alignment, run: str) -> dict[str, int]:
    """How many forward passes a run counted, by kind."""
    passes: dict[str, int] = json.loads((found.folder / run / "run.json").read_text())["forward_passes"]
    return passes


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_experts_on_two_ranks_are_called_right(tmp_path: Path, precision: str) -> None:
    chosen = ("options.experts=4", "align.candidates=[]", "align.matrix.layouts=[pp2,dp2-ep2,tp2-sp-ep2]")
    found = align(CONFIG, tmp_path, *FEWER_RUNS, "max_steps=1", f"precision={precision}", *chosen)
    layouts = {"pp2", "dp2-ep2", "tp2-sp-ep2"}
    assert {name: found.verdicts[name] in PASSED for name in layouts} == dict.fromkeys(layouts, True)


def test_all_layouts_begin_with_one_checkpoint_with_equal_weights_and_moments(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    save_checkpoint(checkpoint, *("--tensor-model-parallel-size", "2"), num_processes=2)
    load = f"options.load={checkpoint}"
    found = align(CONFIG, tmp_path / "aligned", *FEWER_RUNS, *ALONE, load, candidates(tp2=TP2, dp2=DP2))
    assert {name: verdict in PASSED for name, verdict in found.verdicts.items()} == {"tp2": True, "dp2": True}
    for run in ("tp2", "dp2"):
        start = found.start(run)
        assert start["num_updates"] == 3
        assert {kind: counts["num_set"] for kind, counts in start["kinds"].items()} == {"initial": 0, "optimizer": 0}


def test_a_resumed_run_goes_on_as_one_that_was_never_interrupted(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    save_checkpoint(checkpoint)
    resumed = ["begins_at=3", f"options.load={checkpoint}"]
    chosen = candidates(one=resumed, pp2=[*resumed, *PP2])
    found = align(CONFIG, tmp_path / "aligned", *FEWER_RUNS, *ALONE, "first_step=3", "max_steps=5", chosen)
    assert found.verdicts["one"] == "identical"
    assert found.verdicts["pp2"] in EMULATED
    for run in ("one", "pp2"):
        start = found.start(run)
        assert start["num_updates"] == 3
        assert {kind: counts["num_set"] for kind, counts in start["kinds"].items()} == {"initial": 0, "optimizer": 0}
