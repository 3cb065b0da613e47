"""What a model's modules give for each row of a batch on its own: no padding, no micro-batches, no probe."""

from __future__ import annotations

import torch

from mock_scheduler.batch import RolloutBatch
from pipelines.megatron.passes import run_chunk
from pipelines.megatron.places import ModelInputs


@torch.no_grad()
def forward_by_row(gpt: torch.nn.Module, batch: RolloutBatch) -> dict[str, torch.Tensor]:
    """By Megatron's own module name the outputs that are ``[s, 1, ...]``, as ``[T, n]``: one row behind the other.

    Of a router: its weights of all experts and, as ``{name}.map``, its choice, int64 0 or 1; both ``[T, E]``.
    """
    rows: list[dict[str, torch.Tensor]] = []

    def keep(name: str, output: object) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        if name.endswith(".router"):
            rows[-1] |= {name: parts[0].clone(), f"{name}.map": parts[1].long()}
        elif isinstance(parts[0], torch.Tensor) and parts[0].shape[:2] == (length, 1):
            rows[-1][name] = parts[0].flatten(1).clone()

    handles = [
        module.register_forward_hook(lambda _, args, output, name=name: keep(name, output))
        for name, module in gpt.named_modules()
    ]
    gpt.eval()
    for row_tokens in torch.split(batch.tokens.long(), batch.lengths.tolist()):
        rows.append({})
        length = len(row_tokens)
        tokens, positions = row_tokens.unsqueeze(0), torch.arange(length).unsqueeze(0)
        run_chunk(gpt, ModelInputs(tokens=tokens, positions=positions, row_ids=torch.zeros_like(tokens)))
    for handle in handles:
        handle.remove()
    return {name: torch.cat([row[name] for row in rows]).contiguous() for name in rows[0]}
