"""Sums elements into the parts of a sketch on the CPU by ``native.c``, which reads each element once, where it lies.

The C file needs no headers of Python. ``setup.py`` builds it where there is a compiler; elsewhere, and for dtypes that
it does not know, ``sums`` has the same in torch, four times slower. Threads are as many as torch uses.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch

from mock_scheduler.support.native import DTYPE_NUMBERS, load_function
from mock_scheduler.trace.sketch.constants import BLOCK, tables
from mock_scheduler.trace.sketch.totals import Totals
from mock_scheduler.trace.sketch.windows import Run

#: Entries behind a table that the C file may read, and leaves out of all sums.
_NUM_LANES = 8
#: Fewer elements a thread are done before another has started.
_LEAST_OF_A_THREAD = 1 << 18
_HOST = torch.device("cpu")


def can_sum(dtype: torch.dtype) -> bool:
    """Whether ``sum_on_host`` is there, for elements of this dtype."""
    return dtype in DTYPE_NUMBERS and _native() is not None


def sum_on_host(runs: Sequence[Run], dtype: torch.dtype) -> Totals:
    """Sums the elements of runs on the CPU; NaN and infinities are counted, and add 0."""
    num_elements = sum(run.values.numel() for run in runs)
    num_threads = min(torch.get_num_threads(), max(num_elements // _LEAST_OF_A_THREAD, 1))
    shares = [list(runs)] if num_threads == 1 else _share_out(runs, num_threads)
    others = [_workers(torch.get_num_threads()).submit(_sum_runs, share, dtype) for share in shares[1:]]
    totals = _sum_runs(shares[0], dtype)
    for other in others:
        totals.add_(other.result())
    return totals


def _share_out(runs: Sequence[Run], num_threads: int) -> list[list[Run]]:
    """Cuts each run into as many parts as there are threads, of whole blocks where it can be."""
    shares: list[list[Run]] = [[] for _ in range(num_threads)]
    for run in runs:
        first, last = run.start // BLOCK, -(-run.end // BLOCK)
        edges = [first + (last - first) * number // num_threads for number in range(num_threads + 1)]
        for number, share in enumerate(shares):
            share += run.clip(edges[number] * BLOCK, edges[number + 1] * BLOCK)
    return shares


@lru_cache(maxsize=1)
def _workers(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=num_threads - 1, thread_name_prefix="sketch")


# Its threads are not there in a forked child.
os.register_at_fork(after_in_child=_workers.cache_clear)


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
    signs, keys = _padded_tables()
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
        signs.data_ptr(),
        keys.data_ptr(),
        totals.slots.data_ptr(),
        totals.sum_of_squares.data_ptr(),
        totals.counts.data_ptr(),
    )
    return totals


@lru_cache(maxsize=1)
def _padded_tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns uint8 signs, 0x80 for -1, and int64 keys, ``[BLOCK + _NUM_LANES]`` each."""
    signs, keys = (tables(_HOST).signs < 0).to(torch.uint8) * 0x80, tables(_HOST).keys
    return torch.cat([signs, signs[:_NUM_LANES]]), torch.cat([keys, keys[:_NUM_LANES]])


@lru_cache(maxsize=1)
def _native() -> Callable[..., None] | None:
    """Returns ``sketch_rows`` of the C file; ``None`` where it was not built."""
    pointer, number, index, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_int
    rows, sums = [pointer, number, number, number, index, index], [pointer, pointer, pointer, pointer, pointer]
    return load_function(__file__, "sketch_rows", [*rows, flag, flag, *sums])
