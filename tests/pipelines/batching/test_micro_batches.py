"""Micro-batches: every row once and whole, by the rules of each way of batching, the same whatever the layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import BatchError
from pipelines.batching.checks import check_plan
from pipelines.batching.placement import place_step
from pipelines.batching.plan import MicroBatch, StepPlan, Update
from pipelines.batching.values import compute_loss_weights, fill_step, response_values, with_values
from pipelines.config.training import TrainingConfig
from tests.pipelines.step_plans import build_step_plan
from tests.recording.builders import SAMPLING, make_row

T, F = True, False


def make_batch(*lengths: int, turns: Sequence[int] | None = None, prompt_length: int = 2) -> RolloutBatch:
    """Row i has tokens 10·(i + 1), 10·(i + 1) + 1, …; the first ones are the prompt.

    turns: rows of each trajectory; one where left out.
    """
    turns = [1] * len(lengths) if turns is None else turns
    places = [(env_id, turn) for env_id, number in enumerate(turns) for turn in range(number)]
    rows = [
        make_row(
            0,
            env_id,
            turn=turn,
            tokens=[10 * (index + 1) + position for position in range(length)],
            response=[position >= prompt_length for position in range(length)],
            rollout_logprobs=[-0.25 * (position + 1) for position in range(max(length - prompt_length, 0))],
            prompt_length=min(prompt_length, length),
        )
        for index, ((env_id, turn), length) in enumerate(zip(places, lengths, strict=True))
    ]
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=len(turns))


def build(
    batch: RolloutBatch, *, count_multiple: int = 1, dtype: torch.dtype = torch.float32, **training: object
) -> StepPlan:
    """The plan where response token k of the batch has advantage k + 1 and return -(k + 1), k from 0."""
    values = torch.arange(1, len(batch.rollout_logprobs) + 1, dtype=torch.float64)
    config = TrainingConfig(**{"sequence_multiple_of": 1, **training})
    return build_step_plan(batch, values, -values, config, count_multiple=count_multiple, dtype=dtype)


def rows_of(micro_batch: MicroBatch) -> list[list[int]]:
    """The rows in each line, in order, each once."""
    return [list(dict.fromkeys(row for row in line if row >= 0)) for line in micro_batch.row_ids.tolist()]


def rows_by_update(plan: StepPlan) -> list[list[list[list[int]]]]:
    return [[rows_of(micro_batch) for micro_batch in update.micro_batches] for update in plan.updates]


def shapes_of(plan: StepPlan) -> list[tuple[int, ...]]:
    return [tuple(micro_batch.tokens.shape) for micro_batch in plan.micro_batches]


def contents(micro_batch: MicroBatch) -> dict[str, Any]:
    return {"index": micro_batch.index} | {name: value.tolist() for name, value in micro_batch.tensors().items()}


def test_position_t_predicts_token_t_plus_1() -> None:
    plan = build(make_batch(4, 3), micro_batch_size=2, sequence_multiple_of=5)
    (micro_batch,) = plan.micro_batches
    assert contents(micro_batch) == {
        "index": 0,
        "tokens": [[10, 11, 12, 13, 0], [20, 21, 22, 0, 0]],
        "targets": [[11, 12, 13, 0, 0], [21, 22, 0, 0, 0]],
        "response_mask": [[F, T, T, F, F], [F, T, F, F, F]],
        "advantages": [[0.0, 1.0, 2.0, 0.0, 0.0], [0.0, 3.0, 0.0, 0.0, 0.0]],
        "returns": [[0.0, -1.0, -2.0, 0.0, 0.0], [0.0, -3.0, 0.0, 0.0, 0.0]],
        "rollout_logprobs": [[0.0, -0.25, -0.5, 0.0, 0.0], [0.0, -0.25, 0.0, 0.0, 0.0]],
        "weights": [[0.0, 1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0]],
        "kept_mask": [[F, T, T, F, F], [F, T, F, F, F]],
        "loss_weights": [[0.0, 1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0]],
        "row_ids": [[0, 0, 0, 0, -1], [1, 1, 1, -1, -1]],
        "positions": [[0, 1, 2, 3, 0], [0, 1, 2, 0, 0]],
    }
    assert {name: value.dtype for name, value in micro_batch.tensors().items()} == {
        "tokens": torch.int64,
        "targets": torch.int64,
        "response_mask": torch.bool,
        "advantages": torch.float32,
        "returns": torch.float32,
        "rollout_logprobs": torch.float32,
        "weights": torch.float32,
        "kept_mask": torch.bool,
        "loss_weights": torch.float32,
        "row_ids": torch.int64,
        "positions": torch.int64,
    }
    assert (micro_batch.num_tokens, micro_batch.num_real_tokens, micro_batch.is_plain) == (3, 7, True)
    assert plan.row_weights.tolist() == [2.0, 1.0]
    assert plan.row_weights.dtype is torch.float64


def test_rows_packed_into_one_line_keep_their_own_positions_and_targets() -> None:
    """A row's last token has no target, though the column after it has a token."""
    plan = build(make_batch(3, 4), sequence_packing=True, max_tokens_per_micro_batch=9)
    (micro_batch,) = plan.micro_batches
    assert contents(micro_batch) == {
        "index": 0,
        "tokens": [[20, 21, 22, 23, 10, 11, 12, 0, 0]],
        "targets": [[21, 22, 23, 0, 11, 12, 0, 0, 0]],
        "response_mask": [[F, T, T, F, F, T, F, F, F]],
        "advantages": [[0.0, 2.0, 3.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]],
        "returns": [[0.0, -2.0, -3.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0]],
        "rollout_logprobs": [[0.0, -0.25, -0.5, 0.0, 0.0, -0.25, 0.0, 0.0, 0.0]],
        "weights": [[0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]],
        "kept_mask": [[F, T, T, F, F, T, F, F, F]],
        "loss_weights": [[0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]],
        "row_ids": [[1, 1, 1, 1, 0, 0, 0, -1, -1]],
        "positions": [[0, 1, 2, 3, 0, 1, 2, 0, 0]],
    }
    assert (micro_batch.num_tokens, micro_batch.num_real_tokens, micro_batch.is_plain) == (3, 7, False)


def test_dynamic_micro_batches_are_padded_to_their_own_longest_row() -> None:
    plan = build(make_batch(3, 5, 4), batching="dynamic", max_tokens_per_micro_batch=10)
    first, second = plan.micro_batches
    assert first.tokens.tolist() == [[20, 21, 22, 23, 24], [30, 31, 32, 33, 0]]
    assert first.advantages.tolist() == [[0.0, 2.0, 3.0, 4.0, 0.0], [0.0, 5.0, 6.0, 0.0, 0.0]]
    assert second.tokens.tolist() == [[10, 11, 12]]
    assert second.positions.tolist() == [[0, 1, 2]]
    assert [micro_batch.index for micro_batch in plan.micro_batches] == [0, 1]
    assert first.is_plain
    assert second.is_plain


@pytest.mark.parametrize(
    ("lengths", "options", "rows", "shapes"),
    [
        pytest.param(
            (3, 3, 3, 3, 3), {"micro_batch_size": 2}, [[[[0], [1]], [[2], [3]], [[4], []]]], [(2, 3)] * 3, id="fixed"
        ),
        pytest.param(
            (3, 9, 4, 4),
            {"micro_batch_size": 1, "global_batch_size": 2, "sequence_multiple_of": 8},
            # One width for the step, though the second update alone would be narrower: pipeline stages need one shape.
            [[[[0]], [[1]]], [[[2]], [[3]]]],
            [(1, 16)] * 4,
            id="fixed, two updates",
        ),
        pytest.param(
            (4, 6, 6, 5, 4),
            {"batching": "dynamic", "max_tokens_per_micro_batch": 12},
            # Sorted: rows 1, 2 (6), 3 (5), 0, 4 (4). 2·6 fits 12, 3·6 does not; 2·5 fits, 3·5 does not.
            [[[[1], [2]], [[3], [0]], [[4]]]],
            [(2, 6), (2, 5), (1, 4)],
            id="dynamic",
        ),
        pytest.param(
            (4, 6, 6, 5, 4),
            {"batching": "dynamic", "max_tokens_per_micro_batch": 16, "sequence_multiple_of": 4},
            # Padded to 8, 8, 8, 4, 4: 2·8 fits 16, and row 3 with row 0 at width 8.
            [[[[1], [2]], [[3], [0]], [[4]]]],
            [(2, 8), (2, 8), (1, 4)],
            id="dynamic, rounded",
        ),
        pytest.param(
            (5, 6, 4),
            {"batching": "dynamic", "max_tokens_per_micro_batch": 8, "sequence_multiple_of": 4},
            # The longest first by their own length, though rows 0 and 1 are both padded to 8.
            [[[[1]], [[0]], [[2]]]],
            [(1, 8), (1, 8), (1, 4)],
            id="dynamic, equal when rounded",
        ),
        pytest.param(
            (4, 9, 4, 4),
            {"batching": "dynamic", "max_tokens_per_micro_batch": 12, "global_batch_size": 2},
            [[[[1]], [[0]]], [[[2], [3]]]],
            [(1, 9), (1, 4), (2, 4)],
            id="dynamic, two updates",
        ),
        pytest.param(
            (3, 6, 4, 7, 3, 2),
            {"sequence_packing": True, "max_tokens_per_micro_batch": 10},
            # Decreasing: 7, 6, 4, 3 (row 0), 3 (row 4), 2. Lines 7 + 3, 6 + 4, then 3 + 2.
            [[[[3, 0]], [[1, 2]], [[4, 5]]]],
            [(1, 10)] * 3,
            id="packed",
        ),
        pytest.param(
            (5, 5, 5, 5),
            {"sequence_packing": True, "max_tokens_per_micro_batch": 16, "global_batch_size": 2},
            [[[[0, 1]]], [[[2, 3]]]],
            [(1, 16)] * 2,
            id="packed, two updates",
        ),
    ],
)
def test_rows_are_placed_by_the_rule_of_each_way(
    lengths: tuple[int, ...],
    options: dict[str, Any],
    rows: list[list[list[list[int]]]],
    shapes: list[tuple[int, int]],
) -> None:
    plan = build(make_batch(*lengths), **options)
    assert rows_by_update(plan) == rows
    assert shapes_of(plan) == shapes
    assert [micro_batch.index for micro_batch in plan.micro_batches] == list(range(len(shapes)))


def test_an_update_counts_trajectories_not_rows() -> None:
    """Trajectories of 2, 1, 3 and 1 turns, two to an update: 3 rows, then 4."""
    batch = make_batch(3, 4, 5, 3, 4, 5, 6, turns=(2, 1, 3, 1))
    plan = build(batch, micro_batch_size=2, global_batch_size=2)
    assert rows_by_update(plan) == [[[[0], [1]], [[2], []]], [[[3], [4]], [[5], [6]]]]
    assert shapes_of(plan) == [(2, 6)] * 4
    assert plan.row_weights.tolist() == [1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]


def test_fixed_micro_batches_are_slices_of_the_padded_batch() -> None:
    """Value for value: the batch padded to one length, moved left by one, and cut."""
    batch = make_batch(4, 3, 7, 5)
    advantages = torch.tensor([0.1, -0.7, 1.3, 1 / 3], dtype=torch.float64)
    per_token = advantages.repeat_interleave(batch.response_lengths)
    config = TrainingConfig(micro_batch_size=2, global_batch_size=4)
    plan = build_step_plan(batch, per_token, per_token * 2, config, count_multiple=1, dtype=torch.float32)
    padded = batch.pad(8)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(tensor[:, 1:], (0, 1))

    mask = moved(padded.response_mask)
    for part, rows in zip(plan.micro_batches, (slice(0, 2), slice(2, 4)), strict=True):
        assert part.tokens.equal(padded.tokens[rows])
        assert part.targets.equal(moved(padded.tokens)[rows])
        assert part.response_mask.equal(mask[rows])
        assert part.rollout_logprobs.equal(moved(padded.rollout_logprobs)[rows])
        assert part.advantages.equal(torch.where(mask, advantages.float()[:, None], 0.0)[rows])
        assert part.returns.equal(torch.where(mask, (advantages * 2).float()[:, None], 0.0)[rows])


def test_float64_values_are_not_narrowed() -> None:
    batch = make_batch(4)
    values = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    config = TrainingConfig(micro_batch_size=1)
    (part,) = build_step_plan(batch, values, -values, config, count_multiple=1, dtype=torch.float64).micro_batches
    assert part.advantages[part.response_mask].equal(values)
    assert part.returns[part.response_mask].equal(-values)


def test_weights_and_rejections_go_where_their_tokens_are() -> None:
    """Rows of 2 and 1 response tokens, the longer one first in the packed line; a rejected token keeps its weight."""
    batch = make_batch(3, 4)
    config = TrainingConfig(sequence_packing=True, max_tokens_per_micro_batch=8, sequence_multiple_of=1)
    values = torch.zeros(3)
    (part,) = build_step_plan(
        batch,
        values,
        values,
        config,
        count_multiple=1,
        dtype=torch.float64,
        token_weights=torch.tensor([0.5, 1 / 3, 2.0], dtype=torch.float64),
        token_kept=torch.tensor([T, F, T]),
    ).micro_batches
    assert part.weights.tolist() == [[0.0, 1 / 3, 2.0, 0.0, 0.0, 0.5, 0.0, 0.0]]
    assert part.kept_mask.tolist() == [[F, F, T, F, F, T, F, F]]
    assert part.loss_weights.tolist() == [[0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]]
    assert (part.num_tokens, part.num_kept_tokens) == (3, 2)
    assert {part.weights.dtype, part.loss_weights.dtype} == {torch.float64}


@pytest.mark.parametrize(
    ("mode", "rs_denominator", "expected"),
    [
        ("token-mean", "original", [1.0] * 9),
        ("token-mean", "kept", [1.0] * 6 + [0.0] * 3),
        # Updates of trajectories (0, 1) and (2, 3): 4 + 2 tokens in 2 sequences, 3 + 0 tokens in 1.
        ("seq-mean-token-sum", "original", [3.0] * 6 + [3.0] * 3),
        ("seq-mean-token-mean", "original", [3 / 4] * 4 + [3 / 2] * 2 + [1.0] * 3),
        # Kept: 3 of the first trajectory, none of the second, and nothing of the second update.
        ("seq-mean-token-sum", "kept", [3.0] * 4 + [0.0] * 5),
        ("seq-mean-token-mean", "kept", [1.0] * 4 + [0.0] * 5),
    ],
)
def test_loss_weights_by_hand(mode: Any, rs_denominator: Any, expected: list[float]) -> None:
    """Trajectories of 1 + 3 (two rows), 2, 3 and 0 response tokens, two trajectories to an update."""
    batch = make_batch(3, 5, 4, 5, 2, turns=(2, 1, 1, 1))
    kept = torch.tensor([T, F, T, T, F, F, F, F, F])
    arguments = {"loss_agg_mode": mode, "rs_denominator": rs_denominator}
    factors = compute_loss_weights(batch, kept, global_batch_size=2, **arguments)
    assert factors.dtype is torch.float64
    assert factors.tolist() == expected
    values, config = torch.zeros(9), TrainingConfig(micro_batch_size=2, global_batch_size=2)
    plan = build_step_plan(
        batch, values, values, config, count_multiple=2, dtype=torch.float32, token_kept=kept, **arguments
    )
    spread = response_values(plan.micro_batches, {part.index: part.loss_weights for part in plan.micro_batches})
    assert spread.tolist() == expected


def test_without_rejections_both_denominators_are_the_same() -> None:
    batch = make_batch(3, 5, 4, turns=(2, 1))
    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        original, kept, none = (
            compute_loss_weights(batch, rejected, loss_agg_mode=mode, rs_denominator=denominator, global_batch_size=2)
            for denominator, rejected in (("original", None), ("kept", torch.ones(6, dtype=torch.bool)), ("kept", None))
        )
        assert torch.equal(original, kept)
        assert torch.equal(original, none)


def test_arrival_order_changes_nothing() -> None:
    batch = make_batch(5, 3, 4)
    shuffled = RolloutBatch.from_trajectories(reversed(batch.rows()), sampling=SAMPLING, group_size=3)
    options = {"sequence_packing": True, "max_tokens_per_micro_batch": 8}
    one, other = (build(rows, **options).micro_batches for rows in (batch, shuffled))
    assert [contents(part) for part in one] == [contents(part) for part in other]


def test_empty_micro_batches_end_each_update_and_hold_nothing() -> None:
    plan = build(
        make_batch(3, 5, 4, 4, 4),
        batching="dynamic",
        max_tokens_per_micro_batch=7,
        global_batch_size=3,
        count_multiple=4,
    )
    assert rows_by_update(plan) == [[[[1]], [[2]], [[0]], [[]]], [[[3]], [[4]], [[]], [[]]]]
    assert shapes_of(plan) == [(1, 5), (1, 4), (1, 3), (1, 3)] + [(1, 4)] * 4
    # Those that hold rows are numbered first, so that no layout changes their index.
    assert [part.index for part in plan.micro_batches] == [0, 1, 2, 5, 3, 4, 6, 7]
    empty = plan.updates[0].micro_batches[3]
    assert (empty.num_tokens, empty.num_real_tokens, empty.is_plain) == (0, 0, True)
    assert contents(empty) == {
        "index": 5,
        "tokens": [[0, 0, 0]],
        "targets": [[0, 0, 0]],
        "response_mask": [[F, F, F]],
        "advantages": [[0.0, 0.0, 0.0]],
        "returns": [[0.0, 0.0, 0.0]],
        "rollout_logprobs": [[0.0, 0.0, 0.0]],
        "weights": [[0.0, 0.0, 0.0]],
        "kept_mask": [[F, F, F]],
        "loss_weights": [[0.0, 0.0, 0.0]],
        "row_ids": [[-1, -1, -1]],
        "positions": [[0, 0, 0]],
    }


def test_a_line_is_plain_only_where_its_row_starts_it() -> None:
    (packed,) = build(make_batch(4), sequence_packing=True, max_tokens_per_micro_batch=6).micro_batches
    assert packed.is_plain
    moved = {name: value.roll(1, dims=1) for name, value in packed.tensors().items()}
    assert not MicroBatch(index=0, **moved).is_plain
    restarted = replace(packed, positions=torch.tensor([[0, 1, 0, 1, 0, 0]]))
    assert not restarted.is_plain


def test_moving_a_micro_batch_moves_every_tensor() -> None:
    """A tensor that is added and not moved would leave the update on two devices."""
    (micro_batch,) = build(make_batch(4, 3), micro_batch_size=2).micro_batches
    moved = micro_batch.to(torch.device("meta"))
    tensors = {name: getattr(moved, name) for name in MicroBatch.__dataclass_fields__ if name != "index"}
    assert {name: tensor.device.type for name, tensor in tensors.items()} == dict.fromkeys(tensors, "meta")
    assert moved.index == micro_batch.index


# Properties

WAYS: list[dict[str, Any]] = [
    {"micro_batch_size": 1},
    {"micro_batch_size": 3, "sequence_multiple_of": 4},
    {"batching": "dynamic", "max_tokens_per_micro_batch": 12, "sequence_multiple_of": 4},
    {"batching": "dynamic", "max_tokens_per_micro_batch": 13},
    {"sequence_packing": True, "max_tokens_per_micro_batch": 12},
]


@st.composite
def batches(draw: st.DrawFn) -> RolloutBatch:
    """Trajectories of one to three rows of 1 to 12 tokens, with any mask after a first prompt token."""
    turns = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    rows = []
    for env_id, number in enumerate(turns):
        for turn in range(number):
            mask = [False, *draw(st.lists(st.booleans(), max_size=11))]
            tokens = draw(st.lists(st.integers(0, 99), min_size=len(mask), max_size=len(mask)))
            rows.append(
                make_row(
                    0,
                    env_id,
                    turn=turn,
                    tokens=tokens,
                    response=mask,
                    rollout_logprobs=[-0.5 - index for index in range(sum(mask))],
                    prompt_length=1,
                )
            )
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=len(turns))


def read_row(plan: StepPlan, row: int) -> list[list[float]]:
    """All values of a row, column by column, wherever it is in the plan."""
    return [
        [float(part.tensors()[name][line, column]) for name in ("tokens", "targets", "response_mask", "advantages")]
        for part in plan.micro_batches
        for line, column in (part.row_ids == row).nonzero().tolist()
    ]


@settings(deadline=None, max_examples=40)
@given(batch=batches(), way=st.sampled_from(WAYS), global_batch_size=st.integers(1, 4))
def test_every_row_is_in_the_plan_once_and_in_order(
    batch: RolloutBatch, way: dict[str, Any], global_batch_size: int
) -> None:
    plan = build(batch, **way, global_batch_size=global_batch_size, dtype=torch.float64)
    number = 0
    for index, row in enumerate(batch.rows()):
        expected = []
        tokens, mask = row.tokens.tolist(), row.response_mask.tolist()
        for position, token in enumerate(tokens):
            is_response = position + 1 < len(tokens) and mask[position + 1]
            number += is_response
            target = tokens[position + 1] if position + 1 < len(tokens) else 0
            expected.append([token, target, is_response, number if is_response else 0])
        assert read_row(plan, index) == expected
    assert sum(part.num_real_tokens for part in plan.micro_batches) == len(batch.tokens)
    assert sum(part.num_tokens for part in plan.micro_batches) == int(plan.row_weights.sum()) == number


@settings(deadline=None, max_examples=40)
@given(batch=batches(), way=st.sampled_from(WAYS), global_batch_size=st.integers(1, 4))
def test_updates_hold_whole_trajectories_and_micro_batches_keep_their_budget(
    batch: RolloutBatch, way: dict[str, Any], global_batch_size: int
) -> None:
    plan = build(batch, **way, global_batch_size=global_batch_size)
    keys = [identity.trajectory_key for identity in batch.identities]
    number_of = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    for number, update in enumerate(plan.updates):
        rows = {int(row) for part in update.micro_batches for row in part.row_ids.unique() if row >= 0}
        assert rows == {row for row, key in enumerate(keys) if number_of[key] // global_batch_size == number}
    budget = way.get("max_tokens_per_micro_batch")
    for lines, width in shapes_of(plan):
        assert budget is None or lines * width <= budget
        assert width % way.get("sequence_multiple_of", 1) == 0
        assert not way.get("sequence_packing") or (lines, width) == (1, budget)
        assert "micro_batch_size" not in way or lines == way["micro_batch_size"]


@settings(deadline=None, max_examples=40)
@given(batch=batches(), way=st.sampled_from(WAYS), data=st.data())
def test_values_of_response_tokens_come_back_in_the_batch_order(
    batch: RolloutBatch, way: dict[str, Any], data: st.DataObject
) -> None:
    count_multiple = data.draw(st.integers(1, 4))
    plan = build(batch, **way, global_batch_size=2, count_multiple=count_multiple, dtype=torch.float64)
    # What is not a response token must not come back, so it is NaN.
    by_index = {part.index: torch.where(part.response_mask, part.advantages, torch.nan) for part in plan.micro_batches}
    order = data.draw(st.permutations(plan.micro_batches))
    assert response_values(order, by_index).tolist() == list(range(1, len(batch.rollout_logprobs) + 1))
    logprobs = response_values(order, {part.index: part.rollout_logprobs for part in plan.micro_batches})
    assert logprobs.dtype is torch.float64
    assert logprobs.equal(batch.rollout_logprobs.double())


@settings(deadline=None, max_examples=40)
@given(batch=batches(), way=st.sampled_from(WAYS), count_multiple=st.integers(2, 8))
def test_the_count_multiple_adds_empty_micro_batches_and_changes_no_other(
    batch: RolloutBatch, way: dict[str, Any], count_multiple: int
) -> None:
    alone, filled = (
        build(batch, **way, global_batch_size=2, count_multiple=multiple) for multiple in (1, count_multiple)
    )
    for one, other in zip(alone.updates, filled.updates, strict=True):
        num_real = len(one.micro_batches)
        assert [contents(part) for part in one.micro_batches] == [
            contents(part) for part in other.micro_batches[:num_real]
        ]
        assert len(other.micro_batches) % count_multiple == 0
        assert len(other.micro_batches) - num_real < count_multiple
        for part in other.micro_batches[num_real:]:
            assert (part.num_tokens, part.num_real_tokens) == (0, 0)
            assert part.tokens.shape == one.micro_batches[-1].tokens.shape
            assert not any(bool(value.any()) for name, value in part.tensors().items() if name != "row_ids")
    assert len({part.index for part in filled.micro_batches}) == len(filled.micro_batches)
    assert filled.row_weights.equal(alone.row_weights)
    check_plan(filled, batch)


# Wrong plans are refused, with the place

PACKED = {"sequence_packing": True, "max_tokens_per_micro_batch": 8, "global_batch_size": 2}
ROW = "default/group 0/episode 0/env"


def edited(plan: StepPlan, number: int, **columns: dict[int, float]) -> StepPlan:
    """The plan where columns of line 0 of one micro-batch of the step have other values, by field."""
    part = plan.micro_batches[number]
    tensors = {name: tensor.clone() for name, tensor in part.tensors().items()}
    for name, values in columns.items():
        for column, value in values.items():
            tensors[name][0, column] = value
    changed = MicroBatch(index=part.index, **tensors)
    updates = tuple(
        Update(micro_batches=tuple(changed if other is part else other for other in update.micro_batches))
        for update in plan.updates
    )
    return replace(plan, updates=updates)


def swap_updates(plan: StepPlan) -> StepPlan:
    return replace(plan, updates=plan.updates[::-1])


def drop_update(plan: StepPlan) -> StepPlan:
    return replace(plan, updates=plan.updates[:1])


def repeat_micro_batch(plan: StepPlan) -> StepPlan:
    """Update 1 once more, under an index of its own."""
    (part,) = plan.updates[1].micro_batches
    return replace(plan, updates=(*plan.updates, Update(micro_batches=(replace(part, index=7),))))


def same_index(plan: StepPlan) -> StepPlan:
    (part,) = plan.updates[1].micro_batches
    return replace(plan, updates=(plan.updates[0], Update(micro_batches=(replace(part, index=0),))))


def shift_mask(plan: StepPlan) -> StepPlan:
    """The mask of the tokens rather than of their targets."""
    (part,) = plan.updates[1].micro_batches
    moved = replace(part, response_mask=part.response_mask.roll(1, dims=1))
    return replace(plan, updates=(plan.updates[0], Update(micro_batches=(moved,))))


def narrow_targets(plan: StepPlan) -> StepPlan:
    (part,) = plan.updates[1].micro_batches
    cut = replace(part, targets=part.targets[:, 1:])
    return replace(plan, updates=(plan.updates[0], Update(micro_batches=(cut,))))


@pytest.mark.parametrize(
    ("spoil", "problems"),
    [
        pytest.param(
            lambda plan: edited(plan, 0, targets={3: 10}),
            [f"micro-batch 0, line 0, column 3, row 1 ({ROW} 1/turn 0): targets is 10; expected 0"],
            id="a target of the next row",
        ),
        pytest.param(
            lambda plan: edited(plan, 0, positions={4: 4, 5: 5, 6: 6}),
            [f"micro-batch 0, line 0, column 4, row 0 ({ROW} 0/turn 0): position is 4; expected 0, where a row starts"],
            id="positions that do not start again",
        ),
        pytest.param(
            lambda plan: edited(plan, 0, positions={5: 3}),
            [
                f"micro-batch 0, line 0, column 5, row 0 ({ROW} 0/turn 0): position is 3; expected 1",
            ],
            id="a position is left out",
        ),
        pytest.param(
            lambda plan: edited(plan, 0, row_ids={7: 0}, positions={7: 3}),
            [f"micro-batch 0, line 0, column 7, row 0 ({ROW} 0/turn 0): position is 3; the row has 3 tokens"],
            id="a row too long",
        ),
        pytest.param(
            lambda plan: edited(plan, 0, row_ids={6: -1}, positions={6: 0}),
            [f"micro-batch 0, line 0, column 5, row 0 ({ROW} 0/turn 0): the row ends after 2 of its 3 tokens"],
            id="a row cut short",
        ),
        pytest.param(
            lambda plan: edited(plan, 0, row_ids={7: 4}),
            ["micro-batch 0, line 0, column 7, row 4: the batch has rows 0 to 3"],
            id="an unknown row",
        ),
        pytest.param(
            lambda plan: edited(plan, 0, positions={7: 2}),
            ["micro-batch 0, line 0, column 7, padding: position is 2; expected 0"],
            id="a position on padding",
        ),
        pytest.param(
            lambda plan: edited(plan, 1, positions={7: 1}),
            ["micro-batch 1, line 0, column 7, padding: position is 1; expected 0"],
            id="positions that go on through padding",
        ),
        pytest.param(
            lambda plan: edited(plan, 0, tokens={7: 5}),
            ["micro-batch 0, line 0, column 7, padding: tokens is 5; expected 0"],
            id="a token on padding",
        ),
        pytest.param(
            lambda plan: edited(plan, 1, tokens={1: 99}),
            [f"micro-batch 1, line 0, column 1, row 2 ({ROW} 2/turn 0): tokens is 99; expected 31"],
            id="another token",
        ),
        pytest.param(
            lambda plan: edited(plan, 1, rollout_logprobs={1: -0.125}),
            [f"micro-batch 1, line 0, column 1, row 2 ({ROW} 2/turn 0): rollout_logprobs is -0.125; expected -0.25"],
            id="another logprob",
        ),
        pytest.param(
            lambda plan: edited(plan, 1, advantages={0: 1.0}, returns={2: float("nan")}),
            [
                f"micro-batch 1, line 0, column 0, row 2 ({ROW} 2/turn 0): advantages is 1.0; expected 0.0",
                f"micro-batch 1, line 0, column 2, row 2 ({ROW} 2/turn 0): returns is nan; expected 0.0",
            ],
            id="values outside the mask",
        ),
        pytest.param(
            shift_mask,
            [
                f"micro-batch 1, line 0, column 1, row 2 ({ROW} 2/turn 0): response_mask is False; expected True",
                f"micro-batch 1, line 0, column 4, row 3 ({ROW} 3/turn 0): response_mask is False; expected True",
            ],
            id="a mask that is not shifted",
        ),
        pytest.param(
            repeat_micro_batch,
            [
                f"micro-batch 7, line 0, column 0, row 2 ({ROW} 2/turn 0): the row is here again; expected once in all "
                "micro-batches",
                f"micro-batch 7, line 0, column 3, row 3 ({ROW} 3/turn 0): the row is here again; expected once in all "
                "micro-batches",
            ],
            id="rows twice",
        ),
        pytest.param(
            drop_update,
            [f"row 2 ({ROW} 2/turn 0) is in no micro-batch", f"row 3 ({ROW} 3/turn 0) is in no micro-batch"],
            id="rows absent",
        ),
        pytest.param(
            swap_updates,
            [
                f"micro-batch 1, line 0, column 0, row 2 ({ROW} 2/turn 0): in update 0, away from the rows before it",
            ],
            id="updates swapped",
        ),
        pytest.param(same_index, ["2 micro-batches have index 0"], id="an index twice"),
        pytest.param(
            lambda plan: replace(plan, row_weights=plan.row_weights + 1),
            ["row_weights are not the rows' numbers of response tokens"],
            id="weights",
        ),
        pytest.param(lambda plan: replace(plan, updates=()), ["there are none"], id="nothing"),
    ],
)
def test_a_wrong_plan_is_refused_with_the_place(spoil: Callable[[StepPlan], StepPlan], problems: list[str]) -> None:
    """Update 0 has the line 1 1 1 1 0 0 0 -, update 1 the line 2 2 2 3 3 3 - -."""
    batch = make_batch(3, 4, 3, 3)
    plan = build(batch, **PACKED)
    assert rows_by_update(plan) == [[[[1, 0]]], [[[2, 3]]]]
    with pytest.raises(BatchError) as caught:
        check_plan(spoil(plan), batch)
    assert str(caught.value) == "micro-batches do not hold the batch they were made of:" + "".join(
        f"\n  - {problem}" for problem in problems
    )


def test_tensors_of_different_shapes_are_refused() -> None:
    batch = make_batch(3, 4, 3, 3)
    with pytest.raises(BatchError, match=r"micro-batch 1 has tensors of shapes \{.*'targets': \[1, 7\].*\}; expected"):
        check_plan(narrow_targets(build(batch, **PACKED)), batch)


def test_a_trajectory_in_two_updates_is_refused() -> None:
    batch = make_batch(3, 4, turns=(2,))
    plan = build(batch, micro_batch_size=1)
    first, second = plan.micro_batches
    apart = replace(plan, updates=(Update(micro_batches=(first,)), Update(micro_batches=(second,))))
    with pytest.raises(BatchError, match=f"micro-batch 1, line 0, column 0, row 1 .{ROW} 0/turn 1.: in update 1, away"):
        check_plan(apart, batch)


def test_a_row_that_runs_into_the_next_line_is_refused() -> None:
    """Both halves are neighbours in memory, but not in a line."""
    batch = make_batch(4)
    (part,) = build(batch, micro_batch_size=1).micro_batches
    halves = MicroBatch(index=0, **{name: value.view(2, 2) for name, value in part.tensors().items()})
    plan = StepPlan(updates=(Update(micro_batches=(halves,)),), row_weights=torch.tensor([2.0], dtype=torch.float64))
    with pytest.raises(BatchError, match=r"line 1, column 0, row 0 .*: position is 2; expected 0, where a row starts"):
        check_plan(plan, batch)


# What cannot be batched


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batching": "dynamic", "max_tokens_per_micro_batch": 8, "sequence_multiple_of": 8},
            "rows that, rounded up to a multiple of 8, are longer than training.max_tokens_per_micro_batch 8 fit into "
            f"no micro-batch; raise it to the longest row's length:\n  - {ROW} 1/turn 0: 9 tokens",
        ),
        (
            {"sequence_packing": True, "max_tokens_per_micro_batch": 8, "sequence_multiple_of": 8},
            "rows that are longer than training.max_tokens_per_micro_batch 8 fit into no micro-batch; raise it to the "
            f"longest row's length:\n  - {ROW} 1/turn 0: 9 tokens",
        ),
    ],
)
def test_a_row_longer_than_a_micro_batch_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError) as caught:
        build(make_batch(8, 9), **options)
    assert str(caught.value) == message


def test_a_response_token_without_a_token_before_it_is_refused() -> None:
    with pytest.raises(BatchError) as caught:
        build(make_batch(3, prompt_length=0))
    assert str(caught.value) == (
        f"micro-batches cannot be made of this step's batch:\n  - row 0 ({ROW} 0/turn 0) starts with a response token, "
        "which no token predicts; give the row a prompt of at least one token"
    )


def test_values_that_are_not_one_per_response_token_are_refused() -> None:
    batch = make_batch(4, 3)
    with pytest.raises(BatchError) as caught:
        build_step_plan(
            batch,
            torch.zeros(2),
            torch.zeros(3, dtype=torch.int64),
            TrainingConfig(),
            count_multiple=1,
            dtype=torch.float32,
            token_weights=torch.ones(2),
            token_kept=torch.ones(3),
        )
    assert str(caught.value) == (
        "micro-batches cannot be made of this step's batch:\n"
        "  - token_advantages is torch.float32 [2] on cpu; expected floating [3], one per response token\n"
        "  - token_returns is torch.int64 [3] on cpu; expected floating [3], one per response token\n"
        "  - token_weights is torch.float32 [2] on cpu; expected floating [3], one per response token\n"
        "  - token_kept is torch.float32 [3] on cpu; expected torch.bool [3], one per response token"
    )


def test_a_dtype_that_no_gradient_is_computed_in_is_refused() -> None:
    with pytest.raises(BatchError) as caught:
        place_step(make_batch(4, 3), TrainingConfig(), count_multiple=1, dtype=torch.bfloat16)
    assert str(caught.value) == (
        "micro-batches cannot be made of this step's batch:\n"
        "  - dtype is torch.bfloat16; expected torch.float32 or torch.float64"
    )


def test_a_placed_step_is_filled_without_moving_a_row() -> None:
    batch = make_batch(4, 3, 5)
    placed = place_step(batch, TrainingConfig(micro_batch_size=2), count_multiple=2, dtype=torch.float64)
    values = torch.arange(1.0, 1.0 + len(batch.rollout_logprobs), dtype=torch.float64)
    filled = fill_step(placed, batch, token_advantages=values, token_returns=-values, global_batch_size=3)
    for before, after in zip(placed.micro_batches, filled.micro_batches, strict=True):
        assert before.index == after.index
        for name in ("tokens", "targets", "response_mask", "row_ids", "positions", "rollout_logprobs"):
            assert torch.equal(getattr(before, name), getattr(after, name)), name
        assert not before.advantages.any()
        assert torch.equal(after.advantages != 0, after.response_mask)
    found = response_values(filled.micro_batches, {one.index: one.returns for one in filled.micro_batches})
    assert torch.equal(found, -values)


def test_a_count_multiple_below_1_is_refused() -> None:
    with pytest.raises(BatchError, match="count_multiple is 0; expected 1 or more"):
        build(make_batch(4), count_multiple=0)


def test_a_batch_without_rows_is_refused() -> None:
    empty = RolloutBatch.from_trajectories([], sampling=SAMPLING, group_size=1)
    with pytest.raises(BatchError, match="the batch of this step has no rows: there is nothing to train on"):
        build(empty)


def test_absent_values_are_named_by_micro_batch() -> None:
    plan = build(make_batch(4, 3, 5), micro_batch_size=1)
    with pytest.raises(BatchError) as caught:
        response_values(plan.micro_batches, {0: torch.zeros(1, 5), 2: torch.zeros(1, 4)})
    assert str(caught.value) == (
        "values of response tokens cannot be gathered:\n"
        "  - those of micro-batch 1 are absent; expected [1, 5]\n"
        "  - those of micro-batch 2 are torch.float32 [1, 4] on cpu; expected [1, 5]"
    )


def test_some_micro_batches_give_the_values_of_their_rows() -> None:
    plan = build(make_batch(4, 3, 5), micro_batch_size=1, dtype=torch.float64, count_multiple=2)
    part = plan.micro_batches[2]
    assert response_values([part], {2: part.advantages}).tolist() == [4.0, 5.0, 6.0]
    assert response_values([plan.micro_batches[3]], {}).tolist() == []


def test_values_of_some_updates_are_put_where_the_plan_has_their_tokens() -> None:
    batch = make_batch(4, 3, 5, 6, 4, 3, 5, 7)
    numbers = torch.arange(len(batch.rollout_logprobs), dtype=torch.float64) + 1
    training = TrainingConfig(micro_batch_size=3, global_batch_size=4)
    plain = build_step_plan(batch, numbers, numbers, training, count_multiple=1, dtype=torch.float64)
    first = int(batch.response_offsets[4])  # update 1 has trajectories 4 to 7
    kept = numbers[first:] % 2 == 0
    values = {"weights": 10 * numbers[first:], "kept_mask": kept}
    found = with_values(plain.updates[1].micro_batches, batch, values, first=first)
    for before, after in zip(plain.updates[1].micro_batches, found, strict=True):
        mask = before.response_mask
        assert torch.equal(after.weights, 10 * before.advantages)
        assert torch.equal(after.kept_mask, mask & (before.advantages % 2 == 0))
        assert torch.equal(after.advantages, before.advantages)
        assert after.index == before.index
