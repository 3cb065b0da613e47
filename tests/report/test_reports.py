"""Reports of an alignment run: nothing is lost at 100 columns, and the JSON is strict."""

import io
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from mock_scheduler.comparison.bounds.bounds import UNBOUNDED, StatedBounds
from mock_scheduler.comparison.findings import Finding, OnlyIn
from mock_scheduler.comparison.tensors import JUDGED_KINDS, TensorComparison, TensorDifference
from mock_scheduler.comparison.walk.metrics import compare_metrics
from mock_scheduler.config.align import ToleranceConfig
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import build_console
from mock_scheduler.report.alignment.builder import build_view
from mock_scheduler.report.alignment.terminal import print_report
from mock_scheduler.report.json_file import save_result
from mock_scheduler.run_folder.finished_run import RunSummary
from mock_scheduler.support.documents import to_json
from mock_scheduler.trace.entries import RankPlace, TraceKey
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.verdict.direct_verdict import decide
from mock_scheduler.verdict.reasons import BeyondBounds
from mock_scheduler.verdict.results import AlignmentResult, CandidateResult
from mock_scheduler.verdict.verdict import Verdict, VerdictKind
from tests.report import alignments

BOUNDS = StatedBounds(
    tolerance=ToleranceConfig(metric=1e-4, metric_floor=1e-3, activation=1e-4, gradient=1e-4, update=5e-3),
    otherwise=UNBOUNDED,
)
NAME = "decoder.layers.0.self_attention.linear_qkv.weight"


def make_run(name: str) -> RunSummary:
    return RunSummary(
        name=name,
        output_dir=Path("/runs") / name,
        layout="tp1 pp1 dp1",
        wall_s=10.0,
        rollout_s=4.2,
        elapsed_s=12.3,
        built={"engine": 0, "environment": 0},
        batches={},
    )


def make_alignment(relative: float) -> Verdict:
    differences = tuple(
        TensorDifference(
            key=TraceKey(step=0, update=0, kind=kind, name=NAME),
            num_elements=4,
            bit_equal=relative == 0,
            max_abs=relative,
            relative=relative,
            tolerance=1e-3,
        )
        for kind in JUDGED_KINDS
    )
    tensors = TensorComparison(
        steps=(0,), differences=differences, findings=(), baseline_conflicts=(), candidate_conflicts=()
    )
    baseline, candidate = {0: {"pg_loss": 1.0, "gone": 1.0}}, {0: {"pg_loss": math.nan if relative else 1.0}}
    if not relative:
        candidate[0]["gone"] = 1.0
    return decide(compare_metrics(baseline, candidate, bounds=BOUNDS), tensors, bounds=BOUNDS)


def make_result() -> AlignmentResult:
    def candidate(name: str, verdict: Verdict, *overrides: str) -> CandidateResult:
        is_failed = verdict.metrics is None
        return CandidateResult(
            name=name,
            overrides=overrides,
            layout="tp1 pp1 dp1",
            log_path=Path("/runs") / name / "run.log",
            run=None if is_failed else make_run(name),
            verdict=verdict,
        )

    return AlignmentResult(
        config_name="lake",
        output_dir=Path("/runs"),
        recording_dir=Path("/runs/recording"),
        bounds=BOUNDS,
        baseline=make_run("baseline"),
        candidates=(
            candidate("same", make_alignment(0.0)),
            candidate("wrong", make_alignment(math.inf), "training.lr=0.002"),
            candidate("broken", alignments.no_run("the run failed [exit]")),
        ),
    )


FILES = {"result": Path("/runs/align.json"), "recording": Path("/runs/recording")}


def render(width: int, result: AlignmentResult | None = None, *, files: Mapping[str, Path] = FILES) -> str:
    output = io.StringIO()
    print_report(build_view(result or make_result(), is_full=False), Console(file=output, width=width), files=files)
    return output.getvalue()


def with_many_problems(num_findings: int, num_conflicts: int) -> AlignmentResult:
    """One candidate with this many findings and replica conflicts in its tensors, so that it does not pass."""
    result = make_result()
    candidate = result.candidates[0]
    assert candidate.verdict.tensors is not None
    finding = Finding(kind="gradient", step=0, update=0, name=NAME, fact=OnlyIn(side="baseline"))
    place = RankPlace(global_rank=0, coordinates={"tp": 0})
    key = TraceKey(step=0, update=0, kind="gradient", name=NAME)
    conflict = ReplicaConflict(key=key, first=place, second=place, num_elements=1, max_abs=1.0)
    tensors = replace(
        candidate.verdict.tensors,
        findings=(finding,) * num_findings,
        candidate_conflicts=(conflict,) * num_conflicts,
    )
    verdict = replace(candidate.verdict, tensors=tensors, kind=VerdictKind.DIVERGED, why=BeyondBounds())
    return replace(result, candidates=(replace(candidate, verdict=verdict),))


@pytest.mark.parametrize(
    ("files", "where"),
    [(FILES, ", all in /runs/align.json"), ({"result": Path("v.json")}, ", all in v.json"), ({}, "")],
)
def test_what_is_not_shown_is_counted_with_the_file_that_has_it(files: Mapping[str, Path], where: str) -> None:
    """Compare named an align.json that it never writes, and conflicts after the fifth were dropped in silence."""
    lines = render(200, with_many_problems(7, 30), files=files).splitlines()
    assert sum(line.endswith("was traced by the baseline but not by the candidate") for line in lines) == 5
    assert sum(line.startswith("    in the candidate: ") for line in lines) == 5
    assert [line for line in lines if " more" in line] == [f"    and 2 more{where}", f"    and 25 more{where}"]


def test_five_problems_are_all_shown() -> None:
    assert " more" not in render(200, with_many_problems(5, 5))


@pytest.mark.parametrize("width", [60, 100])
def test_the_report_fits_its_columns_and_cuts_nothing_off(width: int) -> None:
    text = render(width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "metric gone was logged by the baseline but not by the candidate" in " ".join(text.split())


def test_verdicts_come_first_one_for_each_candidate() -> None:
    lines = render(100).splitlines()
    assert lines[1] == "Alignment of lake: 1 of 3 candidates passes: 1 diverged, 1 incomparable, 1 identical"
    columns = [" ".join(line.split()) for line in lines[3:]]
    assert columns[:2] == ["candidate verdict proved by worst against baseline seconds", "baseline 12.3"]
    assert "same identical bit-equality – 12.3" in columns
    assert "wrong diverged – ∞ times its bound 12.3" in columns
    assert "broken incomparable – – failed" in columns
    assert lines.index("  tp1 pp1 dp1 training.lr=0.002") < lines.index("wrong: diverged")


def test_the_report_names_reasons_bounds_and_files() -> None:
    text = " ".join(render(160).split())
    for expected in (
        "every bit is equal, in 2 tensors over 1 step would have been found: one changed bit",
        "Each candidate: engines built 0, environments built 0",
        "wrong: diverged",
        "metric gone was logged by the baseline but not by the candidate at 1 of 1 step, first at step 0",
        f"gradient of {NAME} at step 0, update 0: inf, bound 1.0e-03",
        "the run failed [exit]",
        "its output /runs/broken/run.log",
        "metrics |a-b| / max(|a|, |b|, 0.001) 0.0001",
        "incomparable the run failed, or nothing could be compared",
        "/runs/align.json",
    ):
        assert expected in text
    assert "suspect" not in text  # only verdicts that occur are explained


def test_a_localised_divergence_is_told_with_proofs_consequence_and_command(tmp_path: Path) -> None:
    result = alignments.make_result(tmp_path)
    text = " ".join(render(100, result).split())
    for expected in (
        f"tp2.clip diverged refuted by noise 9,805 times its bound 10.0 tp2 of 2 processes exp_name=tp2.clip "
        f"{alignments.SENTENCE}",
        "✗ noise first divergence: as said above; first metric: pg_loss from step 1 on",
        "passes it on decoder.layers.0.mlp (activation gradient): only passes on what decoder.layers.1.mlp does: 0.31,",
        "consequence The baseline clips 2 of 24 response tokens",
        "pg_loss: |a-b| at most 0.25 at step 1, 3,333 times its bound, beyond it from step 1 on",
        "Seconds: 128.0 in all: baseline 10.0, candidates 60.0",
    ):
        assert expected in text
    # A path that is longer than its column is folded within its words.
    assert "".join(f"open {alignments.command(result)}".split()) in "".join(text.split())


def test_a_module_of_its_own_stands_beside_layout_and_overrides() -> None:
    result = make_result()
    own = replace(result, candidates=tuple(replace(item, entry="my.kernel") for item in result.candidates))
    assert "  tp1 pp1 dp1 training.lr=0.002 entry=my.kernel" in render(100, own).splitlines()
    assert "entry=" not in render(100, result)


def test_five_that_only_pass_it_on_are_listed_and_the_rest_is_counted(tmp_path: Path) -> None:
    text = render(160, alignments.with_amplifiers(alignments.make_result(tmp_path), 8))
    lines = [line.split() for line in text.splitlines()]
    assert [line[3] for line in lines if line[:3] == ["passes", "it", "on"]] == [f"module.{n}" for n in range(5)]
    assert ["and", "3", "more,", "in", "the", "JSON", "result"] in lines


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("", 120), ("wide", 120), (None, 120)])
def test_columns_sets_the_width_where_there_is_no_terminal(
    columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert build_console().width == width


def test_the_report_is_plain_text_without_a_terminal() -> None:
    assert "\x1b" not in render(100)


def test_the_json_is_strict_and_keeps_what_json_cannot_say(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "align.json"
    save_result(make_result(), build_view(make_result()), path)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    result = json.loads(path.read_text(), parse_constant=refuse)
    assert result["exit_code"] == 1
    same, wrong, broken = result["candidates"]
    assert same["tensors"]["groups"]["gradient"]["worst"]["margin"] == "inf"
    assert wrong["first_divergence"]["value"] == "inf"
    assert wrong["first_divergence"]["name"] == NAME
    assert (broken["verdict"], broken["metrics"], broken["run"]) == ("incomparable", None, None)
    assert [item.name for item in path.parent.iterdir()] == ["align.json"]


def test_the_json_has_all_that_the_page_says_once_the_alignment_has_ended(tmp_path: Path) -> None:
    result = alignments.make_result(tmp_path)
    save_result(result, build_view(result), tmp_path / "align.json")
    found = json.loads((tmp_path / "align.json").read_text())
    assert found["times"]["total_s"] == 128.0
    assert found["report"]["headline"].startswith("3 of 7 candidates pass")
    assert "candidates" not in found["report"]
    diverged = found["candidates"][1]
    assert diverged["report"]["verdict"]["headline"] == diverged["localisation"]["sentence"] == alignments.SENTENCE
    assert diverged["report"]["sample"]["max_difference"] == 0.25
    assert diverged["report"]["metrics"]["curves"][0]["differences"] == [0.0, 0.25]
    assert diverged["report"]["environment"]["config"][0]["candidate"] == "2"
    assert [proof["name"] for proof in diverged["proofs"]] == ["replicas", "noise"]
    assert [len(item["report"]["proofs"]) for item in found["candidates"]] == [6] * 7
    assert found["candidates"][0]["emulated"]["verdict"] == "identical"
    going = replace(result, times=None)
    save_result(going, build_view(going, is_full=False), tmp_path / "align.json")
    going = json.loads((tmp_path / "align.json").read_text())
    assert (going["times"], going["candidates"][1]["report"]["sample"]) == (None, None)


def test_to_json_says_nan_and_infinity_in_words() -> None:
    assert to_json({"a": [math.nan, -math.inf, 0.1, True, None]}) == {"a": ["nan", "-inf", 0.1, True, None]}
