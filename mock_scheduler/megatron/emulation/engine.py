"""A model of one process that computes as a layout of several does; what a trained model and its schedule ask of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias, reset_model_temporary_tensors
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.transformer.moe.moe_layer import MoELayer

from mock_scheduler.errors import LayoutError
from mock_scheduler.layouts.order_plan import OrderPlan, plan_order
from mock_scheduler.megatron.emulation.accumulators import Accumulators
from mock_scheduler.megatron.emulation.attention import emulate_attention
from mock_scheduler.megatron.emulation.experts import emulate_experts
from mock_scheduler.megatron.emulation.gradients import HeldParameter, gradient_norm, write_main_gradients
from mock_scheduler.megatron.emulation.lanes import (
    cut_lanes,
    cut_values,
    join_batches,
    joined_terms,
    metrics_of_lanes,
    sums_of_lanes,
    sums_of_shares,
)
from mock_scheduler.megatron.emulation.modules import EmulatedModules
from mock_scheduler.megatron.execution import Execution, LossFunction, LossSums, TokenLoss
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.layers.repairs import ValueHead
from pipelines.megatron.places import OwnBatch, cut_shares
from pipelines.megatron.process.runtime import Runtime

_LAYERS = "decoder.layers."


def build_execution(config: PipelineConfig, runtime: Runtime) -> Execution:
    """Builds the order of computation of one model: its own layout's, or that of ``order.emulate``."""
    if config.order.emulate is not None:
        return Emulation(plan_order(config))
    return Execution(
        num_replicas=runtime.dp_size * runtime.cp_size,
        vocab_parts=runtime.tp_size,
        micro_batch_multiple=runtime.micro_batch_multiple,
    )


class Emulation(Execution):
    """Lets one process compute as a layout of several does, for one model of it."""

    def __init__(self, plan: OrderPlan) -> None:
        super().__init__(
            num_replicas=plan.replicas,
            vocab_parts=plan.tp,
            micro_batch_multiple=plan.micro_batch_multiple,
            num_shares=plan.cp,
        )
        self.plan = plan
        self.accumulators = Accumulators()
        self._num_tokens: list[torch.Tensor] = []
        self._runs_left = 0

    def start(self, gpt: GPTModel, optimizer: MegatronOptimizer | None) -> None:
        """Lets a model compute rank by rank, and its optimizer clip by the norm as the layout takes it.

        gpt: built in one process, on its device, in its gradient buffers if it is trained.

        Raises:
            LayoutError: the model is a critic whose replicas would have to compute together; or this Megatron's
                optimizer is not built as 0.16.1 builds it.
        """
        if self.plan.lanes > 1 and isinstance(gpt.output_layer, ValueHead):
            raise LayoutError(
                "order.emulate: a critic's replicas are not computed together, as experts over several of them need; "
                "emulate an expert_model_parallel_size of at most tensor_model_parallel_size × context_parallel_size"
            )
        self._gpt = gpt
        self.modules = emulate_gpt(gpt, self.plan, self.accumulators)
        if optimizer is None:
            return
        if not isinstance(optimizer, ChainedOptimizer):
            raise LayoutError(
                f"order.emulate: the optimizer is a {type(optimizer).__name__}; expected a ChainedOptimizer, whose "
                "gradient norm can be taken as the emulated layout takes it (megatron-core 0.16.1)"
            )
        # Clipping scales every gradient by it, so another last bit of it would be in every parameter.
        optimizer.get_grad_norm = self.gradient_norm
        gpt.config.finalize_model_grads_func = self.finalize

    def clear(self) -> None:
        """Forgets all gradients, before an update."""
        self.accumulators.clear()
        self._num_tokens.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The block computes as one process does."""
        self.modules.is_paused = True
        try:
            yield
        finally:
            self.modules.is_paused = False

    def together(self, batches: Sequence[OwnBatch]) -> list[OwnBatch]:
        """Joins the micro-batches of replicas that compute together."""
        return join_batches(batches, self.plan.lanes)

    def rounds(self, batches: Sequence[OwnBatch]) -> Iterator[Sequence[OwnBatch]]:
        """Yields the passes of each round of virtual replicas; gradients are kept apart until all have run."""
        passes = self.together(batches)
        self._runs_left = self.plan.rounds
        for number in range(self.plan.rounds):
            self.accumulators.round = self.modules.round = number
            # Replica i mod dp computes micro-batch i, so a round's passes lie a stride apart.
            yield passes[number :: self.plan.rounds]

    def parts(self, own: OwnBatch, values: torch.Tensor) -> list[tuple[OwnBatch, torch.Tensor]]:
        """Cuts a pass into its micro-batches, in memory of their own."""
        return cut_lanes(own, values)

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
        shares = zip(cut_shares(own, self.num_shares), cut_values(values, self.num_shares), strict=True)
        results = [compute(*two) for two in shares]
        terms = joined_terms([result.terms for result in results])
        return terms, sums_of_shares([(result.total, result.num_tokens, result.metrics) for result in results])

    def finalize(
        self, chunks: Sequence[torch.nn.Module], num_tokens: torch.Tensor | None = None, **unused: object
    ) -> None:
        """In the place of ``finalize_model_grads``: after the last replica, sum and divide."""
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
        parameters = [parameter for parameter in self._gpt.parameters() if parameter.requires_grad]
        write_main_gradients(parameters, self.accumulators, self.plan, total)
        if self._gpt.config.moe_router_enable_expert_bias:
            _update_router_expert_bias(list(chunks), self._gpt.config)
        reset_model_temporary_tensors(self._gpt.config, list(chunks))

    def gradient_norm(self) -> float:
        """Of the main gradients as they are."""
        dtype = torch.float64 if self._gpt.config.params_dtype is torch.float64 else torch.float32
        return gradient_norm(self._held(), self.plan, dtype)

    def _held(self) -> list[list[list[HeldParameter]]]:
        """By stage and chunk, the parameters in the model's order."""
        plan, by_name = self.plan, dict(self._gpt.named_parameters())
        per_chunk = self._gpt.config.num_layers // (plan.stages * plan.chunks)
        return [
            # A stage of an interleaved pipeline holds every ``stages``-th chunk of layers.
            [list(self._held_by_chunk(by_name, chunk * plan.stages + stage, per_chunk)) for chunk in range(plan.chunks)]
            for stage in range(plan.stages)
        ]

    def _held_by_chunk(
        self, by_name: Mapping[str, torch.nn.Parameter], index: int, per_chunk: int
    ) -> Iterator[HeldParameter]:
        """index: of the chunk in the order of the layers."""
        last = self.plan.stages * self.plan.chunks - 1
        is_apart = self.plan.is_tied and self.plan.stages > 1 and self._gpt.share_embeddings_and_output_weights
        tied = None
        for name, parameter in by_name.items():
            if name.startswith(_LAYERS):
                is_here = int(name.removeprefix(_LAYERS).split(".")[0]) // per_chunk == index
            else:
                # The embedding is computed first; final norm and output, last.
                is_here = index == (0 if name.startswith("embedding.") else last)
            uses = list(self.accumulators.of(parameter))
            is_shared = is_apart and len(uses) > 1
            tied = (parameter, uses[-1]) if is_shared else tied
            if is_here:
                yield HeldParameter(
                    parameter=parameter,
                    accumulator=uses[0],
                    is_vector=parameter.ndim == 1,
                    alone=is_shared,
                    holder=self._holder(name) if uses[0].split.is_expert else None,
                )
        # The last stage holds the shared weight in its buffers too; the norm counts it on the first stage alone.
        if tied is not None and index == last:
            parameter, use = tied
            yield HeldParameter(parameter=parameter, accumulator=use, is_vector=False, counts=False, alone=True)

    def _holder(self, name: str) -> int:
        """The ep rank of an expert's parameter."""
        assert self.plan.experts is not None
        per_rank = self._gpt.config.num_moe_experts // self.plan.experts.sources
        # Experts are dealt to ep ranks in blocks, not round robin.
        return int(name.partition(".local_experts.")[2].split(".")[0]) // per_rank


def emulate_gpt(gpt: GPTModel, plan: OrderPlan, accumulators: Accumulators) -> EmulatedModules:
    """Replaces the ``forward`` of all modules of a chunk, in the order of computation."""
    modules = EmulatedModules(gpt, plan, accumulators)
    modules.replace(gpt.embedding, modules.embed(gpt.embedding))
    for layer in gpt.decoder.layers:
        modules.norm(layer.input_layernorm)
        modules.norm(layer.pre_mlp_layernorm)
        emulate_attention(layer.self_attention, modules)
        if isinstance(layer.mlp, MoELayer):
            emulate_experts(layer.mlp, modules)
        else:
            modules.mlp(layer.mlp)
    modules.norm(gpt.decoder.final_layernorm)
    modules.output(gpt)
    return modules
