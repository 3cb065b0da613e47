"""Routing replay in training: recorded experts are chosen in every layout, and a router's own choice changes no bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.layouts.cases import Case
from benchmarks.layouts.comparison import CaseResult, merged_pairs, read_metrics
from tests.dist.case_runs import describe_unaligned, train_and_compare

pytestmark = [pytest.mark.all, pytest.mark.timeout(900)]  # the first test pays for the launches

REPLAYED = [
    Case(model="moe-by-row", precision="float64", layout=layout, option=f"replay{option}")
    for layout, option in (
        *(("tp1", "+packing"), ("tp1", "+recompute-full"), ("tp1", "+dynamic"), ("tp1", "+turns")),
        *(("tp2-sp-ep2", "+packing+recompute-full"), ("cp2-ep2", ""), ("dp2-ep2", ""), ("pp2-vpp2", "+packing")),
        ("tp2-sp-pp2-ep2", "+recompute-full"),
    )
]
OWN = [
    (Case(model=model, precision="float32", layout=layout, option=option), f"{option}+record")
    for model, layout, option in (
        *(("moe", "tp1", "one-update"), ("moe", "tp1", "one-update+packing+recompute-full")),
        *(("moe", "tp2-sp-ep2", "one-update"), ("moe", "cp2-ep2", "one-update"), ("moe", "pp2-vpp2", "one-update")),
    )
]
OTHER = Case(model="moe-by-row", precision="float64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routing")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, CaseResult]:
    own = [case for plain, option in OWN for case in (plain, _with_option(plain, option))]
    return train_and_compare(folder, [*REPLAYED, *own, OTHER])


def _with_option(case: Case, option: str) -> Case:
    return Case(model=case.model, precision=case.precision, layout=case.layout, option=option)


@pytest.mark.parametrize("case", REPLAYED, ids=[case.name for case in REPLAYED])
def test_one_recorded_routing_is_one_function_in_every_layout(results: dict[str, CaseResult], case: Case) -> None:
    """Experts that no router would choose: a choice of another token or layer is no rounding of float64."""
    assert describe_unaligned([results[case.name]]) == []


def test_another_routing_is_another_function(folder: Path, results: dict[str, CaseResult]) -> None:
    """The cases above would be equal too if nothing were replayed."""
    replayed = REPLAYED[0].reference
    plain, other = (read_metrics(folder / case.name)[0] for case in (OTHER, replayed))
    assert abs(plain["grad_norm"] - other["grad_norm"]) / plain["grad_norm"] > 1e-3


@pytest.mark.parametrize(("plain", "option"), OWN, ids=[case.name for case, _ in OWN])
def test_a_replay_of_the_routers_own_choice_changes_no_bit(
    folder: Path, results: dict[str, CaseResult], plain: Case, option: str
) -> None:
    """Recorded for the old log-probabilities, and chosen again in the update of the same weights."""
    recorded = _with_option(plain, option)
    assert recorded.name in results
    num_gradients = 0
    for key, one, other in merged_pairs(folder / plain.name, folder / recorded.name):
        assert torch.equal(one.tensor, other.tensor), key
        num_gradients += key.kind == "gradient"
    assert num_gradients > 40
    assert read_metrics(folder / plain.name) == read_metrics(folder / recorded.name)
