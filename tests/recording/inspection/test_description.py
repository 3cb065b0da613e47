"""What recorded steps hold, in numbers worked out by hand; histograms keep every count in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.batch import RolloutBatch, Termination
from mock_scheduler.batch.columns import Ragged
from mock_scheduler.batch.versions import Staleness
from mock_scheduler.recording.inspection.description import (
    RecordingStatistics,
    RecordingTotals,
    StepStatistics,
    describe_step,
)
from mock_scheduler.recording.inspection.histogram import Bar, NumberCounts, Spread
from tests.recording.builders import SAMPLING, make_info, make_row


def make_step() -> RolloutBatch:
    """Group 0: two rows, of which one repeats the other; group 1: one row, aborted, without response."""
    first = replace(make_row(0, 0), policy_versions=torch.tensor([3, 4], dtype=torch.int32))
    silent = make_row(
        1, 0, tokens=(1, 2), response=(False, False), rollout_logprobs=(), turn_rewards=(-0.5,), tag="Sokoban"
    )
    rows = [first, replace(first, identity=make_row(0, 1).identity), replace(silent, termination=Termination.ABORTED)]
    extras = {"router": Ragged(torch.zeros(2, 4, dtype=torch.uint8)), "weight": torch.tensor(1.0), "info": {"a": 1}}
    return RolloutBatch.from_trajectories(
        [replace(row, extras=extras) for row in rows], sampling=SAMPLING, group_size=None
    )


def test_a_step_is_described_in_numbers() -> None:
    assert describe_step("val", make_step(), make_info(7, policy_version=4), size_bytes=1234) == StepStatistics(
        folder="val",
        step=7,
        size_bytes=1234,
        num_rows=3,
        num_trajectories=3,
        num_groups=2,
        group_size=None,
        num_tokens=10,
        num_response_tokens=4,
        num_rows_without_response=1,
        num_turns=5,
        # Rewards 1, 1 and -0.5: mean 0.5, squared deviations 0.25, 0.25 and 1.
        reward=Spread(count=3, mean=0.5, std=math.sqrt(0.5), minimum=-0.5, p10=-0.5, median=1.0, p90=1.0, maximum=1.0),
        length=Spread(count=3, mean=10 / 3, std=math.sqrt(8 / 9), minimum=2, p10=2, median=4, p90=4, maximum=4),
        response_length=Spread(count=3, mean=4 / 3, std=math.sqrt(8 / 9), minimum=0, p10=0, median=2, p90=2, maximum=2),
        terminations={"terminated": 2, "truncated": 0, "aborted": 1},
        finish_reasons={},
        tags={"FrozenLake": 2, "Sokoban": 1},
        policy_version=4,
        policy_versions=(0, 4),
        # Two turns in one run of response tokens: the mask does not tell which token is of version 3.
        staleness=None,
        num_mixed_trajectories=2,
        findings=(),
        num_duplicate_rows=1,
        duplicates=("default/group 0/episode 0/env 1/turn 0 repeats default/group 0/episode 0/env 0/turn 0",),
        num_partial_groups=1,
        partial_groups=("default/group 1/episode 0: 1 of 2 trajectories",),
        extras={"info": "JSON", "router": "ragged uint8 [n, 4]", "weight": "float32 []"},
    )


def test_staleness_is_of_tokens_and_what_cannot_be_true_is_listed() -> None:
    """Inspect said -56 of turns where correction said lag 0."""
    long = make_row(0, 0, tokens=(1, 2, 3, 4, 5), response=[False, False, True, True, True], turn_rewards=(1.0,))
    long = replace(long, rollout_logprobs=torch.tensor([-0.5, -0.25, -0.125]))
    ahead = replace(make_row(0, 1, turn_rewards=(0.0,)), policy_versions=torch.tensor([58], dtype=torch.int32))
    batch = RolloutBatch.from_trajectories([long, ahead], sampling=SAMPLING, group_size=None)
    step = describe_step("train", batch, make_info(2, policy_version=2), size_bytes=1)
    assert step.staleness == Staleness(minimum=-56, mean=(3 * 2 - 2 * 56) / 5, maximum=2)
    assert step.findings == (
        "1 turn of 2 with a policy version ahead of the policy: default/group 0/episode 0/env 1/turn 0: version 58, "
        "and the newest policy is 2",
    )


def test_a_step_without_rows_has_no_spread() -> None:
    empty = RolloutBatch.from_trajectories([], sampling=SAMPLING, group_size=None)
    step = describe_step("train", empty, make_info(), size_bytes=0)
    assert (step.num_rows, step.reward, step.response_length) == (0, None, None)
    assert (step.policy_versions, step.staleness, step.partial_groups) == (None, None, ())


def test_a_recording_adds_its_steps_up() -> None:
    statistics = RecordingStatistics()
    first, second = (
        statistics.add("train", make_step(), make_info(step, policy_version=4), size_bytes=100 + step)
        for step in range(2)
    )
    assert (first.step, second.step) == (0, 1)
    assert statistics.totals() == RecordingTotals(
        num_steps=2,
        size_bytes=201,
        num_rows=6,
        num_trajectories=6,
        num_groups=4,
        num_tokens=20,
        num_response_tokens=8,
        num_rows_without_response=2,
        num_duplicate_rows=2,
        num_partial_groups=2,
        num_mixed_trajectories=4,
        terminations={"terminated": 4, "truncated": 0, "aborted": 2},
        finish_reasons={},
        tags={"FrozenLake": 4, "Sokoban": 2},
        extras={"info": ("JSON",), "router": ("ragged uint8 [n, 4]",), "weight": ("float32 []",)},
        reward=replace(first.reward, count=6),
        response_length=replace(first.response_length, count=6),
        reward_bars=(Bar(low=-0.5, high=-0.5, count=2), Bar(low=1.0, high=1.0, count=4)),
        response_length_bars=(Bar(low=0, high=0, count=2), Bar(low=2, high=2, count=4)),
    )


def test_an_extra_that_changes_its_kind_between_steps_is_listed_with_both() -> None:
    statistics = RecordingStatistics()
    for step, dtype in enumerate((torch.float32, torch.float64)):
        row = replace(make_row(), extras={"weight": torch.zeros(2, dtype=dtype)})
        batch = RolloutBatch.from_trajectories([row], sampling=SAMPLING, group_size=1)
        statistics.add("train", batch, make_info(step), size_bytes=1)
    assert statistics.totals().extras == {"weight": ("float32 [2]", "float64 [2]")}


def count(values: Sequence[float]) -> NumberCounts:
    counts = NumberCounts()
    counts.add(values)
    return counts


def test_few_values_have_a_bar_each() -> None:
    assert count([0.0, 1.0, 0.0, 0.5]).bars(6) == (
        Bar(low=0.0, high=0.0, count=2),
        Bar(low=0.5, high=0.5, count=1),
        Bar(low=1.0, high=1.0, count=1),
    )
    assert len(count([float(value) for value in range(6)] * 2).bars(6)) == 6
    assert [(bar.low, bar.high) for bar in count([float(value) for value in range(6)]).bars(6)] == [
        (low, low + 1) for low in range(6)
    ]


@pytest.mark.parametrize(
    ("values", "max_bars", "edges"),
    [
        (range(100), 11, [(low, low + 10) for low in range(0, 100, 10)]),
        (range(3, 20), 6, [(0, 5), (5, 10), (10, 15), (15, 20)]),
        ([index / 10 for index in range(10)], 5, [(0, 0.5), (0.5, 1.0)]),
        ([-7, -1, 0, 1, 12], 4, [(-10, 0), (0, 10), (10, 20)]),
    ],
)
def test_many_values_are_binned_at_round_numbers(
    values: Sequence[float], max_bars: int, edges: list[tuple[float, float]]
) -> None:
    bars = count(list(values)).bars(max_bars)
    assert [(bar.low, bar.high) for bar in bars] == edges
    assert [bar.count for bar in bars] == [sum(low <= value < high for value in values) for low, high in edges]


def test_beyond_the_memory_bound_nothing_is_lost_and_quantiles_stay_close() -> None:
    """100,000 different values in bins 2^-12 of the range wide: a quantile is at most that far below the true one."""
    counts = NumberCounts()
    for start in range(0, 100_000, 1_000):
        counts.add([value / 100_000 for value in range(start, start + 1_000)])
    spread = counts.spread()
    assert spread is not None
    assert (spread.count, spread.minimum, spread.maximum) == (100_000, 0.0, 0.99999)
    assert spread.mean == pytest.approx(0.499995, rel=1e-12)
    assert spread.std == pytest.approx(math.sqrt((100_000**2 - 1) / 12) / 100_000, rel=1e-9)
    for found, true in ((spread.p10, 0.1), (spread.median, 0.5), (spread.p90, 0.9)):
        assert true - 2 / 4096 <= found <= true
    bars = counts.bars(11)
    assert sum(bar.count for bar in bars) == 100_000
    assert [bar.low for bar in bars] == pytest.approx([index / 10 for index in range(10)])


@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), max_size=20), min_size=1), st.integers(2, 15))
def test_counts_do_not_depend_on_the_portions(portions: list[list[float]], max_bars: int) -> None:
    counts, values = NumberCounts(), [value for portion in portions for value in portion]
    for portion in portions:
        counts.add(portion)
    spread = counts.spread()
    if not values:
        assert (spread, counts.bars(max_bars)) == (None, ())
        return
    assert spread is not None
    ordered = sorted(values)
    assert spread.count == len(values)
    assert spread.mean == pytest.approx(fmean(values), rel=1e-9, abs=1e-6)
    assert spread.std == pytest.approx(pstdev(values), rel=1e-6, abs=1e-6)
    quantiles = [ordered[math.ceil(fraction * len(values)) - 1] for fraction in (0.1, 0.5, 0.9)]
    assert [spread.minimum, spread.p10, spread.median, spread.p90, spread.maximum] == [
        ordered[0],
        *quantiles,
        ordered[-1],
    ]
    bars = counts.bars(max_bars)
    assert len(bars) <= max_bars
    assert sum(bar.count for bar in bars) == len(values)
