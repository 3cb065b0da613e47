"""A batch as blocks of whole sequences, each small enough for its computation to stay in a processor's cache.

Contract: a block's result does not depend on the thread that computes it, and results come in the blocks' order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from mock_scheduler.correction.engine.inputs import CorrectionInputs
from mock_scheduler.support.threads import without_inner_threads

#: Measured fastest of 8 Ki to 1 Mi: for smaller blocks the calls take longer than the computation.
BLOCK_TOKENS = 1 << 17

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """Some sequences of a batch; ``place``: their rows, or their packed tokens, in the batch."""

    inputs: CorrectionInputs
    place: slice


def split_inputs(inputs: CorrectionInputs) -> list[Block]:
    """Cuts a batch into blocks of about ``BLOCK_TOKENS`` tokens, or of one longer sequence; at least one block.

    On an accelerator there is one block: large tensors are fast there.
    """
    if not inputs.response_mask.is_cpu:
        return [whole_batch(inputs)]
    if inputs.cu_seqlens is None:
        return list(_split_rows(inputs))
    return list(_split_packed(inputs, inputs.cu_seqlens.long().cpu()))


def whole_batch(inputs: CorrectionInputs) -> Block:
    """Makes the whole batch one block."""
    return Block(inputs=inputs, place=slice(0, len(inputs.response_mask)))


def _split_rows(inputs: CorrectionInputs) -> Iterator[Block]:
    num_rows, width = inputs.response_mask.shape
    step = max(BLOCK_TOKENS // max(width, 1), 1)
    for start in range(0, max(num_rows, 1), step):
        place = slice(start, min(start + step, num_rows))
        yield Block(inputs=_part(inputs, place, None), place=place)


def _split_packed(inputs: CorrectionInputs, offsets: torch.Tensor) -> Iterator[Block]:
    limits = offsets.tolist()
    first, last = 0, len(limits) - 1
    while True:
        end = min(first + 1, last)
        while end < last and limits[end + 1] - limits[first] <= BLOCK_TOKENS:
            end += 1
        place = slice(limits[first], limits[end])
        yield Block(inputs=_part(inputs, place, offsets[first : end + 1] - offsets[first]), place=place)
        first = end
        if first >= last:
            return


def _part(inputs: CorrectionInputs, place: slice, offsets: torch.Tensor | None) -> CorrectionInputs:
    tensors = {name: tensor[place] for name, tensor in inputs.tensors().items()}
    return CorrectionInputs(**tensors, cu_seqlens=offsets)


def map_blocks(compute: Callable[[Block], _Result], blocks: Sequence[Block]) -> Iterator[_Result]:
    """Calls ``compute`` on each block, in order, on all of torch's threads, while torch uses one."""
    num_threads = min(torch.get_num_threads(), len(blocks))
    if num_threads < 2 or any(block.inputs.response_mask.numel() > BLOCK_TOKENS for block in blocks):
        yield from map(compute, blocks)
        return
    with without_inner_threads(), ThreadPoolExecutor(num_threads - 1) as pool:
        # This thread takes its share.
        given = {place: pool.submit(compute, block) for place, block in enumerate(blocks) if place % num_threads}
        for place, block in enumerate(blocks):
            yield given.pop(place).result() if place in given else compute(block)
