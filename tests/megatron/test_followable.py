"""What a trace would be silently wrong about is found in the built model, by the types of its objects."""

from __future__ import annotations

from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import experts

from mock_scheduler.megatron.followable import find_draws, find_obstacles
from mock_scheduler.megatron.observed_model import ObservedModel
from tests.megatron.tiny_model import tiny_model


def named(kind: str, base: type = torch.nn.Module) -> Any:
    return type(kind, (base,), {})


def with_module(kind: str) -> ObservedModel:
    model = tiny_model()
    model.chunks[0].decoder.layers[1].mlp.mixer = named(kind)()
    return model


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("FullyShardedDataParallel", "wrap the model in DistributedDataParallel"),
        ("MambaMixer", "no layer of attention stands there"),
        ("GatedDeltaNet", "no layer of attention stands there"),
        ("CudaGraphManager", "CUDA graphs: a replayed graph calls no hooks; capture none"),
        ("GroupedMLP", "set moe_use_legacy_grouped_gemm=False"),
    ],
)
def test_a_module_that_cannot_be_followed_is_named_with_its_place(kind: str, reason: str) -> None:
    (text,) = find_obstacles(with_module(kind))
    assert text.startswith(f"decoder.layers.1.mlp.mixer is a {kind}: ")
    assert text.endswith(reason)


@pytest.mark.skipif(not hasattr(experts, "GroupedMLP"), reason="megatron-core 0.17 has none")
def test_megatrons_own_grouped_experts_in_one_weight_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built with a package in the place of ``grouped_gemm``, which needs CUDA to be installed."""
    monkeypatch.setattr(experts.gg, "grouped_gemm", object())
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, num_moe_experts=2, moe_ffn_hidden_size=6,
        add_bias_linear=False, use_cpu_initialization=True, cuda_graph_scope=[],
    )  # fmt: skip
    model = tiny_model()
    groups = SimpleNamespace(ep=group, expt_tp=group, expt_dp=group)
    model.chunks[0].decoder.layers[1].mlp.experts = experts.GroupedMLP(2, config, groups)
    assert {name for name, _ in model.chunks[0].decoder.layers[1].mlp.experts.named_parameters()} == {
        "weight1",
        "weight2",
    }
    assert list(find_obstacles(model)) == [
        "decoder.layers.1.mlp.experts is a GroupedMLP: all experts of a rank are in one weight; set "
        "moe_use_legacy_grouped_gemm=False"
    ]


def test_other_modules_are_no_obstacle() -> None:
    assert list(find_obstacles(with_module("TEGroupedMLP"))) == []


@pytest.mark.parametrize("module", ["torch.cuda.graphs", "transformer_engine.pytorch.graph"])
def test_a_module_that_was_captured_in_a_graph_is_named(module: str) -> None:
    """A function of torch's or TransformerEngine's module of graphs stands in its ``forward`` then."""
    model = tiny_model()
    norm = model.chunks[0].decoder.layers[1].input_layernorm

    def new_fwd(*arguments: object) -> None: ...

    norm.forward = new_fwd
    assert list(find_obstacles(model)) == []
    new_fwd.__module__ = module
    assert list(find_obstacles(model)) == [
        "decoder.layers.1.input_layernorm is captured in a CUDA graph: a replayed graph calls no hooks; capture none"
    ]


def test_torch_defines_the_captured_forward_where_it_is_looked_for() -> None:
    code = torch.cuda.graphs.make_graphed_callables.__code__
    inner = {item.co_name: item for item in code.co_consts if isinstance(item, CodeType)}
    assert "new_fwd" in {item.co_name for item in inner["make_graphed_forward"].co_consts if isinstance(item, CodeType)}
    assert torch.cuda.graphs.make_graphed_callables.__module__ == "torch.cuda.graphs"


def test_quantized_parameters_are_found() -> None:
    model = tiny_model()
    layer = model.chunks[0].decoder.layers[0].mlp.linear_fc1
    layer.weight = named("Float8Tensor", torch.nn.Parameter)(layer.weight.detach())
    assert list(find_obstacles(model)) == [
        "decoder.layers.0.mlp.linear_fc1.weight is a quantized parameter: its values are not the tensor's own; keep "
        "parameters in bfloat16"
    ]


def test_a_chunk_without_gradient_buffers_cannot_be_trained() -> None:
    model = tiny_model()
    optimizer = named("LayerWiseDistributedOptimizer", object)()
    trained = ObservedModel(
        chunks=model.chunks, ranks=model.ranks, vocab_size=model.vocab_size, num_replicas=1, optimizer=optimizer
    )
    assert list(find_obstacles(trained)) == [
        "model chunk 0 is a TinyGpt without Megatron's DistributedDataParallel, so its parameters have no reduced "
        "gradients (main_grad); wrap the chunk before the optimizer is built",
        "the optimizer is a LayerWiseDistributedOptimizer: it keeps states by layer on ranks of its own; use another "
        "optimizer",
    ]


def model_of(*modules: torch.nn.Module, **rates: float | None) -> Any:
    """A model with these modules, as ``adapter0.dropout`` and on."""
    gpt: Any = torch.nn.Module()
    for index, module in enumerate(modules):
        adapter: Any = torch.nn.Module()
        adapter.dropout = module
        gpt.add_module(f"adapter{index}", adapter)
    config = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "moe_input_jitter_eps": None, **rates}
    return SimpleNamespace(config=SimpleNamespace(**config), gpts=lambda: [gpt])


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ({}, ()),
        ({"hidden_dropout": 0.1}, ("hidden_dropout",)),
        ({"attention_dropout": 0.1, "hidden_dropout": 0.2}, ("hidden_dropout", "attention_dropout")),
        ({"moe_input_jitter_eps": 1e-2}, ("moe_input_jitter_eps",)),
    ],
)
def test_rates_of_the_configuration_are_named(rates: dict[str, float], found: tuple[str, ...]) -> None:
    assert find_draws(model_of(torch.nn.Dropout(0.0), **rates)) == found


def test_modules_with_a_rate_of_their_own_are_named_once() -> None:
    assert find_draws(model_of(torch.nn.Dropout(0.1), torch.nn.Dropout(0.1))) == ("dropout",)
    # Megatron's own modules have a rate of the configuration.
    assert find_draws(model_of(torch.nn.Dropout(0.1), hidden_dropout=0.1)) == ("hidden_dropout",)
    assert find_draws(model_of(torch.nn.Dropout2d(0.3), hidden_dropout=0.1)) == ("hidden_dropout", "dropout")
