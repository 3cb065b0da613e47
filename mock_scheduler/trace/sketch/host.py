"""Sums elements into the parts of a sketch on the CPU by ``native.c``, which reads each element once, where it lies.

The C file needs no headers of Python. ``setup.py`` builds it where there is a compiler; elsewhere, and for dtypes that
it does not know, ``sums`` has the same in torch, several times slower. Threads are as many as torch uses.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise

import torch

from mock_scheduler.support.native import DTYPE_NUMBERS, load_function
from mock_scheduler.trace.sketch.constants import BLOCK, tables
from mock_scheduler.trace.sketch.totals import Totals
from mock_scheduler.trace.sketch.windows import Run

#: Entries behind a table that the C file may read, and leaves out of all sums.
_NUM_LANES = 8
#: Elements that are summed apart, by whichever thread: fewer are done before another thread has started.
_ELEMENTS_OF_A_PART = 1 << 20
_HOST = torch.device("cpu")


def can_sum(dtype: torch.dtype) -> bool:
    """Whether ``sum_on_host`` is there, for elements of this dtype."""
    return dtype in DTYPE_NUMBERS and _native() is not None


def sum_on_host(runs: Sequence[Run], dtype: torch.dtype) -> Totals:
    """Sums the elements of runs on the CPU; NaN and infinities are counted, and add 0.

    The sums have the same bits for any number of threads: each part has its own, which are added in order.
    """
    parts = cut_runs(runs)
    num_threads = min(torch.get_num_threads(), len(parts))
    shares = [parts[number::num_threads] for number in range(num_threads)]
    others = [_workers(torch.get_num_threads()).submit(_sum_parts, share, dtype) for share in shares[1:]]
    found = [_sum_parts(shares[0], dtype), *(other.result() for other in others)]
    totals = Totals.zero(_HOST)
    for number in range(len(parts)):
        totals.add_(found[number % num_threads][number // num_threads])
    return totals


def block_edges(run: Run) -> list[int]:
    """Lists the blocks at which a run is cut: the first, ones between, and the one behind the last."""
    first, last = run.start // BLOCK, -(-run.end // BLOCK)
    num_cuts = max(min(run.values.numel() // _ELEMENTS_OF_A_PART, last - first), 1)
    return [first + (last - first) * number // num_cuts for number in range(num_cuts + 1)]


def cut_runs(runs: Sequence[Run]) -> list[list[Run]]:
    """Cuts runs into parts at edges of blocks, whatever the number of threads, on which no sum may depend."""
    parts: list[list[Run]] = [[]]
    num_elements = 0
    for run in runs:
        edges = block_edges(run)
        for begin, end in pairwise(edge * BLOCK for edge in edges):
            if num_elements >= _ELEMENTS_OF_A_PART:
                parts.append([])
                num_elements = 0
            own = [run] if len(edges) == 2 else list(run.clip(begin, end))
            parts[-1] += own
            num_elements += sum(item.values.numel() for item in own)
    return parts


@lru_cache(maxsize=1)
def _workers(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=num_threads - 1, thread_name_prefix="sketch")


# Its threads are not there in a forked child.
os.register_at_fork(after_in_child=_workers.cache_clear)


def _sum_parts(parts: Sequence[Sequence[Run]], dtype: torch.dtype) -> list[Totals]:
    return [_sum_runs(part, dtype) for part in parts]


def _sum_runs(runs: Sequence[Run], dtype: torch.dtype) -> Totals:
    totals = Totals.zero(_HOST)
    for run in runs:
        part = _sum_run(run, dtype, is_masked=False)
        # NaN and infinities show in the sum of squares, and are looked for there alone.
        if not math.isfinite(float(part.sum_of_squares)):
            part = _sum_run(run, dtype, is_masked=True)
        totals.add_(part)
    return totals


def _sum_run(run: Run, dtype: torch.dtype, *, is_masked: bool) -> Totals:
    add_rows = _native()
    assert add_rows is not None  # as can_sum said
    values = run.values if run.values.stride(1) == 1 else run.values.contiguous()
    totals = Totals.zero(_HOST)
    add_rows(
        values.data_ptr(),
        len(values),
        values.stride(0) * values.element_size(),
        values.shape[1],
        run.start,
        run.stride,
        DTYPE_NUMBERS[dtype],
        is_masked,
        _constants().data_ptr(),
        totals.slots.data_ptr(),
        totals.sum_of_squares.data_ptr(),
        totals.counts.data_ptr(),
    )
    return totals


@lru_cache(maxsize=1)
def _constants() -> torch.Tensor:
    """Returns the keys, all of which are odd, less 1 where the sign is +1; int64 ``[BLOCK + _NUM_LANES]``."""
    found = tables(_HOST)
    constants = found.keys - (found.signs > 0).to(torch.int64)
    return torch.cat([constants, constants[:_NUM_LANES]])


@lru_cache(maxsize=1)
def _native() -> Callable[..., None] | None:
    """Returns the function of the C file; ``None`` where it was not built, or is of another version of the file."""
    pointer, number, index, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_int
    rows, sums = [pointer, number, number, number, index, index], [pointer, pointer, pointer, pointer]
    return load_function(__file__, "sketch_rows_2", [*rows, flag, flag, *sums])
