"""One canonical name for a parameter, whatever the pipeline stage, wrapper or layer implementation calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mock_scheduler.trace.names import canonical_parameter_name

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
