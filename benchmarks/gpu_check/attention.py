"""Repeats TransformerEngine's attention with its gradients, and prints the answer last.

``determinism`` starts it with ``NVTE_DEBUG``, so that the log names the chosen backend.
"""

from __future__ import annotations

import torch

from benchmarks.gpu_check.determinism import repeat

_TOKENS, _BATCH, _HEADS, _SIZE = 512, 2, 8, 64


def main() -> None:
    """Attends twenty times."""
    from transformer_engine.pytorch import DotProductAttention  # built for the GPU's machine alone

    torch.use_deterministic_algorithms(True)
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (_TOKENS, _BATCH, _HEADS, _SIZE)
    three = [torch.randn(shape, device="cuda", generator=generator).bfloat16().requires_grad_() for _ in range(3)]
    attention = DotProductAttention(_HEADS, _SIZE, attention_dropout=0.0, attn_mask_type="causal")

    def attend() -> tuple[torch.Tensor, ...]:
        output = attention(*three)
        return (output.detach(), *torch.autograd.grad(output.float().square().sum(), three))

    print(repeat(attend))


if __name__ == "__main__":
    main()
