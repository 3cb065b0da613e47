"""Sums a tensor's elements into the parts of a sketch, one piece at a time, on the device where the piece is.

On a device nothing is waited for: all sums stay there until the sketches of a step are finished. On the CPU ``host``
has a faster way, and on a GPU ``fused``, where torch has Triton.
Every sum has a fixed order: there are no atomic operations. In torch, a number of threads changes rounding at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.trace.geometry import Rectangle, rectangles_of
from mock_scheduler.trace.shards import ShardSpec
from mock_scheduler.trace.sketch.constants import BLOCK, NUM_SLOTS, ROWS, block_constants, tables
from mock_scheduler.trace.sketch.fused import can_fuse, sum_fused
from mock_scheduler.trace.sketch.host import can_sum, sum_on_host
from mock_scheduler.trace.sketch.totals import Totals, write_words
from mock_scheduler.trace.sketch.windows import Run, Window, runs_of, windows_of

#: Blocks of a window: what keeps a GPU busy, and what stays in the cache of a CPU.
_BLOCKS_ON_DEVICE = 64
_BLOCKS_ON_HOST = 1


class SketchSums:
    """Sums over the added pieces of one tensor, all of one dtype; ``totals`` stay on the device of the first."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        if dtype.is_complex:
            raise TraceError(
                f"a tensor of {dtype} has no sketch; trace its real and its imaginary part, or trace.level=full"
            )
        self.dtype = dtype
        self.num_elements = 0
        self.totals = Totals.zero(device)

    def add(self, tensor: torch.Tensor, spec: ShardSpec) -> list[Rectangle]:
        """Add a piece, and return the elements of the whole it holds.

        Raises ``TraceError`` where its shape is not its spec's.
        """
        # A training's modes, as the one that runs Megatron on the host, have nothing to change here, and cost more than
        # the sums of a small tensor.
        with torch.no_grad(), torch._C.DisableTorchFunction():
            # A conjugate's imaginary part is negative by a flag, and its bits are not what they mean.
            parts = list(rectangles_of(tensor.detach().resolve_neg(), spec))
            runs = [run for rectangle, values in parts for run in runs_of(rectangle, values, spec.global_shape)]
            self.num_elements += sum(rectangle.num_elements for rectangle, _ in parts)
            self.totals.add_(_sum(runs, tensor))
        return [rectangle for rectangle, _ in parts]


def _is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def _sum(runs: Sequence[Run], tensor: torch.Tensor) -> Totals:
    if _is_host(tensor.device) and can_sum(tensor.dtype):
        return sum_on_host(runs, tensor.dtype)
    if runs and can_fuse(tensor.device, tensor.dtype, _sum_runs_in_torch):
        return sum_fused(runs, tensor.dtype)
    return _sum_in_torch(runs, tensor)


def _sum_runs_in_torch(runs: Sequence[Run]) -> Totals:
    return _sum_in_torch(runs, runs[0].values)


def _sum_in_torch(runs: Sequence[Run], tensor: torch.Tensor) -> Totals:
    totals = Totals.zero(tensor.device)
    num_blocks = _BLOCKS_ON_HOST if _is_host(tensor.device) else _BLOCKS_ON_DEVICE
    for window in windows_of(runs, num_elements=num_blocks * BLOCK):
        _add_blocks(totals, window, tensor)
    return totals


def _add_blocks(totals: Totals, window: Window, tensor: torch.Tensor) -> None:
    """Add rows of one block or whole blocks, on any device and without waiting for it."""
    block, first = divmod(window.first_row, ROWS)
    num_rows = window.num_elements // NUM_SLOTS
    num_blocks = max(num_rows // ROWS, 1)
    num_rows //= num_blocks
    table, constants = tables(tensor.device), block_constants(tensor.device, block, num_blocks)
    own = slice(first * NUM_SLOTS, (first + num_rows) * NUM_SLOTS)
    elements = window.values(torch.empty(window.num_elements, dtype=tensor.dtype, device=tensor.device))
    words = torch.empty_like(elements, dtype=torch.int64)
    write_words(words, elements)
    words = words.view(num_blocks, -1).mul_(table.keys[own]).sum(dim=1)
    values = elements.to(torch.float64, copy=True)
    # Without a BLAS call on a device, whose sums have no fixed order everywhere.
    is_host = _is_host(tensor.device)
    squares = torch.dot(values, values) if is_host else values.new_zeros(())
    not_finite = totals.counts.new_zeros(2)
    # NaN and infinities show in the sum of squares. A device is not asked for it, since the host would have to wait.
    if not is_host or not math.isfinite(float(squares)):
        is_nan, is_infinite = values.isnan(), values.isinf()
        not_finite = torch.stack([is_nan.sum(), is_infinite.sum()])
        squares = values.masked_fill_(is_nan | is_infinite, 0.0).square().sum()
    totals.counts.add_(torch.cat([words.mul_(constants.keys).sum().view(1), not_finite]))
    totals.sum_of_squares.add_(squares)
    signed = values.view(num_blocks, -1).mul_(table.signs[own])
    columns = signed.view(num_blocks, num_rows, NUM_SLOTS).sum(dim=1)
    # The turn of each block's columns, by index, for all blocks at once.
    source = (table.slots - constants.shifts[:, None]).remainder_(NUM_SLOTS)
    totals.slots.add_(columns.gather(1, source).mul_(constants.signs[:, None]).sum(dim=0))
