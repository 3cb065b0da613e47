"""Buffers that belong to a model's state are found by what they are, whatever their names, and traced as parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.megatron.probe.state import read_state
from pipelines.config.model import ModelConfig
from pipelines.megatron.process.runtime import Runtime
from pipelines.megatron.weights import ModelShape, iterate_state_buffers

MODEL = ModelConfig.model_validate({"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2})


class Model(GPTModel):
    """The second stage's layers of a model of four: one router and a norm with statistics; nothing of Megatron's."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        router = torch.nn.Module()
        router.register_buffer("expert_bias", torch.tensor([0.5, -0.5]))
        router.register_buffer("local_tokens_per_expert", torch.ones(2), persistent=False)
        router.register_buffer("num_calls", torch.tensor(3))
        norm = torch.nn.Module()
        norm.register_buffer("running_mean", torch.tensor([0.1], dtype=torch.bfloat16))
        layer = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"router": router}), "input_layernorm": norm})
        self.decoder = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})


RUNTIME = Runtime(
    global_rank=1,
    world_size=4,
    device=torch.device("cpu"),
    tp_rank=0,
    tp_size=1,
    pp_rank=1,
    pp_size=4,
    dp_rank=0,
    dp_size=1,
)


@pytest.mark.parametrize("prefix", ["", "critic."])
def test_persistent_buffers_of_floats_are_state_under_their_canonical_names(prefix: str) -> None:
    """No counter of a step, which is not persistent, and no integers."""
    shape = ModelShape(model=MODEL, vocab_size=16, prefix=prefix)
    found = {item.spec.name: item for item in iterate_state_buffers([Model()], shape, RUNTIME)}
    assert {name: item.buffer.tolist() for name, item in found.items()} == {
        f"{prefix}decoder.layers.1.mlp.router.expert_bias": [0.5, -0.5],
        f"{prefix}decoder.layers.1.input_layernorm.running_mean": [torch.tensor(0.1).bfloat16().item()],
    }
    assert {item.spec.global_shape for item in found.values()} == {(2,), (1,)}
    assert all(item.spec.splits == () and item.spec.flat_range is None for item in found.values())


def model_of(dtype: torch.dtype) -> Any:
    shape = ModelShape(model=MODEL, vocab_size=16)
    return SimpleNamespace(
        shape=shape,
        transformer_config=SimpleNamespace(params_dtype=dtype),
        parameters=lambda: iter(()),
        state_buffers=lambda: iterate_state_buffers([Model()], shape, RUNTIME),
    )


@pytest.mark.parametrize("kind", ["initial", "parameter"])
@pytest.mark.parametrize(
    ("dtype", "traced"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_they_are_traced_in_the_precision_of_updates(kind: TraceKind, dtype: torch.dtype, traced: torch.dtype) -> None:
    """So that every parameter of a trace has one dtype; widening is exact."""
    pieces = {piece.spec.name: piece for piece in read_state(model_of(dtype), kind)}
    bias = pieces["decoder.layers.1.mlp.router.expert_bias"]
    assert (bias.tensor.dtype, bias.tensor.tolist(), bias.dims) == (traced, [0.5, -0.5], ("expert",))
    mean = pieces["decoder.layers.1.input_layernorm.running_mean"]
    assert (mean.tensor.dtype, mean.dims) == (traced, ("channel",))


@pytest.mark.parametrize("kind", ["gradient", "optimizer", "weight"])
def test_they_have_no_gradient_no_moments_and_no_rounded_copy(kind: TraceKind) -> None:
    assert list(read_state(model_of(torch.bfloat16), kind)) == []
