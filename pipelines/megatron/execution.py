"""The order in which one process computes its share of a batch: its own layout's.

Contract: ``Execution`` is the identity form of ``pipelines.megatron.emulation``. Every method hands its arguments on
as they are, so ordinary training neither copies nor adds anything for an emulation that it does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer

from pipelines.batching.plan import MicroBatch
from pipelines.megatron.logprobs import VocabShard, vocab_parallel_logprobs
from pipelines.megatron.places import OwnBatch
from pipelines.megatron.process_of_rank import Runtime

LossSums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The loss summed over response tokens, their number (int), and metrics without graph, float64."""

LossFunction = Callable[[OwnBatch, torch.Tensor], LossSums]
"""From a micro-batch and the model's output for it to its sums."""


OutputReduction = Callable[[OwnBatch, torch.Tensor], torch.Tensor]
"""From a micro-batch and the model's output for it to what is kept of that."""

ShareMeasure = Callable[[MicroBatch, torch.Tensor], torch.Tensor]
"""From the tokens of one cp rank and ``[b, s]`` values of them to numbers ``[width]``."""


class LossOutput(Protocol):
    """The loss of one micro-batch, of policy or critic."""

    @property
    def total(self) -> torch.Tensor:
        """Returns the sum over response tokens, with graph."""
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
        """Returns the summands, ``[b, T]`` by name."""
        ...


TokenLoss = Callable[[MicroBatch, Mapping[str, torch.Tensor]], LossOutput]
"""From a micro-batch's targets and ``[b, s]`` values by name to its loss."""


class Execution:
    """Computes in the order of the process's own layout.

    num_replicas: the ranks whose gradients of a parameter's part are summed. vocab_parts: the tp ranks' parts of the
    vocabulary. micro_batch_multiple: the divisor of an update's number of micro-batches. cp_size: the ranks that share
    a line. own_cp_ranks: those of them whose numbers this process computes.
    """

    def __init__(
        self, *, num_replicas: int, vocab_parts: int, micro_batch_multiple: int, cp_size: int, own_cp_ranks: slice
    ) -> None:
        self.num_replicas = num_replicas
        self.vocab_parts = vocab_parts
        self.micro_batch_multiple = micro_batch_multiple
        self.cp_size = cp_size
        self.own_cp_ranks = own_cp_ranks

    @classmethod
    def of_layout(cls, runtime: Runtime) -> Execution:
        """Builds the execution of the layout that this process is part of."""
        return cls(
            num_replicas=runtime.dp_size * runtime.cp_size,
            vocab_parts=runtime.tp_size,
            micro_batch_multiple=runtime.micro_batch_multiple,
            cp_size=runtime.cp_size,
            own_cp_ranks=slice(runtime.cp_rank, runtime.cp_rank + 1),
        )

    def start(self, gpt: GPTModel, optimizer: MegatronOptimizer | None) -> None:
        """Takes a built model over, with its optimizer if it is trained."""

    def clear(self) -> None:
        """Forgets all gradients, before an update."""

    def paused(self) -> AbstractContextManager[None]:
        """The block computes as one process does, as when tokens are generated one by one."""
        return nullcontext()

    def arrange(self, own: OwnBatch) -> OwnBatch:
        """Puts the tokens of a micro-batch into the order in which they are computed."""
        return own

    def together(self, batches: Sequence[OwnBatch]) -> list[OwnBatch]:
        """Joins the micro-batches that one pass computes."""
        return list(batches)

    def rounds(self, batches: Sequence[OwnBatch]) -> Iterable[Sequence[OwnBatch]]:
        """Yields the passes of an update in rounds, each with a backward pass of its own."""
        return [self.together(batches)]

    def reduce_parts(self, own: OwnBatch, output: torch.Tensor, reduce: OutputReduction) -> dict[int, torch.Tensor]:
        """Reduces the output of a pass without graph, by index of its micro-batches."""
        return {own.index: reduce(own, output)}

    def logprobs(
        self, logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard, *, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes ``vocab_parallel_logprobs`` of a micro-batch."""
        return vocab_parallel_logprobs(logits, targets, shard, temperature=temperature)

    def sum_parts(self, own: OwnBatch, output: torch.Tensor, loss: LossFunction) -> LossSums:
        """Sums the losses of a pass's micro-batches, each with the gradient that it has alone."""
        return loss(own, output)

    def metrics_of_parts(self, own: OwnBatch, metrics: torch.Tensor) -> dict[int, torch.Tensor]:
        """Gives the metrics of ``sum_parts`` by micro-batch index."""
        return {own.index: metrics}

    def sum_shares(
        self, own: OwnBatch, values: Mapping[str, torch.Tensor], compute: TokenLoss
    ) -> tuple[Mapping[str, torch.Tensor], LossSums]:
        """Sums the losses of the cp ranks' shares of a micro-batch; also returns the terms, ``[b, s]`` by name."""
        result = compute(own.batch, values)
        return result.terms, (result.total, result.num_tokens.int(), result.metrics)

    def measure_shares(self, own: OwnBatch, values: torch.Tensor, measure: ShareMeasure) -> torch.Tensor:
        """Measures each own cp rank's share, ``[width]`` or ``[own cp ranks, width]``."""
        return measure(own.batch, values)
