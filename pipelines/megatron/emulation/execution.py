"""Trains in the order of ``order.emulate``: passes of virtual replicas, losses of virtual ranks, the engine's sums."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias, reset_model_temporary_tensors
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer

from mock_scheduler.errors import LayoutError
from mock_scheduler.layouts.order_plan import OrderPlan, plan_order
from mock_scheduler.megatron.emulation.engine import Engine
from mock_scheduler.megatron.emulation.parts import cut_graph, join_graph
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.emulation.lanes import (
    cut_lanes,
    cut_shares,
    cut_values,
    gathered_shares,
    join_batches,
    joined_terms,
    metrics_of_lanes,
    sums_of_lanes,
    sums_of_shares,
)
from pipelines.megatron.emulation.layers import PIPELINE_MODULES, logprobs_of_parts
from pipelines.megatron.execution import Execution, LossFunction, LossSums, OutputReduction, ShareMeasure, TokenLoss
from pipelines.megatron.layers.repairs import ValueHead
from pipelines.megatron.logprobs import VocabShard
from pipelines.megatron.places import OwnBatch
from pipelines.megatron.process_of_rank import Runtime


def build_execution(config: PipelineConfig, runtime: Runtime) -> Execution:
    """Builds the order of computation of one model: its own layout's, or that of ``order.emulate``."""
    if config.order.emulate is not None:
        return Emulation(plan_order(config))
    return Execution.of_layout(runtime)


class Emulation(Execution):
    """Lets one process compute as a layout of several does, for one model of it."""

    def __init__(self, plan: OrderPlan) -> None:
        super().__init__(
            num_replicas=plan.replicas,
            vocab_parts=plan.tp,
            micro_batch_multiple=plan.micro_batch_multiple,
            cp_size=plan.cp,
            own_cp_ranks=slice(0, plan.cp),
        )
        self.plan = plan
        self._engine = Engine(plan, PIPELINE_MODULES)
        self._num_tokens: list[torch.Tensor] = []
        self._runs_left = 0

    def start(self, gpt: GPTModel, optimizer: MegatronOptimizer | None) -> None:
        """Lets a model compute rank by rank, and its optimizer clip by the norm as the layout takes it.

        gpt: built in one process, on its device, in its gradient buffers if it is trained.

        Raises:
            LayoutError: the model is a critic whose replicas would have to compute together; or as the engine says.
        """
        if self.plan.lanes > 1 and isinstance(gpt.output_layer, ValueHead):
            raise LayoutError(
                "order.emulate: a critic's replicas are not computed together, as experts over several of them need; "
                "emulate an expert_model_parallel_size of at most tensor_model_parallel_size × context_parallel_size"
            )
        self._gpt = gpt
        self._engine.start(gpt, optimizer)
        if optimizer is not None:
            gpt.config.finalize_model_grads_func = self.finalize

    def clear(self) -> None:
        """Forgets all gradients, before an update."""
        self._engine.clear()
        self._num_tokens.clear()

    def paused(self) -> AbstractContextManager[None]:
        """The block computes as one process does."""
        return self._engine.paused()

    def arrange(self, own: OwnBatch) -> OwnBatch:
        """Puts a whole line into the order of the emulated cp ranks."""
        return gathered_shares(own, self.plan.cp)

    def together(self, batches: Sequence[OwnBatch]) -> list[OwnBatch]:
        """Joins the micro-batches of replicas that compute together."""
        return join_batches(batches, self.plan.lanes)

    def rounds(self, batches: Sequence[OwnBatch]) -> Iterator[Sequence[OwnBatch]]:
        """Yields the passes of each round of virtual replicas; gradients are kept apart until all have run."""
        passes = self.together(batches)
        self._runs_left = self.plan.rounds
        for number in range(self.plan.rounds):
            self._engine.begin_round(number)
            # Replica i mod dp computes micro-batch i, so a round's passes lie a stride apart.
            yield passes[number :: self.plan.rounds]

    def reduce_parts(self, own: OwnBatch, output: torch.Tensor, reduce: OutputReduction) -> dict[int, torch.Tensor]:
        """Reduces the output of each lane, in memory of its own."""
        return {part.index: reduce(part, values) for part, values in cut_lanes(own, output)}

    def logprobs(
        self, logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard, *, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the cp ranks' shares one by one, each over the tp ranks' parts of the vocabulary."""
        by_share = zip(cut_graph(logits, 1, self.plan.cp), targets.chunk(self.plan.cp, dim=1), strict=True)
        results = [logprobs_of_parts(*two, shard, num_parts=self.plan.tp, temperature=temperature) for two in by_share]
        logprobs, entropy = (join_graph(of_shares, 1) for of_shares in zip(*results, strict=True))
        return logprobs, entropy

    def sum_parts(self, own: OwnBatch, output: torch.Tensor, loss: LossFunction) -> LossSums:
        """Sums the losses of all lanes."""
        return sums_of_lanes(own, output, loss)

    def metrics_of_parts(self, own: OwnBatch, metrics: torch.Tensor) -> dict[int, torch.Tensor]:
        """Gives each lane's metrics by micro-batch index."""
        return metrics_of_lanes(own, metrics)

    def sum_shares(
        self, own: OwnBatch, values: Mapping[str, torch.Tensor], compute: TokenLoss
    ) -> tuple[Mapping[str, torch.Tensor], LossSums]:
        """Sums the losses of the emulated cp ranks, each of its own share."""
        shares = zip(cut_shares(own, self.plan.cp), cut_values(values, self.plan.cp), strict=True)
        results = [compute(*two) for two in shares]
        terms = joined_terms([result.terms for result in results])
        return terms, sums_of_shares([(result.total, result.num_tokens, result.metrics) for result in results])

    def measure_shares(self, own: OwnBatch, values: torch.Tensor, measure: ShareMeasure) -> torch.Tensor:
        """Measures each emulated cp rank's share, ``[cp, width]``."""
        shares = zip(cut_shares(own, self.plan.cp), values.chunk(self.plan.cp, dim=1), strict=True)
        return torch.stack([measure(*two) for two in shares])

    def finalize(
        self, chunks: Sequence[torch.nn.Module], num_tokens: torch.Tensor | None = None, **unused: object
    ) -> None:
        """Stands in for ``finalize_model_grads``: after the last replica, sum and divide."""
        if num_tokens is not None:
            self._num_tokens.append(num_tokens)
        # Megatron calls this at the end of every round; the sums of replicas wait for the last.
        self._runs_left -= 1
        if self._runs_left:
            return
        total = torch.stack(self._num_tokens).sum() if self._num_tokens else None
        if total is not None and self._gpt.config.params_dtype is torch.float64:
            # 1 / tokens of an integer would be in float32.
            total = total.double()
        # Megatron multiplies by 1 / tokens and does not divide: the two round differently.
        self._engine.write_gradients(None if total is None or int(total) == 0 else 1.0 / total)
        if self._gpt.config.moe_router_enable_expert_bias:
            _update_router_expert_bias(list(chunks), self._gpt.config)
        reset_model_temporary_tensors(self._gpt.config, list(chunks))
