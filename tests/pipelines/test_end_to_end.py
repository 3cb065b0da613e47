"""The main job through the real command line: one recorded baseline, and a verdict for each of six candidates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mock_scheduler.cli import main
from tests.pipelines.conftest import TinyAlignment
from tests.pipelines.tiny_runs import read_json

pytestmark = pytest.mark.timeout(600)  # the first test pays for eight runs, on a busy machine several minutes

NUM_PARAMETERS = 15  # two layers of six, the embedding, the final norm and the output layer
NUM_TENSORS = 2 * 4 * NUM_PARAMETERS  # two steps of four updates
NUM_STATES = 2 * NUM_PARAMETERS + 1  # moments and the count of updates, at the end of the last step
PLACES_OF_A_FAULT = ("step", "update", "kind", "name")


def first_divergence(candidate: dict) -> tuple:
    return tuple(candidate["first_divergence"][field] for field in PLACES_OF_A_FAULT)


def exceeding_at(candidate: dict, *, step: int, update: int) -> dict[str, set[str]]:
    """Names beyond tolerance at one update, by kind."""
    names: dict[str, set[str]] = {"gradient": set(), "parameter": set()}
    for tensor in candidate["tensors"]["exceeding"]:
        key = tensor["key"]
        if (key["step"], key["update"]) == (step, update) and key["kind"] in names:
            names[key["kind"]].add(key["name"])
    return names


def test_one_diverged_candidate_makes_the_exit_code_1(tiny_alignment: TinyAlignment) -> None:
    assert tiny_alignment.exit_code == 1
    assert read_json(tiny_alignment.folder / "align.json")["exit_code"] == 1


def test_every_candidate_gets_its_verdict(tiny_alignment: TinyAlignment) -> None:
    result = read_json(tiny_alignment.folder / "align.json")
    assert {candidate["name"]: candidate["verdict"] for candidate in result["candidates"]} == {
        "same-layout": "identical",
        "tp2-pp2": "identical (emulated)",
        "clip-range": "diverged",
        "double-lr": "diverged",
        "norm-gradients": "diverged",
        "other-length": "incomparable",
    }
    assert all(f"{name}" in tiny_alignment.terminal for name in ("same-layout", "identical", "incomparable"))


def test_the_same_layout_is_identical_in_every_bit_that_is_counted(tiny_alignment: TinyAlignment) -> None:
    candidate = tiny_alignment.candidate("same-layout")
    assert candidate["first_divergence"] is None
    assert all(metric["bit_equal"] for metric in candidate["metrics"]["differences"])
    for kind in ("gradient", "parameter"):
        group = candidate["tensors"]["groups"][kind]
        assert (group["num_compared"], group["num_bit_equal"]) == (NUM_TENSORS, NUM_TENSORS)
    assert candidate["reason"].startswith(
        f"bit-equal: {len(candidate['metrics']['differences'])} metrics over 2 steps, "
    )
    assert candidate["reason"].endswith(
        f"{NUM_TENSORS} gradients, {NUM_STATES} optimizer tensors, {NUM_TENSORS} parameters; one changed bit would "
        "have been found"
    )


def test_another_layout_compares_every_tensor_within_rounding(tiny_alignment: TinyAlignment) -> None:
    candidate = tiny_alignment.candidate("tp2-pp2")
    assert candidate["layout"] == "tp2 pp2 dp1"
    assert candidate["first_divergence"] is None
    for kind in ("gradient", "parameter"):
        group = candidate["tensors"]["groups"][kind]
        assert group["num_compared"] == NUM_TENSORS
        # Not all bits can be equal: tp reorders sums. A comparison of a file with itself would be.
        assert group["num_bit_equal"] < NUM_TENSORS
        assert 0.0 < group["worst"]["relative"] <= group["worst"]["tolerance"] < 1e-3
    proofs = {proof["name"]: proof["outcome"] for proof in candidate["proofs"]}
    assert (proofs["replicas"], proofs["bit-equality"], proofs["emulation"]) == ("proved", "open", "proved")
    assert candidate["tensors"]["candidate_replica_conflicts"] == []


def test_another_clip_range_is_found_where_it_first_clips(tiny_alignment: TinyAlignment) -> None:
    """The first pass over the batch has ratio 1 and clips nothing: updates 0 and 1 are equal, update 2 is not."""
    candidate = tiny_alignment.candidate("clip-range")
    assert first_divergence(candidate) == (0, 2, "loss", "pg_loss")
    assert "first metric: approx_kl from step 0 on" in candidate["reason"]
    for update in (0, 1):
        assert exceeding_at(candidate, step=0, update=update) == {"gradient": set(), "parameter": set()}
    assert "output_layer.weight" in exceeding_at(candidate, step=0, update=2)["gradient"]
    exceeding = {
        metric["name"] for metric in candidate["metrics"]["differences"] if metric["first_exceeding_step"] == 0
    }
    assert {"clip_frac", "approx_kl"} <= exceeding


def test_a_doubled_learning_rate_is_found_in_the_first_updates_parameters(tiny_alignment: TinyAlignment) -> None:
    candidate = tiny_alignment.candidate("double-lr")
    assert first_divergence(candidate) == (0, 0, "parameter", "embedding.word_embeddings.weight")
    assert candidate["first_divergence"]["value"] == pytest.approx(1.0, abs=1e-4)
    assert "first metric: approx_kl from step 0 on" in candidate["reason"]
    first_update = exceeding_at(candidate, step=0, update=0)
    assert first_update["gradient"] == set()
    assert len(first_update["parameter"]) == NUM_PARAMETERS
    (rate,) = [metric for metric in candidate["metrics"]["differences"] if metric["name"] == "lr"]
    assert (rate["first_exceeding_step"], rate["max_relative"], rate["max_abs"]) == (0, 0.5, 2e-3)


def test_unreduced_norm_gradients_are_named_with_the_ranks_that_disagree(tiny_alignment: TinyAlignment) -> None:
    """At the first update only gradients of norms are wrong: all others, and so the loss they come from, agree."""
    candidate = tiny_alignment.candidate("norm-gradients")
    assert first_divergence(candidate) == (0, 0, "gradient", "decoder.layers.0.input_layernorm.weight")
    assert candidate["first_divergence"]["message"].startswith(
        "copies within the candidate differ: decoder.layers.0.input_layernorm.weight: ranks tp0 and tp1 hold different "
        "gradients at step 0 (64 elements, "
    )
    assert "not summed over tp: each tp rank holds its own part, and their sum is the baseline" in candidate["reason"]
    norms = {f"decoder.layers.{layer}.{norm}_layernorm.weight" for layer in (0, 1) for norm in ("input", "pre_mlp")}
    assert exceeding_at(candidate, step=0, update=0)["gradient"] == {*norms, "decoder.final_layernorm.weight"}
    conflicts = candidate["tensors"]["candidate_replica_conflicts"]
    # The last step's moments, which gradients make, are kept by each rank as well.
    found = {conflict["key"]["name"].removesuffix(".exp_avg").removesuffix(".exp_avg_sq") for conflict in conflicts}
    assert found == {*norms, "decoder.final_layernorm.weight"}
    assert candidate["tensors"]["baseline_replica_conflicts"] == []


def test_another_sequence_length_is_incomparable_and_says_why(tiny_alignment: TinyAlignment) -> None:
    candidate = tiny_alignment.candidate("other-length")
    assert candidate["run"] is None
    assert candidate["reason"] == (
        "the run failed (exit code 3): ContractError: [Rollout Mock] This run breaks the contract of "
        f"{tiny_alignment.recording} in 1 field:\n"
        "  sequence_length: recorded 192, current 96. Set sequence_length as in the recording run."
    )
    assert read_json(tiny_alignment.folder / "other-length" / "error.json")["exit_code"] == 3


def test_two_finished_runs_get_by_hand_the_verdict_that_the_alignment_gave(
    tiny_alignment: TinyAlignment, tmp_path: Path
) -> None:
    for name, exit_code in (("tp2-pp2", 0), ("double-lr", 1)):
        path = tmp_path / f"{name}.json"
        folders = [str(tiny_alignment.folder / run) for run in ("baseline", name)]
        assert main(["compare", *folders, "--json", str(path)]) == exit_code
        candidate, of_align = read_json(path), tiny_alignment.candidate(name)
        # Emulation and referee are the alignment's own; the measured noise is found beside the baseline.
        assert candidate["verdict"] == {"tp2-pp2": "rounding", "double-lr": "diverged"}[name]
        assert candidate["reason"] in of_align["reason"]
        keys = ("first_divergence", "tensors", "metrics")
        assert {key: candidate[key] for key in keys} == {key: of_align[key] for key in keys}


def test_a_mock_run_builds_no_engine_and_no_environment(tiny_alignment: TinyAlignment) -> None:
    """The entry of ``same-layout`` fails the run if gymnasium was ever imported in it."""
    assert read_json(tiny_alignment.folder / "baseline" / "ledger.json")["built"] == {
        "engine": 1,
        "environment": 16,
        "scheduler": 1,
    }
    for name in ("same-layout", "tp2-pp2"):
        ledger = read_json(tiny_alignment.folder / name / "ledger.json")
        assert ledger["built"] == {"engine": 0, "environment": 0, "scheduler": 0}
        assert ledger["called"] == {}
        assert ledger["answered"] == {"get_batch": 2, "collect_metrics": 2}
        assert ledger["suppressed"] == {"update_weights": 2, "resume": 2, "suspend": 2, "close": 1}


def test_a_run_says_what_it_was(tiny_alignment: TinyAlignment) -> None:
    run = read_json(tiny_alignment.folder / "tp2-pp2" / "run.json")
    assert {name: run[name] for name in ("status", "mode", "layout", "world_size", "num_steps")} == {
        "status": "completed",
        "mode": "mock",
        "layout": "tp2 pp2 dp1",
        "world_size": 4,
        "num_steps": 2,
    }
    assert 0.0 < run["rollout_s"] < run["wall_s"]


def test_recorded_values_never_mix_with_live_ones(tiny_alignment: TinyAlignment) -> None:
    def metrics_of(name: str) -> list[dict[str, float]]:
        lines = (tiny_alignment.folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["step"] for line in lines] == [0, 1]
        return [json.loads(line)["metrics"] for line in lines]

    for live, replayed in zip(metrics_of("baseline"), metrics_of("same-layout"), strict=True):
        rollout = {name: value for name, value in live.items() if name.startswith("rollout/")}
        assert rollout
        assert {f"recorded/{name}": value for name, value in rollout.items()} == {
            name: value for name, value in replayed.items() if name.startswith("recorded/")
        }
        assert not any(name.startswith("rollout/") for name in replayed)
