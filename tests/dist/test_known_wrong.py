"""Layouts that Megatron computes wrongly, trained through the pipeline on real gloo processes in float64.

Each is refused by its rule's name; allowed, it is shown to be wrong, and not by rounding, where the installed Megatron
has the fault, and right where it has not. All but one leave the loss equal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks.layouts.cases import (
    KNOWN_WRONG_CASES,
    RULES_OF_OTHER_MODELS,
    Case,
    allowing,
    build_config,
    refused_cases,
)
from benchmarks.layouts.comparison import is_first_update, merged_pairs, read_metrics, relative_difference
from benchmarks.layouts.options import PLAIN
from mock_scheduler.layouts.rules.known_wrong import KNOWN_WRONG, MEGATRON, installed_megatron
from tests.dist.case_runs import train

pytestmark = [pytest.mark.all, pytest.mark.timeout(600)]  # the first test pays for both launches

RULES = {rule.name: rule for rule in KNOWN_WRONG if rule.name not in RULES_OF_OTHER_MODELS}
BOUND = 1e-12
# Megatron's own router computes scores in float32.
ROUTER_BOUND = 1e-5


def one_update(rule: str, *further: str) -> Case:
    """The rule's case, allowed, with one update of one step, so that nothing but that update is judged."""
    case = KNOWN_WRONG_CASES[rule]
    names = ["one-update", *([] if case.option == PLAIN else [case.option])]
    allowed = allowing(replace(case, option="+".join(names)), rule)
    return replace(allowed, option="+".join([allowed.option, *further]))


REPEATED = one_update("pipeline-crossing", "repeat")
OVERLAPPING = Case(model="dense", precision="float64", layout="pp2-vpp2", option="one-update")
PER_TOKEN = Case(model="dense", precision="float64", layout="cp2", option="one-update")
OWN_ROUTER = Case(model="moe", precision="float64", layout="tp2-sp-ep2", option="one-update")


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Relative errors of one update against one process: the loss, and gradients by name; and replicas that differ."""

    loss: float
    gradients: dict[str, float]
    conflicts: frozenset[str]

    def of(self, part: str) -> dict[str, float]:
        """The gradients whose name has this part."""
        return {name: error for name, error in self.gradients.items() if part in name}


def errors_of(root: Path, case: Case, reference: Case | None = None) -> Errors:
    reference = reference or case.reference
    gradients, conflicts = {}, set()
    for key, expected, found in merged_pairs(root / reference.name, root / case.name):
        if key.kind == "gradient" and is_first_update(key):
            gradients[key.name] = relative_difference(expected.tensor, found.tensor)
            conflicts |= {conflict.key.name for conflict in found.conflicts}
    losses = [read_metrics(root / one.name)[0]["total_loss"] for one in (reference, case)]
    loss = abs(losses[1] - losses[0]) / abs(losses[0])
    return Errors(loss=loss, gradients=gradients, conflicts=frozenset(conflicts))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("known_wrong")
    train(folder, [*(one_update(rule) for rule in RULES), REPEATED, OVERLAPPING, PER_TOKEN, OWN_ROUTER])
    return folder


def has_fault(rule: str) -> bool:
    return RULES[rule].holds_for({MEGATRON: installed_megatron() or ""})


def test_every_rule_has_a_case() -> None:
    assert KNOWN_WRONG_CASES.keys() == RULES.keys()


@pytest.mark.parametrize("rule", list(RULES))
def test_it_is_refused_by_the_rules_name_and_runs_where_allowed(rule: str) -> None:
    assert build_config(one_update(rule)).parallel.allow_known_wrong == [rule]
    case = KNOWN_WRONG_CASES[rule]
    if not has_fault(rule):
        assert build_config(case).parallel.allow_known_wrong == []
        return
    with pytest.raises(ValueError, match="is known to compute wrong values with megatron-core") as refused:
        build_config(case)
    assert f"[{rule}; {RULES[rule].source}]" in str(refused.value)
    assert f"parallel.allow_known_wrong=[{rule}]" in str(refused.value)
    assert (rule, case) in list(refused_cases(case.model))


def test_batched_communication_between_two_stages_of_chunks_crosses(root: Path) -> None:
    """R1 of the reference: wrong from the loss on, and repeatable, which is why a repeat proves nothing."""
    found = errors_of(root, one_update("pipeline-crossing"))
    assert found.loss > 1e-4
    assert max(found.gradients.values()) > 0.1
    repeated = errors_of(root, REPEATED, one_update("pipeline-crossing"))
    assert repeated.loss == 0.0
    assert set(repeated.gradients.values()) == {0.0}


def test_overlapping_communication_does_not_cross(root: Path) -> None:
    found = errors_of(root, OVERLAPPING)
    assert found.loss < BOUND
    assert max(found.gradients.values()) < BOUND


def test_experts_under_tp_without_ep_are_not_summed_over_their_replicas(root: Path) -> None:
    """R2 of the reference: the loss is equal and dense gradients are right, but replicas of experts differ."""
    found = errors_of(root, one_update("experts-under-tp"))
    experts = found.of(".local_experts.")
    assert len(experts) == 3 * 4 * 2
    assert found.loss < BOUND
    assert max(error for name, error in found.gradients.items() if name not in experts) < BOUND
    if has_fault("experts-under-tp"):
        assert found.conflicts == experts.keys()
        assert min(experts.values()) > 0.1
    else:
        assert not found.conflicts
        assert max(experts.values()) < BOUND


def test_megatrons_own_router_weakens_its_losses_under_tp(root: Path) -> None:
    """R4 of the reference: the last layer's router is wrong, and nothing else of that layer."""
    found = errors_of(root, one_update("aux-loss-per-token"))
    assert found.loss < ROUTER_BOUND
    last = found.of("layers.3.mlp.")
    routers = found.of(".mlp.router.weight")
    assert max(error for name, error in last.items() if name not in routers) < ROUTER_BOUND
    if has_fault("aux-loss-per-token"):
        assert min(routers.values()) > 0.1
    else:
        assert max(found.gradients.values()) < ROUTER_BOUND


def test_the_router_of_this_project_is_right_in_that_layout(root: Path) -> None:
    found = errors_of(root, OWN_ROUTER)
    assert max([found.loss, *found.gradients.values()]) < BOUND
    assert not found.conflicts


def test_a_mean_over_micro_batches_is_wrong_where_the_sequence_is_split(root: Path) -> None:
    """R3 of the reference: each cp rank divides by its own tokens; the loss that is reported is equal."""
    found = errors_of(root, one_update("loss-tuple-under-cp"))
    assert found.loss < BOUND
    assert min(found.gradients.values()) > 0.1
    assert not found.conflicts
    assert max(errors_of(root, PER_TOKEN).gradients.values()) < BOUND


def test_biases_of_experts_are_summed_over_tp_ranks_that_hold_other_experts(root: Path) -> None:
    """The loss and all gradients but those of the experts' second biases are right."""
    found = errors_of(root, one_update("expert-bias-under-tp"))
    biases = {name: error for name, error in found.of(".local_experts.").items() if name.endswith("linear_fc2.bias")}
    assert len(biases) == 3 * 4
    assert found.loss < BOUND
    assert max(error for name, error in found.gradients.items() if name not in biases) < BOUND
    assert min(biases.values()) > 0.1
