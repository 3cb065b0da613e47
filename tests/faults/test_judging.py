"""The proofs of other tools by hand-worked numbers, and what counts as found, placed and called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mock_scheduler.comparison import findings
from mock_scheduler.comparison.measure.figures import compute_figures
from mock_scheduler.comparison.tensors import TensorDifference
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.verdict.divergences import Divergence
from tests.faults.catalogue import find_fault
from tests.faults.fault import Expected, Run
from tests.faults.matrix.evidence import Evidence, Finding, _angle, by_emulation, by_loss, by_noise, by_slope
from tests.faults.matrix.judging import Judgement, describe_place, is_called, is_placed
from tests.faults.matrix.table import from_json, matrix_header, matrix_rows, summarise, to_json, to_markdown
from tests.faults.runs import silent_groups

_EXPECTED = Expected(phase="backward", names=("*layernorm.weight",), kind="copies|not summed")


def _first(*, kind: str = "gradient", name: str = "decoder.final_layernorm.weight", update: int = 0) -> Divergence:
    finding = findings.Finding(kind=kind, step=0, update=update, name=name, fact=findings.OnlyIn(side="baseline"))
    return Divergence(step=0, update=update, kind=kind, name=name, evidence=finding, value=1.0, bound=0.0)


def _difference(baseline: torch.Tensor, candidate: torch.Tensor) -> TensorDifference:
    figures = compute_figures(baseline, candidate)
    return TensorDifference(
        key=TraceKey(step=0, update=0, kind="gradient", name="w"),
        num_elements=baseline.numel(),
        bit_equal=False,
        max_abs=figures.max_abs,
        relative=figures.relative,
        tolerance=0.0,
        figures=figures,
    )


@pytest.mark.parametrize(
    ("factor", "angle"),
    # 1 - 2f / (1 + f²) = (f - 1)² / (1 + f²)
    [(1.03, 0.0009 / 2.0609), (2.0, 0.2), (0.5, 0.2), (-1.0, 2.0)],
)
def test_angle_of_a_scaled_tensor(factor: float, angle: float) -> None:
    baseline = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert _angle(_difference(baseline, baseline * factor)) == pytest.approx(angle, rel=1e-12)


def test_angle_of_an_orthogonal_tensor_is_1() -> None:
    baseline, candidate = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 5.0])
    assert _angle(_difference(baseline, candidate)) == 1.0


def _evidence(losses: tuple[float, float]) -> Evidence:
    nowhere = Path("nowhere")
    return Evidence(precision="float32", reference=nowhere, candidate=nowhere, noise=None, emulated=None, losses=losses)


def test_loss_is_compared_as_it_is_printed() -> None:
    assert by_loss(_evidence((1.23451, 1.23449))) == Finding(outcome="found", text="1.235e+00 and 1.234e+00")
    assert by_loss(_evidence((1.23461, 1.23469))).outcome == "silent"


def test_proof_without_its_reference_is_not_available() -> None:
    evidence = _evidence((1.0, 1.0))
    assert [proof(evidence).outcome for proof in (by_noise, by_slope, by_emulation)] == ["not available"] * 3


def test_place_is_phase_update_and_name() -> None:
    assert is_placed(_first(), _EXPECTED)
    assert describe_place(_first()) == "backward, update 0, decoder.final_layernorm.weight"
    assert not is_placed(_first(kind="parameter"), _EXPECTED)
    assert not is_placed(_first(name="output_layer.weight"), _EXPECTED)
    assert not is_placed(_first(update=1), _EXPECTED)
    assert not is_placed(None, _EXPECTED)


def test_one_of_several_words_is_enough() -> None:
    assert is_called("gradients that are not summed over tp", _EXPECTED)
    assert is_called("copies within the candidate differ", _EXPECTED)
    assert not is_called("candidate is 2.000 times the baseline", _EXPECTED)


def _judgement(**findings: str) -> Judgement:
    return Judgement(
        fault="scale-3",
        precision="float32",
        findings={name: Finding(outcome=outcome) for name, outcome in findings.items()},  # type: ignore[arg-type]
        place="",
        sentence="",
        is_placed=True,
        is_called=True,
        is_loss_equal=True,
        is_silent=True,
        acted=[[1, 2, 2]],
    )


def test_wrong_place_counts_as_half_and_a_loss_counts_as_nothing() -> None:
    found = _judgement(slope="found")
    assert found.score == "whole"
    assert replace(found, is_placed=False).score == "half"
    assert _judgement(loss="found", norm="found", slope="silent").score == "missed"


def test_silent_runs_are_made_once_for_all_faults() -> None:
    faults = [find_fault(name) for name in ("wrong-shard", "mask-shifted", "head-dropped")]
    assert silent_groups(faults) == {Run(layout="dp2"): [faults[0], faults[2]], Run(layout="tp2"): [faults[1]]}


def test_matrix_shows_each_fault_in_the_order_of_the_catalogue() -> None:
    scale = _judgement(loss="silent", slope="found", emulation="not available")
    clean = replace(scale, fault="none (dense tp2)", findings={}, is_silent=None, is_loss_equal=None)
    shard = replace(scale, fault="wrong-shard", is_placed=False)
    rows = matrix_rows([scale, shard, clean])
    assert [row[0] for row in rows] == ["none (dense tp2)", "wrong-shard", "scale-3"]
    assert dict(zip(matrix_header(), rows[2], strict=True)) == {
        "fault": "scale-3",
        "no.": "17",
        "run": "dense tp2",
        "precision": "float32",
        "loss": "-",
        "norm": "",
        "sglang": "",
        "replicas": "",
        "noise": "",
        "slope": "found",
        "emulation": "n/a",
        "loss equal": "yes",
        "silent": "yes",
        "place": "yes",
        "word": "yes",
        "score": "whole",
    }
    assert rows[0][-1] == "passed"
    assert to_markdown([scale]).count("\n") == 3
    assert from_json(to_json([scale, shard, clean])) == [scale, shard, clean]
    assert summarise([scale, shard, clean]) == (
        "float32: 2 of 2 faults found, 1 at the right place, 2 by the right word, 2 silent where they must be; "
        "0 false alarms in 1 clean layouts; 0 errors."
    )
