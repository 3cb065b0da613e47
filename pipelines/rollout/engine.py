"""The policy under training as a rollout engine, under whatever layout is running.

Within a model-parallel group (tp × pp) the leader plays episodes and calls :meth:`PolicyEngine.sample`; all other
ranks stand in :meth:`PolicyEngine.follow` until the leader calls :meth:`PolicyEngine.finish`. Each call is one
forward pass over the rows' whole history; the last stage samples, and every rank of the group learns the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mock_scheduler.config.schema import GeneratingArgs
from mock_scheduler.ledger import Ledger
from pipelines.environments.grid_tokens import PAD_ID
from pipelines.megatron.forward import forward_only
from pipelines.megatron.sampling import sample_tokens
from pipelines.megatron.trainer import PolicyTrainer

_STOP = 0


class PolicyEngine:
    """Samples the next token of many rows at once with the trainer's own model."""

    def __init__(self, trainer: PolicyTrainer, ledger: Ledger) -> None:
        self._trainer = trainer
        self._runtime = trainer.runtime
        if self._runtime.is_leader:
            ledger.count("built", "engine")  # one engine is one model-parallel group
        self._multiple_of = trainer.config.training.sequence_multiple_of
        self._group = parallel_state.get_model_parallel_group()
        self._leader = dist.get_global_rank(self._group, 0)
        last_stage = (self._runtime.pp_size - 1) * self._runtime.tp_size
        self._sampler = dist.get_global_rank(self._group, last_stage)

    def sample(
        self, prefixes: Sequence[Sequence[int]], uniforms: Sequence[float], args: GeneratingArgs
    ) -> tuple[list[int], list[float]]:
        """The next token of each prefix and the log-probability with which it was drawn. Leader only.

        ``uniforms``: one number in [0, 1) per row, which decides the token. No prefix may be empty.
        """
        lengths = torch.tensor([len(prefix) for prefix in prefixes], dtype=torch.int64)
        width = -(-int(lengths.max()) // self._multiple_of) * self._multiple_of
        tokens = torch.full((len(prefixes), width), PAD_ID, dtype=torch.int64)
        for row, prefix in enumerate(prefixes):
            tokens[row, : len(prefix)] = torch.tensor(prefix, dtype=torch.int64)
        self._broadcast(torch.tensor([len(prefixes), width], dtype=torch.int64))
        packed = torch.cat((lengths.unsqueeze(1), tokens), dim=1)
        numbers = torch.tensor(uniforms, dtype=torch.float64)
        sampled, logprobs = self._forward(self._broadcast(packed), self._broadcast(numbers), args)
        return sampled.tolist(), logprobs.tolist()

    def follow(self, args: GeneratingArgs) -> None:
        """Take part in the leader's calls until it finishes. Every other rank of the group."""
        while True:
            num_rows, width = self._broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
            if num_rows == _STOP:
                return
            packed = self._broadcast(torch.zeros(num_rows, 1 + width, dtype=torch.int64))
            self._forward(packed, self._broadcast(torch.zeros(num_rows, dtype=torch.float64)), args)

    def finish(self) -> None:
        """Release the ranks that follow. Leader only."""
        self._broadcast(torch.tensor([_STOP, 0], dtype=torch.int64))

    def _broadcast(self, tensor: torch.Tensor, *, source: int | None = None) -> torch.Tensor:
        tensor = tensor.to(self._runtime.device)
        if self._group.size() > 1:
            dist.broadcast(tensor, src=self._leader if source is None else source, group=self._group)
        return tensor

    def _forward(
        self, packed: torch.Tensor, uniforms: torch.Tensor, args: GeneratingArgs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lengths, tokens = packed[:, 0], packed[:, 1:].contiguous()
        rows = torch.arange(len(tokens), device=tokens.device)
        last_logits = forward_only(
            self._trainer.data_parallel, [tokens], reduce=lambda _, logits: logits[rows, lengths - 1]
        )
        result = torch.zeros(2, len(tokens), dtype=torch.float64, device=self._runtime.device)
        if self._runtime.is_last_stage:
            # On the host: a cumulative sum has no deterministic form on CUDA, and every device then draws alike.
            sampled, logprobs = sample_tokens(self._whole_vocabulary(last_logits[0]).cpu(), uniforms.cpu(), args)
            result = torch.stack((sampled.double(), logprobs.double())).to(self._runtime.device)
        result = self._broadcast(result, source=self._sampler)
        return result[0].long(), result[1].float()

    def _whole_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """``[n, V]`` from this rank's ``[n, V / tp]`` columns, -inf on tokens that cannot be chosen."""
        if self._runtime.tp_size > 1:
            parts = [torch.empty_like(logits) for _ in range(self._runtime.tp_size)]
            dist.all_gather(parts, logits.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
            logits = torch.cat(parts, dim=-1)
        allowed = self._trainer.allowed
        return logits[:, : len(allowed)].masked_fill(~allowed, -torch.inf)
