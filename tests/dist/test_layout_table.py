"""The table of ``python -m benchmarks.layouts``: layouts train as one process does, and the table says where not."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mock_scheduler.display.console import Console
from typer.testing import CliRunner

from benchmarks.layouts.__main__ import app
from benchmarks.layouts.cases import LAYOUTS, OPTION_CASES, PRECISIONS, Case, build_config, layout_cases
from benchmarks.layouts.comparison import CaseComparison, Difference, compare_cases, relative_difference
from benchmarks.layouts.comparison import CaseResult, render
from benchmarks.layouts.training import METRICS_FILE
from mock_scheduler.trace.entries import TraceEntry
from tests.rank_traces import save_rank_trace
from mock_scheduler.trace.shards import whole
from tests.dist.case_runs import describe_unaligned, train_and_compare

pytestmark = [pytest.mark.all, pytest.mark.timeout(600)]  # the first test pays for both launches

SMALL = [
    Case(model="dense", precision="float64", layout="tp2-sp"),
    Case(model="dense", precision="float64", layout="pp2-vpp2"),
    Case(model="moe", precision="float64", layout="cp2-ep2"),
]
NORM = "decoder.final_layernorm.weight"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CaseResult]:
    return train_and_compare(tmp_path_factory.mktemp("table"), SMALL)


@pytest.mark.parametrize("case", SMALL, ids=[case.name for case in SMALL])
def test_a_layout_trains_as_one_process_does(results: dict[str, CaseResult], case: Case) -> None:
    assert describe_unaligned([results[case.name]]) == []
    # Two processes cannot be equal to one by accident of comparing a run with itself.
    assert results[case.name].comparison.worst() > 0.0


def test_the_table_has_a_row_for_every_case_and_a_column_for_what_it_has(results: dict[str, CaseResult]) -> None:
    console = Console(width=160, file=io.StringIO())
    with console.capture() as captured:
        console.print(render("dense", list(results.values())))
    text = captured.get()
    assert [name for name in ("tp2-sp", "pp2-vpp2", "1st gradients", "replicas", "equal") if name not in text] == []
    assert "experts" not in text
    assert "…" not in text


def write_case(folder: Path, *, gradient: float, loss: float) -> None:
    """What a worker leaves of one step of one update."""
    entries = [
        TraceEntry(update=0, kind=kind, spec=whole(NORM, (2,)), tensor=torch.tensor([3.0, value]))
        for kind, value in (("gradient", gradient), ("parameter", 4.0))
    ]
    save_rank_trace(folder, step=0, global_rank=0, world_size=1, coordinates={"tp": 0}, entries=entries)
    (folder / METRICS_FILE).write_text(json.dumps([{"total_loss": loss}]), encoding="utf-8")


def test_differences_are_relative_to_the_reference(tmp_path: Path) -> None:
    """(3, 4) has norm 5; 4.5 in place of 4 is 0.1 of it. A loss of 1e-5 is judged as one of 1e-3."""
    write_case(tmp_path / "one", gradient=4.0, loss=0.0)
    write_case(tmp_path / "other", gradient=4.5, loss=1e-5)
    found = compare_cases(tmp_path / "one", tmp_path / "other")
    assert found.gradient == found.first_gradient == Difference(value=pytest.approx(0.1), place=NORM)
    assert found.parameter == Difference(value=0.0, place="-")
    assert found.metrics == {"total_loss": pytest.approx(1e-2)}
    assert (found.num_conflicts, found.num_tensors) == (0, 2)
    assert relative_difference(torch.zeros(2), torch.tensor([3.0, 4.0])) == 5.0


def test_a_gradient_that_is_no_number_is_the_worst(tmp_path: Path) -> None:
    write_case(tmp_path / "one", gradient=4.0, loss=1.0)
    write_case(tmp_path / "other", gradient=float("nan"), loss=float("nan"))
    found = compare_cases(tmp_path / "one", tmp_path / "other")
    assert found.gradient == Difference(value=float("inf"), place=NORM)
    assert found.worst() == float("inf")


def comparison(*, first: float = 0.0, other: float = 0.0, conflicts: int = 0, tensors: int = 8) -> CaseComparison:
    return CaseComparison(
        metrics={"total_loss": 0.0},
        first_gradient=Difference(value=first, place=NORM),
        gradient=Difference(value=max(first, other), place=NORM),
        parameter=Difference(value=0.0, place="-"),
        num_conflicts=conflicts,
        num_tensors=tensors,
    )


@pytest.mark.parametrize(
    ("precision", "found", "is_aligned"),
    [
        ("float64", comparison(first=1e-13, other=1e-13), True),
        ("float64", comparison(other=1e-11), False),
        ("float64", comparison(conflicts=1), False),
        ("float64", comparison(tensors=0), False),
        ("float32", comparison(first=1e-6, other=1e-5), True),
        ("float32", comparison(first=1e-3), False),
        ("float32", comparison(other=1e-1), False),
    ],
)
def test_a_case_is_aligned_within_its_bounds(precision: str, found: CaseComparison, is_aligned: bool) -> None:
    case = Case(model="dense", precision=precision, layout="tp2")
    assert CaseResult(case=case, comparison=found).is_aligned is is_aligned


def test_what_keeps_bits_must_not_even_round() -> None:
    recomputed = Case(model="dense", precision="float32", option="turns+recompute-full")
    assert CaseResult(case=recomputed, comparison=comparison()).is_aligned
    assert not CaseResult(case=recomputed, comparison=comparison(other=1e-9)).is_aligned
    assert not replace(recomputed, option="packing+recompute-full").is_exact
    assert not replace(recomputed, layout="tp2").is_exact


def test_a_case_is_compared_with_one_process_that_computes_the_same_function() -> None:
    case = Case(model="dense", precision="float64", layout="cp2", option="turns+packing+micro-batch-means")
    assert case.reference.name == "dense/float64/tp1/turns+micro-batch-means"
    assert Case.parse(case.name) == case


@pytest.mark.parametrize(
    "case", [*layout_cases(tuple(LAYOUTS), ["float64"])], ids=lambda case: f"{case.model}-{case.layout}"
)
def test_every_layout_of_the_table_can_be_run(case: Case) -> None:
    assert build_config(case).parallel.world_size == case.world_size <= 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "dense,mo"], "mo given; expected one or several of dense, moe"),
        (["--options", "--models", "moe"], "moe given; expected one or several of dense, moe-by-row"),
        (["--precisions", "bfloat16"], "bfloat16 given; expected one or several of float32, float64"),
    ],
)
def test_what_the_command_does_not_know_is_an_error(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert message in result.output


def test_a_folder_that_holds_something_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["--output-dir", str(tmp_path)], env={"COLUMNS": "300", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert "is not empty; name a new folder" in result.output


def test_tables_hold_every_kind_of_layout_and_option() -> None:
    layouts = {part.rstrip("0123456789") for names in LAYOUTS.values() for name in names for part in name.split("-")}
    assert layouts == {"tp", "sp", "pp", "vpp", "cp", "ep", "dp", "plain"}
    options = {part for cases in OPTION_CASES.values() for _, option in cases for part in option.split("+")}
    assert {"dynamic", "packing", "turns", "recompute-selective", "recompute-full", "recompute-block-3"} < options


@pytest.mark.all
@pytest.mark.timeout(3600)
def test_all_layouts_of_all_models_in_both_precisions(tmp_path: Path) -> None:
    cases = layout_cases(("dense", "moe"), PRECISIONS)
    assert describe_unaligned(list(train_and_compare(tmp_path, cases).values())) == []
