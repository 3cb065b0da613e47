"""Whatever of a tensor of any bits ranks and micro-batches hold, merging gives the whole, bit for bit."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mock_scheduler.support.tensor_bytes import view_as_bits
from mock_scheduler.trace.entries import TraceEntry
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.shards import ShardSpec, Split, blocks_of_indices, whole
from tests.trace.builders import entry, key, save

BIT_PATTERNS = {
    torch.float32: torch.tensor([0, 1 << 31, 0x7FC00001, -1, 0x7F800000, 0x3F800000], dtype=torch.int64).to(
        torch.int32
    ),
    torch.bfloat16: torch.tensor([0, -0x8000, 0x7FC1, -1, 0x7F80, 0x3F80], dtype=torch.int16),
    torch.float64: torch.tensor([0, -(1 << 63), 0x7FF8 << 48 | 1, -1, 0x7FF0 << 48, 1], dtype=torch.int64),
    torch.int64: torch.tensor([0, -(1 << 63), 1, -1, (1 << 63) - 1, 7], dtype=torch.int64),
    torch.uint16: torch.tensor([0, -0x8000, 1, -1, 0x7FFF, 7], dtype=torch.int16),
    torch.float8_e4m3fn: torch.tensor([0, -128, 127, -1, 1, 7], dtype=torch.int8),
    torch.bool: torch.tensor([0, 1, 1, 0, 1, 0], dtype=torch.int8),
}


def dealt(draw: st.DrawFn, size: int, num_hands: int) -> list[list[int]]:
    """The indices of a dimension, dealt out to so many hands, each ascending."""
    hands = draw(st.lists(st.integers(0, num_hands - 1), min_size=size, max_size=size))
    return [[index for index in range(size) if hands[index] == hand] for hand in range(num_hands)]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[torch.Tensor, list[list[TraceEntry]]]:
    """A token tensor of any bits, and what 3 or 4 ranks hold of it.

    Tokens are dealt out to micro-batches, channels to shards; a shard of a micro-batch is held by one rank or by
    several, entirely or (by two ranks) as two flat ranges.
    """
    dtype = draw(st.sampled_from(list(BIT_PATTERNS)))
    shape = (draw(st.integers(0, 6)), draw(st.integers(0, 4)))
    picks = draw(st.lists(st.integers(0, 5), min_size=math.prod(shape), max_size=math.prod(shape)))
    tensor = BIT_PATTERNS[dtype][torch.tensor(picks, dtype=torch.int64)].view(dtype).reshape(shape)
    ranks: list[list[TraceEntry]] = [[], [], []]
    for tokens in dealt(draw, shape[0], draw(st.integers(1, 4))):
        for channels in dealt(draw, shape[1], draw(st.integers(1, 2))):
            splits = Split(dim=0, blocks=blocks_of_indices(tokens)), Split(dim=1, blocks=blocks_of_indices(channels))
            local = len(tokens), len(channels)
            spec = ShardSpec(name="x", global_shape=shape, local_shape=local, splits=splits)
            piece = entry(spec, tensor[tokens][:, channels], dims=("token", "channel"))
            holders = draw(st.permutations(range(3)))
            cut = draw(st.integers(0, math.prod(local)))
            if draw(st.booleans()):
                for rank, owned in zip(holders, [(0, cut), (cut, math.prod(local))], strict=False):
                    ranks[rank].append(replace(piece, spec=replace(spec, flat_range=owned)))
            else:
                for rank in holders[: draw(st.integers(1, 3))]:
                    ranks[rank].append(piece)
    if draw(st.booleans()):  # overlaps each of the others in part
        ranks.append([entry(whole("x", shape), tensor, dims=("token", "channel"))])
    return tensor, ranks


@given(layout=layouts())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_deal_of_any_bits_to_ranks_and_micro_batches_merges_to_the_whole(
    tmp_path_factory: pytest.TempPathFactory, layout: tuple[torch.Tensor, list[list[TraceEntry]]]
) -> None:
    tensor, ranks = layout
    trace_dir = tmp_path_factory.mktemp("trace")
    if not tensor.numel():
        ranks = [[entry(whole("x", tuple(tensor.shape)), tensor)]]
    filled = [[piece for piece in pieces if piece.tensor.numel() or not tensor.numel()] for pieces in ranks]
    for rank, pieces in enumerate(filled):
        save(trace_dir, rank, len(filled), pieces)
    with open_trace(trace_dir) as reader:
        merged = reader.merge(key("x"))
    assert merged.tensor.dtype == tensor.dtype
    assert torch.equal(view_as_bits(merged.tensor), view_as_bits(tensor))
    assert (merged.conflicts, merged.present) == ((), None)
