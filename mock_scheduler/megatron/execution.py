"""The order in which one process computes its share of a batch: its own layout's here, another's in ``emulation``.

Contract: ``Execution`` is the identity form. Every method hands its arguments on as they are, so ordinary training
neither copies nor adds anything for an emulation that it does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer

from pipelines.batching.plan import MicroBatch
from pipelines.megatron.places import OwnBatch

LossSums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The loss summed over response tokens, their number (int), and metrics without graph, float64."""

LossFunction = Callable[[OwnBatch, torch.Tensor], LossSums]
"""From a micro-batch and the model's output for it to its sums."""


class LossOutput(Protocol):
    """The loss of one micro-batch, of policy or critic."""

    @property
    def total(self) -> torch.Tensor:
        """The sum over response tokens, with graph."""
        ...

    @property
    def num_tokens(self) -> torch.Tensor:
        """This micro-batch's share of the denominator."""
        ...

    @property
    def metrics(self) -> torch.Tensor:
        """Sums without graph, float64."""
        ...

    @property
    def terms(self) -> Mapping[str, torch.Tensor]:
        """The summands, ``[b, T]`` by name."""
        ...


TokenLoss = Callable[[MicroBatch, Mapping[str, torch.Tensor]], LossOutput]
"""From a micro-batch's targets and ``[b, s]`` values by name to its loss."""


class Execution:
    """Computes in the order of the process's own layout.

    num_replicas: the ranks whose gradients of a parameter's part are summed. vocab_parts: the tp ranks' parts of the
    vocabulary. micro_batch_multiple: the divisor of an update's number of micro-batches. num_shares: the cp ranks whose
    shares of a line this process computes.
    """

    def __init__(self, *, num_replicas: int, vocab_parts: int, micro_batch_multiple: int, num_shares: int = 1) -> None:
        self.num_replicas = num_replicas
        self.vocab_parts = vocab_parts
        self.micro_batch_multiple = micro_batch_multiple
        self.num_shares = num_shares

    def start(self, gpt: GPTModel, optimizer: MegatronOptimizer | None) -> None:
        """Takes a built model over, with its optimizer if it is trained."""

    def clear(self) -> None:
        """Forgets all gradients, before an update."""

    def paused(self) -> AbstractContextManager[None]:
        """The block computes as one process does, as when tokens are generated one by one."""
        return nullcontext()

    def together(self, batches: Sequence[OwnBatch]) -> list[OwnBatch]:
        """Joins the micro-batches that one pass computes."""
        return list(batches)

    def rounds(self, batches: Sequence[OwnBatch]) -> Iterable[Sequence[OwnBatch]]:
        """Yields the passes of an update in rounds, each with a backward pass of its own."""
        return [self.together(batches)]

    def parts(self, own: OwnBatch, values: torch.Tensor) -> list[tuple[OwnBatch, torch.Tensor]]:
        """Cuts ``[b, s, ...]`` of a pass into its micro-batches' columns, without graph."""
        return [(own, values)]

    def sum_parts(self, own: OwnBatch, output: torch.Tensor, loss: LossFunction) -> LossSums:
        """Sums the losses of a pass's micro-batches, each with the gradient that it has alone."""
        return loss(own, output)

    def metrics_of_parts(self, own: OwnBatch, metrics: torch.Tensor) -> dict[int, torch.Tensor]:
        """Gives the metrics of ``sum_parts`` by micro-batch index."""
        return {own.batch.index: metrics}

    def sum_shares(
        self, own: OwnBatch, values: Mapping[str, torch.Tensor], compute: TokenLoss
    ) -> tuple[Mapping[str, torch.Tensor], LossSums]:
        """Sums the losses of the cp ranks' shares of a micro-batch; also returns the terms, ``[b, s]`` by name."""
        result = compute(own.batch, values)
        return result.terms, (result.total, result.num_tokens.int(), result.metrics)
