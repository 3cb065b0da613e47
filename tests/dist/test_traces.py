"""Real gloo processes: what modules compute has one canonical form, whatever the layout."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from benchmarks.layouts.cases import LAYOUTS, OPTION_CASES, Case
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import open_trace
from tests.dist.conftest import launch
from tests.dist.traced_steps import FAULT, SHORT, TWICE, case_of, traced_steps
from tests.merged_traces import Merged, different_bits, distances, merge_step

pytestmark = [pytest.mark.all, pytest.mark.timeout(600)]  # the first test pays for the launches

#: Relative Frobenius distance in float64: sums in another order leave 1e-14, a wrong computation 1e-3 and more.
BOUND = 1e-12

LONG = (
    *(case_of("moe-by-row", layout, "one-update") for layout in ("dp2-ep2", "tp2-sp-pp2-ep2")),
    *(case_of(model, layout) for model in ("dense", "moe") for layout in LAYOUTS[model]),
    *(case_of(model, layout, option) for model, cases in OPTION_CASES.items() for layout, option in cases),
)
#: Layouts that compute each token's own numbers with the same operations as one process does.
_ORDERED = frozenset({"pp2", "pp2-vpp2"})


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cases of ``SHORT`` and their references."""
    return traced_steps(tmp_path_factory, "one rank", "two ranks")


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layout and option, with one launch for each number of processes."""
    root = tmp_path_factory.mktemp("all-traces")
    by_size: dict[int, dict[str, None]] = {}
    for item in (item for case in LONG for item in (case.reference, case)):
        by_size.setdefault(item.world_size, {})[item.name] = None
    for size, names in sorted(by_size.items()):
        launch(size, root, tuple(names), module="tests.dist.workers.trace_worker")
    return root


@functools.cache
def merge_once(folder: Path) -> Merged:
    """As ``merge_step``, of what several tests compare with."""
    return merge_step(folder)


def both(root: Path, case: Case) -> tuple[Merged, Merged]:
    return merge_step(root / case.name), merge_once(root / case.reference.name)


def check(root: Path, case: Case) -> None:
    """Every kind has the canonical form and content of the one process, in every update."""
    found, expected = both(root, case)
    errors = distances(found, expected)
    assert {key.describe(): error for key, error in errors.items() if not error < BOUND} == {}
    kinds = {"activation", "logits", "activation_gradient"} | ({"router"} if case.model != "dense" else set())
    assert {key.kind for key in errors} == kinds
    if case.is_exact:
        assert different_bits(found, expected) == []


def name_of(case: Case) -> str:
    return case.name.replace("/float64", "")


@pytest.mark.parametrize("case", SHORT, ids=name_of)
def test_every_tensor_is_that_of_one_process(short: Path, case: Case) -> None:
    check(short, case)


@pytest.mark.parametrize("case", [case for case in SHORT if case.layout in _ORDERED], ids=name_of)
def test_pipelines_and_recomputation_change_no_bit(short: Path, case: Case) -> None:
    """Of the first update; before the second the gradients' norm has been summed stage by stage."""
    assert different_bits(*both(short, case)) == []


def test_the_same_layout_twice_is_the_same_to_the_bit(short: Path) -> None:
    once, again = (merge_step(short / case.name) for case in TWICE)
    assert different_bits(again, once) == []


def test_a_gradient_that_is_not_reduced_is_found_where_it_is_lost(short: Path) -> None:
    """Layer 2's linear_qkv leaves out the sum over tp: the norm before it is the first to disagree."""
    with open_trace(short / "fault" / FAULT.name) as trace:
        merged = {key: trace.merge(key) for key in trace.keys(0) if key.kind == "activation_gradient"}
    wrong = {key.name: item.conflicts for key, item in merged.items() if key.update == 0 and item.conflicts}
    assert "decoder.layers.2.input_layernorm" in wrong
    later = ("decoder.layers.3", "decoder.layers.2.mlp", "decoder.layers.2.self_attention", "decoder.final", "output")
    assert [name for name in wrong if name.startswith(later)] == []
    conflict = wrong["decoder.layers.2.input_layernorm"][0]
    assert conflict.axes == ("tp",)
    key = TraceKey(step=0, update=0, kind="activation_gradient", name="decoder.layers.2.input_layernorm")
    assert conflict.key == key


@pytest.mark.all
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("case", LONG, ids=name_of)
def test_every_tensor_of_every_layout_and_option_is_that_of_one_process(long: Path, case: Case) -> None:
    check(long, case)
