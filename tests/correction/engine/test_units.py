"""Units of levels and inputs: sums of runs, and every input that cannot be meant, refused by name."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mock_scheduler.correction import CorrectionInputs, compute_correction
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from mock_scheduler.correction.engine.inputs import check_inputs
from mock_scheduler.correction.engine.tokens import count_positions
from mock_scheduler.correction.engine.units import Reduction, Runs
from mock_scheduler.errors import CorrectionError

SEGMENTS = RolloutCorrectionConfig(rollout_is="segment", rollout_is_threshold="inf").spec


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("sum", [0.0, 3.0, 0.0, -2.5, 0.0]),
        ("max", [-math.inf, 2.0, -math.inf, -1.0, -math.inf]),
        ("min", [math.inf, 1.0, math.inf, -1.5, math.inf]),
    ],
)
def test_runs_are_reduced_and_empty_ones_have_the_neutral_value(reduction: Reduction, expected: list[float]) -> None:
    values, lengths = torch.tensor([1.0, 2.0, -1.5, -1.0]), torch.tensor([0, 2, 0, 2, 0])
    found = Runs(lengths).reduce(values, reduction)
    assert found.dtype == torch.float64
    assert found.tolist() == expected
    assert Runs(lengths[:0]).reduce(values[:0], reduction).tolist() == []
    assert Runs(torch.zeros(2, dtype=torch.int64)).reduce(values[:0], reduction).tolist() == [expected[0]] * 2


@pytest.mark.parametrize("length", [7, 8, 127, 128, 129, 1000, 4097])
def test_a_sum_does_not_depend_on_where_its_run_lies(length: int) -> None:
    """Every offset into the tensor, to the bit: or padding and batching would change weights."""
    draw = np.random.default_rng(length)
    run = draw.standard_normal(length)
    alone = float(Runs(torch.tensor([length])).reduce(torch.from_numpy(run), "sum"))
    for before in range(1, 10):
        values = torch.from_numpy(np.concatenate([draw.standard_normal(before), run, draw.standard_normal(3)]))
        assert float(Runs(torch.tensor([before, length, 3])).reduce(values, "sum")[1]) == alone
    assert alone == pytest.approx(math.fsum(run), rel=1e-12, abs=1e-12)


def test_positions_are_counted_within_each_run() -> None:
    assert count_positions(torch.tensor([2, 0, 3]), 5).tolist() == [0, 1, 0, 1, 2]
    assert count_positions(torch.tensor([], dtype=torch.int64), 0).tolist() == []


def _inputs(**changes: torch.Tensor) -> CorrectionInputs:
    tensors = {
        "train_logprobs": torch.zeros(2, 3),
        "rollout_logprobs": torch.zeros(2, 3),
        "response_mask": torch.ones(2, 3),
    }
    return CorrectionInputs(**{**tensors, **changes})


def test_every_input_of_another_shape_or_dtype_is_named() -> None:
    inputs = _inputs(
        train_logprobs=torch.zeros(2, 4),
        rollout_logprobs=torch.zeros(2, 3, dtype=torch.int64),
        turn_ids=torch.zeros(2, 3),
        positions=torch.zeros(2, 3, dtype=torch.bool),
    )
    with pytest.raises(CorrectionError) as raised:
        compute_correction(inputs, SEGMENTS)
    assert str(raised.value) == (
        "rollout correction: train_logprobs is torch.float32 [2, 4] on cpu; response_mask is torch.float32 [2, 3] on "
        "cpu; rollout_logprobs is torch.int64 [2, 3] on cpu; expected a floating dtype; turn_ids is torch.float32 "
        "[2, 3] on cpu; expected an integer dtype; positions is torch.bool [2, 3] on cpu; expected an integer dtype"
    )


@pytest.mark.parametrize(
    ("offsets", "shape", "problem"),
    [
        (None, (6,), "response_mask is torch.float32 [6] on cpu; expected [B, T], or [N] with cu_seqlens"),
        ([0, 6], (2, 3), "cu_seqlens is given, and response_mask is torch.float32 [2, 3] on cpu; expected [N]"),
        ([1, 6], (6,), "cu_seqlens must rise from 0 to 6"),
        ([0, 5], (6,), "cu_seqlens must rise from 0 to 6"),
        ([0, 4, 2, 6], (6,), "cu_seqlens must rise from 0 to 6"),
        ([], (6,), "cu_seqlens is torch.int64 [0] on cpu; expected integer [S + 1]"),
        ([0.0, 6.0], (6,), "cu_seqlens is torch.float32 [2] on cpu; expected integer [S + 1]"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(offsets: list[float] | None, shape: tuple[int, ...], problem: str) -> None:
    is_integer = offsets is not None and all(isinstance(value, int) for value in offsets)
    inputs = CorrectionInputs(
        train_logprobs=torch.zeros(shape),
        rollout_logprobs=torch.zeros(shape),
        response_mask=torch.ones(shape),
        cu_seqlens=None if offsets is None else torch.tensor(offsets, dtype=torch.int64 if is_integer else None),
    )
    with pytest.raises(CorrectionError) as raised:
        check_inputs(inputs)
    assert str(raised.value) == f"rollout correction: {problem}"


def test_turns_whose_tokens_do_not_lie_together_are_refused() -> None:
    with pytest.raises(CorrectionError) as raised:
        compute_correction(_inputs(turn_ids=torch.tensor([[0, 1, 0], [0, 0, 0]])), SEGMENTS)
    assert str(raised.value) == "rollout correction: turn_ids do not keep the tokens of each turn together"


def test_turns_below_0_are_refused() -> None:
    """−1 of the second sequence would have been a turn of the first."""
    with pytest.raises(CorrectionError) as raised:
        compute_correction(_inputs(turn_ids=torch.tensor([[0, 1, 1], [-1, 0, 0]])), SEGMENTS)
    assert str(raised.value) == "rollout correction: turn_ids of response tokens are 0 and above; one is -1"
    masked = torch.tensor([[1, 1, 1], [0, 1, 1]])
    inputs = _inputs(turn_ids=torch.tensor([[0, 1, 1], [-1, 0, 0]]), response_mask=masked)
    assert compute_correction(inputs, SEGMENTS).mask.tolist() == masked.tolist()
