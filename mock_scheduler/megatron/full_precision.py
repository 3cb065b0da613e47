"""Keeps a float64 run in float64 where Megatron-core (0.16.1, 0.19.2) narrows to float32 or knows no such type.

Megatron's optimizers list their types, and float64 is none of them. Gradients are converted on the way to the
optimizer; their norm, the division by the number of tokens and the angles of the rotary embedding are float32. A
float64 run is there to tell rounding from a wrong computation: one step in float32 would leave 1e-8 of everything
behind it. Each repair can go when its function in Megatron computes in the dtype of its arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.optimizer import optimizer as megatron_optimizer
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.overrides import TorchFunctionMode

from mock_scheduler.megatron.host_device import has_cuda

_FULL_PRECISION = "torch.cuda.FloatTensor"


class _Float64Mode(TorchFunctionMode):
    """Answers one method of a float64 tensor, called without arguments, in the place of torch."""

    def __init__(self, method: Callable[..., Any], answer: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._method = method
        self._answer = answer

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the intercepted function returns
        if func is self._method and len(args) == 1 and not kwargs and args[0].dtype is torch.float64:
            return self._answer(args[0])
        return func(*args, **kwargs) if kwargs else func(*args)


@functools.cache
def _install() -> None:
    """Installs, once and for good, the changes that only float64 tensors meet."""
    copy = DistributedOptimizer._copy_model_grads_to_main_grads

    @functools.wraps(copy)
    def copy_without_narrowing(optimizer: DistributedOptimizer) -> None:
        with _Float64Mode(torch.Tensor.float, lambda tensor: tensor):
            copy(optimizer)

    DistributedOptimizer._copy_model_grads_to_main_grads = copy_without_narrowing
    if has_cuda():  # without, ``HostDeviceMode`` answers for every type
        _Float64Mode(torch.Tensor.type, lambda _: _FULL_PRECISION).__enter__()


def prepare_optimizer(dtype: torch.dtype) -> None:
    """Let Megatron build and run optimizers of parameters of this dtype; before the first is built."""
    if dtype is torch.float64:
        _install()
    megatron_optimizer.get_grad_norm_fp32 = wide_gradient_norm if dtype is torch.float64 else get_grad_norm_fp32


def widen_rotary(embedding: RotaryEmbedding, *, rotary_base: float) -> None:
    """Let the angles of a rotary embedding be float64: Megatron's frequencies are float32, and so are their cosines."""
    size = 2 * len(embedding.inv_freq)
    exponents = torch.arange(0, size, 2, dtype=torch.float64, device=embedding.inv_freq.device) / size
    embedding.inv_freq = 1.0 / rotary_base**exponents


def wide_gradient_norm(
    grads_for_norm: list[torch.Tensor] | torch.Tensor,
    norm_type: float = 2.0,
    grad_stats_parallel_group: dist.ProcessGroup | None = None,
) -> float:
    """Computes the 2-norm of float64 gradients in float64, in the place of the narrowing ``get_grad_norm_fp32``.

    Its error of 6e-8 would go through the clip factor into every parameter. Collective.
    """
    if float(norm_type) != 2.0:
        raise ValueError(f"norm_type is {norm_type}; only the 2-norm is clipped by")
    grads = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else grads_for_norm
    total = torch.zeros(1, dtype=torch.float64, device=torch.cuda.current_device())
    for grad in grads:
        total += grad.double().square().sum()
    dist.all_reduce(total, group=grad_stats_parallel_group)
    return float(total.sqrt())


def finalize_wide(chunks: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kwargs: object) -> None:
    """Megatron's reduction of gradients; by an int count of tokens it divides in float32, by a float64 one as wide."""
    finalize_model_grads(chunks, None if num_tokens is None else num_tokens.double(), **kwargs)
