"""Names, shards and outputs of TransformerEngine's and Megatron-Bridge's own classes, built here and not run.

TransformerEngine 2.20.2 without its compiled part, Megatron-Bridge 0.6.2, megatron-core 0.19.2. Three things say what
is right: models that were built with the compiled part (``tests/golden``), the whole model of one process, and where
Megatron's and Megatron-Bridge's checkpoints put each element.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from mock_scheduler.trace.shards import ShardSpec, owned_mask, place_shard

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1800)]  # the first test pays for building all

ROOT = Path(__file__).parents[2]
PACKAGES = [Path(sys.prefix) / "built", Path(sys.prefix) / "text"]
GOLDEN = json.loads((ROOT / "tests/golden/transformer_engine_parameters.json").read_text(encoding="utf-8"))["models"]
DENSE = (
    "gpt2_like", "qwen3_like", "latent", "lora", "canonical_lora", "dora", "lora_latent", "bridge_dense",
)  # fmt: skip
EXPERTS = (
    "moe_sequential", "moe_grouped", "shared_experts", "predicting", "lora_sequential", "lora_grouped",
    "lora_each_expert", "lora_outer", "canonical_each_expert", "bridge_experts",
)  # fmt: skip
FP8 = ("fp8_delayed", "fp8_tensorwise", "fp8_blockwise")
CASES = [
    *(f"{kind}/{layout}" for kind in DENSE for layout in ("tp2-sp", "pp2-vpp2", "tp2-sp-pp2", "dp2-distributed")),
    *(f"{kind}/{layout}" for kind in EXPERTS for layout in ("pp2-ep2", "tp2-sp-ep2", "dp4-ep2-distributed")),
    *(f"{kind}/tp2-sp" for kind in FP8),
    *(f"{kind}/tp2-sp-ep2-etp2" for kind in EXPERTS if kind != "lora_outer"),  # its factors are of etp 1 alone
]
#: Where Megatron-Bridge's checkpoints put elements elsewhere than its own forward pass has them, under tp: they cut the
#: gate's and the up projection's factors in halves, each of which is one matrix, and DoRA's lengths of both in none.
WRONG_CHECKPOINTS = {
    "canonical_lora": {
        f"decoder.layers.mlp.linear_fc1.adapter.adapter_{name}.linear_out.weight" for name in ("gate", "up")
    },
    "dora": {"decoder.layers.mlp.linear_fc1.adapter.weight_magnitude"},
}
GOLDEN_LAYOUTS = {"tp1 ep1": "tp1", "tp2 ep1": "tp2-sp", "tp1 ep2": "ep2"}
_CORE = "self_attention.core_attention"
_SPECS = TypeAdapter(list[ShardSpec])

each_case = pytest.mark.parametrize("case", CASES)


def golden_case(key: str) -> str:
    kind, _, layout = key.partition(" @ ")
    return f"{kind}/{GOLDEN_LAYOUTS[layout]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all cases are built."""
    for packages in PACKAGES:
        assert packages.is_dir(), f"{packages} is not there; launch/test.sh --integrations installs it"
    place = tmp_path_factory.mktemp("built")
    cases = dict.fromkeys(
        [*(f"{kind}/tp1" for kind in (*DENSE, *EXPERTS, *FP8)), *map(golden_case, GOLDEN), *CASES],
    )
    command = [sys.executable, "-W", "ignore", "-m", "tests.integrations.host_kernels", str(place), *cases]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PACKAGES)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return place


@cache
def ranks_of(folder: Path, case: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / f"{case}.json").read_text(encoding="utf-8"))
    return found


def whole_model(folder: Path, case: str) -> dict[str, Any]:
    """What one process of a case's kind has."""
    (rank,) = ranks_of(folder, f"{case.partition('/')[0]}/tp1")
    return rank


def shapes(rank: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    found = {spec.name: spec.global_shape for spec in _SPECS.validate_python(rank["parameters"])}
    assert len(found) == len(rank["parameters"])
    return found


def holders(ranks: Iterable[Mapping[str, Any]], of: str) -> dict[str, set[int]]:
    """By name: in how many places its elements are, where equal shards are one place."""
    counts: dict[str, torch.Tensor] = {}
    seen: set[object] = set()
    for rank in ranks:
        for spec in _SPECS.validate_python(rank[of]):
            if (spec.name, spec.elements) not in seen:
                seen.add((spec.name, spec.elements))
                held = torch.zeros(spec.global_shape, dtype=torch.int64)
                place_shard(held, owned_mask(spec).long(), spec)
                counts[spec.name] = counts.get(spec.name, torch.zeros_like(held)) + held
    return {name: set(count.unique().tolist()) for name, count in counts.items()}


@pytest.mark.parametrize("key", GOLDEN)
def test_what_is_built_without_kernels_is_what_was_built_with_them(folder: Path, key: str) -> None:
    """Names, shapes and marks of parameters as Megatron has them."""
    marks = ranks_of(folder, golden_case(key))[0]["marks"]
    assert {name: mark for name, mark in marks.items() if ".layers." not in name or ".layers.0." in name} == GOLDEN[key]


@each_case
def test_each_element_of_each_parameter_has_one_place(folder: Path, case: str) -> None:
    expected = shapes(whole_model(folder, case))
    found: dict[str, tuple[int, ...]] = {}
    for rank in ranks_of(folder, case):
        found |= shapes(rank)
    assert found == expected
    assert holders(ranks_of(folder, case), "parameters") == {name: {1} for name in expected}


@each_case
def test_each_gradient_of_a_trained_parameter_has_one_owner(folder: Path, case: str) -> None:
    """Of ranges too, where Megatron's distributed optimizer with TransformerEngine's Adam has parts."""
    (trained,) = {frozenset(spec["name"] for spec in whole_model(folder, case)["gradients"])}
    is_adapted = "lora" in case or "dora" in case or "canonical" in case
    assert all(".adapter." in name for name in trained) == is_adapted
    assert holders(ranks_of(folder, case), "gradients") == {name: {1} for name in trained}


@each_case
def test_elements_are_where_megatrons_checkpoint_has_them(folder: Path, case: str) -> None:
    """Gate and up halves, experts of other ranks and layers of other stages among them."""
    kind = case.partition("/")[0]
    merged, expected = (torch.load(folder / f"{name}.pt") for name in (case, f"{kind}/tp1"))
    assert merged.keys() == expected.keys()
    assert bool(merged) == (kind != "lora_outer")
    wrong = {key for key, tensor in merged.items() if not torch.equal(tensor, expected[key])}
    assert wrong == (WRONG_CHECKPOINTS.get(kind, set()) if "tp2" in case else set())


@each_case
def test_every_layout_shows_the_outputs_of_one_process(folder: Path, case: str) -> None:
    one, ranks = whole_model(folder, case), ranks_of(folder, case)
    assert {name for rank in ranks for name in rank["observed"]} == set(one["observed"])
    assert {tuple(item) for rank in ranks for item in rank["unobserved"]} == set(map(tuple, one["unobserved"]))
    widths = {name: size for rank in ranks for name, size in rank["widths"].items()}
    assert widths.keys() == one["widths"].keys()
    assert {name: size for name, size in widths.items() if size[0] != size[1]} == {}


@pytest.mark.parametrize("kind", [*DENSE, *EXPERTS])
def test_no_name_tells_of_the_implementation_and_only_fused_norms_are_hidden(folder: Path, kind: str) -> None:
    one = whole_model(folder, kind)
    names = set(shapes(one))
    assert {name for name in names if "layer_norm_" in name or "to_wrap" in name or name[-1].isdigit()} == set()
    hidden = {(name.rpartition(".")[2], reason) for name, reason in one["unobserved"]}
    within = "TransformerEngine computes it within"
    is_latent, has_experts = "latent" in kind, kind in EXPERTS
    expected = {("input_layernorm", f"{within} self_attention.linear_qkv")} if not is_latent else {
        (f"{name}_layernorm", f"{within} self_attention.linear_{name}_up_proj") for name in ("q", "kv")
    }  # fmt: skip
    if not has_experts or kind == "shared_experts":  # whose first layer has none
        expected.add(("pre_mlp_layernorm", f"{within} mlp.linear_fc1"))
    assert hidden == expected
    norms = {name.rpartition(".layers.0.")[2] for name in names if "norm.weight" in name and ".layers.0." in name}
    assert {"input_layernorm.weight", "pre_mlp_layernorm.weight"} <= norms


@pytest.mark.parametrize("kind", FP8)
def test_a_training_in_fp8_is_read_as_one_in_bfloat16_and_its_order_is_refused_by_name(folder: Path, kind: str) -> None:
    """Its parameters are not quantized, and scales and histories are no tensors of the model."""
    plain, found = whole_model(folder, "qwen3_like"), whole_model(folder, kind)
    assert {key for key in plain if plain[key] != found[key]} == {"order_limits"}
    assert [text for text in found["order_limits"] if text not in plain["order_limits"]] == [
        "TransformerConfig.fp8 hybrid: only None is followed"
    ]


@pytest.mark.parametrize("kind", ["qwen3_like", *FP8])
def test_extra_states_and_fp8_metadata_are_of_these_modules_and_in_no_trace(folder: Path, kind: str) -> None:
    one = whole_model(folder, kind)
    linears = ["self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"]
    norms = ["self_attention.q_layernorm", "self_attention.k_layernorm"]
    layers = [
        f"decoder.layers.{name}._extra_state/shard_{layer}_4" for layer in range(4) for name in [*linears, *norms]
    ]
    assert sorted(one["extra_states"]) == sorted([*layers, "decoder.final_layernorm._extra_state/shard_0_1"])
    with_meta = [f"decoder.layers.{layer}.{name}" for layer in range(4) for name in [*linears, _CORE]]
    assert sorted(one["fp8_metadata"]) == sorted(with_meta)
    # Before the first pass nothing of a recipe is there; its tensors are no parameters and no buffers later on.
    assert {tuple(keys) for keys in one["fp8_metadata"].values()} == {("fp8_checkpoint", "fp8_group")}
    traced = {*shapes(one), *one["observed"]}
    assert not [name for name in traced if "_extra_state" in name or "fp8" in name]


def test_megatron_bridge_builds_a_model_of_hugging_faces_with_megatrons_names(folder: Path) -> None:
    assert shapes(whole_model(folder, "bridge_dense")).keys() == shapes(whole_model(folder, "qwen3_like")).keys()
    own, bridge = (shapes(whole_model(folder, kind)).keys() for kind in ("moe_grouped", "bridge_experts"))
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in bridge - own} == {"q_layernorm", "k_layernorm"}
    assert own - bridge == set()


def test_adapters_have_names_beside_those_of_the_model(folder: Path) -> None:
    beside = {
        kind: {
            name.removeprefix("decoder.layers.0."): shape
            for name, shape in shapes(whole_model(folder, kind)).items()
            if name.startswith("decoder.layers.0.") and ".adapter." in name
        }
        for kind in ("canonical_lora", "lora_grouped", "lora_each_expert", "lora_outer")
    }
    assert {name for name in beside["canonical_lora"] if "linear_qkv" in name} == {
        f"self_attention.linear_qkv.adapter.adapter_{part}.linear_{factor}.weight"
        for part in "qkv"
        for factor in ("in", "out")
    }
    first, second = (f"mlp.experts.linear_fc1.adapter.linear_{factor}.weight" for factor in ("in", "out"))
    assert [beside["lora_grouped"][name] for name in (first, second)] == [(8, 64), (192, 8)]
    assert [beside["lora_each_expert"][name] for name in (first, second)] == [(4, 8, 64), (4, 192, 8)]
    assert [beside["lora_outer"][name] for name in (first, second)] == [(8, 64), (4, 192, 8)]


@pytest.mark.parametrize("case", ["lora_sequential/tp1", "lora/tp1"])
def test_what_adapters_compute_is_seen_whole_and_once(folder: Path, case: str) -> None:
    """A router's scores with its adapter's part; no output where a fused adapter calls hooks without one."""
    assert ranks_of(folder, case)[0]["wrong"] == []
