"""Says how each observed output lies in the whole tensor, on this rank: its dimensions and its split.

A canonical output is ``[T, ...]``: the step's tokens, then one process's numbers for a token. Sizes come from the
configuration, the split from the type of the module that computes the output; the first pass shows whether both are
right (``shares.select_tokens``). Layouts of outputs: megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.parameters import has_value_head
from mock_scheduler.megatron.partition import is_column_parallel
from mock_scheduler.trace.entries import DimName
from mock_scheduler.trace.shards import Block, Split, even_split

#: Megatron's transformer layer, which carries no annotations.
Layer = Any
Content = Literal[
    "hidden", "joined", "qkv", "query", "key", "value", "compressed_query", "compressed_kv", "expanded_query",
    "expanded_kv", "normed_query", "normed_kv", "ffn", "output", "experts", "expert_scores", "expert_choice",
]  # fmt: skip
"""What an output has for each token; ``build_form`` says its dimensions and how tensor parallelism splits them.

joined: hidden states whose channels tensor parallelism splits. value: of MLA's attention. compressed, expanded, normed:
behind MLA's down projections, up projections and the norms between them.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputForm:
    """Holds the dimensions after the token dimension of an output.

    dims, shape: of the canonical tensor. local_shape: this rank's part. splits: the place of this part. width: how many
    numbers the module gives per token, where vocabulary padding follows the local part; else its size. is_sliced:
    sequence parallelism leaves this rank a slice of the columns.
    """

    dims: tuple[DimName, ...]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    width: int
    is_sliced: bool = False


def build_form(content: Content, module: torch.nn.Module, layer: Layer, model: ObservedModel) -> OutputForm | str:
    """How an output of this content lies in the whole, on this rank; or why nothing can say it.

    Args:
        content: what the module gives for each token.
        module: the one that computes it; an adapter counts as the layer that it wraps.
        layer: the transformer layer around it; the ``GPTModel`` of modules outside the layers.
        model: for configuration and ranks.
    """
    if content == "output":
        return _output_form(layer, model)
    if content in ("qkv", "key") and model.config.num_query_groups < model.ranks.tp_size:
        return "tensor parallelism has more ranks than the attention has groups of queries, so it splits heads"
    dims, shape = _features(content, layer, model)
    if content in _SPLIT:
        num_parts = 2 if content == "ffn" and model.config.gated_linear_unit else 1
        return _split_form(dims, shape, base_layer(module), model, num_parts=num_parts)
    if content in ("compressed_query", "compressed_kv") and is_column_parallel(base_layer(module)):
        return _split_form(dims, shape, base_layer(module), model)
    is_sliced = model.config.sequence_parallel and model.ranks.tp_size > 1
    return OutputForm(dims=dims, shape=shape, local_shape=shape, width=_product(shape), is_sliced=is_sliced)


#: Contents whose first feature dimension tensor parallelism splits.
_SPLIT: frozenset[Content] = frozenset(
    {"joined", "qkv", "query", "key", "value", "expanded_query", "expanded_kv", "ffn"}
)


def base_layer(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the layer inside an adapter (LoRA); every other module itself."""
    for name in ("to_wrap", "base_layer"):
        inner = module._modules.get(name)
        if inner is not None:
            return base_layer(inner)
    return module


def is_latent_attention(layer: Layer) -> bool:
    """Whether a layer's attention is Megatron's multi-latent one (MLA)."""
    return isinstance(layer.self_attention, MultiLatentAttention)


def _features(content: Content, layer: Layer, model: ObservedModel) -> tuple[tuple[DimName, ...], tuple[int, ...]]:
    """Names and sizes of the feature dimensions of one token in one process."""
    config: Any = model.config  # MLA's has further fields
    groups, heads, head_size = config.num_query_groups, config.num_attention_heads, config.kv_channels
    match content:
        case "hidden" | "joined":
            return ("channel",), (config.hidden_size,)
        case "qkv":
            # Within linear_qkv's output each group has its query heads (gated: twice), then its key and its value.
            num_queries = heads * (2 if vars(config).get("attention_output_gate") else 1)
            return ("head", "channel"), (num_queries + 2 * groups, head_size)
        case "query" | "key":
            return ("head", "channel"), (heads if content == "query" else groups, head_size)
        case "value":
            return ("head", "channel"), (heads, config.v_head_dim)
        case "expanded_query":
            return ("head", "channel"), (heads, config.qk_head_dim + config.qk_pos_emb_head_dim)
        case "expanded_kv":
            return ("head", "channel"), (heads, config.qk_head_dim + config.v_head_dim)
        case "compressed_query" | "normed_query":
            return ("channel",), (config.q_lora_rank,)
        case "compressed_kv":
            return ("channel",), (config.kv_lora_rank + config.qk_pos_emb_head_dim,)
        case "normed_kv":
            return ("channel",), (config.kv_lora_rank,)
        case "ffn":
            return ("channel",), (_ffn_size(layer, config),)
        case "expert_scores":
            return ("expert",), (config.num_moe_experts,)
        case "expert_choice":
            return ("slot",), (config.moe_router_topk,)
        case _:
            width = vars(config).get("moe_latent_size") or config.hidden_size
            return ("slot", "channel"), (config.moe_router_topk, width)


def _ffn_size(layer: Layer, config: Any) -> int:  # noqa: ANN401 - Megatron's configuration
    """Reads the width of the layer's own MLP, where it has a configuration of its own."""
    own = vars(layer.mlp).get("config") or config
    return int(own.ffn_hidden_size) * (2 if config.gated_linear_unit else 1)


def _split_form(
    dims: tuple[DimName, ...],
    shape: tuple[int, ...],
    module: torch.nn.Module,
    model: ObservedModel,
    *,
    num_parts: int = 1,
) -> OutputForm:
    """Features whose first dimension tensor parallelism splits; every rank has all columns."""
    ranks = model.ranks
    if isinstance(module, ColumnParallelLinear) and module.gather_output:
        return OutputForm(dims=dims, shape=shape, local_shape=shape, width=_product(shape))
    local_shape = (shape[0] // ranks.tp_size, *shape[1:])
    splits = even_split(1, size=shape[0], rank=ranks.tp_rank, num_ranks=ranks.tp_size, num_parts=num_parts)
    return OutputForm(dims=dims, shape=shape, local_shape=local_shape, splits=splits, width=_product(local_shape))


def _output_form(gpt: GPTModel, model: ObservedModel) -> OutputForm:
    """Describes logits without vocabulary padding (the last ranks have most of it), or one value, on every rank."""
    if has_value_head(gpt):
        return OutputForm(dims=("channel",), shape=(1,), local_shape=(1,), width=1)
    ranks, vocab_size, layer = model.ranks, model.vocab_size, gpt.output_layer
    num_parts = 1 if isinstance(layer, ColumnParallelLinear) and layer.gather_output else ranks.tp_size
    width = int(gpt.vocab_size) // num_parts
    start = ranks.tp_rank * width if num_parts > 1 else 0
    length = max(0, min(width, vocab_size - start))
    splits: tuple[Split, ...] = ()
    if num_parts > 1:
        splits = (Split(dim=1, blocks=(Block(local_start=0, global_start=start, length=length),)),)
    return OutputForm(dims=("vocab",), shape=(vocab_size,), local_shape=(length,), splits=splits, width=width)


def _product(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
