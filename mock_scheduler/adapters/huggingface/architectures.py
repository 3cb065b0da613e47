"""The kinds of models that are read from Hugging Face, by ``model_type``; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """Names in a layer with experts: ``block``, and in each expert ``gate``, ``up`` and ``down``."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    width: str = "moe_intermediate_size"


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """The differences of a kind of model from a Llama. ``causal``: the class of its language model.

    ``has_window_switch``: ``sliding_window`` counts only with ``use_sliding_window``.
    """

    causal: str
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_shared_expert: bool = False
    has_window_switch: bool = False
    experts: ExpertNames | None = None


MIXTRAL_EXPERTS = ExpertNames(
    block="block_sparse_moe", gate="w1", up="w3", down="w2", count=("num_local_experts",), width="intermediate_size"
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(causal="LlamaForCausalLM"),
    "qwen2": Architecture(causal="Qwen2ForCausalLM", has_qkv_bias=True, has_window_switch=True),
    "qwen3": Architecture(causal="Qwen3ForCausalLM", has_qk_norm=True, has_window_switch=True),
    "mixtral": Architecture(causal="MixtralForCausalLM", experts=MIXTRAL_EXPERTS),
    "qwen2_moe": Architecture(
        causal="Qwen2MoeForCausalLM",
        has_qkv_bias=True,
        has_window_switch=True,
        has_shared_expert=True,
        experts=ExpertNames(),
    ),
    "qwen3_moe": Architecture(
        causal="Qwen3MoeForCausalLM", has_qk_norm=True, has_window_switch=True, experts=ExpertNames()
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceModel:
    """A model as ``config.json`` describes it; ``fields``: its shape by the names of Megatron's configuration."""

    architecture: Architecture
    fields: Mapping[str, Any]

    @property
    def num_heads(self) -> int:
        """Heads of the queries."""
        return int(self.fields["num_attention_heads"])

    @property
    def num_groups(self) -> int:
        """Heads of keys and values."""
        return int(self.fields["num_query_groups"])
