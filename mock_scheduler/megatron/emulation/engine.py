"""Lets a model of one process compute as the ranks of a layout do, and sums its gradients as they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from mock_scheduler.errors import LayoutError
from mock_scheduler.layouts.order_plan import OrderPlan
from mock_scheduler.megatron.emulation.accumulators import Accumulators
from mock_scheduler.megatron.emulation.attention import emulate_attention, emulate_core
from mock_scheduler.megatron.emulation.cross_entropy import emulate_cross_entropy
from mock_scheduler.megatron.emulation.experts import emulate_experts
from mock_scheduler.megatron.emulation.gradients import HeldParameter, gradient_norm, write_main_gradients
from mock_scheduler.megatron.emulation.modules import EmulatedModules, Emulators
from mock_scheduler.megatron.emulation.parts import Blocks, Tokens
from mock_scheduler.megatron.emulation.router import emulate_router

_LAYERS = "decoder.layers."

#: Parts of a model whose arithmetic is followed as Megatron writes it.
MEGATRON_MODULES: Emulators = {
    LanguageModelEmbedding: lambda module, modules: modules.embed(module),
    torch.nn.LayerNorm: lambda module, modules: modules.norm(module),
    torch.nn.RMSNorm: lambda module, modules: modules.norm(module),
    SelfAttention: emulate_attention,
    DotProductAttention: emulate_core,
    MLP: lambda module, modules: modules.mlp(module),
    SharedExpertMLP: lambda module, modules: modules.mlp(module),
    MoELayer: emulate_experts,
    TopKRouter: emulate_router,
    ColumnParallelLinear: lambda module, modules: modules.output(module),
}


class Engine:
    """Follows the order of a layout for one model of one process.

    ``emulators``: by type of module. ``blocks``: how a line's tokens are dealt to cp ranks; 1 where they lie as dealt.
    """

    def __init__(self, plan: OrderPlan, emulators: Emulators = MEGATRON_MODULES, *, blocks: Blocks = 1) -> None:
        self.plan = plan
        self.accumulators = Accumulators()
        self._emulators = emulators
        self._tokens = Tokens(shares=plan.shares, blocks=blocks)

    def start(self, gpt: GPTModel, optimizer: MegatronOptimizer | None) -> None:
        """Lets a model compute rank by rank, and its optimizer clip by the norm as the layout takes it.

        gpt: built in one process, on its device, in its gradient buffers if it is trained.

        Raises:
            LayoutError: this Megatron's optimizer is not built as 0.16.1 builds it.
        """
        self._gpt = gpt
        self._modules = emulate_gpt(gpt, self.plan, self.accumulators, self._emulators, self._tokens)
        if optimizer is None:
            return
        if not isinstance(optimizer, ChainedOptimizer):
            raise LayoutError(
                f"order.emulate: the optimizer is a {type(optimizer).__name__}; expected a ChainedOptimizer, whose "
                "gradient norm can be taken as the emulated layout takes it (megatron-core 0.16.1)"
            )
        # Clipping scales every gradient by it, so another last bit of it would be in every parameter.
        optimizer.get_grad_norm = self.gradient_norm

    def clear(self) -> None:
        """Forgets all gradients, before an update."""
        self.accumulators.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The block computes as one process does."""
        self._modules.is_paused = True
        try:
            yield
        finally:
            self._modules.is_paused = False

    def begin_round(self, number: int) -> None:
        """Says whose micro-batches come next: those of this lot of virtual replicas."""
        self.accumulators.round = self._modules.round = number

    def set_loss_scale(self, scale: float) -> None:
        """Says how large a replica's loss is in units of this process's, a power of two."""
        self._modules.loss_scale = scale

    def write_gradients(self, scaling: torch.Tensor | None) -> None:
        """Writes every parameter's main gradient; scaling: as for ``write_main_gradients``."""
        parameters = [parameter for parameter in self._gpt.parameters() if parameter.requires_grad]
        write_main_gradients(parameters, self.accumulators, self.plan, scaling)

    def gradient_norm(self) -> float:
        """Computes the norm of the main gradients as they are."""
        # Megatron adds the squares in float32 whatever the gradients are; a float64 training here does so in float64.
        dtype = torch.float64 if self._gpt.config.params_dtype is torch.float64 else torch.float32
        return gradient_norm(self._held(), self.plan, dtype)

    def _held(self) -> list[list[list[HeldParameter]]]:
        """Returns by stage and chunk, the parameters in the model's order."""
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
        """Yields index: of the chunk in the order of the layers."""
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
        """Returns the ep rank of an expert's parameter."""
        assert self.plan.experts is not None
        per_rank = self._gpt.config.num_moe_experts // self.plan.experts.sources
        # Experts are dealt to ep ranks in blocks, not round robin.
        return int(name.partition(".local_experts.")[2].split(".")[0]) // per_rank


def emulate_gpt(
    gpt: GPTModel, plan: OrderPlan, accumulators: Accumulators, emulators: Emulators, tokens: Tokens
) -> EmulatedModules:
    """Replaces the ``forward`` of all modules of a chunk, in the order of computation."""
    modules = EmulatedModules(gpt, plan, accumulators, emulators, tokens)
    # In the order of computation, so that a tied weight's first use is the embedding's and its last the output's.
    modules.emulate(gpt.embedding)
    for layer in gpt.decoder.layers:
        for module in (layer.input_layernorm, layer.pre_mlp_layernorm, layer.self_attention, layer.mlp):
            modules.emulate(module)
    modules.emulate(gpt.decoder.final_layernorm)
    modules.emulate(gpt.output_layer)
    emulate_cross_entropy(gpt, modules)
    return modules
