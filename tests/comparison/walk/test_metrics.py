"""Metrics of two runs: every difference is found and named, on either side."""

import math
from pathlib import Path

import pytest

from mock_scheduler.comparison.walk.metrics import compare_metrics, differ, load_metrics
from mock_scheduler.errors import TraceError
from mock_scheduler.verdict.wording.findings import describe_finding
from tests.comparison.stated import stated

BOUNDS = stated(metric=1e-3)


def test_equal_metrics_are_bit_equal() -> None:
    log = {0: {"pg_loss": 0.1}, 1: {"pg_loss": math.nan}}
    (difference,) = compare_metrics(log, log, bounds=BOUNDS).differences
    assert difference.bit_equal
    assert (difference.max_abs, difference.first_different_step) == (0.0, None)


def test_figures_name_the_steps() -> None:
    baseline = {0: {"loss": 1.0}, 1: {"loss": 1.0}, 2: {"loss": 100.0}}
    candidate = {0: {"loss": 1.0}, 1: {"loss": 1.0 + 2**-20}, 2: {"loss": 101.0}}
    (difference,) = compare_metrics(baseline, candidate, bounds=BOUNDS).differences
    assert not difference.bit_equal
    assert (difference.max_abs, difference.max_abs_step) == (1.0, 2)
    assert (difference.max_relative, difference.max_relative_step) == (1 / 101, 2)
    assert (difference.first_different_step, difference.first_exceeding_step) == (1, 2)


@pytest.mark.parametrize(
    ("mine", "other", "expected"),
    [
        (1.0, 1.0, (0.0, 0.0)),
        (math.nan, math.nan, (0.0, 0.0)),
        (math.nan, 1.0, (math.inf, math.inf)),
        (1.0, math.nan, (math.inf, math.inf)),
        (math.inf, math.inf, (0.0, 0.0)),
        (math.inf, -math.inf, (math.inf, math.inf)),
        (0.0, 0.0005, (0.0005, 0.5)),
        (-2.0, 2.0, (4.0, 2.0)),
    ],
)
def test_differ(mine: float, other: float, expected: tuple[float, float]) -> None:
    assert differ(mine, other, floor=1e-3) == expected


def test_the_sign_of_zero_is_not_bit_equal_but_within_tolerance() -> None:
    (difference,) = compare_metrics({0: {"a": 0.0}}, {0: {"a": -0.0}}, bounds=BOUNDS).differences
    assert (difference.bit_equal, difference.first_exceeding_step) == (False, None)


def test_what_is_missing_on_either_side_is_found_and_named() -> None:
    baseline = {0: {"a": 1.0, "b": 1.0}, 1: {"a": 1.0}}
    candidate = {0: {"a": 1.0, "c": 1.0}, 2: {"a": 1.0}}
    comparison = compare_metrics(baseline, candidate, bounds=BOUNDS)
    assert [describe_finding(finding) for finding in comparison.findings] == [
        "step 1 was logged by the baseline but not by the candidate",
        "step 2 was logged by the candidate but not by the baseline",
        "metric b was logged by the baseline but not by the candidate at 1 of 1 step, first at step 0",
        "metric c was logged by the candidate but not by the baseline at 1 of 1 step, first at step 0",
    ]


def test_wall_clock_and_recorded_values_are_not_compared() -> None:
    baseline = {0: {"time/step_s": 1.0, "recorded/time": 2.0, "rollout/tokens_per_second": 3.0, "timeouts": 1.0}}
    comparison = compare_metrics(baseline, {0: {"timeouts": 1.0}}, bounds=BOUNDS)
    assert [difference.name for difference in comparison.differences] == ["timeouts"]
    assert comparison.findings == ()


def test_metrics_are_read_in_full_precision(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "metrics": {"a": 0.1, "b": NaN, "n": 3}}\n')
    metrics = load_metrics(path)[0]
    assert metrics["a"].hex() == (0.1).hex()
    assert math.isnan(metrics["b"])
    assert metrics["n"] == 3.0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 0, "met', "not JSON (Unterminated string starting at); the run may have been cut off"),
        ('{"step": 0}', 'expected {"step": int, "metrics": {name: number}}, found {"step": 0}'),
        ('{"step": 0, "metrics": {"a": "x"}}', "metric a is 'x', expected a number"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(TraceError) as caught:
        load_metrics(path)
    assert str(caught.value) == f"{path}:1: {message}"


def test_a_step_logged_twice_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "metrics": {}}\n' * 2)
    with pytest.raises(TraceError) as caught:
        load_metrics(path)
    assert str(caught.value) == f"{path}:2: step 0 is logged twice"
