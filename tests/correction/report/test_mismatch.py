"""Rollout and training of one policy version must agree; where they do not, the cause is named."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mock_scheduler.correction.report.builder import ReportBuilder, ReportOptions
from mock_scheduler.correction.report.presets import list_presets
from mock_scheduler.correction.report.scored_step import ScoredStep
from mock_scheduler.correction.report.view import Advice
from tests.correction.report.policies import ROWS, Policy, sample, step_of, values
from tests.correction.report.reports import TRAINING

FLOAT32 = replace(TRAINING, precision="float32", rollout_precision="float32")
BFLOAT16 = replace(TRAINING, precision="bfloat16", rollout_precision="bfloat16")
TITLE = "Rollout and training disagree at lag 0"


def found(*steps: ScoredStep, training: object = FLOAT32) -> list[Advice]:
    builder = ReportBuilder(
        ReportOptions(
            recording="dumps/v1",
            run="runs/v1",
            training=training,  # type: ignore[arg-type]
            configured=None,
            presets=list_presets(("decoupled_token_is",)),
            num_worst=0,
            vocabulary=None,
        )
    )
    for step in steps:
        builder.add(step)
    return [item for item in builder.build().advice if item.title == TITLE]


POLICY = Policy.draw(0)
TOKENS = sample(POLICY)
OWN = values(POLICY, TOKENS)


def bfloat16_noise(seed: int, size: float = 0.02) -> torch.Tensor:
    return size * torch.randn(OWN.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rounding_is_no_disagreement_in_either_type() -> None:
    float32 = OWN.float().double() + 3e-7
    assert found(step_of(TOKENS, float32, OWN)) == []
    assert found(step_of(TOKENS, (OWN + bfloat16_noise(1)).clamp(max=0), OWN), training=BFLOAT16) == []
    # A type that is not told may be bfloat16.
    assert found(step_of(TOKENS, (OWN + bfloat16_noise(1)).clamp(max=0), OWN), training=TRAINING) == []


def test_other_weights_with_a_lag_are_no_disagreement() -> None:
    assert found(step_of(TOKENS, OWN, values(POLICY.moved(1, 0.3), TOKENS), step=3, lag=1)) == []


def shifted(by: int) -> torch.Tensor:
    """As frameworks get it wrong: the value of the token after (1) or before (-1), and 0 where there is none."""
    empty = torch.zeros(ROWS, 1, dtype=torch.float64)
    return torch.cat((OWN[:, 1:], empty), 1) if by == 1 else torch.cat((empty, OWN[:, :-1]), 1)


@pytest.mark.parametrize(
    ("by", "text"), [(1, "next token: they lie one place to the left"), (-1, "previous token: they")]
)
@pytest.mark.parametrize("training", [FLOAT32, BFLOAT16, TRAINING])
def test_a_shift_by_one_token_is_named_either_way(by: int, text: str, training: object) -> None:
    noise = bfloat16_noise(2) if training is not FLOAT32 else torch.zeros(())
    (advice,) = found(step_of(TOKENS, shifted(by), OWN + noise), training=training)
    assert advice.severity == "problem"
    assert f"each recorded log-probability is that of the {text}" in advice.condition


def test_a_shift_of_some_rows_is_named_with_their_number() -> None:
    rollout = OWN.clone()
    rollout[:6] = shifted(1)[:6]
    (advice,) = found(step_of(TOKENS, rollout, OWN))
    assert "one place to the left" in advice.condition
    assert "6 of 24 rows are far from all others" in advice.condition


@pytest.mark.parametrize("training", [FLOAT32, BFLOAT16])
def test_values_of_the_likeliest_token_are_named(training: object) -> None:
    likeliest = POLICY.logprobs(TOKENS[:, :-1]).amax(dim=-1)
    (advice,) = found(step_of(TOKENS, likeliest, OWN), training=training)
    assert "those of the likeliest token, and not of the sampled one" in advice.condition


@pytest.mark.parametrize(("kept", "temperature"), [(0.9, 1.0), (0.95, 1.0), (0.8, 1.0)])
def test_a_cut_distribution_is_named(kept: float, temperature: float) -> None:
    logprobs = POLICY.logprobs(TOKENS[:, :-1], temperature)
    ordered, places = logprobs.exp().sort(dim=-1, descending=True)
    inside = ordered.cumsum(-1) - ordered < kept
    mass = (ordered * inside).sum(-1)
    is_kept = torch.zeros_like(inside).scatter(-1, places, inside).gather(2, TOKENS[:, 1:, None])[..., 0]
    rollout = torch.where(is_kept, OWN - mass.log(), OWN)
    (advice,) = found(step_of(TOKENS, rollout, OWN))
    assert "of a distribution cut to its likeliest tokens (top-p, top-k)" in advice.condition


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.3])
@pytest.mark.parametrize("samples_at_it", [True, False])
def test_another_temperature_is_named_with_about_its_value(temperature: float, samples_at_it: bool) -> None:
    tokens = sample(POLICY, temperature=temperature if samples_at_it else 1.0)
    (advice,) = found(step_of(tokens, values(POLICY, tokens, temperature), values(POLICY, tokens)))
    assert "those of another temperature, about" in advice.condition
    estimate = float(advice.condition.partition("about ")[2].split()[0])
    assert estimate == pytest.approx(temperature, rel=0.25)


@pytest.mark.parametrize("size", [0.05, 0.3])
def test_other_weights_at_lag_0_are_named(size: float) -> None:
    """Rows of an older timeline were once said to be amiss in nothing."""
    trained = POLICY.moved(5, size)
    (advice,) = found(step_of(TOKENS, OWN, values(trained, TOKENS)))
    assert "fit the sampled tokens (mean ratio" in advice.condition
    assert "another timeline" in advice.condition
    assert advice.severity == "problem"


@pytest.mark.parametrize(("own", "other"), [(1, 0), (0, 1), (2, 0)])
def test_the_step_whose_weights_sampled_is_named_by_tokens_with_the_same_history(own: int, other: int) -> None:
    """Two steps play the same tokens: in ``own``, with the values of the weights of step ``other``."""
    policies = {own: POLICY.moved(8, 0.3), other: POLICY}
    steps = {
        own: step_of(TOKENS, values(POLICY, TOKENS), values(policies[own], TOKENS), step=own),
        other: step_of(TOKENS, values(POLICY, TOKENS), values(POLICY, TOKENS), step=other),
    }
    (advice,) = found(*(steps[step] for step in sorted(steps)))
    assert advice.condition.startswith(
        f"the recorded log-probabilities are those of the weights of step {other} (version {other}), by 384 tokens"
    )
    assert f"at step {own} the mean |log ratio|" in advice.condition


@pytest.mark.parametrize("constant", [-1.0, -0.25, -3.0])
def test_made_up_constants_are_named(constant: float) -> None:
    (advice,) = found(step_of(TOKENS, torch.full_like(OWN, constant), OWN))
    assert f"100% of the recorded log-probabilities are {constant:g}: made up" in advice.condition


def test_tokens_that_nobody_sampled_are_named_with_their_number() -> None:
    """A response mask with a template's tokens in it: their recorded values were filled in."""
    rollout = OWN.clone()
    rollout[:, :2] = 0.0
    (advice,) = found(step_of(TOKENS, rollout, OWN))
    assert "48 response tokens have a recorded log-probability of exactly 0, and all others agree" in advice.condition
    assert "the response mask has tokens that nobody sampled" in advice.condition


def test_raw_logprobs_are_named_where_training_has_another_temperature() -> None:
    training = replace(FLOAT32, temperature=0.5)
    tokens = sample(POLICY, temperature=0.5)
    (advice,) = found(step_of(tokens, values(POLICY, tokens), values(POLICY, tokens, 0.5)), training=training)
    assert "where training computes at 0.5, as raw log-probabilities are" in advice.condition


def test_a_disagreement_without_a_known_cause_is_said_all_the_same() -> None:
    (advice,) = found(step_of(TOKENS, OWN - 0.5 + bfloat16_noise(3, 0.4), OWN))
    assert advice.condition.endswith("None of the known causes fits")
    assert "rounding explains 0.0001 with float32 on both sides" in advice.condition


def test_a_step_unlike_the_others_is_found_below_the_bound_of_its_type() -> None:
    """A timeline of bfloat16 that changes in the midst of a recording."""
    steps = [step_of(TOKENS, (OWN + bfloat16_noise(n, 0.002)).clamp(max=0), OWN, step=n) for n in range(3)]
    other = step_of(TOKENS, OWN, values(POLICY.moved(9, 0.06), TOKENS), step=3)
    (advice,) = found(*steps, other, training=BFLOAT16)
    assert "at step 3 the mean |log ratio|" in advice.condition
    assert found(*steps, training=BFLOAT16) == []


def test_the_mean_ratio_is_no_second_guess_where_a_cause_is_named() -> None:
    builder = ReportBuilder(
        ReportOptions(
            recording="dumps/v1",
            run="runs/v1",
            training=FLOAT32,
            configured=None,
            presets=[],
            num_worst=0,
            vocabulary=None,
        )
    )
    builder.add(step_of(TOKENS, shifted(1), OWN))
    titles = [item.title for item in builder.build().advice]
    assert TITLE in titles
    assert "The mean ratio is not 1" not in titles
    assert math.isfinite(float(OWN.mean()))
