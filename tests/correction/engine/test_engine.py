"""The engine against a slow reference in plain Python, for every kind of rule, and by hand where a value says more."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mock_scheduler.correction import CorrectionResult, compute_correction, correction_metrics
from mock_scheduler.correction.config.rules import Action, Aggregation, Condition, CorrectionSpec, Level, Rule
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from tests.correction.engine.batches import BOUNDS, Batch, random_batch, random_spec, rule_fields
from tests.correction.engine.plain import correct_plainly

LEVELS: tuple[Level, ...] = ("token", "segment", "sequence", "geometric")
ACTIONS: tuple[Action, ...] = ("reject_token", "reject_sequence", "zero_weight")
CONDITIONS: tuple[Condition, ...] = ("always", "positive_advantage", "negative_advantage", "not_positive_advantage")
#: What the reference leaves out; tested in ``test_metrics``.
ONLY_OURS = (
    "by_position",
    "by_lag",
    "probs_",
    "rejected_k3",
    "kept_k3",
    "num_",
    "all_rejected",
    "rollout_nan_fraction",
)


def section(**values: object) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig.model_validate(values)


def assert_as_plain(batch: Batch, spec: CorrectionSpec, *, has_turns: bool = True) -> CorrectionResult:
    """Weights, mask and every metric of the reference, and no metric that it has not."""
    result = compute_correction(batch.inputs(has_turns=has_turns), spec)
    plain = correct_plainly(batch.plain(has_turns=has_turns), spec)
    if plain.weights is None:
        assert result.weights is None
    else:
        assert result.weights is not None
        torch.testing.assert_close(
            result.weights, torch.tensor(plain.weights, dtype=torch.float64), rtol=1e-12, atol=0.0
        )
    assert torch.equal(result.mask, torch.tensor(plain.kept).reshape(batch.mask.shape))
    metrics = correction_metrics(result.states, spec)
    ours = {name for name in metrics if not name.split("/", 1)[1].startswith(ONLY_OURS)}
    known = {name for name in plain.metrics if plain.metrics and name != "rollout_corr/kept_fraction"}
    assert ours - {"rollout_corr/kept_fraction"} == {name for name in known if name in metrics or _is_missing(name)}
    wrong = {
        name: (metrics[name], value)
        for name, value in plain.metrics.items()
        if not math.isclose(metrics[name], value, rel_tol=_relative(name), abs_tol=_absolute(name, plain.metrics))
    }
    assert not wrong
    return result


def _relative(name: str) -> float:
    """Quantiles are of logarithms in float32, up to 20."""
    return 20 * 2**-23 if "/rollout_is_p" in name else 1e-9


def _absolute(name: str, metrics: dict[str, float]) -> float:
    """A deviation of nearly equal values is the root of what cancels: of 1e-16 of their square."""
    return 3e-8 * max(1.0, abs(metrics[f"{name.removesuffix('_std')}_mean"])) if name.endswith("_std") else 1e-12


def _is_missing(name: str) -> bool:
    """Every metric of the reference is one of ours."""
    raise AssertionError(f"{name} is not among the metrics")


def _rules_of(level: Level, action: Action) -> Iterator[dict[str, object]]:
    """Every estimator and aggregation; of all actions together each with every condition, and with both switches."""
    aggregations: dict[Level, tuple[Aggregation, ...]] = {"token": ("sum",), "geometric": ("sum", "mean")}
    for estimator in BOUNDS:
        for aggregation in aggregations.get(level, ("sum", "mean", "max")):
            for step in range(2):
                number = (2 * ACTIONS.index(action) + len(aggregation) + step) % 4
                when, clamps = CONDITIONS[number], number in (1, 2) and estimator != "prob_diff"
                switches = {"when": when, "reverse": number % 2 == 1, "clamps_tokens": clamps}
                yield {**rule_fields(level, estimator, aggregation), **switches, "action": action}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("level", LEVELS)
def test_every_rule_is_as_the_plain_reference_has_it(level: Level, action: Action) -> None:
    acted: set[bool] = set()
    rules = list(_rules_of(level, action))
    assert len(rules) == 10 * {"token": 1, "geometric": 2}.get(level, 3)
    for seed, rule in enumerate(rules):
        spec = section(rollout_is="token", rollout_is_threshold="inf", rules=[rule]).spec
        batch = random_batch(seed, distance=40 * 64 if rule["clamps_tokens"] else 24)
        result = assert_as_plain(batch, spec)
        assert result.weights is not None
        acts = result.weights == 0.0 if action == "zero_weight" else ~result.mask
        acted |= set(acts[batch.mask].tolist())
    assert acted == {False, True}


@pytest.mark.parametrize("action", ["truncate", "clip"])
@pytest.mark.parametrize("level", LEVELS)
def test_every_bound_of_weights_is_as_the_plain_reference_has_it(level: Level, action: Action) -> None:
    rule = {"level": level, "action": action, "lower": 0.83 if action == "clip" else None, "upper": 1.19}
    spec = section(rollout_is=level, rollout_is_threshold="inf", rules=[rule]).spec
    at_bound = {0.83: 0, 1.19: 0}
    for seed in range(10):
        weights = assert_as_plain(random_batch(seed, distance=48), spec).weights
        assert weights is not None
        at_bound = {bound: count + int((weights == bound).sum()) for bound, count in at_bound.items()}
    assert at_bound[1.19] > 0
    assert (at_bound[0.83] > 0) == (action == "clip")
    for estimator in ("k1", "k2", "k3", "prob_diff"):
        with pytest.raises(ValidationError, match="cuts the weights themselves"):
            Rule.model_validate({**rule, "estimator": estimator})


@given(batch_seed=st.integers(0, 10**6), spec_seed=st.integers(0, 10**6), has_turns=st.booleans())
def test_any_rules_together_are_as_the_plain_reference_has_them(
    batch_seed: int, spec_seed: int, has_turns: bool
) -> None:
    """Also with a veto, batch normalisation, and log-probabilities that are not known."""
    batch = random_batch(batch_seed, unknown_share=0.1 * (batch_seed % 3))
    assert_as_plain(batch, random_spec(spec_seed), has_turns=has_turns)


def test_plain_reference_finds_a_planted_fault() -> None:
    """Negative control: one token more in the mask, and the assertion that compares masks fails."""
    batch = random_batch(3)
    spec = section(rules=[{**rule_fields("token", "ratio"), "action": "reject_token"}]).spec
    plain = correct_plainly(batch.plain(), spec)
    mask = compute_correction(batch.inputs(), spec).mask
    rejected = (~mask & batch.mask).nonzero()[0].tolist()
    plain.kept[rejected[0]][rejected[1]] = True
    differing = (mask != torch.tensor(plain.kept)).nonzero().tolist()
    assert differing == [rejected]
