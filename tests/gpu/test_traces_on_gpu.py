"""A trace on a GPU: copies that nobody waits for have the right values, and fused sketches have the CPU's bits."""

from __future__ import annotations

import pytest
import torch

from mock_scheduler.trace.full.memory import begin_copy
from mock_scheduler.trace.shards import whole
from mock_scheduler.trace.sketch import fused, sums
from mock_scheduler.trace.sketch.sums import SketchSums

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU is visible")]


def test_a_copy_has_the_values_before_what_overwrites_them_next() -> None:
    tensor = torch.arange(1 << 24, dtype=torch.float32, device="cuda").view(1 << 12, -1)
    copies = []
    for _ in range(4):
        torch.cuda._sleep(20_000_000)  # the copies are behind it, and the host is not
        copies += [begin_copy(tensor), begin_copy(tensor.t())]
        tensor.add_(1.0)
    for number, (copy, wait) in enumerate(copies):
        wait()
        expected = torch.arange(1 << 24, dtype=torch.float32).view(1 << 12, -1) + number // 2
        assert copy.is_pinned()
        assert torch.equal(copy, expected.t() if number % 2 else expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fused_sketches_have_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    if not fused.can_fuse(torch.device("cuda"), dtype, sums._sum_runs_in_torch):
        pytest.skip("this torch has no Triton, or its kernels were refused: the log says why")
    values = torch.randn(1500, 2100, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    host, device = (SketchSums(dtype, torch.device(name)) for name in ("cpu", "cuda"))
    host.add(values, whole("x", (1500, 2100)))
    device.add(values.cuda(), whole("x", (1500, 2100)))
    assert torch.equal(device.totals.slots.cpu(), host.totals.slots)
    assert torch.equal(device.totals.counts.cpu(), host.totals.counts)
    assert float(device.totals.sum_of_squares) == pytest.approx(float(host.totals.sum_of_squares), rel=1e-13)
