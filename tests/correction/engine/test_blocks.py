"""A batch larger than a block: each sequence has what it has alone, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from mock_scheduler.correction import (
    CorrectionInputs,
    CorrectionResult,
    CorrectionStates,
    compute_correction,
    correction_metrics,
)
from mock_scheduler.correction.config.rules import CorrectionSpec
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from mock_scheduler.correction.engine.blocks import BLOCK_TOKENS, split_inputs
from mock_scheduler.errors import CorrectionError

ROWS, WIDTH = 7, BLOCK_TOKENS // 2 - 3
#: Weights and rejections of every level at once.
EVERYTHING = RolloutCorrectionConfig.model_validate(
    {
        "rollout_is": "token",
        "rollout_is_threshold": 1.5,
        "rollout_rs": "token_k1,seq_mean_k1,seq_max_k2",
        "rollout_rs_threshold": "0.2_5.0,0.9999_1.0001,0.95",
        "rollout_token_veto_threshold": 1e-2,
        "rules": [{"level": "segment", "action": "reject_token", "aggregation": "mean", "upper": 1.001}],
    }
).spec


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Torch's number of threads is afterwards what it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def large_batch() -> CorrectionInputs:
    """Rows of different lengths, the third of none, with a gap in every response."""
    generator = torch.Generator().manual_seed(5)
    rollout = -torch.rand(ROWS, WIDTH, generator=generator)
    mask = torch.arange(WIDTH) < torch.randint(WIDTH // 2, WIDTH, (ROWS, 1), generator=generator)
    mask[:, 100:200] = False
    mask[2] = False
    return CorrectionInputs(
        train_logprobs=rollout + 0.2 * torch.randn(ROWS, WIDTH, generator=generator),
        rollout_logprobs=rollout,
        response_mask=mask,
    )


def row(inputs: CorrectionInputs, index: int) -> CorrectionInputs:
    return CorrectionInputs(**{name: tensor[index : index + 1] for name, tensor in inputs.tensors().items()})


def packed(inputs: CorrectionInputs) -> CorrectionInputs:
    """All of it, padding too, as one sequence of tokens."""
    flat = {name: tensor.flatten() for name, tensor in inputs.tensors().items()}
    return CorrectionInputs(**flat, cu_seqlens=torch.arange(ROWS + 1) * WIDTH)


def assert_same(first: CorrectionResult, second: CorrectionResult, spec: CorrectionSpec) -> None:
    """To the bit, but for the shape."""
    for one, other in ((first.weights, second.weights), (first.weights_by_token, second.weights_by_token)):
        assert one is not None
        assert other is not None
        assert torch.equal(one.flatten(), other.flatten())
    assert torch.equal(first.mask.flatten(), second.mask.flatten())
    assert torch.equal(first.kept, second.kept)
    assert correction_metrics(first.states, spec) == correction_metrics(second.states, spec)


def test_blocks_are_whole_sequences_of_the_batch_in_order() -> None:
    inputs = large_batch()
    assert [block.place for block in split_inputs(inputs)] == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 7)]
    blocks = split_inputs(packed(inputs))
    assert [block.place for block in blocks] == [
        slice(first * WIDTH, min(first + 2, ROWS) * WIDTH) for first in (0, 2, 4, 6)
    ]
    assert [block.inputs.cu_seqlens for block in blocks][3] is not None
    assert [len(block.inputs.cu_seqlens) for block in blocks if block.inputs.cu_seqlens is not None] == [3, 3, 3, 2]


def test_a_sequence_longer_than_a_block_is_one() -> None:
    lengths = [5, BLOCK_TOKENS + 1, 3, 4]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.zeros(int(offsets[-1]))
    inputs = CorrectionInputs(
        train_logprobs=values, rollout_logprobs=values, response_mask=values + 1, cu_seqlens=offsets
    )
    sizes = [block.place.stop - block.place.start for block in split_inputs(inputs)]
    assert sizes == [5, BLOCK_TOKENS + 1, 7]
    result = compute_correction(inputs, EVERYTHING)
    assert result.weights is not None
    assert torch.equal(result.weights, torch.ones_like(values))


def test_every_sequence_of_a_large_batch_has_what_it_has_alone() -> None:
    inputs = large_batch()
    whole = compute_correction(inputs, EVERYTHING)
    alone = [compute_correction(row(inputs, index), EVERYTHING) for index in range(ROWS)]
    assert whole.weights is not None
    assert 0.0 < float((whole.mask & inputs.response_mask).sum() / inputs.response_mask.sum()) < 1.0
    joined = CorrectionResult(
        weights=torch.cat([item.weights for item in alone if item.weights is not None]),
        mask=torch.cat([item.mask for item in alone]),
        kept=torch.cat([item.kept for item in alone]),
        weights_by_token=torch.cat([item.weights_by_token for item in alone if item.weights_by_token is not None]),
        states=CorrectionStates.merge([item.states for item in alone]),
    )
    assert_same(whole, joined, EVERYTHING)
    assert_same(whole, compute_correction(packed(inputs), EVERYTHING), EVERYTHING)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_divided_by_the_mean_of_all_blocks(level: str) -> None:
    """The mean of the blocks' means would be another."""
    inputs = large_batch()
    section = RolloutCorrectionConfig.model_validate({"rollout_is": level, "rollout_is_threshold": 1.5})
    plain = compute_correction(inputs, section.spec).weights_by_token
    normalised = compute_correction(inputs, replace(section.spec, batch_normalize=True)).weights_by_token
    assert plain is not None
    assert normalised is not None
    lengths = inputs.response_mask.sum(1)
    if level == "token":
        mean = plain.double().mean()
    else:
        mean = torch.stack([part.double().mean() for part in plain.split(lengths.tolist()) if len(part)]).mean()
    torch.testing.assert_close(normalised.double(), plain.double() / mean, rtol=3e-7, atol=0.0)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("count", [2, 3])
def test_any_number_of_threads_gives_the_same(count: int) -> None:
    inputs = large_batch()
    spec = replace(EVERYTHING, batch_normalize=True)
    torch.set_num_threads(1)
    one = compute_correction(inputs, spec)
    torch.set_num_threads(count)
    assert_same(one, compute_correction(inputs, spec), spec)
    assert torch.get_num_threads() == count


def test_an_error_names_the_place_in_the_batch_and_counts_all_of_it() -> None:
    """One value that is not finite in the second block, and one in the last."""
    inputs = large_batch()
    inputs.train_logprobs[3, 17] = float("nan")
    inputs.rollout_logprobs[6, 18] = -float("inf")
    with pytest.raises(CorrectionError) as raised:
        compute_correction(inputs, replace(EVERYTHING, nan_policy="error"))
    number = int(inputs.response_mask.sum())
    assert str(raised.value).startswith(
        f"rollout correction: 2 of {number} response tokens have no finite log-probability, the first at row 3, "
        "column 17 (training nan, rollout "
    )
