"""A comparison as JSON: strict, bounded with the totals said, and the same content as the text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mock_scheduler.comparison.tensors import LedgerComparison
from mock_scheduler.errors import AlignmentError
from mock_scheduler.report.comparison_json import MAX_LISTED
from mock_scheduler.report.json_file import comparison_to_json, save_comparison, save_replicas
from mock_scheduler.support.documents import to_json
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.verdict.results import ComparisonResult, ReplicaResult
from mock_scheduler.verdict.verdict import VerdictKind
from tests.report.comparisons import (
    SENTENCE,
    TP0,
    TP1,
    diverged,
    identical,
    incomparable,
    infinite,
    rounding,
    sketched,
)


def load_strict(path: Path) -> dict[str, Any]:
    """JSON without the constants that JSON does not have."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


@pytest.mark.parametrize(
    ("make", "verdict", "exit_code"),
    [
        (identical, "identical", 0),
        (rounding, "rounding", 0),
        (diverged, "diverged", 1),
        (sketched, "diverged", 1),
        (infinite, "diverged", 1),
        (incomparable, "incomparable", 3),
    ],
)
def test_every_result_is_saved_as_strict_json(
    make: Callable[[Path], ComparisonResult], verdict: str, exit_code: int, tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "v.json"
    save_comparison(make(tmp_path), path)
    content = load_strict(path)
    assert (content["format_version"], content["verdict"], content["exit_code"]) == (3, verdict, exit_code)
    assert [item.name for item in path.parent.iterdir()] == ["v.json"]


def test_the_first_divergence_is_there_with_all_that_was_found(tmp_path: Path) -> None:
    save_comparison(diverged(tmp_path), tmp_path / "v.json")
    content = load_strict(tmp_path / "v.json")
    assert content["sentence"] == SENTENCE
    difference = content["first_divergence"]["difference"]
    assert difference["tier"] == "diverged"
    assert difference["figures"]["worst"] == {
        "index": [17, 40],
        "baseline": 0.125,
        "candidate": 0.1281,
        "sample": "train/g0/e1/v3/t0",
        "position": 5,
        "baseline_ranks": [{"global_rank": 0, "coordinates": {"tp": 0, "pp": 0, "dp": 0}}],
        "candidate_ranks": [
            {"global_rank": 0, "coordinates": {"tp": 0, "pp": 0, "dp": 0}},
            {"global_rank": 1, "coordinates": {"tp": 1, "pp": 0, "dp": 0}},
        ],
    }
    assert (
        difference["localities"][0]["text"]
        == "channels 32 to 63 hold 98.0 % of the difference (32 of 64 channels): just the piece of one rank"
    )
    assert (difference["residual"]["value"], difference["residual"]["text"]) == (
        -1.0,
        "the part of tp1 is missing from the candidate",
    )


def test_tiers_and_steps_are_counted_by_kind(tmp_path: Path) -> None:
    save_comparison(diverged(tmp_path), tmp_path / "v.json")
    tensors = load_strict(tmp_path / "v.json")["tensors"]
    assert tensors["num_compared"] == 316
    assert tensors["tiers"]["activation"] == {
        "identical": 15, "ulp": 0, "tolerance": 0, "undecided": 0, "diverged": 63, "missing": 0, "unobserved": 1,
        "unjudged": 0,
    }  # fmt: skip
    assert [row["step"] for row in tensors["per_step"]] == [0, 1]
    assert [row["gradient"]["num_compared"] for row in tensors["per_step"]] == [39, 39]
    assert tensors["groups"]["gradient"]["num_compared"] == 78
    conflict = tensors["candidate_replica_conflicts"][0]
    assert (conflict["axes"], conflict["num_elements"]) == (["tp"], 64)
    assert tensors["ledgers"][1]["difference"].startswith(
        "step 0, global rank 1 (tp1 pp0 dp0): collective call 12 is all_reduce"
    )
    assert tensors["notes"] == ["the ledger of random calls was not compared: only the candidate traced it"]


def test_a_sketch_keeps_its_error_bars_and_what_to_do_next(tmp_path: Path) -> None:
    save_comparison(sketched(tmp_path), tmp_path / "v.json")
    content = load_strict(tmp_path / "v.json")
    assert content["full_dump"] == ["trace.level=full", "trace.steps='0'", "trace.patterns=['decoder.layers.2.*']"]
    tensors = content["tensors"]
    assert (tensors["level"], tensors["num_exceeding"]) == ("sketch", 198)
    undecided = tensors["undecided"][0]
    assert (undecided["low"], undecided["relative"], undecided["high"]) == (5e-5, 1e-4, 2e-4)


def test_lists_are_bounded_and_their_totals_are_said(tmp_path: Path) -> None:
    result = diverged(tmp_path, layers=60, steps=2)
    tensors = result.verdict.tensors
    assert tensors is not None
    many = replace(tensors, notes=("a note",) * 1234)
    content = comparison_to_json(replace(result, verdict=replace(result.verdict, tensors=many)))["tensors"]
    assert isinstance(content, dict)
    assert (len(content["exceeding"]), content["num_exceeding"]) == (MAX_LISTED, len(many.exceeding))
    assert content["num_exceeding"] > MAX_LISTED
    assert (len(content["notes"]), content["num_notes"]) == (MAX_LISTED, 1234)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    path = tmp_path / "file" / "v.json"
    with pytest.raises(AlignmentError) as caught:
        save_comparison(identical(tmp_path), path)
    assert str(caught.value) == f"{path} cannot be written: {path.parent} is not a folder"
    assert caught.value.exit_code == 5


def test_replicas_are_saved_with_axes_and_ranks(tmp_path: Path) -> None:
    key = TraceKey(step=0, update=0, kind="gradient", name="output_layer.weight")
    result = ReplicaResult(
        path=str(tmp_path),
        steps=(0,),
        num_tensors=3,
        num_copies={"tp": 4},
        conflicts=(ReplicaConflict(key=key, first=TP0, second=TP1, num_elements=2, max_abs=math.nan),),
        ledgers=(LedgerComparison(kind="random", step=0, num_ranks=2, num_calls=3, difference=None),),
    )
    save_replicas(result, tmp_path / "r.json")
    content = load_strict(tmp_path / "r.json")
    assert (content["exit_code"], content["num_tensors"], content["num_copies"]) == (1, 3, {"tp": 4})
    conflict = content["conflicts"][0]
    assert (conflict["axes"], conflict["first"]["global_rank"], conflict["max_abs"]) == (["tp"], 0, "nan")
    assert conflict["description"].startswith("output_layer.weight: ranks tp0 and tp1 hold different gradients")
    assert content["num_ledgers"] == 1


def test_plain_data_becomes_json_and_anything_else_is_refused() -> None:
    assert to_json(
        {"verdict": VerdictKind.DIVERGED, "values": (math.nan, -math.inf, 0.5), "path": Path("a"), "none": None}
    ) == {"verdict": "diverged", "values": ["nan", "-inf", 0.5], "path": "a", "none": None}
    with pytest.raises(TypeError, match=r"^object has no JSON form$"):
        to_json(object())
