"""Sums elements into the parts of a sketch on a GPU by three kernels of Triton, which read each element once.

Slots, fingerprint and counts have the bits that ``host`` gives on a CPU: elements are added in the same order, and cut
into the same parts. The sum of squares is added in another order, and differs by rounding. Nothing is waited for, but
once: before its first use on a device the kernels are held to torch's operations there, and left alone where they
differ or cannot be compiled. ``tests/integrations/test_fused_sketch.py`` runs them in Triton's interpreter; no GPU has
run them yet.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType

import torch

from mock_scheduler.support.native import DTYPE_NUMBERS
from mock_scheduler.support.tensor_bytes import view_as_bits
from mock_scheduler.trace.sketch.constants import BLOCK, NUM_SLOTS, ROWS, UPPER_HALF, block_constants, tables
from mock_scheduler.trace.sketch.host import block_edges, cut_runs
from mock_scheduler.trace.sketch.totals import Totals
from mock_scheduler.trace.sketch.windows import Run

logger = logging.getLogger("mock_scheduler.trace")

_TILE = 256
_NUM_TILES = -(-NUM_SLOTS // _TILE)
#: Blocks that one launch goes through: the memory of their columns, 16 KiB each, stays small beside a tensor's.
_MOST_BLOCKS = 1 << 12
_SIGNED_UPPER_HALF = UPPER_HALF - (1 << 64)


def can_fuse(device: torch.device, dtype: torch.dtype, in_torch: Callable[[Sequence[Run]], Totals]) -> bool:
    """Says whether ``sum_fused`` is there for elements of this dtype; the first call on a device tries it.

    ``in_torch``: the same sums by torch's operations.
    """
    return device.type == "cuda" and dtype in DTYPE_NUMBERS and _agrees(device, dtype, in_torch)


@lru_cache(maxsize=64)
def _agrees(device: torch.device, dtype: torch.dtype, in_torch: Callable[[Sequence[Run]], Totals]) -> bool:
    if find_spec("triton") is None:
        return False
    values = torch.linspace(-3.0, 5.0, 2 * BLOCK + 12_345, dtype=torch.float64).to(device, dtype)
    values[7], values[-7] = float("nan"), float("inf")
    runs = [Run(start=NUM_SLOTS + 5, stride=values.numel(), values=values.view(1, -1))]
    try:
        found, expected = sum_fused(runs, dtype), in_torch(runs)
    except Exception as error:  # noqa: BLE001 - whatever a compiler of another release raises, torch's operations stay
        logger.warning("sketches are summed by torch's operations: the fused kernels cannot run here: %s", error)
        return False
    bound = 1e-9 * float(expected.sum_of_squares) ** 0.5
    is_equal = bool(torch.equal(found.counts, expected.counts))
    is_close = float((found.slots - expected.slots).norm()) <= bound
    if not (is_equal and is_close):
        logger.warning("sketches are summed by torch's operations: the fused kernels gave others on %s", device)
    return is_equal and is_close


@lru_cache(maxsize=1)
def _kernels() -> ModuleType:
    return importlib.import_module("mock_scheduler.trace.sketch.fused_kernels")


def sum_fused(runs: Sequence[Run], dtype: torch.dtype) -> Totals:
    """Sums the elements of runs on their device, without waiting for it; NaN and infinities are counted, and add 0."""
    device = runs[0].values.device if runs else torch.device("cpu")
    if len(runs) == 1:
        return _sum_run(runs[0], dtype)
    totals = Totals.zero(device)
    for part in cut_runs(runs):
        of_part = Totals.zero(device)
        for run in part:
            of_part.add_(_sum_run(run, dtype))
        totals.add_(of_part)
    return totals


def _sum_run(run: Run, dtype: torch.dtype) -> Totals:
    """Sums one run, in the parts in which a CPU does."""
    totals = Totals.zero(run.values.device)
    edges = block_edges(run)
    for first, last in _launches(edges):
        totals.add_(_launch(run, dtype, edges[first : last + 1]))
    return totals


def _launches(edges: Sequence[int]) -> Sequence[tuple[int, int]]:
    """Cuts the parts between edges into groups; one alone where it has no more blocks than a launch may have."""
    if edges[-1] - edges[0] <= _MOST_BLOCKS:
        return [(0, len(edges) - 1)]
    return list(pairwise(range(len(edges))))


def _launch(run: Run, dtype: torch.dtype, edges: Sequence[int]) -> Totals:
    """Sums the blocks of a run from the first to the last of the edges, which part them."""
    kernels, values, device = _kernels(), run.values, run.values.device
    num_rows, length = values.shape
    row_step, column_step = values.stride()
    stride = run.stride
    if stride == length and row_step == length and column_step == 1:  # rows one after another are one row
        num_rows, length, stride = 1, num_rows * length, num_rows * length
    num_blocks, num_parts = edges[-1] - edges[0], len(edges) - 1
    table, constants = tables(device), block_constants(device, edges[0], num_blocks)
    columns = torch.empty(num_blocks, NUM_SLOTS, dtype=torch.float64, device=device)
    squares = torch.empty(num_blocks, _NUM_TILES, dtype=torch.float64, device=device)
    counts = torch.empty(num_blocks, _NUM_TILES, 3, dtype=torch.int64, device=device)
    kernels.sum_columns[(num_blocks, _NUM_TILES)](
        view_as_bits(values),
        table.signs,
        table.keys,
        columns,
        squares,
        counts,
        edges[0] * BLOCK - run.start,
        num_rows,
        length,
        stride,
        row_step,
        column_step,
        DTYPE=DTYPE_NUMBERS[dtype],
        ROWS=ROWS,
        NUM_SLOTS=NUM_SLOTS,
        TILE=_TILE,
        UPPER_HALF=_SIGNED_UPPER_HALF,
    )
    parts = torch.empty(num_parts, NUM_SLOTS, dtype=torch.float64, device=device)
    first_blocks = torch.tensor([edge - edges[0] for edge in edges], dtype=torch.int64).to(device, non_blocking=True)
    turn = kernels.turn_columns[(_NUM_TILES, num_parts)]
    turn(columns, constants.signs, constants.shifts, first_blocks, parts, NUM_SLOTS=NUM_SLOTS, TILE=_TILE)
    totals = Totals.zero(device)
    kernels.add_parts[(_NUM_TILES,)](parts, totals.slots, num_parts, NUM_SLOTS=NUM_SLOTS, TILE=_TILE)
    of_blocks = counts.sum(dim=1)
    of_blocks[:, 0].mul_(constants.keys)
    totals.counts.copy_(of_blocks.sum(dim=0))
    totals.sum_of_squares.copy_(squares.sum())
    return totals
