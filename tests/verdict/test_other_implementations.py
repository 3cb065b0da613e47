"""A run of Megatron's local layers against TransformerEngine's: one name for each parameter, fused or grouped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.trace.entries import StepFooter, TraceEntry, Unobserved
from mock_scheduler.trace.names import canonical_module_name, canonical_parameter_name
from mock_scheduler.trace.shards import whole
from mock_scheduler.verdict.compare_runs import compare_paths
from mock_scheduler.verdict.verdict import Verdict, VerdictKind
from tests.rank_traces import save_rank_trace

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "implementation_names.json").read_text())["models"]
#: Beyond what the golden models have: experts in one grouped linear layer, numbered at the parameter.
GROUPED = {
    "local": [f"decoder.layers.0.mlp.experts.local_experts.{expert}.linear_fc1.weight" for expert in range(12)],
    "transformer_engine": [f"decoder.layers.0.mlp.experts.linear_fc1.weight{expert}" for expert in range(12)],
}
KINDS: tuple[TraceKind, ...] = ("initial", "gradient", "parameter")


def values(name: str, kind: str) -> torch.Tensor:
    """Values that follow from a canonical name."""
    seed = sum(place * ord(letter) for place, letter in enumerate(f"{kind} {name}", start=1))
    drawn = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
    return drawn if kind != "parameter" else values(name, "initial") - 0.125 * values(name, "gradient")


def write(folder: Path, names: list[str], planted: Mapping[str, float], *, implementation: str) -> Path:
    """A trace under the names of an implementation; ``planted``: added to one element of a gradient, by name."""
    entries = []
    for raw in names:
        name = canonical_parameter_name(raw)
        for kind in KINDS:
            tensor = values(name, kind).clone()
            if kind == "gradient":
                tensor[2, 1] += planted.get(raw, 0.0)
            spec = whole(name, tuple(tensor.shape))
            entries.append(TraceEntry(update=0, kind=kind, spec=spec, tensor=tensor, dims=("row", "column")))
    norm = canonical_module_name("decoder.layers.0.input_layernorm")
    unobserved: tuple[Unobserved, ...] = ()
    if implementation == "local":
        spec = whole(norm, (5, 3))
        entries.append(TraceEntry(update=0, kind="activation", spec=spec, tensor=torch.ones(5, 3)))
    else:
        unobserved = (Unobserved(kind="activation", name=norm, reason="fused into the linear layer behind it"),)
    save_rank_trace(
        folder,
        step=0,
        global_rank=0,
        world_size=1,
        coordinates={"tp": 0},
        entries=entries,
        footer=StepFooter(kinds=(*KINDS, "activation"), unobserved=unobserved),
    )
    return folder


def compare(tmp_path: Path, names: Mapping[str, list[str]], **planted: float) -> Verdict:
    ours = write(tmp_path / "local", names["local"], {}, implementation="local")
    theirs = write(tmp_path / "fused", names["transformer_engine"], planted, implementation="transformer_engine")
    tolerance = ["gradient=1e-6", "update=1e-6"]
    return compare_paths(ours, theirs, tolerance=tolerance).verdict


MODELS = {**GOLDEN, "grouped experts": GROUPED}


@pytest.mark.parametrize("model", MODELS)
def test_both_implementations_are_compared_name_by_name(tmp_path: Path, model: str) -> None:
    verdict = compare(tmp_path, MODELS[model])
    assert verdict.kind is VerdictKind.IDENTICAL
    assert verdict.tensors is not None
    assert verdict.tensors.findings == ()
    assert len(verdict.tensors.differences) == 2 * len(MODELS[model]["local"])
    # What one implementation does not show is listed, and is no difference.
    assert [item.name for item in verdict.tensors.not_compared] == ["decoder.layers.0.input_layernorm"]


@pytest.mark.parametrize(
    ("model", "raw", "name"),
    [
        ("gpt2_like", "decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.0.pre_mlp_layernorm.weight"),
        (
            "gpt2_like",
            "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.1.input_layernorm.weight",
        ),
        ("gpt2_like", "decoder.layers.1.mlp.linear_fc2.weight", "decoder.layers.1.mlp.linear_fc2.weight"),
        (
            "grouped experts",
            "decoder.layers.0.mlp.experts.linear_fc1.weight11",
            "decoder.layers.0.mlp.experts.local_experts.11.linear_fc1.weight",
        ),
    ],
)
def test_a_planted_difference_is_found_under_its_canonical_name(
    tmp_path: Path, model: str, raw: str, name: str
) -> None:
    verdict = compare(tmp_path, MODELS[model], **{raw: 1e-3})
    assert verdict.kind is VerdictKind.DIVERGED
    assert verdict.tensors is not None
    assert [item.key.name for item in verdict.tensors.exceeding] == [name]
    assert verdict.first is not None
    assert verdict.first.place == (0, 0, "gradient", name)
    assert verdict.first.worst is not None
    assert verdict.first.worst.index == (2, 1)
