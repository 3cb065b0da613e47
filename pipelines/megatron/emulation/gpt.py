"""Lets every module of a one-process ``GPTModel`` compute as the ranks of a layout do."""

from __future__ import annotations

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import MoELayer

from mock_scheduler.megatron.order_plan import OrderPlan
from pipelines.megatron.emulation.accumulators import Accumulators
from pipelines.megatron.emulation.attention import emulate_attention
from pipelines.megatron.emulation.experts import emulate_experts
from pipelines.megatron.emulation.modules import EmulatedModules


def emulate_gpt(gpt: GPTModel, plan: OrderPlan, accumulators: Accumulators) -> EmulatedModules:
    """Replace the ``forward`` of all modules of a chunk, in the order in which they compute."""
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
