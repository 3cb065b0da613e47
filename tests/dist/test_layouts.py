"""Real gloo processes: every layout starts from the same bits and trains to the same state."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import open_trace
from pipelines.megatron.weights import canonical_initial_weight
from tests.dist.conftest import LAYOUTS
from tests.dist.workers.worker import VARIANTS

pytestmark = pytest.mark.timeout(600)  # the first test pays for both launches

GOLDEN = Path(__file__).parents[1] / "golden" / "parameters.json"
NORMS = ("input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "final_layernorm")

# float32 with sums in another order: errors of a few units of 2^-24 = 6e-8 in gradients of up to a hundred terms.
GRADIENT_BOUND = 2e-5
METRIC_BOUND = 1e-5
# Differences of log-probabilities, of which both are rounded: absolute, for values of about 1.4 and logits of a few.
LOGPROB_BOUND = 1e-6

variants = pytest.mark.parametrize("variant", list(VARIANTS))
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def merged(folder: Path) -> dict[TraceKey, torch.Tensor]:
    """Every tensor of a trace's step 0, put together from all ranks, whose replicas must agree to the bit."""
    with open_trace(folder) as trace:
        tensors = {key: trace.merge(key) for key in sorted(trace.keys(0), key=str)}
    assert [conflict.describe() for tensor in tensors.values() for conflict in tensor.conflicts] == []
    return {key: tensor.tensor for key, tensor in tensors.items()}


def initial_parameters(folder: Path) -> dict[str, torch.Tensor]:
    """What the step began with."""
    return {key.name: tensor for key, tensor in merged(folder / "trained").items() if key.kind == "initial"}


def assert_close(found: dict[TraceKey, torch.Tensor], expected: dict[TraceKey, torch.Tensor], bound: float) -> None:
    """Relative Frobenius distance of each tensor below ``bound``; tensors that are 0 must be 0."""
    assert found.keys() == expected.keys()
    errors = {
        key.describe(): float((found[key].double() - expected[key].double()).norm())
        / max(float(expected[key].double().norm()), 1e-30)
        for key in found
    }
    assert {name: error for name, error in errors.items() if not error <= bound} == {}


def metrics(folder: Path, name: str) -> dict[str, float]:
    """The metrics of a step, which all ranks must have alike."""
    files = sorted(folder.glob(f"{name}_*.json"))
    values = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    assert values
    assert all(value == values[0] for value in values)
    return values[0]


def abs_tol(name: str) -> float:
    return LOGPROB_BOUND if name.startswith("rollout_logprob_diff_") else 1e-8


def assert_metrics_close(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    wrong = {
        name: (found[name], expected[name])
        for name in found
        if not math.isclose(found[name], expected[name], rel_tol=METRIC_BOUND, abs_tol=abs_tol(name))
    }
    assert wrong == {}


@variants
def test_names_and_shapes_are_megatrons(runs: Path, variant: str) -> None:
    """Against names read from the real modules; here the vocabulary has 118 tokens and the first is tied."""
    expected = {name: tuple(shape) for name, shape in json.loads(GOLDEN.read_text(encoding="utf-8"))[variant].items()}
    expected["embedding.word_embeddings.weight"] = (118, 64)
    if variant == "qwen":
        del expected["output_layer.weight"]
    else:
        expected["output_layer.weight"] = (118, 64)
        expected["embedding.position_embeddings.weight"] = (128, 64)
    found = {name: tuple(tensor.shape) for name, tensor in initial_parameters(runs / "tp1" / variant).items()}
    assert found == expected


@variants
@pytest.mark.parametrize("layout", ["tp1", *LAYOUTS])
def test_initial_weights_are_the_canonical_ones_to_the_bit(runs: Path, layout: str, variant: str) -> None:
    """Under every layout, with a padded vocabulary, a gated MLP and tied embeddings among them."""
    found = initial_parameters(runs / layout / variant)
    expected = {
        name: canonical_initial_weight(name, tuple(tensor.shape), model=VARIANTS[variant], seed=42)
        for name, tensor in found.items()
    }
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert found.keys() == initial_parameters(runs / "tp1" / variant).keys()


@variants
@layouts
def test_one_update_has_the_gradients_and_metrics_of_one_process(runs: Path, layout: str, variant: str) -> None:
    expected, found = merged(runs / "tp1" / variant / "trained"), merged(runs / layout / variant / "trained")
    is_gradient = {key: key.kind == "gradient" for key in expected}
    assert found.keys() == expected.keys()
    assert_close(
        {key: found[key] for key in found if is_gradient[key]},
        {key: expected[key] for key in expected if is_gradient[key]},
        GRADIENT_BOUND,
    )
    assert all(float(tensor.norm()) > 0.0 for key, tensor in expected.items() if is_gradient[key])
    assert_metrics_close(metrics(runs / layout / variant, "first"), metrics(runs / "tp1" / variant, "first"))


@variants
@pytest.mark.parametrize("layout", ["tp1", *LAYOUTS])
def test_the_policy_that_is_trained_is_the_one_that_sampled(runs: Path, layout: str, variant: str) -> None:
    """On-policy the trainer's own log-probabilities are the recorded ones but for rounding; after one update they are
    not, and the mean over all tokens and the largest of all ranks are the same in every layout.
    """
    on_policy = metrics(runs / layout / variant, "first")
    assert 0.0 <= on_policy["rollout_logprob_diff_mean"] <= on_policy["rollout_logprob_diff_max"] <= LOGPROB_BOUND
    found, expected = (metrics(runs / name / variant, "next") for name in (layout, "tp1"))
    for name in ("rollout_logprob_diff_mean", "rollout_logprob_diff_max"):
        assert expected[name] > 1000 * LOGPROB_BOUND
        assert found[name] == pytest.approx(expected[name], rel=1e-3)


@variants
@pytest.mark.parametrize("layout", ["tp1", *LAYOUTS])
def test_logits_of_one_micro_batch_live_at_a_time(runs: Path, layout: str, variant: str) -> None:
    """Those of all micro-batches of a step were collected first: gigabytes with a real vocabulary."""
    folder = runs / layout / variant
    counts = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("live_logits_*.json"))]
    per_rank = 4 // (2 if "dp2" in layout else 1)
    ranks_with_logits = 1 if layout == "tp1" else (2 if "pp2" in layout else 4)
    assert sorted(counts) == [[]] * (len(counts) - ranks_with_logits) + [[1] * per_rank] * ranks_with_logits


@pytest.mark.parametrize("rank", range(4))
def test_split_logprobs_entropy_and_gradients_are_the_whole_ones_in_float64(runs: Path, rank: int) -> None:
    """With vocabulary padding on the last rank and an excluded token on the first."""
    errors = json.loads((runs / LAYOUTS[0] / f"vocab_{rank}.json").read_text(encoding="utf-8"))
    assert errors.keys() == {"logprobs", "entropy", "gradient"}
    assert max(errors.values()) <= 1e-12


def test_unreduced_norm_gradients_leave_the_first_loss_equal_to_the_bit(runs: Path) -> None:
    """Why equal losses prove nothing: every metric but the gradient norm is the healthy run's, and only gradients of
    norms are wrong, differently on the two tp ranks.
    """
    healthy, faulty = runs / "tp2-dp2-sp" / "qwen", runs / "tp2-dp2-sp-fault" / "qwen"
    expected, found = metrics(healthy, "first"), metrics(faulty, "first")
    assert [name for name in expected if found[name] != expected[name]] == ["grad_norm"]
    with open_trace(healthy / "trained") as good, open_trace(faulty / "trained") as bad:
        keys = [key for key in good.keys(0) if key.kind == "gradient"]
        wrong = {key.name for key in keys if not torch.equal(good.merge(key).tensor, bad.merge(key).tensor)}
        conflicts = [conflict for key in keys for conflict in bad.merge(key).conflicts]
    assert wrong == {key.name for key in keys if key.name.split(".")[-2] in NORMS}
    assert {conflict.key.name for conflict in conflicts} == wrong
    assert {conflict.axes for conflict in conflicts} == {("tp",)}
