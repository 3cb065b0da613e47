"""Where the tokens of a share lie among all tokens of a step, whatever the lines, columns and ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.megatron.probe.shares import TokenIndex, TokenPlaces
from mock_scheduler.trace.shards import Block, Split
from pipelines.batching.plan import MicroBatch
from pipelines.config.training import TrainingConfig
from pipelines.megatron.places import OwnBatch, own_batch
from pipelines.megatron.process_of_rank import Runtime
from tests.batches import make_batch
from tests.pipelines.step_plans import build_step_plan

# Rows of 3, 4, 5, 6 tokens, of which the first two are the prompt: tokens 0-2, 3-6, 7-11, 12-17.
BATCH = make_batch(2, 2)
NUM_TOKENS = 18
PADDING = -1


def runtime_of(cp_rank: int = 0, cp_size: int = 1) -> Runtime:
    return Runtime(
        global_rank=cp_rank, world_size=cp_size, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, dp_rank=0, dp_size=1,
        cp_rank=cp_rank, cp_size=cp_size, device=torch.device("cpu"),
    )  # fmt: skip


def micro_batches(**training: object) -> tuple[MicroBatch, ...]:
    config = TrainingConfig.model_validate({"global_batch_size": 4, **training})
    zeros = torch.zeros(int(BATCH.response_mask.sum()), dtype=torch.float64)
    return build_step_plan(BATCH, zeros, zeros, config, count_multiple=1, dtype=torch.float32).micro_batches


def places_of(own: OwnBatch, **options: object) -> TokenPlaces:
    return TokenIndex(BATCH.lengths).places(own, **options)  # type: ignore[arg-type]


def indices_of(places: TokenPlaces) -> list[int]:
    """The canonical index of each of the places' tokens, in their order."""
    indices = [PADDING] * places.num_tokens
    for block in places.split.blocks:
        for offset in range(block.length):
            assert indices[block.local_start + offset] == PADDING
            indices[block.local_start + offset] = block.global_start + offset
    return indices


def lines(*rows: list[tuple[int, int] | None], mask: list[list[bool]] | None = None) -> OwnBatch:
    """A share of these cells, each row and position or padding."""
    row_ids = torch.tensor([[PADDING if cell is None else cell[0] for cell in line] for line in rows])
    positions = torch.tensor([[0 if cell is None else cell[1] for cell in line] for line in rows])
    zeros = torch.zeros(row_ids.shape)
    response_mask = torch.tensor(mask) if mask is not None else torch.ones(row_ids.shape, dtype=torch.bool)
    batch = MicroBatch(
        index=0,
        tokens=row_ids,
        targets=row_ids,
        response_mask=response_mask,
        advantages=zeros,
        returns=zeros,
        rollout_logprobs=zeros,
        weights=response_mask.float(),
        kept_mask=response_mask,
        loss_weights=response_mask.float(),
        row_ids=row_ids,
        positions=positions,
    )
    return own_batch(batch, runtime_of())


def test_tokens_go_where_their_row_and_position_are_in_the_batch() -> None:
    """The second row stands before the first, and the first one's middle token is elsewhere."""
    own = lines([(1, 0), (1, 1), None], [(0, 2), None, (0, 0)])
    places = places_of(own)
    assert places.cells.tolist() == [5, 3, 0, 1]
    assert places.split == Split(
        dim=0,
        blocks=(
            Block(local_start=0, global_start=0, length=1),
            Block(local_start=1, global_start=2, length=3),
        ),
    )


def test_a_slice_of_the_columns_numbers_its_own_cells() -> None:
    own = lines([(1, 0), (1, 1), (1, 2), (1, 3)], [(0, 0), (0, 1), (0, 2), None])
    places = places_of(own, columns=slice(2, 4))
    assert places.cells.tolist() == [2, 0, 1]
    assert indices_of(places) == [2, 5, 6]


def test_only_tokens_that_predict_a_response_token_are_kept_where_asked() -> None:
    own = lines([(0, 0), (0, 1), (0, 2), None], mask=[[False, True, False, True]])
    assert places_of(own, response_only=True).cells.tolist() == [1]


def test_padding_alone_has_no_places() -> None:
    places = places_of(lines([None, None]))
    assert places.num_tokens == 0
    assert places.split.blocks == ()


@pytest.mark.parametrize(
    "training",
    [
        {"micro_batch_size": 1},
        {"micro_batch_size": 4},
        {"batching": "dynamic", "max_tokens_per_micro_batch": 16},
        {"sequence_packing": True, "max_tokens_per_micro_batch": 16},
    ],
    ids=["one row", "four rows", "dynamic", "packing"],
)
@given(cp_size=st.sampled_from([1, 2, 4]), num_slices=st.sampled_from([1, 2]))
@settings(max_examples=6, deadline=None)
def test_shares_have_every_token_once_and_its_own_value(
    training: dict[str, object], cp_size: int, num_slices: int
) -> None:
    """Over micro-batches, context-parallel ranks and slices of sequence parallelism."""
    found: list[int] = []
    for batch in micro_batches(**training):
        for cp_rank in range(cp_size):
            own = own_batch(batch, runtime_of(cp_rank, cp_size))
            width = own.batch.tokens.shape[1]
            for part in range(num_slices):
                columns = slice(part * width // num_slices, (part + 1) * width // num_slices)
                places = places_of(own, columns=columns)
                indices = indices_of(places)
                tokens = own.batch.tokens[:, columns].reshape(-1)[places.cells]
                assert tokens.tolist() == BATCH.tokens[indices].tolist()
                found += indices
    assert sorted(found) == list(range(NUM_TOKENS))
