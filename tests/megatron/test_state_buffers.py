"""Buffers that belong to a model's state are found by what they are, whatever their names, and traced as parameters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.parameters import iterate_state_buffers
from mock_scheduler.megatron.probe.state import read_state
from mock_scheduler.megatron.ranks import ModelRanks


class Model(GPTModel):
    """The second stage's layers of a model of four: one router and a norm with statistics; nothing of Megatron's."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.nn.Module.__init__(self)
        self.config = SimpleNamespace(num_moe_experts=2, params_dtype=dtype)
        self.share_embeddings_and_output_weights = False
        router = torch.nn.Module()
        router.register_buffer("expert_bias", torch.tensor([0.5, -0.5]))
        router.register_buffer("local_tokens_per_expert", torch.ones(2), persistent=False)
        router.register_buffer("num_calls", torch.tensor(3))
        norm = torch.nn.Module()
        norm.register_buffer("running_mean", torch.tensor([0.1], dtype=torch.bfloat16))
        layer = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"router": router}), "input_layernorm": norm})
        layer.layer_number = 2
        self.decoder = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})


RANKS = ModelRanks(
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
    model = model_of(torch.float32, prefix=prefix)
    found = {item.spec.name: item for item in iterate_state_buffers(model)}
    assert {name: item.buffer.tolist() for name, item in found.items()} == {
        f"{prefix}decoder.layers.1.mlp.router.expert_bias": [0.5, -0.5],
        f"{prefix}decoder.layers.1.input_layernorm.running_mean": [torch.tensor(0.1).bfloat16().item()],
    }
    assert {item.spec.global_shape for item in found.values()} == {(2,), (1,)}
    assert all(item.spec.splits == () and item.spec.flat_range is None for item in found.values())


def model_of(dtype: torch.dtype, *, prefix: str = "") -> ObservedModel:
    return ObservedModel(chunks=[Model(dtype)], ranks=RANKS, vocab_size=16, num_replicas=1, prefix=prefix)


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
