"""Builds layers with experts: their fields of Megatron's configuration, their specs, and the row of each token.

The layer's router (``expert_router``) must know each token's place: its row, unique within the training step, and its
position there (``routing``). Places travel as ``padding_mask``, the one argument that Megatron passes from the model to
its experts and keeps for recomputation: int64 ``[b, s]``, -1 for padding.

Names: ``decoder.layers.N.mlp.`` followed by ``router.weight`` ``[E, h]``, ``router.bias`` ``[E]`` (with
``add_bias_linear``), ``experts.local_experts.I.linear_fc1.weight`` and ``linear_fc2.weight`` (expert I of this ep rank,
the model's expert ep_rank · E / ep + I) and ``shared_experts.linear_fc1.weight``, ``linear_fc2.weight``
and ``gate_weight`` ``[1, h]`` (with ``moe_shared_expert_gate``).
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer import ModuleSpec, transformer_layer
from megatron.core.transformer.moe.moe_layer import MoELayer

from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.megatron.host_device import define_router_gemm
from pipelines.config.model import ModelConfig
from pipelines.megatron.layers.expert_router import LayoutInvariantRouter
from pipelines.megatron.layers.routing import places_of

ROUTER_DTYPES = {torch.float32: None, torch.bfloat16: "fp32", torch.float64: "fp64"}
"""``moe_router_dtype``: no router computes in less than float32, and none in less than its model."""


def moe_config_fields(model: ModelConfig, parallel: ParallelConfig, precision: torch.dtype) -> dict[str, object]:
    """Lists the experts' fields of Megatron's ``TransformerConfig``; empty for a model without experts."""
    if model.num_moe_experts is None:
        return {}
    return {
        "num_moe_experts": model.num_moe_experts,
        "moe_layer_freq": [int(has_experts) for has_experts in model.moe_layers],
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate": model.moe_shared_expert_gate,
        "moe_router_topk": model.moe_router_topk,
        "moe_router_score_function": model.moe_router_score_function,
        "moe_router_pre_softmax": model.moe_router_pre_softmax,
        "moe_router_topk_scaling_factor": model.moe_router_topk_scaling_factor,
        "moe_router_load_balancing_type": model.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_z_loss_coeff": model.moe_z_loss_coeff or None,
        "moe_router_enable_expert_bias": model.moe_router_enable_expert_bias,
        "moe_router_bias_update_rate": model.moe_router_bias_update_rate,
        "moe_router_dtype": ROUTER_DTYPES[precision],
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
    }


def _is_not_about_mlp_type(record: logging.LogRecord) -> bool:
    """Megatron's layers log that they do not know ``RowMoELayer`` by name; it finds its process groups itself."""
    return not record.getMessage().startswith("Unknown MLP type")


def expert_mlp_spec(model: ModelConfig) -> ModuleSpec | functools.partial[MoELayer]:
    """The ``mlp`` of a layer with experts: Megatron's, with our layer and router unless its own are asked for."""
    define_router_gemm()
    spec = get_moe_module_spec(
        use_te=model.transformer_impl == "transformer_engine", num_experts=model.num_moe_experts, moe_grouped_gemm=False
    )
    if model.moe_router_impl == "megatron":
        return spec
    logging.getLogger(transformer_layer.__name__).addFilter(_is_not_about_mlp_type)
    if isinstance(spec, functools.partial):  # from megatron-core 0.19 on
        submodules = replace(spec.keywords["submodules"], router=LayoutInvariantRouter)
        return functools.partial(RowMoELayer, submodules=submodules)
    return replace(spec, module=RowMoELayer, submodules=replace(spec.submodules, router=LayoutInvariantRouter))


def padding_mask_argument(
    row_ids: torch.Tensor,
    model: ModelConfig,
    *,
    positions: torch.Tensor | None = None,
    is_first_chunk: bool,
    sequence_parallel: bool,
) -> torch.Tensor | None:
    """Makes ``GPTModel``'s ``padding_mask``, by which its routers learn the place of each token.

    row_ids: int64 ``[b, s]`` of the tokens that this rank passes to the model, before sequence parallelism splits them.
    positions: int64, likewise; only a routing table reads them.
    The chunk with the embedding splits its mask itself; the others are handed their slice, ``[b, s / tp]``. ``None``
    where no router reads it. Megatron's own router gets its bool mask, True for padding, except with an expert bias,
    whose counter fails on any mask (0.16.1).
    """
    if model.num_moe_experts is None:
        return None
    mask = row_ids if positions is None else places_of(row_ids, positions)
    if model.moe_router_impl == "megatron":
        if model.moe_router_enable_expert_bias:
            return None
        mask = row_ids < 0
    if sequence_parallel and not is_first_chunk:
        mask = scatter_to_sequence_parallel_region(mask.transpose(0, 1).contiguous()).transpose(0, 1).contiguous()
    return mask


class RowMoELayer(MoELayer):
    """Megatron's layer with experts; it hands the router the place of each token."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        intermediate_tensors: None = None,
        padding_mask: torch.Tensor | None = None,
        **unused: object,
    ) -> tuple[torch.Tensor, None]:
        """Returns the experts' output for ``[s, b, h]``, and no bias; stages as in ``MoELayer.forward`` (0.16.1).

        padding_mask: int64 places ``[b, s]``, -1 for padding; ``None``: every token is real and of row 0.
        """
        if self.training and self.attn_tp_group.size() > 1 and not self.config.sequence_parallel:
            raise ValueError("experts under tensor parallelism train with sequence_parallel only: set it to true")
        row_ids = None if padding_mask is None else padding_mask.transpose(0, 1).contiguous()
        if self.moe_layer_recompute:
            return tensor_parallel.checkpoint(self._forward_rows, False, hidden_states, row_ids), None
        return self._forward_rows(hidden_states, row_ids), None

    def _forward_rows(self, hidden_states: torch.Tensor, row_ids: torch.Tensor | None) -> torch.Tensor:
        shared_output = self.shared_experts_compute(hidden_states)
        probs, routing_map = self.router(hidden_states, row_ids)
        dispatched, probs = self.preprocess(hidden_states, probs, routing_map)
        dispatched, probs = self.dispatch(dispatched, probs)
        output, _ = self.routed_experts_compute(dispatched, probs)
        return self.postprocess(self.combine(output), shared_output)
