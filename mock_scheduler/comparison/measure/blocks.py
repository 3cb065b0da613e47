"""Large tensors by blocks of a fixed size, on all processors this process may use.

Contract: a block gives the same result on any thread, and results come in the order of the blocks, so sums over them
are the same on any machine. Chunks of a block stay in the processor's cache. Torch's own threads are off meanwhile
(``threads.without_inner_threads``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

from mock_scheduler.comparison.thresholds import BLOCK_ELEMENTS, CHUNK_ELEMENTS, MOST_THREADS, NUM_BUFFERS

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Scratch(threading.local):
    """Memory of one thread for the chunk it computes: made once, and overwritten by the next chunk."""

    def __init__(self) -> None:
        self._wide = torch.empty(NUM_BUFFERS, CHUNK_ELEMENTS, dtype=torch.float64)
        self._narrow = torch.empty(CHUNK_ELEMENTS, dtype=torch.int64)

    def wide(self, place: int, size: int) -> torch.Tensor:
        """Returns float64 ``[size]``, one of four; grows where a single row is longer than a chunk."""
        # Made anew only for what does not fit: an allocation per chunk would cost more than the sums.
        if size > self._wide.shape[1]:
            self._wide = torch.empty(NUM_BUFFERS, size, dtype=torch.float64)
        return self._wide[place, :size]

    def bits(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns ``[size]`` of an integer dtype."""
        if size > len(self._narrow):
            self._narrow = torch.empty(size, dtype=torch.int64)
        return self._narrow.view(dtype)[:size]


SCRATCH = Scratch()


def map_blocks(compute: Callable[[_Item], _Result], blocks: Sequence[_Item]) -> list[_Result]:
    """Computes blocks, several at a time, and returns the results in order. ``compute`` must not itself call this."""
    if len(blocks) < 2 or num_threads() < 2:
        return [compute(block) for block in blocks]
    # ``map`` keeps the order, on which the sums of floats depend.
    return list(_executor().map(compute, blocks))


def split_blocks(num_elements: int) -> list[tuple[int, int]]:
    """Returns the first element of each block, and the one after its last."""
    # By a fixed size rather than by the number of threads, so that sums are the same on every machine.
    return [(start, min(start + BLOCK_ELEMENTS, num_elements)) for start in range(0, num_elements, BLOCK_ELEMENTS)]


def split_chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yields the first element of each chunk between two elements, and the one after its last."""
    for begin in range(start, stop, CHUNK_ELEMENTS):
        yield begin, min(begin + CHUNK_ELEMENTS, stop)


def num_threads() -> int:
    """Returns how many processors this process may use, at most 8."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MOST_THREADS)


@cache
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=num_threads(), thread_name_prefix="compare")
