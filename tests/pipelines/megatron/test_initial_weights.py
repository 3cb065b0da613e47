"""The digest of the initial weights: it changes with every field that changes them, and with no other."""

from __future__ import annotations

import json

import pytest
import torch

from pipelines.config.model import ModelConfig, RopeScalingConfig
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.parameter_shapes import Shape, parameter_shapes
from pipelines.megatron.weights import canonical_initial_weight, compute_initial_weights_digest
from tests.pipelines.tiny_runs import ROOT
from tests.programs import run_program

GOLDEN = json.loads((ROOT / "tests" / "golden" / "parameters.json").read_text(encoding="utf-8"))

QWEN = ModelConfig(num_query_groups=2, ffn_hidden_size=128, qk_layernorm=True)
GPT2 = ModelConfig(normalization="LayerNorm", swiglu=False, add_bias_linear=True)
MOE = QWEN.model_copy(update={"num_moe_experts": 4, "moe_shared_expert_intermediate_size": 48, "num_layers": 3})
VARIANTS = {
    "qwen": QWEN,
    "gpt2": GPT2,
    "tied, learned positions": GPT2.model_copy(
        update={"position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False}
    ),
    "bias of qkv alone": QWEN.model_copy(update={"add_qkv_bias": True, "num_layers": 1}),
    "norms with bias of queries and keys": QWEN.model_copy(update={"normalization": "LayerNorm", "swiglu": False}),
    "experts": MOE,
    "experts in every other layer, with biases": GPT2.model_copy(
        update={"num_moe_experts": 3, "moe_layer_freq": 2, "moe_ffn_hidden_size": 40}
    ),
    "heads of another size": QWEN.model_copy(update={"kv_channels": 24, "num_layers": 1}),
    "shared expert with a gate": MOE.model_copy(update={"moe_shared_expert_gate": True, "num_layers": 1}),
    "padded vocabulary": QWEN.model_copy(update={"make_vocab_size_divisible_by": 100}),
}


def digest(model: ModelConfig = QWEN, *, vocab_size: int = 128, sequence_length: int = 64, seed: int = 42) -> str:
    return compute_initial_weights_digest(model, vocab_size=vocab_size, sequence_length=sequence_length, seed=seed)


@pytest.mark.parametrize("variant", ["qwen", "gpt2"])
def test_the_listed_parameters_are_the_golden_ones(variant: str) -> None:
    shapes = parameter_shapes(VARIANTS[variant], vocab_size=128, sequence_length=64)
    assert {name: list(shape) for name, shape in shapes.items()} == GOLDEN[variant]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Shape]]:
    """Names and shapes of really built models, which need Megatron's process groups and so a process of their own."""
    lines = [
        PipelineConfig(
            exp_name="x", sequence_length=64, model=model.model_copy(update={"vocab_size": 118})
        ).model_dump_json()
        for model in VARIANTS.values()
    ]
    path = tmp_path_factory.mktemp("models") / "configs.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    finished = run_program("tests.pipelines.workers.list_parameters", [str(path)])
    assert finished.returncode == 0, finished.stderr
    listed = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith("[[")]
    return {
        variant: {name: tuple(shape) for name, shape in parameters}
        for variant, parameters in zip(VARIANTS, listed, strict=True)
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_listed_parameters_are_those_of_a_built_model(variant: str, built: dict[str, dict[str, Shape]]) -> None:
    assert parameter_shapes(VARIANTS[variant], vocab_size=118, sequence_length=64) == built[variant]


# Another value of each field, on a model that has biases and learned positions; the other fields stay.
BASE = VARIANTS["tied, learned positions"]
CHANGING: dict[str, object] = {
    "num_layers": 3,
    "hidden_size": 32,
    "ffn_hidden_size": 96,
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "qk_layernorm": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "init_method_std": 0.03,
    "kv_channels": 32,
}
KEEPING: dict[str, object] = {
    "num_attention_heads": 2,  # as many rows of keys and values as before: the same tensors
    "layernorm_epsilon": 1e-6,
    "add_qkv_bias": True,  # add_bias_linear gives that bias already
    "rotary_base": 1000,
    "rope_scaling": RopeScalingConfig(),
    "hf_checkpoint": "elsewhere",  # its weights have a digest of their own
    "make_vocab_size_divisible_by": 128,
    "transformer_impl": "transformer_engine",
    "attention_backend": "flash",
    "vocab_size": 128,  # the argument counts, which is what is in effect
}
# The same on a model with experts, whose fields have no effect without.
EXPERTS_CHANGING: dict[str, object] = {
    "num_moe_experts": 8,
    "moe_layer_freq": 2,
    "moe_ffn_hidden_size": 40,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": True,
}
EXPERTS_KEEPING: dict[str, object] = {
    "moe_router_topk": 3,
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,
    "moe_router_topk_scaling_factor": 2.0,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.1,
    "moe_router_enable_expert_bias": True,  # a bias starts at 0, and is no parameter
    "moe_router_bias_update_rate": 0.1,
    "moe_router_replay": "record",
    "moe_router_impl": "megatron",
}


def test_every_field_of_the_model_is_covered_below() -> None:
    experts = EXPERTS_CHANGING.keys() | EXPERTS_KEEPING.keys()
    assert CHANGING.keys() | KEEPING.keys() | experts == ModelConfig.model_fields.keys()


@pytest.mark.parametrize("field", EXPERTS_CHANGING)
def test_a_field_that_changes_the_experts_changes_the_digest(field: str) -> None:
    assert digest(MOE.model_copy(update={field: EXPERTS_CHANGING[field]})) != digest(MOE)


@pytest.mark.parametrize("field", EXPERTS_KEEPING)
def test_a_field_of_routing_leaves_the_digest(field: str) -> None:
    assert digest(MOE.model_copy(update={field: EXPERTS_KEEPING[field]})) == digest(MOE)


@pytest.mark.parametrize("field", CHANGING)
def test_a_field_that_changes_the_weights_changes_the_digest(field: str) -> None:
    assert digest(BASE.model_copy(update={field: CHANGING[field]})) != digest(BASE)


@pytest.mark.parametrize("field", KEEPING)
def test_a_field_that_leaves_the_weights_leaves_the_digest(field: str) -> None:
    assert digest(BASE.model_copy(update={field: KEEPING[field]})) == digest(BASE)


def test_seed_vocabulary_and_learned_positions_change_the_digest() -> None:
    assert len({digest(BASE), digest(BASE, seed=43), digest(BASE, vocab_size=127)}) == 3
    assert digest(BASE, sequence_length=65) != digest(BASE)
    assert digest(QWEN, sequence_length=65) == digest(QWEN)


@pytest.mark.parametrize("field", ["num_attention_heads", "num_query_groups"])
def test_heads_change_the_digest_where_they_change_a_shape(field: str) -> None:
    assert digest(QWEN.model_copy(update={field: 1 if field == "num_query_groups" else 8})) != digest(QWEN)


def test_one_bit_of_one_weight_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    clean = digest()
    name = "decoder.layers.1.mlp.linear_fc2.weight"

    def flipped(of: str, shape: Shape, *, model: ModelConfig, seed: int) -> torch.Tensor:
        weight = canonical_initial_weight(of, shape, model=model, seed=seed)
        if of == name:
            weight.view(torch.int32).view(-1)[-1] ^= 1
        return weight

    monkeypatch.setattr("pipelines.megatron.weights.canonical_initial_weight", flipped)
    assert digest() != clean


# A model with tensors of more than 2^20 elements, of which only the first values are made.
LARGE = ModelConfig(num_layers=1, hidden_size=256, ffn_hidden_size=2048)


@pytest.mark.parametrize("change", [{"seed": 43}, {"vocab_size": 50001}, {"init_method_std": 0.0200000000001}])
def test_large_tensors_are_covered_too(change: dict[str, float]) -> None:
    def large(*, seed: int = 42, vocab_size: int = 50000, init_method_std: float = 0.02) -> str:
        model = LARGE.model_copy(update={"init_method_std": init_method_std})
        return digest(model, seed=seed, vocab_size=vocab_size)

    assert large(**change) != large()  # type: ignore[arg-type]


def test_the_first_values_of_a_large_tensor_are_those_that_are_hashed() -> None:
    """What the digest of a large tensor rests on: its values come from one stream, in the order of the elements."""
    name = "output_layer.weight"
    whole = canonical_initial_weight(name, (1100, 1000), model=LARGE, seed=42)
    first = canonical_initial_weight(name, (4096,), model=LARGE, seed=42)
    assert torch.equal(whole.view(-1)[:4096], first)


def test_the_digest_needs_no_model_and_stays_what_it_is() -> None:
    """Recordings hold it: another recipe, generator or order of values must show here."""
    assert digest() == "edac9dc777c4f66d17cf8bf7c4e43db4b6534c8715d7094f926b401e8b3b5377"
