"""Lists the parameters of a model by their canonical names, with their whole shapes; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from mock_scheduler.trace.names import OUTPUT_LAYER, WORD_EMBEDDINGS
from pipelines.config.model import ModelConfig

Shape = tuple[int, ...]


def parameter_shapes(model: ModelConfig, *, vocab_size: int, sequence_length: int) -> dict[str, Shape]:
    """Returns every parameter's global shape by its canonical name, in the order of Megatron's ``GPTModel``.

    ``vocab_size``: unpadded. ``sequence_length``: the number of learned positions, where the model has them.
    """
    shapes: dict[str, Shape] = {WORD_EMBEDDINGS: (vocab_size, model.hidden_size)}
    if model.position_embedding_type == "learned_absolute":
        shapes["embedding.position_embeddings.weight"] = (sequence_length, model.hidden_size)
    for layer in range(model.num_layers):
        shapes |= {f"decoder.layers.{layer}.{name}": shape for name, shape in _layer_shapes(model, layer)}
    shapes |= dict(_norm_shapes("decoder.final_layernorm", model.hidden_size, model))
    if model.untie_embeddings_and_output_weights:
        shapes[OUTPUT_LAYER] = (vocab_size, model.hidden_size)
    return shapes


def _layer_shapes(model: ModelConfig, layer: int) -> Iterator[tuple[str, Shape]]:
    hidden, head = model.hidden_size, model.head_size
    qkv = (model.num_attention_heads + 2 * model.query_groups) * head
    has_bias = model.add_bias_linear
    yield from _norm_shapes("input_layernorm", hidden, model)
    yield from _linear_shapes(
        "self_attention.linear_proj", (hidden, model.num_attention_heads * head), has_bias=has_bias
    )
    yield from _linear_shapes("self_attention.linear_qkv", (qkv, hidden), has_bias=has_bias or model.add_qkv_bias)
    if model.qk_layernorm:
        yield from _norm_shapes("self_attention.q_layernorm", head, model)
        yield from _norm_shapes("self_attention.k_layernorm", head, model)
    yield from _norm_shapes("pre_mlp_layernorm", hidden, model)
    if model.moe_layers[layer]:
        yield from _expert_shapes(model)
    else:
        yield from _mlp_shapes("mlp", model.ffn_size, model)


def _mlp_shapes(name: str, inner: int, model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    fc1, hidden = inner * (2 if model.swiglu else 1), model.hidden_size
    yield from _linear_shapes(f"{name}.linear_fc1", (fc1, hidden), has_bias=model.add_bias_linear)
    yield from _linear_shapes(f"{name}.linear_fc2", (hidden, inner), has_bias=model.add_bias_linear)


def _expert_shapes(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    num_experts = model.num_moe_experts or 0
    yield from _linear_shapes("mlp.router", (num_experts, model.hidden_size), has_bias=model.add_bias_linear)
    for expert in range(num_experts):
        yield from _mlp_shapes(f"mlp.experts.local_experts.{expert}", model.expert_ffn_size, model)
    if model.moe_shared_expert_intermediate_size is not None:
        yield from _mlp_shapes("mlp.shared_experts", model.moe_shared_expert_intermediate_size, model)
    if model.moe_shared_expert_gate:
        yield "mlp.shared_experts.gate_weight", (1, model.hidden_size)


def _norm_shapes(name: str, size: int, model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (size,)
    if model.normalization == "LayerNorm":
        yield f"{name}.bias", (size,)


def _linear_shapes(name: str, shape: Shape, *, has_bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", shape
    if has_bias:
        yield f"{name}.bias", shape[:1]
