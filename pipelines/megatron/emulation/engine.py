"""A model of one process that computes as a layout of several does; what a trained model and its schedule ask of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias, reset_model_temporary_tensors
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.transformer.moe.moe_layer import MoELayer

from mock_scheduler.errors import LayoutError
from mock_scheduler.megatron.order_plan import OrderPlan, plan_order
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.emulation.accumulators import Accumulators
from pipelines.megatron.emulation.attention import emulate_attention
from pipelines.megatron.emulation.experts import emulate_experts
from pipelines.megatron.emulation.gradients import HeldParameter, gradient_norm, write_main_gradients
from pipelines.megatron.emulation.modules import EmulatedModules
from pipelines.megatron.layers.repairs import ValueHead

_LAYERS = "decoder.layers."

Lot = TypeVar("Lot")


def emulated_plan(config: PipelineConfig) -> OrderPlan | None:
    """The plan that a run follows; ``None`` where it computes in its own layout's order."""
    return None if config.order.emulate is None else plan_order(config)


class Emulation:
    """Of one model. gpt: built in one process, on its device, in its gradient buffers if it is trained.

    Raises:
        LayoutError: the model is a critic whose replicas would have to compute together.
    """

    def __init__(self, gpt: GPTModel, plan: OrderPlan) -> None:
        if plan.lanes > 1 and isinstance(gpt.output_layer, ValueHead):
            raise LayoutError(
                "order.emulate: a critic's replicas are not computed together, as experts over several of them need; "
                "emulate an expert_model_parallel_size of at most tensor_model_parallel_size × context_parallel_size"
            )
        self.plan = plan
        self.accumulators = Accumulators()
        self.modules = emulate_gpt(gpt, plan, self.accumulators)
        self._gpt = gpt
        gpt.emulated = self.modules
        self._num_tokens: list[torch.Tensor] = []
        self._runs_left = 0

    def attach(self, optimizer: MegatronOptimizer) -> None:
        """Let the optimizer clip by the norm as the layout takes it.

        Raises:
            LayoutError: this Megatron's optimizer is not built as 0.16.1 builds it.
        """
        if not isinstance(optimizer, ChainedOptimizer):
            raise LayoutError(
                f"order.emulate: the optimizer is a {type(optimizer).__name__}; expected a ChainedOptimizer, whose "
                "gradient norm can be taken as the emulated layout takes it (megatron-core 0.16.1)"
            )
        optimizer.get_grad_norm = self.gradient_norm

    def clear(self) -> None:
        """Forget all gradients, before an update."""
        self.accumulators.clear()
        self._num_tokens.clear()

    def rounds(self, batches: Sequence[Lot]) -> Iterator[list[Lot]]:
        """Yields the batches of each round of virtual replicas; gradients are kept apart until all have run.

        batches: as ``together`` gives them.
        """
        self._runs_left = self.plan.rounds
        for number in range(self.plan.rounds):
            self.accumulators.round = self.modules.round = number
            yield list(batches[number :: self.plan.rounds])

    def finalize(
        self, chunks: Sequence[torch.nn.Module], num_tokens: torch.Tensor | None = None, **unused: object
    ) -> None:
        """In the place of ``finalize_model_grads``: after the last replica, sum and divide."""
        if num_tokens is not None:
            self._num_tokens.append(num_tokens)
        self._runs_left -= 1
        if self._runs_left:
            return
        total = torch.stack(self._num_tokens).sum() if self._num_tokens else None
        if total is not None and self._gpt.config.params_dtype is torch.float64:
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
        if tied is not None and index == last:
            parameter, use = tied
            yield HeldParameter(parameter=parameter, accumulator=use, is_vector=False, counts=False, alone=True)

    def _holder(self, name: str) -> int:
        """The ep rank of an expert's parameter."""
        assert self.plan.experts is not None
        per_rank = self._gpt.config.num_moe_experts // self.plan.experts.sources
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
