"""Differences of two batches: every planted change is found, named and located, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.batch import RolloutBatch, Termination, Trajectory
from mock_scheduler.batch.columns import Ragged
from mock_scheduler.recording.inspection.diff import BatchDifferences, compare_batches
from tests.recording.builders import SAMPLING, make_identity, make_row

ROW = "default/group 0/episode 0/env 1/turn 0"


def make_rows() -> list[Trajectory]:
    """Three rows, of which the tests change the middle one."""
    return [
        replace(make_row(0, 0), extras=make_extras()),
        replace(make_row(0, 1, tokens=(1, 2, 7, 8)), extras=make_extras()),
        replace(make_row(0, 2, tokens=(1, 2, 9, 10)), extras=make_extras()),
    ]


def make_extras() -> dict[str, object]:
    return {
        "loss_weight": torch.tensor(1.0),
        "router": Ragged(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)),
        "info": {"messages": [{"role": "user", "text": "go"}], "seed": 1},
    }


def make_batch(rows: Sequence[Trajectory], *, meta: dict[str, object] | None = None) -> RolloutBatch:
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=None, meta=meta)


def compare_changed(change: Callable[[Trajectory], Trajectory]) -> BatchDifferences:
    first, middle, last = make_rows()
    return compare_batches(make_batch(make_rows()), make_batch([first, change(middle), last]))


def with_extra(name: str, value: object) -> Callable[[Trajectory], Trajectory]:
    return lambda row: replace(row, extras={**row.extras, name: value})


def float_of_bits(bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def test_equal_batches_are_identical() -> None:
    differences = compare_batches(make_batch(make_rows()), make_batch(make_rows()))
    assert differences.is_identical
    assert differences.first() == "none"
    assert differences.describe() == "recorded and played are identical (3 rows)"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda row: replace(row, tokens=torch.tensor([1, 2, 7, 9], dtype=torch.int32)),
            ["tokens[3]: recorded 8, played 9 (1 of 4 positions differ)"],
        ),
        (
            lambda row: replace(row, response_mask=torch.tensor([False, True, False, True]), prompt_length=1),
            [
                "response_mask[1]: recorded False, played True (2 of 4 positions differ)",
                "prompt_length: recorded 2, played 1",
                # SHA-256 of the prompts [1, 2] and [1] as little-endian int32, by sha256sum.
                'prompt_digest: recorded "34fb5c825de7ca4aea6e712f19d439c1da0c92c37b423936c5f618545ca4fa1f", '
                'played "67abdd721024f0ff4e0b3f4c2fc13bc5bad42d0b7851d456d88d203d15aaa450"',
            ],
        ),
        (
            lambda row: replace(row, rollout_logprobs=torch.tensor([-0.5, -0.1])),
            ["rollout_logprobs[1]: recorded -0.25, played -0.1 (1 of 2 positions differ)"],
        ),
        (
            lambda row: replace(row, turn_rewards=torch.tensor([-0.0, 1.0])),
            ["turn_rewards[0]: recorded 0.0, played -0.0 (1 of 2 positions differ)"],
        ),
        (
            lambda row: replace(row, policy_versions=torch.tensor([0, 3], dtype=torch.int32)),
            ["policy_versions[1]: recorded 0, played 3 (1 of 2 positions differ)"],
        ),
        (lambda row: replace(row, reward=0.1), ["reward: recorded 1.0, played 0.1"]),
        (
            lambda row: replace(row, termination=Termination.ABORTED),
            ["termination: recorded terminated, played aborted"],
        ),
        (lambda row: replace(row, tag="Sokoban"), ['tag: recorded "FrozenLake", played "Sokoban"']),
        (
            lambda row: replace(
                row,
                tokens=torch.tensor([1, 2, 7, 8, 5], dtype=torch.int32),
                response_mask=torch.tensor([False, False, True, True, False]),
            ),
            [
                "tokens[4]: recorded absent, played 5 (lengths 4 and 5, 0 of the first 4 positions differ)",
                "response_mask[4]: recorded absent, played False (lengths 4 and 5, 0 of the first 4 positions differ)",
            ],
        ),
        (with_extra("loss_weight", torch.tensor(0.5)), ["extra 'loss_weight': recorded 1.0, played 0.5"]),
        (
            with_extra("router", Ragged(torch.tensor([[1, 2], [3, 5]], dtype=torch.int16))),
            ["extra 'router'[1, 1]: recorded 4, played 5 (1 of 4 positions differ)"],
        ),
        (
            with_extra("router", Ragged(torch.tensor([[1, 2]], dtype=torch.int16))),
            ["extra 'router'[1]: recorded [3, 4], played absent (lengths 2 and 1, 0 of the first 2 positions differ)"],
        ),
        (
            with_extra("info", {"messages": [{"role": "tool", "text": "go"}], "seed": 1}),
            ['extra \'info\'.messages[0].role: recorded "user", played "tool"'],
        ),
        (
            with_extra("info", {"messages": [{"role": "user", "text": "go"}, 7], "seed": 1}),
            ["extra 'info'.messages[1]: recorded absent, played 7"],
        ),
        (
            with_extra("info", {"messages": [{"role": "user", "text": "go"}]}),
            ["extra 'info'.seed: recorded 1, played absent"],
        ),
        (
            with_extra("info", {"messages": [{"role": "user", "text": "go"}], "seed": 1.0}),
            ["extra 'info'.seed: recorded 1, played 1.0"],
        ),
    ],
)
def test_a_changed_row_is_named_with_field_position_and_both_values(
    change: Callable[[Trajectory], Trajectory], expected: list[str]
) -> None:
    differences = compare_changed(change)
    assert [str(row.identity) for row in differences.rows] == [ROW]
    assert [field.describe(("recorded", "played")) for field in differences.rows[0].fields] == expected
    assert differences.first() == f"{ROW}: {expected[0]}"
    assert (differences.num_different_rows, differences.is_identical) == (1, False)
    assert (differences.whole, differences.only_a, differences.only_b) == ((), (), ())


def test_nans_of_different_payload_are_shown_by_their_bits() -> None:
    first, middle, last = make_rows()
    rows = [
        [first, replace(middle, extras={**make_extras(), "loss_weight": float_of_bits(bits)}), last]
        for bits in (0x7FC00000, 0x7FC00001)
    ]
    differences = compare_batches(make_batch(rows[0]), make_batch(rows[1]))
    assert differences.first() == f"{ROW}: extra 'loss_weight': recorded nan (0x7fc00000), played nan (0x7fc00001)"
    assert compare_batches(make_batch(rows[1]), make_batch(rows[1])).is_identical


@pytest.mark.parametrize(
    ("dtype", "bits_dtype", "expected"),
    [
        (torch.bfloat16, torch.int16, ("1.0078125", "1.015625")),
        (torch.float16, torch.int16, ("0.1", "0.10004")),
        (torch.float64, torch.int64, ("0.1", "0.10000000000000002")),
        (torch.float8_e4m3fn, torch.uint8, ("0.001953125", "0.00390625")),
        (torch.uint8, torch.uint8, ("1", "2")),
    ],
)
def test_values_of_any_dtype_are_written_exactly(
    dtype: torch.dtype, bits_dtype: torch.dtype, expected: tuple[str, str]
) -> None:
    start = {torch.bfloat16: 0x3F81, torch.float16: 0x2E66, torch.float64: 0x3FB999999999999A}.get(dtype, 1)
    first, middle, last = make_rows()
    batches = [
        make_batch(
            [
                replace(row, extras={"x": torch.tensor([start, bits], dtype=bits_dtype).view(dtype)})
                for row, bits in ((first, start), (middle, start + add), (last, start))
            ]
        )
        for add in (0, 1)
    ]
    (field,) = compare_batches(*batches).rows[0].fields
    assert (field.where, field.a, field.b) == ("[1]", *expected)


def test_extras_of_another_kind_concern_the_whole_batch() -> None:
    changed = [
        replace(
            row,
            extras={
                "loss_weight": torch.tensor([1.0], dtype=torch.float64),
                "router": Ragged(torch.zeros(2, 3, dtype=torch.int16)),
                "new": 1,
            },
        )
        for row in make_rows()
    ]
    differences = compare_batches(make_batch(make_rows()), make_batch(changed))
    assert [difference.describe(("a", "b")) for difference in differences.whole] == [
        "extra 'info': a JSON, b absent",
        "extra 'loss_weight': a float32 [], b float64 [1]",
        "extra 'new': a absent, b JSON",
        "extra 'router': a ragged int16 [n, 2], b ragged int16 [n, 3]",
    ]
    assert differences.num_different_rows == 0
    assert not differences.is_identical


def test_rows_of_one_side_are_listed_and_the_others_still_compared() -> None:
    rows = make_rows()
    other = [
        replace(rows[1], identity=make_identity(3, 0)),
        replace(rows[2], rollout_logprobs=torch.tensor([-0.5, -0.75])),
    ]
    assert compare_batches(make_batch(rows), make_batch(other)).describe(("left", "right")) == (
        "left and right differ: 1 of 1 rows in both differ; 2 of 3 rows only in left; 1 of 2 rows only in right\n"
        "first: default/group 0/episode 0/env 0/turn 0: only in left\n"
        "rows by field: rollout_logprobs 1\n"
        "only in left:\n"
        "  default/group 0/episode 0/env 0/turn 0\n"
        "  default/group 0/episode 0/env 1/turn 0\n"
        "only in right:\n"
        "  default/group 3/episode 0/env 0/turn 0\n"
        "in both, but different:\n"
        "  default/group 0/episode 0/env 2/turn 0: "
        "rollout_logprobs[1]: left -0.25, right -0.75 (1 of 2 positions differ)"
    )


def test_sampling_group_size_and_meta_are_compared_key_by_key() -> None:
    rows = make_rows()
    a = make_batch(rows, meta={"reward_model": {"name": "rm", "revision": 1}, "seed": 5})
    b = RolloutBatch.from_trajectories(
        rows, sampling=replace(SAMPLING, temperature=0.7), group_size=3, meta={"reward_model": {"name": "rm"}}
    )
    differences = compare_batches(a, b)
    assert [difference.describe(("a", "b")) for difference in differences.whole] == [
        "group_size: a null, b 3",
        "meta.reward_model.revision: a 1, b absent",
        "meta.seed: a 5, b absent",
        "sampling.temperature: a 1.0, b 0.7",
    ]
    assert differences.first(("a", "b")) == "whole batch: group_size: a null, b 3"
    assert differences.num_different_rows == 0


def test_the_limit_bounds_the_details_and_never_the_counts() -> None:
    rows = [make_row(group, 0) for group in range(30)]
    changed = [replace(row, tag="other") for row in rows]
    differences = compare_batches(make_batch(rows), make_batch(changed), limit=3)
    assert [row.identity.group_id for row in differences.rows] == [0, 1, 2]
    assert differences.num_different_rows == 30
    assert differences.field_counts == {"tag": 30}
    assert len(compare_batches(make_batch(rows), make_batch(changed)).rows) == 30
    assert compare_batches(make_batch(rows), make_batch(changed), limit=0).first() == "in rows that were not asked for"


def test_the_first_differing_row_is_described_in_full_and_the_others_in_short() -> None:
    rows = [make_row(group, 0) for group in range(2)]
    changed = [replace(row, tag="other", termination=Termination.ABORTED) for row in rows]
    assert compare_batches(make_batch(rows), make_batch(changed)).describe() == (
        "recorded and played differ: 2 of 2 rows in both differ\n"
        "first: default/group 0/episode 0/env 0/turn 0: termination: recorded terminated, played aborted\n"
        '  tag: recorded "FrozenLake", played "other"\n'
        "rows by field: termination 2, tag 2\n"
        "other rows that differ:\n"
        "  default/group 1/episode 0/env 0/turn 0: termination: recorded terminated, played aborted; also tag"
    )


def test_the_description_shows_at_most_twenty_rows_of_each_kind() -> None:
    rows = [make_row(group, 0) for group in range(60)]
    other = [replace(row, tag="other") for row in rows[:30]]
    lines = compare_batches(make_batch(rows), make_batch(other)).describe().splitlines()
    assert len(lines) == 3 + 2 * 22
    assert lines[26] == ('default/group 0/episode 0/env 0/turn 0: tag: recorded "FrozenLake", played "other"'.rjust(84))
    assert lines[3] == "only in recorded:"
    assert lines[24] == "  and 10 more"
    assert lines[25] == "in both, but different:"
    assert lines[46] == "  and 10 more"


def test_a_long_value_is_cut() -> None:
    differences = compare_changed(with_extra("info", "x" * 500))
    shown = '"' + "x" * 98 + "…"
    assert differences.rows[0].fields[0].describe(("a", "b")).endswith(f", b {shown}")


values = st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf")])


@st.composite
def batches(draw: st.DrawFn) -> RolloutBatch:
    """Small batches that are often equal to each other, or nearly."""
    rows = []
    for env_id in draw(st.sets(st.integers(0, 2), min_size=1)):
        length = draw(st.integers(2, 3))
        row = make_row(
            0,
            env_id,
            tokens=draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)),
            response=[False] * length,
            rollout_logprobs=[],
            turn_rewards=draw(st.lists(st.sampled_from([0.0, -0.0]), max_size=1)),
            prompt_length=1,
        )
        extras = {"x": torch.tensor(draw(values)), "y": draw(st.sampled_from([None, 1, 1.0, True, "1", [1], {"a": 1}]))}
        rows.append(replace(row, extras=extras))
    return make_batch(rows, meta=draw(st.sampled_from([{}, {"a": 1}, {"a": 1.0}])))


@given(batches(), batches())
def test_batches_are_identical_exactly_where_their_digests_are(a: RolloutBatch, b: RolloutBatch) -> None:
    differences = compare_batches(a, b)
    assert differences.is_identical == (a.digest() == b.digest())
    assert differences.is_identical == (differences.first() == "none")
    assert compare_batches(a, a).is_identical
