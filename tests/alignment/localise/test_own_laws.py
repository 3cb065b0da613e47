"""A real alignment of candidates whose own runs contradict themselves: which law is broken, and at which tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipelines.tiny_runs import read_json, run_cli, write_tiny_config

CANDIDATES = (
    "{name: part, entry: tests.alignment.projection_not_reduced, overrides: ['parallel.tensor_model_parallel_size=2']}",
    "{name: again, entry: tests.alignment.forgetful_recomputation, overrides: ['training.recompute_granularity=full']}",
    "{name: clip, entry: tests.alignment.clipped_at_another_norm, overrides: []}",
    "{name: right, overrides: ['training.recompute_granularity=full']}",
)


@pytest.mark.all
@pytest.mark.timeout(1800)
def test_each_is_diverged_at_the_tensor_that_contradicts_another(tmp_path: Path) -> None:
    options = (
        "max_steps=1",
        "training.clip_grad=0.01",
        "align.proofs.num_perturbations=2",
        "align.proofs.localise=false",
        f"align.candidates=[{', '.join(CANDIDATES)}]",
    )
    finished = run_cli("align", write_tiny_config(tmp_path), ["--output-dir", str(tmp_path / "out"), *options])
    assert finished.returncode == 1, finished.stdout + finished.stderr
    part, again, clip, right = read_json(tmp_path / "out" / "align.json")["candidates"]
    assert right["verdict"] == "identical"
    assert [item["verdict"] for item in (part, again, clip)] == ["diverged"] * 3
    places = [(item["first_divergence"]["kind"], item["first_divergence"]["name"]) for item in (part, again, clip)]
    assert places == [
        ("activation", "decoder.layers.1.self_attention.linear_proj"),
        ("recomputed", "decoder.layers.1.input_layernorm"),
        ("gradient_norm", "clip"),
    ]
    assert part["sentence"].startswith(
        "step 0, update 0, forward: copies within the candidate differ: decoder.layers.1.self_attention.linear_proj: "
        "ranks tp0 and tp1 hold different activations at step 0"
    )
    assert "first in micro-batch 0, sample " in again["sentence"]
    assert "the coefficient is 1.02 times what the baseline's clip makes of such a norm" in clip["sentence"]
    proofs = [{proof["name"]: proof["outcome"] for proof in item["proofs"]} for item in (part, again, clip)]
    assert [found["replicas"] for found in proofs] == ["refuted", "refuted", "not tried"]
    assert proofs[2]["equal inputs"] == "refuted"
