"""Compares the bits of products that a layout splits: the candidate's own, emulation's, and slices of the whole one.

A library chooses tiles, and so the order of sums, by shape. A candidate multiplies its own contiguous part; emulation
multiplies parts that are cut from the whole weight. The two must have equal bits, since a verdict of ``identical
(emulated)`` rests on it. Whether the whole product's slice has them too says where no emulation is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import DEFAULT, patch

import torch

from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.findings import FindingsLog
from mock_scheduler.megatron.emulation.arithmetic import column_product, row_product
from mock_scheduler.megatron.emulation.parts import cut, ordered_sum

#: Tokens, input features, output features: of small models, of 7B ones, and odd sizes; two for a rehearsal.
_SHAPES = (
    *((512, 1024, 1024), (2048, 4096, 4096), (4096, 4096, 14336), (8192, 2048, 6144), (96, 256, 512)),
    *((4096, 14336, 4096), (1000, 1536, 1536), (33, 320, 960)),
)
_REHEARSED = ((96, 256, 512), (33, 320, 960))
_DEGREES = (2, 4, 8)
_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitProduct:
    """Holds one comparison. emulated, whole: the share of elements with the candidate's bits."""

    shape: tuple[int, int, int]
    dtype: str
    split: str
    degree: int
    emulated: float
    whole: float

    @property
    def row(self) -> tuple[str, ...]:
        """Returns its row of the table."""
        sizes = " x ".join(map(str, self.shape))
        return sizes, self.dtype, self.split, str(self.degree), f"{self.emulated:.1%}", f"{self.whole:.1%}"


def check(context: CheckContext) -> None:
    """Multiplies all shapes; then once more with batch-invariant kernels where Megatron has them."""
    shapes = _SHAPES if context.is_gpu else _REHEARSED
    compare_all(context.log, shapes, context.device, torch.matmul, title="the library's products")
    if not context.is_gpu:
        context.log.not_run("batch-invariant kernels", "they are Triton's, which needs a GPU")
        return
    try:
        from megatron.core.transformer.custom_layers import batch_invariant_kernels as kernels
    except ImportError as error:
        context.log.not_run("batch-invariant kernels", f"this Megatron-core has none that load: {error}")
        return
    with use_invariant_kernels(kernels, has_transformer_engine=context.machine.has_transformer_engine):
        compare_all(context.log, shapes, context.device, torch.matmul, title="batch-invariant products")


@contextmanager
def use_invariant_kernels(kernels: Any, *, has_transformer_engine: bool) -> Iterator[None]:  # noqa: ANN401 - a module
    """Puts Megatron's batch-invariant kernels in the place of torch's products.

    Megatron-core 0.16.1 and 0.19.2 put them into TransformerEngine too, and fail where it lacks.
    """
    steps = ("_te_patch_for_batch_invariant", "_te_unpatch_for_batch_invariant")
    skipped = nullcontext() if has_transformer_engine else patch.multiple(kernels, **dict.fromkeys(steps, DEFAULT))
    with skipped, kernels.set_batch_invariant_mode(True):
        yield


def compare_all(
    log: FindingsLog,
    shapes: tuple[tuple[int, int, int], ...],
    device: torch.device,
    matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    title: str,
) -> None:
    """Compares every shape, dtype, split and degree, writes the table, and judges emulation."""
    found = [item for shape in shapes for dtype in _DTYPES for item in _compare(shape, dtype, device, matmul)]
    columns = ("tokens x in x out", "dtype", "split", "parts", "emulation's bits", "whole product's bits")
    log.table(title, columns, [item.row for item in found])
    judge(log, title, found)


def judge(log: FindingsLog, title: str, found: list[SplitProduct]) -> None:
    """Holds emulation to the candidate's bits everywhere, and counts where the whole product has them."""
    wrong = [item for item in found if item.emulated < 1.0]
    text = (
        f"{len(found)} products" if not wrong else f"{len(wrong)} of {len(found)} not, first {', '.join(wrong[0].row)}"
    )
    log.hold(
        f"{title}: emulation has the candidate's bits",
        is_held=bool(found) and not wrong,
        found=text,
        expected="all elements of all products",
    )
    for split in sorted({item.split for item in found}):
        own = [item for item in found if item.split == split]
        log.note(
            f"{title}: the whole product, cut by {split}, has them",
            f"in {sum(item.whole == 1.0 for item in own)} of {len(own)}",
        )


def _compare(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    matmul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Iterator[SplitProduct]:
    tokens, num_in, num_out = shape
    generator = torch.Generator().manual_seed(20_200)
    inputs = torch.randn(tokens, 1, num_in, generator=generator).to(device, dtype)
    weight = torch.randn(num_out, num_in, generator=generator).mul_(num_in**-0.5).to(device, dtype)
    whole = matmul(inputs, weight.t())
    name = str(dtype).removeprefix("torch.")
    with torch.no_grad():
        for degree in _DEGREES:
            if num_in % degree or num_out % degree:
                continue
            candidate = torch.cat([matmul(inputs, part.clone().t()) for part in weight.chunk(degree, dim=0)], dim=-1)
            emulated = torch.cat(column_product(inputs, cut(weight, 0, degree), []), dim=-1)
            yield _result(shape, name, "output features", degree, candidate, emulated, whole)
            pairs = zip(inputs.chunk(degree, dim=-1), weight.chunk(degree, dim=1), strict=True)
            own = [matmul(one.contiguous(), part.contiguous().t()) for one, part in pairs]
            candidate = ordered_sum(own)
            emulated = row_product(cut(inputs, -1, degree), cut(weight, 1, degree))
            yield _result(shape, name, "input features", degree, candidate, emulated, whole)
            if tokens % degree:
                continue
            batches = inputs.chunk(degree, dim=0)
            candidate = torch.cat([matmul(batch.clone(), weight.t()) for batch in batches])
            emulated = torch.cat([column_product(batch, [weight], [])[0] for batch in cut(inputs, 0, degree)])
            yield _result(shape, name, "tokens", degree, candidate, emulated, whole)


def _result(
    shape: tuple[int, int, int],
    dtype: str,
    split: str,
    degree: int,
    candidate: torch.Tensor,
    emulated: torch.Tensor,
    whole: torch.Tensor,
) -> SplitProduct:
    shares = [float((other == candidate).double().mean()) for other in (emulated, whole)]
    return SplitProduct(shape=shape, dtype=dtype, split=split, degree=degree, emulated=shares[0], whole=shares[1])
