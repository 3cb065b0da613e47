"""What ``mock-scheduler compare`` prints: the verdict first, nothing wider than the terminal, every cut said."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mock_scheduler.comparison.tensors import LedgerComparison, LedgerDifference
from mock_scheduler.display.console import Console
from mock_scheduler.report.comparison.text import print_comparison, print_replicas
from mock_scheduler.report.comparison.view import count_tiers, name_sides
from mock_scheduler.trace.entries import LedgerCall, TraceKey
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.verdict.results import ComparisonResult, ReplicaResult
from mock_scheduler.verdict.wording.tensors import (
    describe_margin,
    describe_ranks,
    format_relative,
    format_slope,
    format_times,
)
from tests.report.comparisons import (
    SENTENCE,
    TP0,
    TP1,
    diverged,
    identical,
    incomparable,
    infinite,
    make_difference,
    rounding,
    sketched,
)

KEY = TraceKey(step=0, update=0, kind="gradient", name="output_layer.weight")


def render(result: ComparisonResult, *, width: int = 100, files: dict[str, Path] | None = None) -> str:
    output = io.StringIO()
    print_comparison(result, Console(file=output, width=width), files=files or {})
    return output.getvalue()


def test_an_identical_comparison_is_this_text_of_less_than_a_screen(tmp_path: Path) -> None:
    text = render(identical(tmp_path), files={"json": Path("v.json")})
    assert [line.rstrip() for line in text.splitlines()] == [
        "identical: tp2 against base",
        "  base: tp1 pp1 dp1",
        "  tp2: tp2 pp1 dp1",
        "",
        "  bit-equal: 3 metrics over 3 steps, 78 activations, 2 output tensors, 2 loss tensors, 78 activation",
        "  gradients, 78 gradients, 78 parameters; one changed bit would have been found",
        "",
        "  tensors by kind      compared  identical",
        "  activation                 78         78",
        "  output                      2          2",
        "  loss                        2          2",
        "  activation gradient        78         78",
        "  gradient                   78         78",
        "  parameter                  78         78",
        "",
        "Metrics: 3 of 3 metrics equal to the last bit over 3 steps",
        "",
        "Bounds: Stated: ||a-b|| / ||a|| of what the forward pass computes at most 0.0001; of gradients and",
        "the optimizer's state 0.0001; of the change d by an update ||d_a-d_b|| / ||d_a|| 0.005; metrics",
        "|a-b| / max(|a|, |b|, 0.001) 0.0001; each beyond rounding; integers equal.",
        "json: v.json",
    ]


def test_a_divergence_begins_with_the_verdict_and_its_sentence(tmp_path: Path) -> None:
    lines = render(diverged(tmp_path)).splitlines()
    assert lines[0] == "diverged: tp2 against base"
    assert " ".join(line.strip() for line in lines[4:10]) == SENTENCE


def test_the_first_divergent_tensors_have_their_figures_and_words(tmp_path: Path) -> None:
    lines = [line.rstrip() for line in render(diverged(tmp_path), width=120).splitlines()]
    start = lines.index("Beyond their bound: 301 of 316 tensors, as computed")
    first = "    decoder.layers.2.self_attention.linear_proj"
    assert lines[start + 1 : start + 8] == [
        "                                                 relative    bound  max |a-b|     ULP     slope    cosine",
        "  step 0, update 0: activation",
        f"{first}   3.1e-03  1.0e-04    3.1e-03  52,009  0.998967  0.999990",
        "      where       channels 32 to 63 hold 98.0 % of the difference (32 of 64 channels): just the piece of one "
        "rank",
        "      looks like  the part of tp1 is missing from the candidate",
        "      worst       sample train/g0/e1/v3/t0 token 5, element [17, 40]: 0.125 in the baseline, 0.1281 in the "
        "candidate;",
        "                  held by global rank 0 (tp0 pp0 dp0) in the baseline and global rank 0 (tp0 pp0 dp0), "
        "global rank 1",
    ]
    assert "  and 291 more (with --json)" in lines


def test_everything_beside_the_tensors_is_said(tmp_path: Path) -> None:
    text = render(diverged(tmp_path), width=300)
    for expected in (
        "Without a number\n  gradient of decoder.layers.1.mlp.linear_fc1.bias at step 0, update 0 was traced by the "
        "baseline but not by the candidate\n",
        "Replicas that disagree\n  in the candidate: decoder.layers.0.input_layernorm.weight: ranks tp0 and tp1 hold "
        "different gradients at step 0 (64 elements, by up to 0.25)\n",
        "Choice of experts\n  router of decoder.layers.1.mlp.router at step 0, update 0: rounding chose other experts "
        "for 2 of 64 tokens, between logits that are at most 3.0e-07 apart\n",
        "Calls\n  collective at step 0: step 0, global rank 1 (tp1 pp0 dp0): collective call 12 is all_reduce of 64 "
        "float32 over ranks 0, 1 in the baseline, and all_gather of 64 float32 over ranks 0, 1 in the candidate\n"
        "  random: all 12 calls of 1 step on 2 ranks equal\n",
        "Not compared\n  activation of decoder.layers.0.input_layernorm, not in the candidate: fused into the linear "
        "layer after it\n  the ledger of random calls was not compared: only the candidate traced it\n",
    ):
        assert expected in text


def test_what_is_left_out_is_counted_with_the_file_that_has_it(tmp_path: Path) -> None:
    result = diverged(tmp_path)
    tensors = result.verdict.tensors
    assert tensors is not None
    many = replace(tensors, findings=tensors.findings * 7, candidate_conflicts=tensors.candidate_conflicts * 9)
    result = replace(result, verdict=replace(result.verdict, tensors=many))
    text = render(result, files={"json": Path("v.json")})
    more = [line for line in text.splitlines() if " more" in line]
    assert more == ["  and 291 more, in v.json", "  and 2 more, in v.json", "  and 4 more, in v.json"]


def test_a_rounding_result_shows_the_nearest_to_their_bounds(tmp_path: Path) -> None:
    lines = [line.rstrip() for line in render(rounding(tmp_path)).splitlines()]
    start = lines.index("Nearest to their bound, worst first")
    assert sum(line.endswith("1.000000 1.000000") for line in lines[start:]) == 3
    assert "  activation                 78         16     62" in lines
    assert not any(" more" in line for line in lines)


def test_a_narrow_terminal_has_whole_names_and_bounds_before_other_figures(tmp_path: Path) -> None:
    lines = render(diverged(tmp_path), width=80).splitlines()
    assert "    decoder.layers.2.self_attention.linear_proj  3.1e-03 1.0e-04   3.1e-03" in lines
    assert not any("slope" in line or "ULP" in line for line in lines)


def test_a_sketch_says_that_it_estimates_and_what_to_run_next(tmp_path: Path) -> None:
    lines = [line.rstrip() for line in render(sketched(tmp_path)).splitlines()]
    note = "  level sketch: relative differences are estimated, and what stands beside them is their error bar"
    assert lines[3] == note
    assert "    decoder.layers.2.pre_mlp_layernorm            1.3e-03  7.9e-04 to 2.0e-03  1.0e-04" in lines
    start = lines.index("Next: a full trace of the place, in both runs, shows its elements; run them again with")
    assert lines[start + 1] == "  trace.level=full trace.steps='0' trace.patterns=['decoder.layers.2.*']"


def test_an_incomparable_result_says_why_and_nothing_else(tmp_path: Path) -> None:
    assert render(incomparable(tmp_path)) == (
        "incomparable: tp2 against base\n  base: tp1 pp1 dp1\n  tp2: tp2 pp1 dp1\n\n"
        "  the two runs trained on other rollouts from step 1 on (2 of 3 steps), so nothing in their training\n"
        "  can be compared; replay the baseline's recording in the candidate: rollout_mock.mode=mock and its\n"
        "  rollout_mock.dump_dir\n\n"
    )


@pytest.mark.parametrize("make", [identical, rounding, diverged, sketched, incomparable, infinite])
@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_cut_or_wider_than_the_terminal(
    make: Callable[[Path], ComparisonResult], width: int, tmp_path: Path
) -> None:
    text = render(make(Path("/runs")), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert "\x1b" not in text


def test_the_reason_does_not_repeat_the_sentence(tmp_path: Path) -> None:
    text = " ".join(render(diverged(tmp_path)).split())
    assert text.count("the part of tp1 is missing from the candidate, channels 32 to 63") == 1
    assert "first metric: pg_loss from step 0 on" in text
    assert "beyond the stated bounds: 1 of 3 metrics, 301 of 316 tensors; 1 could not be compared" in text


def test_ranks_are_named_once_where_both_runs_have_the_same() -> None:
    assert describe_ranks((TP0,), (TP0,)) == "global rank 0 (tp0 pp0 dp0) in both runs"
    assert describe_ranks((TP0,), ()) == "global rank 0 (tp0 pp0 dp0) in the baseline"
    assert describe_ranks((), ()) == ""
    many = describe_ranks((TP0, TP1) * 3, (TP1,))
    assert many.count("global rank") == 5
    assert "and 2 more in the baseline and global rank 1 (tp1 pp0 dp0) in the candidate" in many


def test_two_sides_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    result = incomparable(tmp_path)
    sides = [
        replace(side, name="run", path=tmp_path / folder / "run")
        for side, folder in ((result.baseline, "a"), (result.candidate, "b"))
    ]
    assert name_sides(replace(result, baseline=sides[0], candidate=sides[1])) == ("a/run", "b/run")


def test_tiers_of_a_sketch_add_up_to_what_was_compared(tmp_path: Path) -> None:
    tensors = sketched(tmp_path).verdict.tensors
    assert tensors is not None
    counts = {item.kind: item for item in count_tiers(tensors)}
    gradient = counts["gradient"]
    assert (gradient.compared, gradient.undecided, gradient.diverged, gradient.missing) == (78, 26, 52, 1)
    assert sum(item.compared for item in counts.values()) == len(tensors.differences) == 316


def test_numbers_are_short_and_lose_no_meaning() -> None:
    assert format_relative(make_difference(KEY, 0.0)) == "0"
    assert format_relative(make_difference(KEY, 3.14e-3)) == "3.1e-03"
    estimated = make_difference(KEY, 3e-3, low=2e-3, high=4e-3)
    assert format_relative(estimated) == "~3.0e-03 (2.0e-03 to 4.0e-03)"
    assert [format_slope(value) for value in (1.0, -0.5, 1e6)] == ["1.000000", "-0.500000", "1.00e+06"]
    assert [format_times(value) for value in (3.14, 1300.2, 2.4e9)] == ["3.1", "1,300", "2.4e+09"]
    assert describe_margin(make_difference(KEY, 1e-6)) == "100 times below its bound of 1.0e-04"
    assert describe_margin(make_difference(KEY, 1e-3)) == "10 times its bound of 1.0e-04"
    assert describe_margin(make_difference(KEY, 1e-3, tolerance=0.0)) == "beyond its bound of 0.0e+00"


#: The candidate's rank 1 draws once more.
DREW_MORE = LedgerDifference(
    position=3,
    calls=(None, LedgerCall(operation="normal_", group=(), dtype="float32", num_elements=8)),
    num_calls=(3, 4),
    places=(TP1,),
)


def render_replicas(result: ReplicaResult) -> str:
    output = io.StringIO()
    print_replicas(result, Console(file=output, width=200), files={})
    return output.getvalue()


def make_replicas(
    *, num_conflicts: int = 0, copies: int = 40, difference: LedgerDifference | None = None
) -> ReplicaResult:
    conflict = ReplicaConflict(key=KEY, first=TP0, second=TP1, num_elements=1, max_abs=0.5)
    ledger = LedgerComparison(kind="random", step=0, num_ranks=2, num_calls=3, difference=difference)
    return ReplicaResult(
        path="/runs/a",
        steps=(0, 1),
        num_tensors=12,
        num_copies={"tp": copies, "dp": 0},
        conflicts=(conflict,) * num_conflicts,
        ledgers=(ledger,),
    )


def test_replicas_that_agree_disagree_or_do_not_exist() -> None:
    assert render_replicas(make_replicas()) == (
        "replicas agree: every copy is equal to the last bit\n"
        "  12 tensors of 2 steps in /runs/a; copies by axis: tp 40, dp 0\n"
        "\nCalls\n  random: all 3 calls of 1 step on 2 ranks equal\n"
    )
    assert render_replicas(make_replicas(num_conflicts=6, difference=DREW_MORE)) == (
        "replicas disagree: in 6 tensors and the calls of 1 step\n"
        "  12 tensors of 2 steps in /runs/a; copies by axis: tp 40, dp 0\n"
        "\nReplicas\n"
        + "  output_layer.weight: ranks tp0 and tp1 hold different gradients at step 0 (1 element, by up to 0.5)\n"
        * 5
        + "  and 1 more (with --json)\n\nCalls\n  random at step 0: step 0, global rank 1 (tp1 pp0 dp0): "
        "random call 3 is absent (3 in all) in the baseline, and normal_ of 8 float32 in the candidate\n"
    )
    text = render_replicas(make_replicas(copies=0))
    assert text.startswith("nothing compared: no element of this trace is held twice\n")
