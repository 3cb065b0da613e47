"""A model under training as the instruments see it: chunks, optimizer and ranks, whoever built them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.transformer import TransformerConfig

from mock_scheduler.megatron.ranks import ModelRanks


def unwrapped(chunk: torch.nn.Module) -> GPTModel:
    """The ``GPTModel`` inside its wrappers."""
    inner: Any = chunk
    while not isinstance(inner, GPTModel):
        inner = inner.module
    return inner


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ObservedModel:
    """This rank's part of one model.

    chunks: its model chunks in the order of Megatron's list, in ``DistributedDataParallel`` where they are trained.
    optimizer: Megatron's, ``None`` of a model that is never trained. prefix: the beginning of canonical names, as
    ``critic.``. vocab_size: without padding. num_replicas: the ranks whose gradients of a parameter's part are summed,
    dp × cp; those of the emulated layout where one process follows another.
    """

    chunks: Sequence[torch.nn.Module]
    ranks: ModelRanks
    vocab_size: int
    num_replicas: int
    optimizer: MegatronOptimizer | None = None
    prefix: str = ""

    @property
    def config(self) -> TransformerConfig:
        """Megatron's configuration of the model."""
        return unwrapped(self.chunks[0]).config

    @property
    def optimizers(self) -> list[MegatronOptimizer]:
        """Megatron's optimizers one by one, whether it chained several or not."""
        if self.optimizer is None:
            return []
        is_chained = isinstance(self.optimizer, ChainedOptimizer)
        return list(self.optimizer.chained_optimizers) if is_chained else [self.optimizer]

    def gpts(self) -> Iterator[GPTModel]:
        """Yields the ``GPTModel`` of each chunk."""
        yield from map(unwrapped, self.chunks)

    def gather_parameters(self) -> None:
        """Makes this rank's parameters current, where their gathering would wait for the next forward pass."""
        for chunk in self.chunks:
            if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
