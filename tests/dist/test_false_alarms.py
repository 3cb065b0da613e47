"""Legal changes over layouts, ways to compute and precisions, dense and with experts: none is ever called diverged.

Real runs, as a user makes them with ``mock-scheduler align legal_changes``: gloo processes, noise that is measured, and
references that add in each layout's order. A part of what the two configurations hold: every axis, and every way to
compute under a few of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.pipelines.tiny_runs import run_command

pytestmark = [pytest.mark.all, pytest.mark.timeout(3600)]

DENSE = (
    "align.matrix.layouts=[tp1,tp2-sp,cp2,dp2,pp2-vpp2,tp2-sp-pp2,tp2-dp2]",
    "align.matrix.exclude=[tp1,'*.dynamic','*.recompute-selective','*-*p2.*','tp2-sp.recompute-full',"
    "'dp2.recompute-full']",
)
FEW_DENSE = (
    "align.matrix.layouts=[tp1,tp2-sp,cp2,dp2,tp2-sp-pp2]",
    "align.matrix.exclude=[tp1,'*.dynamic','*.recompute*','*.micro-batch-1','*2.plain-optimizer','cp2.*','*pp2.*']",
)
EXPERTS = (
    "align.matrix.layouts=[tp1,dp2-ep2,tp2-sp-ep2,cp2-ep2,pp2-vpp2,pp2-dp2-ep2]",
    "align.matrix.exclude=[tp1,'*.dynamic','*.recompute-selective','cp2-ep2.*','pp2-*.*','*2.plain-optimizer',"
    "'*2.micro-batch-1']",
)
FEW_EXPERTS = (
    "align.matrix.layouts=[tp1,dp2-ep2,tp2-sp-ep2,cp2-ep2]",
    "align.matrix.exclude=[tp1,'*.dynamic','*.recompute*','*.micro-batch-1','*2.plain-optimizer','cp2-ep2.*']",
)
BFLOAT16 = "precision=bfloat16"

PASSING = frozenset({"identical", "identical (emulated)", "rounding"})
#: What must have every bit of one process.
NOTHING_CHANGED = ("repeat", "tp1.recompute-full")
#: Ways to compute under which only the order of a layout's sums may be another.
ONLY_LAYOUT = ("", "plain-optimizer", "recompute-full")
OTHER_BATCHES = ("micro-batch-1", "packing")


@dataclass(frozen=True, kw_only=True, slots=True)
class Campaign:
    """One alignment. ``suspects``: exactly the candidates that are called suspect, which is a false alarm of a kind."""

    config: str
    overrides: tuple[str, ...]
    num_candidates: int
    suspects: frozenset[str] = frozenset()


CAMPAIGNS = {
    "dense-float32": Campaign(config="legal_changes", overrides=FEW_DENSE, num_candidates=10),
    "dense-bfloat16": Campaign(config="legal_changes", overrides=(*DENSE, BFLOAT16), num_candidates=21),
    "experts-float32": Campaign(config="legal_changes_experts", overrides=FEW_EXPERTS, num_candidates=8),
    "experts-bfloat16": Campaign(config="legal_changes_experts", overrides=(*EXPERTS, BFLOAT16), num_candidates=14),
}


@pytest.fixture(scope="module", params=CAMPAIGNS)
def name(request: pytest.FixtureRequest) -> str:
    """Of the campaign that is looked at."""
    return str(request.param)


@pytest.fixture(scope="module")
def candidates(name: str, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    """What ``align.json`` says of each candidate, by its name."""
    campaign, folder = CAMPAIGNS[name], tmp_path_factory.mktemp(name)
    command = ("-m", "mock_scheduler.cli", "align", campaign.config, "--output-dir", str(folder), *campaign.overrides)
    done = run_command(command, environ={"OMP_NUM_THREADS": "1"}, timeout_s=3000.0)
    assert (folder / "align.json").is_file(), done.stdout + done.stderr
    found = json.loads((folder / "align.json").read_text(encoding="utf-8"))
    return {item["name"]: item for item in found["candidates"]}


def verdicts_of(candidates: Mapping[str, dict[str, Any]], options: tuple[str, ...]) -> dict[str, str]:
    """The verdicts of candidates with these ways to compute, ``""`` being none, by their names."""
    return {name: item["verdict"] for name, item in candidates.items() if name.partition(".")[2] in options}


def emulation_of(candidate: dict[str, Any]) -> str:
    """What became of the proof of a candidate's own order of sums."""
    return next((proof["outcome"] for proof in candidate["proofs"] if proof["name"] == "emulation"), "not tried")


def test_no_legal_change_is_called_diverged(name: str, candidates: Mapping[str, dict[str, Any]]) -> None:
    suspects = CAMPAIGNS[name].suspects
    assert len(candidates) == CAMPAIGNS[name].num_candidates
    failing = {each: item["reason"] for each, item in candidates.items() if item["verdict"] not in PASSING}
    assert {each: reason for each, reason in failing.items() if each not in suspects} == {}
    assert {each for each, item in candidates.items() if item["verdict"] == "suspect"} == suspects


def test_what_changes_nothing_is_identical(candidates: Mapping[str, dict[str, Any]]) -> None:
    names = [each for each in NOTHING_CHANGED if each in candidates]
    assert {each: candidates[each]["verdict"] for each in names} == dict.fromkeys(names, "identical")


def test_layouts_equal_a_reference_in_their_order_of_sums(candidates: Mapping[str, dict[str, Any]]) -> None:
    """So that no noise decides on a layout alone."""
    verdicts = verdicts_of(candidates, ONLY_LAYOUT)
    followed = {each for each in verdicts if emulation_of(candidates[each]) != "not tried"}
    assert {verdicts[each] for each in followed} == {"identical (emulated)"}
    assert {verdicts[each] for each in verdicts.keys() - followed} == {"identical"}
    assert any(each.startswith("tp2-sp") for each in followed)
    assert any(each.startswith("cp2") for each in followed)


def test_other_batches_are_rounding(candidates: Mapping[str, dict[str, Any]]) -> None:
    """They add the same in an order that no layout describes."""
    verdicts = verdicts_of(candidates, OTHER_BATCHES)
    assert len(verdicts) >= 3
    assert set(verdicts.values()) == {"rounding"}
