"""Large tensors: by blocks on all processors this process may use, or by few of their elements.

Contract: a block gives the same result on any thread, and results come in the order of the blocks, so sums over them
are the same on any machine. Chunks of a block stay in the processor's cache. Torch's own threads are off meanwhile
(``threads.without_inner_threads``). The few elements are flat and float64, to be looked at several times.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch

from mock_scheduler.comparison.residuals import Sample
from mock_scheduler.comparison.tensors import Figures
from mock_scheduler.comparison.thresholds import (
    BLOCK_ELEMENTS,
    CHUNK_ELEMENTS,
    FEWEST_ELEMENTS,
    MOST_THREADS,
    NUM_BUFFERS,
    SAMPLE_ELEMENTS,
)

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Scratch(threading.local):
    """Memory of one thread for the chunk it computes: made once, and overwritten by the next chunk."""

    def __init__(self) -> None:
        self._wide = torch.empty(NUM_BUFFERS, CHUNK_ELEMENTS, dtype=torch.float64)
        self._narrow = torch.empty(CHUNK_ELEMENTS, dtype=torch.int64)
        self._flags = torch.empty(CHUNK_ELEMENTS, dtype=torch.bool)

    def wide(self, place: int, size: int) -> torch.Tensor:
        """Returns float64 ``[size]``, one of four; grows where a single row is longer than a chunk."""
        # Made anew only for what does not fit: an allocation per chunk would cost more than the sums.
        if size > self._wide.shape[1]:
            self._wide = torch.empty(NUM_BUFFERS, size, dtype=torch.float64)
        return self._wide[place, :size]

    def floats(self, place: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns ``[size]`` of a floating-point dtype, in the memory of ``wide``."""
        return self.wide(place, size).view(dtype)[:size]

    def flags(self, size: int) -> torch.Tensor:
        """Returns bool ``[size]``."""
        if size > len(self._flags):
            self._flags = torch.empty(size, dtype=torch.bool)
        return self._flags[:size]

    def bits(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns ``[size]`` of an integer dtype."""
        if size > len(self._narrow):
            self._narrow = torch.empty(size, dtype=torch.int64)
        return self._narrow.view(dtype)[:size]


SCRATCH = Scratch()


def map_blocks(compute: Callable[[_Item], _Result], blocks: Sequence[_Item]) -> list[_Result]:
    """Computes blocks, several at a time, and returns the results in order. ``compute`` must not itself call this."""
    left, results = iter(enumerate(blocks)), dict[int, _Result]()

    def take_blocks() -> None:
        # Python's lock lets one thread at a time ask an iterator of a sequence.
        for place, block in left:
            results[place] = compute(block)

    # This thread works too, and each other one is woken once and not for each block.
    others = [_executor().submit(take_blocks) for _ in range(min(num_threads(), len(blocks)) - 1)]
    try:
        take_blocks()
    finally:
        # Where this thread failed or was interrupted, the others begin no more blocks.
        for _ in left:
            pass
        wait(others)
    for other in others:
        other.result()
    # In order, on which the sums of floats depend.
    return [results[place] for place in range(len(blocks))]


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
    # The affinity: a container or a launcher may give this process fewer than the machine has.
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MOST_THREADS)


@cache
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=num_threads(), thread_name_prefix="compare")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FlatPair:
    """Flat float64 elements, 0 in both where absent; a is the baseline.

    Args:
        stride: Distance of neighbouring elements in the tensor.
        square: ``||a - b||²``.
        num_elements: Elements of the tensor that are present.
        eps: Spacing of its numbers at 1; 0 where it has no floats.
        rounding: A relative difference that is no larger may be rounding.
        sample: How many elements these are; ``None`` where they are all.
    """

    baseline: torch.Tensor
    candidate: torch.Tensor
    difference: torch.Tensor
    present: torch.Tensor | None
    square: float
    stride: int
    num_elements: int
    eps: float
    rounding: float
    sample: Sample | None

    @property
    def is_small(self) -> bool:
        """Whether a fitted number would prove nothing."""
        return self.num_elements < FEWEST_ELEMENTS

    def explained(self, remainder: torch.Tensor) -> float:
        """Returns the part of ||a - b||² an explanation with this remainder accounts for."""
        # 1 where nothing remains; below 0 where the explanation is worse than none.
        return 1.0 - square_of(remainder) / self.square if self.square else 0.0


def flatten(
    baseline: torch.Tensor,
    candidate: torch.Tensor,
    present: torch.Tensor | None,
    figures: Figures,
    *,
    rounding: float,
) -> FlatPair:
    """Takes at most 1 Mi evenly spaced elements of both; ``rounding``: as of ``FlatPair``."""
    stride = max(math.ceil(baseline.numel() / SAMPLE_ELEMENTS), 1)
    # Columns are mostly even in number, so that an even stride would never see half of them.
    stride += stride > 1 and stride % 2 == 0
    mask = None if present is None else present.expand(baseline.shape).reshape(-1)[::stride]
    mine, other = (spread(side, stride, mask) for side in (baseline, candidate))
    difference = other - mine
    return FlatPair(
        baseline=mine,
        candidate=other,
        difference=difference,
        present=mask,
        square=square_of(difference),
        stride=stride,
        num_elements=figures.num_elements,
        eps=torch.finfo(baseline.dtype).eps if baseline.is_floating_point() else 0.0,
        rounding=rounding,
        sample=Sample(num_seen=mine.numel(), num_elements=baseline.numel()) if stride > 1 else None,
    )


def spread(tensor: torch.Tensor, stride: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Returns float64: every ``stride``-th element; 0 where the mask is False and where it is not finite."""
    values = tensor.reshape(-1)[::stride].double()
    # NaN and infinity are findings by themselves, and would explain nothing else.
    values = values.where(values.isfinite(), 0.0)
    return values if mask is None else values.where(mask, 0.0)


def square_of(values: torch.Tensor) -> float:
    """Returns the sum of squares of a flat float64 tensor."""
    return float(torch.dot(values, values))
