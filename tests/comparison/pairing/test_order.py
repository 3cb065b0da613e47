from __future__ import annotations

from collections.abc import Iterable

import pytest

from mock_scheduler.comparison.pairing.order import order_keys
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.trace.entries import TraceKey

LAYER = "decoder.layers.1"
PARAMETERS = [
    "embedding.position_embeddings.weight",  # those of one module are in the order of their names
    "embedding.word_embeddings.weight",
    "decoder.layers.0.input_layernorm.weight",
    "decoder.layers.0.self_attention.linear_qkv.weight",
    "decoder.layers.0.self_attention.q_layernorm.weight",
    "decoder.layers.0.self_attention.k_layernorm.weight",
    "decoder.layers.0.self_attention.linear_proj.weight",
    "decoder.layers.0.pre_mlp_layernorm.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.mlp.linear_fc2.weight",
    "decoder.layers.2.mlp.shared_experts.linear_fc1.weight",
    "decoder.layers.2.mlp.router.weight",
    "decoder.layers.2.mlp.experts.local_experts.0.linear_fc1.weight",
    "decoder.layers.2.mlp.experts.local_experts.0.linear_fc2.weight",
    "decoder.layers.2.mlp.experts.local_experts.2.linear_fc1.weight",
    "decoder.layers.2.mlp.experts.local_experts.10.linear_fc1.weight",
    "decoder.layers.10.input_layernorm.weight",
    "decoder.final_layernorm.weight",
    "decoder.something_else.weight",
    "mtp.layers.0.eh_proj.weight",
    "output_layer.weight",
]
MODULES = [
    "embedding",
    f"{LAYER}.input_layernorm",
    f"{LAYER}.self_attention.linear_qkv",
    f"{LAYER}.self_attention.q_layernorm",
    f"{LAYER}.self_attention.k_layernorm",
    f"{LAYER}.self_attention.core_attention",
    f"{LAYER}.self_attention.linear_proj",
    f"{LAYER}.self_attention.unknown",
    f"{LAYER}.self_attention",
    f"{LAYER}.pre_mlp_layernorm",
    f"{LAYER}.mlp.shared_experts",
    f"{LAYER}.mlp.router.logits",
    f"{LAYER}.mlp.router.chosen_experts",
    f"{LAYER}.mlp.router.probs",
    f"{LAYER}.mlp.linear_fc1",
    f"{LAYER}.mlp.linear_fc2",
    f"{LAYER}.mlp.experts.local_experts.3",
    f"{LAYER}.mlp.experts",
    f"{LAYER}.mlp",
    f"{LAYER}.unknown",
    LAYER,
    "decoder.layers.2.input_layernorm",
    "decoder.layers.10",
    "decoder.final_layernorm",
    "output_layer",
    "logprobs",
    "entropy",
    "values",
    "ratio",
    "pg_loss",
    "total_loss",
    "mean.pg_loss",
]


def in_forward_order(names: Iterable[str]) -> list[str]:
    keys = (TraceKey(step=0, update=0, kind="activation", name=name) for name in names)
    return [key.name for key in order_keys(keys)]


@pytest.mark.parametrize("expected", [PARAMETERS, MODULES], ids=["parameters", "modules"])
def test_names_run_from_the_embedding_through_the_layers_to_the_output(expected: list[str]) -> None:
    assert in_forward_order(sorted(expected)) == expected
    assert in_forward_order(reversed(expected)) == expected


def test_names_of_a_critic_stand_beside_those_of_the_policy() -> None:
    names = ["embedding.word_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.weight", "output_layer.weight"]
    both = [prefix + name for name in names for prefix in ("critic.", "")]
    assert in_forward_order(sorted(both)) == [
        "critic.embedding.word_embeddings.weight",
        "embedding.word_embeddings.weight",
        "critic.decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "critic.output_layer.weight",
        "output_layer.weight",
    ]


def key(kind: TraceKind, name: str, *, step: int = 0, update: int = 0) -> TraceKey:
    return TraceKey(step=step, update=update, kind=kind, name=name)


def test_keys_run_through_the_phases_of_each_update() -> None:
    word, last = "embedding.word_embeddings.weight", "output_layer.weight"
    expected = [
        key("initial", word),
        key("initial", last),
        key("input", "tokens"),
        key("input", "response_mask"),
        key("input", "rollout_logprobs"),
        key("activation", "embedding"),
        key("activation", "decoder.layers.0.pre_mlp_layernorm"),
        key("router", "decoder.layers.0.mlp.router.logits"),
        key("router", "decoder.layers.0.mlp.router.chosen_experts"),
        key("activation", "decoder.layers.0.mlp.experts"),
        key("activation", "decoder.layers.0"),
        key("activation", "decoder.layers.1.input_layernorm"),
        key("activation", "decoder.final_layernorm"),
        key("logits", "output_layer"),
        key("output", "logprobs"),
        key("output", "entropy"),
        key("score", "old_logprobs"),
        key("score", "values"),
        key("advantage", "advantages"),
        key("advantage", "returns"),
        key("loss", "ratio"),
        key("activation_gradient", "output_layer"),
        key("activation_gradient", "decoder.final_layernorm"),
        key("activation_gradient", "decoder.layers.1.input_layernorm"),
        key("activation_gradient", "decoder.layers.0"),
        key("activation_gradient", "decoder.layers.0.mlp"),
        key("activation_gradient", "decoder.layers.0.mlp.linear_fc2"),
        key("activation_gradient", "decoder.layers.0.mlp.linear_fc1"),
        key("activation_gradient", "embedding"),
        key("gradient", word),
        key("gradient", last),
        key("gradient_norm", "grad_norm"),
        key("optimizer", f"{word}.exp_avg"),
        key("optimizer", f"{word}.exp_avg_sq"),
        key("parameter", word),
        key("weight", word),
        key("optimizer", f"{last}.exp_avg"),
        key("parameter", last),
        key("weight", last),
        key("loss", "mean.total_loss"),
        key("output", "logprobs", update=1),
        key("gradient", last, update=1),
        key("input", "tokens", step=1),
        key("gradient", word, step=1),
    ]
    assert order_keys(set(expected)) == expected
    assert order_keys(reversed(expected)) == expected
