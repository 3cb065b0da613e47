"""Lists the operations whose repetition is asked for, each with inputs that make an unordered sum show."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

Operation = Callable[[], tuple[torch.Tensor, ...]]


def build_operations(device: torch.device, *, scale: int) -> dict[str, Operation]:
    """Makes the operations; ``scale``: 1 for a rehearsal, more for a GPU's many blocks."""
    generator = torch.Generator().manual_seed(20_200)

    def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    rows, width = 256 * scale, 128 * scale
    left, right, hidden = values(rows, width), values(width, width), values(rows, width)
    index = torch.randint(0, 8, (rows,), generator=generator).to(device)
    heads = [values(2, 4, 64 * scale, 64) for _ in range(3)]
    weight = values(width)
    logits, table = values(rows, width, dtype=torch.float32), values(64, width)
    wide = values(rows, width, dtype=torch.float32)

    def gradients(call: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Operation:
        def run() -> tuple[torch.Tensor, ...]:
            own = [item.detach().requires_grad_() for item in inputs]
            output = call(*own)
            return (output.detach(), *torch.autograd.grad(output.float().sum(), own))

        return run

    def add_at(target: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(8, width, device=device).index_add_(0, index, target),)

    operations: dict[str, Operation] = {
        "product, bfloat16": lambda: (left @ right,),
        "product, float32": lambda: (wide @ right.float(),),
        "product and its gradients, bfloat16": gradients(torch.matmul, left, right),
        "layer norm and its gradients": gradients(lambda x, w: F.layer_norm(x, (width,), w), hidden, weight),
        "RMS norm and its gradients": gradients(lambda x, w: F.rms_norm(x, (width,), w), hidden, weight),
        "softmax and its gradient": gradients(lambda x: F.softmax(x, -1) * x, logits),
        "cross entropy and its gradient": gradients(lambda x: F.cross_entropy(x, index), logits),
        "embedding and its gradient": gradients(lambda x: F.embedding(index, x), table),
        "GELU and its gradient": gradients(F.gelu, hidden),
        "index_add_, float32": lambda: add_at(wide),
        "scatter_add_, float32": lambda: (
            torch.zeros(8, width, device=device).scatter_add_(0, index[:, None].expand(-1, width), wide),
        ),
        "index_put_ that adds, float32": lambda: (
            torch.zeros(8, width, device=device).index_put_((index,), wide, accumulate=True),
        ),
        "cumsum, float32": lambda: (wide.cumsum(0),),
        "sum of all, float32": lambda: (wide.sum(),),
        "topk": lambda: tuple(logits.topk(4, dim=-1)),
        "sort, stable": lambda: tuple(logits.sort(dim=-1, stable=True)),
    }
    return operations | _attention(gradients, heads)


def _attention(gradients: Callable[..., Operation], heads: list[torch.Tensor]) -> Mapping[str, Operation]:
    backends = torch.nn.attention.SDPBackend

    def attend(backend: torch.nn.attention.SDPBackend) -> Callable[..., torch.Tensor]:
        def call(*three: torch.Tensor) -> torch.Tensor:
            with torch.nn.attention.sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*three, is_causal=True)

        return call

    names = {
        "math": backends.MATH,
        "flash": backends.FLASH_ATTENTION,
        "memory-efficient": backends.EFFICIENT_ATTENTION,
        "cuDNN": backends.CUDNN_ATTENTION,
    }
    return {
        f"attention ({name}) and its gradients": gradients(attend(backend), *heads) for name, backend in names.items()
    }
