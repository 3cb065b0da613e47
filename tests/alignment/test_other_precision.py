"""Real alignments of bfloat16 with float32, and of float32 routers in a model of bfloat16; wrong ones on each side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.tiny_runs import read_json, run_cli, write_tiny_config

pytestmark = [pytest.mark.all, pytest.mark.timeout(1800)]

FROZEN = "tests.faults.optimizer_frozen"
SCALED = "tests.alignment.output_scaled_on_one_rank"
NARROW_ROUTER = "tests.alignment.router_in_bfloat16"
PLAIN = "pipelines.agentic"
TP2 = "parallel.tensor_model_parallel_size=2"
#: Each token has every expert, so that rounding turns no choice.
EXPERTS = (
    "model.moe_router_topk=4",
    *("model.num_moe_experts=4", "model.moe_ffn_hidden_size=64", "model.moe_router_score_function=sigmoid"),
    *("model.moe_router_load_balancing_type=seq_aux_loss", "model.moe_aux_loss_coeff=0.01"),
)
EMBEDDING = "embedding.word_embeddings.weight"


def align(folder: Path, candidates: Mapping[str, str], *overrides: str) -> Mapping[str, dict[str, Any]]:
    """What ``align.json`` says of candidates, ``entry override override`` by their names."""
    texts = []
    for name, changes in candidates.items():
        entry, *own = changes.split()
        quoted = ", ".join(f"'{override}'" for override in own)
        texts.append(f"{{name: {name}, entry: {entry}, overrides: [{quoted}]}}")
    command = ["--output-dir", str(folder / "out"), f"align.candidates=[{', '.join(texts)}]", *overrides]
    finished = run_cli("align", write_tiny_config(folder), [*command, "max_steps=1"])
    assert (folder / "out" / "align.json").is_file(), finished.stdout + finished.stderr
    return {item["name"]: item for item in read_json(folder / "out" / "align.json")["candidates"]}


def place_of(candidate: Mapping[str, Any]) -> tuple[str, int, str]:
    """The kind, update and name of its first divergence."""
    first = candidate["first_divergence"]
    return first["kind"], first["update"], first["name"]


def assert_is_rounding(candidate: Mapping[str, Any], precision: str) -> None:
    """It passes as rounding of this precision, and says in numbers what that does to training."""
    assert candidate["verdict"] == "rounding", candidate["reason"]
    assert candidate["why"]["precision"] == precision
    consequence = candidate["consequence"]
    assert consequence["num_tokens"] > 0
    assert consequence["kl_candidate"] != consequence["kl_baseline"]
    assert all(0.5 < cosine < 1.0 for cosine in consequence["update_cosine"])
    assert consequence["gaps"][0]["median"] != consequence["gaps"][1]["median"]


@pytest.mark.parametrize(("baseline", "candidate"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_another_precision_is_its_rounding_and_a_fault_in_it_is_none(
    baseline: str, candidate: str, tmp_path: Path
) -> None:
    other = f"precision={candidate}"
    candidates = {"other": f"{PLAIN} {other}", "other-tp2": f"{PLAIN} {other} {TP2}", "frozen": f"{FROZEN} {other}"}
    candidates["scaled"] = f"{SCALED} {other} {TP2}"
    found = align(tmp_path, candidates, f"precision={baseline}")
    assert_is_rounding(found["other"], "bfloat16")
    assert_is_rounding(found["other-tp2"], "bfloat16")
    assert {name: item["verdict"] for name, item in found.items() if name in ("frozen", "scaled")} == {
        "frozen": "diverged",
        "scaled": "diverged",
    }
    assert place_of(found["frozen"]) == ("parameter", 0, EMBEDDING)
    assert place_of(found["scaled"]) == ("activation", 0, "decoder.layers.1.mlp.linear_fc1")


def test_a_fault_of_the_baseline_alone_is_found_in_another_precision(tmp_path: Path) -> None:
    candidates = {"right": f"{PLAIN} precision=bfloat16"}
    found = align(tmp_path, candidates, "precision=float32", f"align.entry={FROZEN}")["right"]
    assert found["verdict"] == "diverged"
    assert place_of(found) == ("parameter", 0, EMBEDDING)


def test_a_float32_router_in_bfloat16_is_no_divergence_and_a_fault_beside_it_is_one(tmp_path: Path) -> None:
    candidates = {"wide": PLAIN, "wide-frozen": FROZEN}
    changes = ("precision=bfloat16", f"align.entry={NARROW_ROUTER}", "align.proofs.localise=true", *EXPERTS)
    found = align(tmp_path, candidates, *changes)
    # Two perturbed runs are few: where a later update is beyond their noise, float64 says that both compute the same.
    outcomes = {proof["name"]: proof["outcome"] for proof in found["wide"]["proofs"]}
    verdict = found["wide"]["verdict"]
    assert verdict == "rounding" or (verdict, outcomes["referee"]) == ("suspect", "proved"), found["wide"]["reason"]
    assert found["wide-frozen"]["verdict"] == "diverged"
    assert place_of(found["wide-frozen"]) == ("parameter", 0, EMBEDDING)
    # The rounding of the router's logits comes before it, and is no cause.
    localisation = found["wide-frozen"]["localisation"]
    assert (localisation["phase"], localisation["name"]) == ("update", EMBEDDING)


def test_a_narrower_router_is_a_divergence_with_both_types(tmp_path: Path) -> None:
    found = align(tmp_path, {"narrow": NARROW_ROUTER}, "precision=bfloat16", *EXPERTS)["narrow"]
    assert found["verdict"] == "diverged"
    assert "router" in found["first_divergence"]["name"]
