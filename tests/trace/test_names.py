"""One canonical name for a parameter or module, whatever stage, wrapper or layer implementation calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mock_scheduler.trace.names import canonical_module_name, canonical_parameter_name

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "implementation_names.json").read_text())["models"]


@pytest.mark.parametrize("model", GOLDEN)
def test_local_and_transformer_engine_models_have_the_same_canonical_names(model: str) -> None:
    local, fused = GOLDEN[model]["local"], GOLDEN[model]["transformer_engine"]
    assert set(local) != set(fused)
    assert {canonical_parameter_name(name) for name in fused} == set(local)
    assert [canonical_parameter_name(name) for name in local] == local


def test_a_fused_norm_is_the_norm_before_its_linear_layer() -> None:
    name = "decoder.layers.1.self_attention.linear_qkv.layer_norm_bias"
    assert canonical_parameter_name(name) == "decoder.layers.1.input_layernorm.bias"
    name = "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"
    assert canonical_parameter_name(name) == "decoder.layers.1.pre_mlp_layernorm.weight"


def test_layers_are_numbered_through_the_pipeline_and_wrappers_are_dropped() -> None:
    name = "module.module.decoder.layers.1.mlp.linear_fc2.weight"
    assert canonical_parameter_name(name, layer_offset=6) == "decoder.layers.7.mlp.linear_fc2.weight"
    assert (
        canonical_parameter_name("decoder.final_layernorm.weight", layer_offset=6) == "decoder.final_layernorm.weight"
    )


def test_a_tied_output_layer_is_the_embedding() -> None:
    assert canonical_parameter_name("output_layer.weight", tied_output=True) == "embedding.word_embeddings.weight"
    assert canonical_parameter_name("output_layer.weight") == "output_layer.weight"


@pytest.mark.parametrize("model", GOLDEN)
def test_a_module_is_named_as_its_parameters_are(model: str) -> None:
    for name in GOLDEN[model]["local"]:
        module, _, parameter = name.rpartition(".")
        assert f"{canonical_module_name(module)}.{parameter}" == canonical_parameter_name(name)
        wrapped = canonical_module_name(f"module.module.{module}", layer_offset=4)
        assert f"{wrapped}.{parameter}" == canonical_parameter_name(name, layer_offset=4)


@pytest.mark.parametrize("model", GOLDEN)
def test_modules_of_both_implementations_have_one_name_but_for_fused_norms(model: str) -> None:
    modules = {
        implementation: {canonical_module_name(name.rpartition(".")[0]) for name in names}
        for implementation, names in GOLDEN[model].items()
    }
    fused = {f"decoder.layers.{layer}.{norm}" for layer in (0, 1) for norm in ("input_layernorm", "pre_mlp_layernorm")}
    assert modules["local"] - modules["transformer_engine"] == fused
    assert modules["transformer_engine"] <= modules["local"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decoder.layers.1", "decoder.layers.7"),
        ("module.decoder.layers.0.mlp.router", "decoder.layers.6.mlp.router"),
        ("decoder.layers", "decoder.layers"),
        ("decoder.final_layernorm", "decoder.final_layernorm"),
        ("", ""),
    ],
)
def test_layers_and_their_parts_are_numbered_through_the_pipeline(name: str, expected: str) -> None:
    assert canonical_module_name(name, layer_offset=6) == expected
