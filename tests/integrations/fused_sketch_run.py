"""Compares sketches of Triton's kernels, in its interpreter, with those of the C file; prints what differs, as JSON."""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import torch

from mock_scheduler.support.native import DTYPE_NUMBERS
from mock_scheduler.trace.geometry import rectangles_of
from mock_scheduler.trace.sketch import fused, sums
from mock_scheduler.trace.sketch.host import can_sum, sum_on_host
from mock_scheduler.trace.sketch.windows import runs_of
from tests.trace.sketch.pieces import pieces


def main() -> None:
    """Every dtype and every way to lie in memory, with NaN and infinities; and one tensor of several parts."""
    found: list[str] = []
    count = 0
    for dtype in DTYPE_NUMBERS:
        assert can_sum(dtype)
        for tensor, spec in pieces(dtype):
            tensor = tensor.clone()
            if tensor.numel() > 9:
                tensor[(0,) * tensor.ndim], tensor[(-1,) * tensor.ndim] = float("nan"), float("-inf")
            parts = list(rectangles_of(tensor, spec))
            runs = [run for rectangle, values in parts for run in runs_of(rectangle, values, spec.global_shape)]
            if not runs:
                continue
            count += 1
            one, other = fused.sum_fused(runs, dtype), sum_on_host(runs, dtype)
            where = f"{dtype} {tuple(tensor.shape)}"
            found += [f"{where}: slots"] if not torch.equal(one.slots, other.slots) else []
            found += [f"{where}: counts"] if not torch.equal(one.counts, other.counts) else []
            error = abs(float(one.sum_of_squares - other.sum_of_squares))
            found += [f"{where}: squares"] if error > 1e-13 * float(other.sum_of_squares) else []
    agrees = fused._agrees(torch.device("cpu"), torch.float32, sums._sum_runs_in_torch)
    print(json.dumps({"count": count, "differences": found, "agrees": agrees}))


if __name__ == "__main__":
    main()
