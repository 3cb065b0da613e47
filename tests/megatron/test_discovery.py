"""Names, shards and outputs of whatever is built are found: every layout of a kind gives what one process gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from mock_scheduler.comparison.pairing.order import order_keys
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.shards import ShardSpec, place_shard
from tests.dist.conftest import launch
from tests.megatron.discovery_worker import PADDED, VOCABULARY
from tests.merged_traces import distances, merge_step
from tests.sharing import make_once

pytestmark = pytest.mark.timeout(600)  # the first test pays for the launches

MODULE = "tests.megatron.discovery_worker"
LAYOUTS = ("experts/dp4-ep2-distributed", "latent/tp2-sp-dp2", "predicting/tp2-sp-pp2")
FURTHER = (
    *("dense/pp2-vpp2-dp2", "vision/tp2-sp-pp2", "adapter/tp2-dp2", "experts/tp2-sp-dp2-ep2", "allgather/dp4-ep4"),
    "latent/tp2-dp2",
)
each_layout = pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.all) for layout in FURTHER)]
)
#: Megatron's vocabulary-parallel cross-entropy computes in float32: with tp, gradients of float64 differ by about 1e-8.
BOUND, SPLIT_VOCABULARY_BOUND = 1e-12, 1e-6
BACKWARD = ("activation_gradient", "gradient", "optimizer")
_SPEC = TypeAdapter(ShardSpec)


Runs = Callable[[str], Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """From a layout, or a kind in one process, to its folder; each list of layouts is launched once."""

    def folder_of(case: str) -> Path:
        layouts = LAYOUTS if case in _with_one_process(LAYOUTS) else FURTHER
        name = "discovery" if layouts is LAYOUTS else "further-discovery"
        return make_once(tmp_path_factory, name, partial(_run, layouts))[0] / case

    return folder_of


def _with_one_process(layouts: Sequence[str]) -> list[str]:
    return [*dict.fromkeys(one_process(layout) for layout in layouts), *layouts]


def one_process(layout: str) -> str:
    return f"{layout.partition('/')[0]}/tp1"


def _run(layouts: Sequence[str], folder: Path) -> dict[str, object]:
    one = [case for case in _with_one_process(layouts) if case not in layouts]
    launch(1, folder, tuple(one), module=MODULE)
    launch(4, folder, tuple(layouts), module=MODULE)
    return {}


def facts(runs: Runs, case: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(runs(case).glob("*.json"))]


def specs(rank: Mapping[str, Any]) -> list[ShardSpec]:
    return [_SPEC.validate_python(spec) for spec in rank["parameters"]]


def held(spec: ShardSpec) -> torch.Tensor:
    """int64 of the whole shape: 1 where the rank has the element."""
    whole = torch.zeros(spec.global_shape, dtype=torch.int64)
    place_shard(whole, torch.ones(spec.local_shape, dtype=torch.int64), spec)
    return whole


@each_layout
def test_each_element_of_each_parameter_has_a_place(runs: Runs, layout: str) -> None:
    """Names are unique on a rank; all ranks together have the names and shapes of one process, each element once by
    ranks that are no replicas.
    """
    (one,) = facts(runs, one_process(layout))
    expected = {spec.name: spec.global_shape for spec in specs(one)}
    assert len(expected) == len(one["parameters"])
    owners: dict[str, torch.Tensor] = {}
    elements: dict[str, set[object]] = {}
    for rank in facts(runs, layout):
        assert len({spec.name for spec in specs(rank)}) == len(rank["parameters"])
        for spec in specs(rank):
            assert spec.global_shape == expected[spec.name]
            if spec.elements in elements.setdefault(spec.name, set()):
                continue  # a replica
            elements[spec.name].add(spec.elements)
            counts = owners.setdefault(spec.name, torch.zeros(spec.global_shape, dtype=torch.int64))
            counts += held(spec)
    assert owners.keys() == expected.keys()
    assert {name: counts.unique().tolist() for name, counts in owners.items()} == {name: [1] for name in expected}


@each_layout
def test_values_and_gradients_are_those_of_one_process(runs: Runs, layout: str) -> None:
    """A wrong name, shard or form of an output is another tensor, or a missing one."""
    merged, expected = (merge_step(runs(case) / "trace") for case in (layout, one_process(layout)))
    assert len(merged) > 100
    bounds = {
        key: BOUND if "tp2" not in layout or key.kind not in BACKWARD else SPLIT_VOCABULARY_BOUND for key in merged
    }
    far = {key for key, distance in distances(merged, expected).items() if distance > bounds[key]}
    if layout.startswith("latent/"):  # the next tests
        far = {key for key in far if key.kind not in BACKWARD}
    assert far == set()


def test_a_gradient_that_megatron_leaves_partial_is_found_where_it_arises(runs: Runs) -> None:
    """Megatron (0.16.1) adds no gradient of the rotary keys up over tp ranks where its local layers compute MLA.

    Each has that of its own heads alone, and gathering the projection's channels sums up nothing on the way back.
    """
    merged, expected = (merge_step(runs(case) / "trace") for case in ("latent/tp2-sp-dp2", "latent/tp1"))
    found = distances(merged, expected)
    backward = [key for key in order_keys(found) if key.kind == "activation_gradient"]
    first = next(key for key in backward if found[key] > SPLIT_VOCABULARY_BOUND)
    assert first.name == "decoder.layers.3.self_attention.linear_kv_down_proj"
    difference = (merged[first].tensor - expected[first].tensor).norm(dim=0)
    size = expected[first].tensor.norm(dim=0)
    is_far = (difference > SPLIT_VOCABULARY_BOUND * size).tolist()
    assert is_far == [False] * 8 + [True] * 8  # kv_lora_rank, qk_pos_emb_head_dim


@pytest.mark.all
def test_a_gradient_that_megatron_sums_twice_is_found(runs: Runs) -> None:
    """Megatron (0.16.1) adds gradients of MLA's query norm up over tp ranks, each of which has the whole of it."""
    merged, expected = (merge_step(runs(case) / "trace") for case in ("latent/tp2-dp2", "latent/tp1"))
    found = {key: value for key, value in distances(merged, expected).items() if key.kind == "gradient"}
    last = {key.name: value for key, value in found.items() if key.name.startswith("decoder.layers.3.self_attention.")}
    far = {name for name, value in last.items() if value > SPLIT_VOCABULARY_BOUND}
    prefix = "decoder.layers.3.self_attention"
    assert far == {f"{prefix}.q_layernorm.weight", f"{prefix}.linear_kv_down_proj.weight"}
    twice = next(key for key in found if key.name == f"{prefix}.q_layernorm.weight")
    assert torch.allclose(merged[twice].tensor, 2 * expected[twice].tensor, rtol=1e-6)


@each_layout
def test_what_a_layout_shows_and_does_not_show_is_that_of_one_process(runs: Runs, layout: str) -> None:
    (one,) = facts(runs, one_process(layout))
    ranks = facts(runs, layout)
    assert {name for rank in ranks for name in rank["observed"]} == set(one["observed"])
    unobserved = {(name, reason) for rank in ranks for name, reason in rank["unobserved"]}
    assert unobserved == {(name, reason) for name, reason in one["unobserved"]}
    with open_trace(runs(layout) / "trace") as trace:
        assert {item.name for item in trace.footer(0).unobserved} == {name for name, _ in unobserved}


@pytest.mark.parametrize(
    ("layout", "received"),
    [
        ("predicting/tp2-sp-pp2", {"decoder.layers.1"}),
        pytest.param("dense/pp2-vpp2-dp2", {f"decoder.layers.{layer}" for layer in range(3)}, marks=pytest.mark.all),
    ],
)
def test_a_later_stage_shows_what_it_received_as_a_replica_of_what_was_sent(
    runs: Runs, layout: str, received: set[str]
) -> None:
    with open_trace(runs(layout) / "trace") as trace:
        for kind in ("activation", "activation_gradient"):
            keys = {key.name: key for key in trace.keys(0) if key.kind == kind}
            stages = {
                name: {piece.place.coordinates["pp"] for piece in trace.pieces(key)} for name, key in keys.items()
            }
            assert {name for name, held in stages.items() if held == {0, 1}} == received
            assert [trace.merge(keys[name]).conflicts for name in received] == [()] * len(received)


@pytest.mark.all
def test_padding_of_the_vocabulary_is_no_element(runs: Runs) -> None:
    first, second = specs(facts(runs, "adapter/tp2-dp2")[0]), specs(facts(runs, "adapter/tp2-dp2")[1])
    rows = [next(spec for spec in rank if spec.name == "output_layer.weight") for rank in (first, second)]
    assert [spec.global_shape[0] for spec in rows] == [VOCABULARY] * 2
    assert [spec.local_shape[0] for spec in rows] == [PADDED // 2] * 2
    assert [int(held(spec).sum()) for spec in rows] == [48 * 32, 42 * 32]


@pytest.mark.all
def test_names_are_those_that_no_layout_and_no_wrapper_changes(runs: Runs) -> None:
    """By kind: names beside those of a dense model; a language model's have no prefix."""
    dense = {spec.name for spec in specs(facts(runs, "dense/tp1")[0])}
    kinds = ("vision", "adapter", "experts", "latent", "predicting")
    beside = {kind: {spec.name for spec in specs(facts(runs, f"{kind}/tp1")[0])} - dense for kind in kinds}
    assert beside["vision"] == {"vision_model.weight", "vision_model.bias"}
    assert beside["adapter"] == {
        f"decoder.layers.{layer}.mlp.linear_fc1.adapter.linear_{factor}.weight"
        for layer in range(4)
        for factor in ("in", "out")
    }
    assert {name for name in beside["experts"] if name.startswith("decoder.layers.1.mlp.") and ".3." not in name} == {
        "decoder.layers.1.mlp.router.weight",
        *(
            f"decoder.layers.1.mlp.experts.local_experts.{expert}.linear_fc{number}.weight"
            for expert in range(3)
            for number in (1, 2)
        ),
        *(f"decoder.layers.1.mlp.shared_experts.linear_fc{number}.weight" for number in (1, 2)),
    }
    assert {name.rpartition(".layers.0.")[2] for name in beside["latent"] if ".layers.0." in name} == {
        f"self_attention.{name}.weight"
        for name in (
            "kv_layernorm", "linear_kv_down_proj", "linear_kv_up_proj", "linear_q_down_proj", "linear_q_up_proj",
        )
    }  # fmt: skip
    assert "mtp.layers.1.transformer_layer.self_attention.linear_qkv.weight" in beside["predicting"]
    assert all(name.startswith("mtp.layers.") for name in beside["predicting"])


@pytest.mark.all
def test_experts_outputs_that_no_rank_of_a_token_has_are_unobserved(runs: Runs) -> None:
    (one,) = facts(runs, "allgather/tp1")
    reason = "the allgather dispatcher adds the experts' outputs of a token up before the token's rank has them"
    assert one["unobserved"] == [[f"decoder.layers.{layer}.mlp.experts", reason] for layer in range(4)]


@pytest.mark.all
def test_ranks_without_experts_have_no_axis_of_them(runs: Runs) -> None:
    """Megatron's tensor parallelism of experts is that of the model where nobody sets it."""
    assert facts(runs, "latent/tp2-sp-dp2")[3]["coordinates"] == {"tp": 1, "pp": 0, "dp": 1}
    assert facts(runs, "experts/tp2-sp-dp2-ep2")[3]["coordinates"] == {"tp": 1, "pp": 0, "dp": 1, "ep": 1}
    assert facts(runs, "allgather/dp4-ep4")[3]["num_replicas"] == 4
