"""Shards follow from the type of a layer, and from marks where the type is unknown; contradictions are refused.

TransformerEngine's and Megatron-Bridge's classes are stand-ins of the same names; tests/integrations builds theirs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from mock_scheduler.errors import ConfigError, TraceError
from mock_scheduler.megatron.observed_model import ObservedModel, unwrapped
from mock_scheduler.megatron.parameters import iterate_parameters
from mock_scheduler.trace.shards import Block, ShardSpec
from tests.megatron.tiny_model import HIDDEN, one_rank


class TELinear(torch.nn.Module):
    """TransformerEngine's: marks every weight as split along dimension 0, whether it is or not."""

    def __init__(self, *, parallel_mode: str | None = None, names: tuple[str, ...] = ("weight",)) -> None:
        super().__init__()
        self.parallel_mode = parallel_mode
        for name in names:
            self.register_parameter(name, marked(0, 4, HIDDEN))


class TEColumnParallelGroupedLinear(TELinear):
    """Of Megatron's wrappers."""


class TERowParallelGroupedLinear(TELinear):
    """Of Megatron's wrappers."""


class TELayerNormColumnParallelLinear(torch.nn.Module):
    """Of Megatron's wrappers; a norm computed within."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(HIDDEN))
        self.weight = marked(0, 4, HIDDEN)


def marked(dim: int, *shape: int) -> torch.nn.Parameter:
    parameter: Any = torch.nn.Parameter(torch.ones(shape))
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1
    return parameter


def local_layer(
    kind: type[ColumnParallelLinear] | type[RowParallelLinear], weight: torch.nn.Parameter
) -> torch.nn.Module:
    """One of Megatron's own layers with just a weight and a bias."""
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.weight, layer.bias = weight, torch.nn.Parameter(torch.ones(4))
    return layer


def model_of(layers: dict[str, torch.nn.Module], **axes: int) -> ObservedModel:
    """A chunk with one layer that has these modules by path."""
    gpt = GPTModel.__new__(GPTModel)
    torch.nn.Module.__init__(gpt)
    gpt.config = SimpleNamespace(num_moe_experts=4, gated_linear_unit=True)
    gpt.share_embeddings_and_output_weights = False
    layer: Any = torch.nn.Module()
    layer.layer_number = 3
    for path, module in layers.items():
        owner = layer
        for part in path.split(".")[:-1]:
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner._modules[part]
        owner.add_module(path.split(".")[-1], module)
    gpt.decoder = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})
    return ObservedModel(chunks=[gpt], ranks=one_rank(**axes), vocab_size=16, num_replicas=1)


def specs_of(layers: dict[str, torch.nn.Module], **axes: int) -> dict[str, ShardSpec]:
    return {
        item.spec.name.removeprefix("decoder.layers.2."): item.spec
        for item in iterate_parameters(model_of(layers, **axes))
    }


TP2 = {"tp_rank": 1, "tp_size": 2, "etp_rank": 1, "etp_size": 2}


@pytest.mark.parametrize(
    ("mode", "shape", "start"), [("column", (8, HIDDEN), 4), (None, (4, HIDDEN), 0), ("row", (4, 2 * HIDDEN), HIDDEN)]
)
def test_a_mark_of_transformer_engine_does_not_count(mode: str | None, shape: tuple[int, ...], start: int) -> None:
    """It marks a weight that each rank has whole, as MLA's down projections, like one that is split."""
    spec = specs_of({"self_attention.linear_q_down_proj": TELinear(parallel_mode=mode)}, **TP2)[
        "self_attention.linear_q_down_proj.weight"
    ]
    assert (spec.global_shape, [block.global_start for split in spec.splits for block in split.blocks]) == (
        shape,
        [start] if mode else [],
    )


def test_grouped_experts_are_split_by_their_layers_type() -> None:
    """With experts TransformerEngine knows of no parallelism, and marks a row-parallel weight along dimension 0."""
    experts = {
        "mlp.experts.linear_fc1": TEColumnParallelGroupedLinear(names=("weight0", "weight1")),
        "mlp.experts.linear_fc2": TERowParallelGroupedLinear(names=("weight0", "weight1")),
    }
    specs = specs_of(experts, **TP2, ep_rank=1, ep_size=2)
    names = [f"mlp.experts.local_experts.{expert}.linear_fc{number}.weight" for number in (1, 2) for expert in (2, 3)]
    assert list(specs) == names
    assert [specs[name].global_shape for name in names] == [(8, HIDDEN)] * 2 + [(4, 2 * HIDDEN)] * 2
    # Gate and up halves one after another.
    assert specs[names[0]].splits[0].blocks == (
        Block(local_start=0, global_start=2, length=2),
        Block(local_start=2, global_start=6, length=2),
    )
    assert specs[names[2]].splits[0].dim == 1


@pytest.mark.parametrize(
    ("path", "norm"),
    [
        ("self_attention.linear_qkv", "input_layernorm"),
        ("mlp.linear_fc1", "pre_mlp_layernorm"),
        ("self_attention.linear_q_up_proj", "self_attention.q_layernorm"),
        ("self_attention.linear_kv_up_proj", "self_attention.kv_layernorm"),
    ],
)
def test_a_fused_norm_is_whole_and_its_layer_split(path: str, norm: str) -> None:
    specs = specs_of({path: TELayerNormColumnParallelLinear()}, **TP2)
    assert list(specs) == [f"{norm}.weight", f"{path}.weight"]
    assert [spec.is_whole for spec in specs.values()] == [True, False]


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_layer_without_marks_is_split_by_its_type(
    kind: type[ColumnParallelLinear] | type[RowParallelLinear],
) -> None:
    """Megatron marks a weight where it initializes it, which a loaded model may have left out."""
    weight = torch.nn.Parameter(torch.ones(4, HIDDEN))
    specs = specs_of({"self_attention.linear_proj": local_layer(kind, weight)}, **TP2)
    is_column = kind is ColumnParallelLinear
    assert {name.rpartition(".")[2]: spec.global_shape for name, spec in specs.items()} == {
        "weight": (8, HIDDEN) if is_column else (4, 2 * HIDDEN),
        "bias": (8,) if is_column else (4,),
    }


@pytest.mark.parametrize(("kind", "dim", "expected"), [(ColumnParallelLinear, 1, 0), (RowParallelLinear, 0, 1)])
def test_a_wrong_mark_is_refused(
    kind: type[ColumnParallelLinear] | type[RowParallelLinear], dim: int, expected: int
) -> None:
    layer = local_layer(kind, marked(dim, 4, HIDDEN))
    with pytest.raises(TraceError) as raised:
        specs_of({"self_attention.linear_proj": layer}, **TP2)
    assert str(raised.value) == (
        "decoder.layers.2.self_attention.linear_proj.weight: Megatron's mark says that ranks split it along dimension "
        f"{dim}; expected {expected} of a {kind.__name__}. A wrong mark makes gradient norms and traces wrong: set the "
        "parameter's partition_dim as its layer does, or remove the mark"
    )


def test_a_norm_that_is_marked_as_split_and_is_not_is_whole() -> None:
    """Megatron counts it once for each tp rank in the norm of gradients, where the wrong mark is found."""

    class HandNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = marked(-1, HIDDEN)

    specs = specs_of({"input_layernorm": HandNorm()}, **TP2)
    assert specs["input_layernorm.weight"].is_whole


def test_a_mark_of_no_dimension_is_refused() -> None:
    unknown = torch.nn.Module()
    unknown.weight = marked(2, 4, HIDDEN)
    with pytest.raises(TraceError, match=r"along dimension 2; expected one of its 2 dimensions"):
        specs_of({"gate": unknown}, **TP2)


@pytest.mark.parametrize(("is_marked", "shape"), [(True, (8, HIDDEN)), (False, (4, HIDDEN))])
def test_a_parameter_of_an_unknown_module_is_placed_by_its_mark(is_marked: bool, shape: tuple[int, ...]) -> None:
    unknown = torch.nn.Module()
    unknown.own_factor = marked(0, 4, HIDDEN) if is_marked else torch.nn.Parameter(torch.ones(4, HIDDEN))
    assert specs_of({"self_attention.gate": unknown}, **TP2)["self_attention.gate.own_factor"].global_shape == shape


@pytest.mark.parametrize("name", ["DotProductAttention", "TEDotProductAttention"])
def test_each_rank_has_the_sinks_of_its_own_heads(name: str) -> None:
    """Megatron leaves them unmarked, and so out of its gradient norm on all tp ranks but the first (0.16.1, 0.19.2)."""
    bases = (
        (torch.nn.Module,) if name == "DotProductAttention" else (type("DotProductAttention", (torch.nn.Module,), {}),)
    )
    attention = type(name, bases, {})()
    attention.softmax_offset = torch.nn.Parameter(torch.ones(2))
    spec = specs_of({"self_attention.core_attention": attention}, **TP2)["self_attention.core_attention.softmax_offset"]
    assert (spec.global_shape, spec.splits[0].blocks) == ((4,), (Block(local_start=0, global_start=2, length=2),))


def test_two_parameters_of_one_name_are_refused() -> None:
    """A norm that is there both by itself and within the layer behind it."""
    norm = torch.nn.LayerNorm(HIDDEN, bias=False)
    with pytest.raises(TraceError) as raised:
        specs_of({"self_attention.linear_qkv": TELayerNormColumnParallelLinear(), "input_layernorm": norm})
    assert str(raised.value).startswith(
        "decoder.layers.2.input_layernorm.weight: the parameters "
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight and decoder.layers.0.input_layernorm.weight of "
        "this rank both have this name. "
    )


def test_the_second_factor_of_a_gated_layers_adapter_is_split_in_two_halves() -> None:
    """Its output is added to gate and up; the first factor is an ordinary one."""
    layer, adapter = torch.nn.Module(), torch.nn.Module()
    layer.to_wrap = local_layer(ColumnParallelLinear, marked(0, 4, HIDDEN))
    for name in ("linear_in", "linear_out"):
        adapter.add_module(name, local_layer(ColumnParallelLinear, marked(0, 4, HIDDEN)))
    layer.adapter = adapter
    specs = specs_of({"mlp.linear_fc1": layer}, **TP2)
    assert {name: len(spec.splits[0].blocks) for name, spec in specs.items() if name.endswith("weight")} == {
        "mlp.linear_fc1.weight": 2,
        "mlp.linear_fc1.adapter.linear_in.weight": 1,
        "mlp.linear_fc1.adapter.linear_out.weight": 2,
    }


class PackedPerExpertLinear(torch.nn.Module):
    """Megatron-Bridge's: the matrices of a rank's experts one after another."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = parameter


class ParallelLinearDoRAAdapter(torch.nn.Module):
    """Megatron-Bridge's: a length for each output of the layer that it wraps."""

    def __init__(self, *, input_is_parallel: bool, base_linear_is_parallel: bool = True) -> None:
        super().__init__()
        self.input_is_parallel, self.base_linear_is_parallel = input_is_parallel, base_linear_is_parallel
        self.weight_magnitude = torch.nn.Parameter(torch.ones(4))


def test_the_adapters_of_a_ranks_experts_in_one_weight_are_split_over_experts_and_within() -> None:
    """Over ep along their first dimension, and the second factor's rows in gate and up halves over etp."""
    adapter = torch.nn.ModuleDict(
        {
            "linear_in": PackedPerExpertLinear(torch.nn.Parameter(torch.ones(2, 3, HIDDEN))),
            "linear_out": PackedPerExpertLinear(marked(1, 2, 4, 3)),
        }
    )
    layer = torch.nn.ModuleDict({"adapter": adapter})
    specs = specs_of({"mlp.experts.linear_fc1": layer}, **TP2, ep_rank=1, ep_size=2)
    first, second = (specs[f"mlp.experts.linear_fc1.adapter.linear_{factor}.weight"] for factor in ("in", "out"))
    assert (first.global_shape, second.global_shape) == ((4, 3, HIDDEN), (4, 8, 3))
    of_rank = Block(local_start=0, global_start=2, length=2)
    assert [split.blocks for split in first.splits] == [(of_rank,)]
    halves = (of_rank, Block(local_start=2, global_start=6, length=2))
    assert [(split.dim, split.blocks) for split in second.splits] == [(0, (of_rank,)), (1, halves)]


@pytest.mark.parametrize(
    ("path", "adapter", "starts"),
    [
        ("self_attention.linear_qkv", ParallelLinearDoRAAdapter(input_is_parallel=False), [4]),
        ("mlp.linear_fc1", ParallelLinearDoRAAdapter(input_is_parallel=False), [2, 6]),
        ("mlp.linear_fc2", ParallelLinearDoRAAdapter(input_is_parallel=True), []),
        (
            "self_attention.linear_q_down_proj",
            ParallelLinearDoRAAdapter(input_is_parallel=False, base_linear_is_parallel=False),
            [],
        ),
    ],
)
def test_doras_lengths_are_split_as_their_layers_outputs(
    path: str, adapter: torch.nn.Module, starts: list[int]
) -> None:
    spec = specs_of({path: torch.nn.ModuleDict({"adapter": adapter})}, **TP2)[f"{path}.adapter.weight_magnitude"]
    assert [block.global_start for split in spec.splits for block in split.blocks] == starts


@pytest.mark.parametrize(("num_models", "inside"), [(0, "no GPTModel is"), (2, "2 GPTModels are")])
def test_a_chunk_without_one_language_model_is_refused(num_models: int, inside: str) -> None:
    chunk = torch.nn.ModuleList(model_of({}).chunks[0] for _ in range(num_models))
    with pytest.raises(ConfigError) as raised:
        unwrapped(chunk)
    assert str(raised.value) == (
        f"{inside} in a model chunk of type ModuleList; expected one of Megatron-core's in each. Hybrid (Mamba), BERT "
        "and T5 models cannot be followed; attach to the chunks of a GPTModel"
    )


def test_any_wrapper_is_taken_off() -> None:
    (gpt,) = model_of({}).chunks
    chunk = gpt
    for _ in range(3):
        wrapper = torch.nn.Module()
        wrapper.module = chunk
        chunk = wrapper
    assert unwrapped(chunk) is gpt
