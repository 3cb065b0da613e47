"""Advice is there exactly where its condition holds, names the values, and does not repeat the guide's mistakes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mock_scheduler.batch import SamplingParams
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from mock_scheduler.correction.report.advice import bias_advice, guide_advice, hidden_variance
from mock_scheduler.correction.report.view import Advice, TrainingSide
from tests.correction.report.reports import TRAINING, advice_of, make_report, make_step

LN2 = math.log(2)


def titles(**metrics: float) -> list[str]:
    named = {f"mismatch/{name}": value for name, value in metrics.items()}
    return [item.title for item in guide_advice({0: named}, watched="x")]


@pytest.mark.parametrize(
    ("metrics", "title"),
    [
        ({"rollout_is_std": 1.01}, "High variance in IS weights"),
        ({"rollout_is_eff_sample_size": 0.29}, "High variance in IS weights"),
        ({"rollout_is_veto_fraction": 0.11}, "Too many sequences vetoed"),
        ({"rollout_is_mean": 0.49}, "Mean IS weight far from 1"),
        ({"rollout_is_mean": 2.01}, "Mean IS weight far from 1"),
        ({"rollout_is_masked_fraction": 0.51}, "Too much data discarded"),
        ({"rollout_rs_masked_fraction": 0.51}, "Too much data discarded"),
    ],
)
def test_each_condition_of_the_guide_gives_its_advice_and_no_other(metrics: dict[str, float], title: str) -> None:
    assert titles(**metrics) == [title]


def test_no_advice_at_the_bounds_themselves() -> None:
    bounds = {"rollout_is_std": 1.0, "rollout_is_eff_sample_size": 0.3, "rollout_is_veto_fraction": 0.1}
    assert titles(**bounds, rollout_rs_masked_fraction=0.5, rollout_is_masked_fraction=0.5) == []
    assert titles(rollout_is_mean=0.5) == titles(rollout_is_mean=2.0) == []


def test_names_of_the_newest_release_count_too_and_steps_are_named() -> None:
    metrics = {step: {"rollout_corr/rollout_is_std": value} for step, value in ((3, 0.5), (4, 1.5), (5, 2.5))}
    (advice,) = guide_advice(metrics, watched="the configured rollout_correction")
    assert advice.condition == (
        "rollout_is_std 1.5 > 1.0 at steps 4-5 (values of step 4), with the configured rollout_correction"
    )


def advise(name: str, value: float) -> Advice:
    return guide_advice({0: {f"mismatch/{name}": value}}, watched="x")[0]


def test_geometric_is_said_to_be_an_option_of_rejection() -> None:
    """The guide gives it as a level of weights, which it is not."""
    assert "option of rollout_rs alone" in advise("rollout_is_std", 2.0).remedies[0]
    assert "option of rejection" in advise("rollout_rs_masked_fraction", 0.9).remedies[2]


def test_a_relaxed_veto_is_a_lower_threshold() -> None:
    """The guide relaxes 1e-4 to 1e-3, which vetoes more."""
    remedy = advise("rollout_is_veto_fraction", 0.5).remedies[0]
    assert remedy.startswith("lower rollout_token_veto_threshold, from 1e-4 to 1e-5")


def test_variance_that_bounds_hide_is_a_note() -> None:
    raw = {"rollout_corr/rollout_is_raw_std": 3.0, "rollout_corr/rollout_is_std": 0.4}
    (advice,) = hidden_variance({2: raw}, watched="x")
    assert (advice.severity, advice.condition) == ("note", "before they are bounded rollout_is_raw_std 3 > 1.0, with x")
    assert hidden_variance({2: {**raw, "rollout_corr/rollout_is_std": 1.5}}, watched="x") == []


def test_a_mean_ratio_five_standard_errors_from_one_is_bias() -> None:
    assert bias_advice(1.05, 0.0101) == bias_advice(0.95, 0.0101) == []
    (above,), (below,) = bias_advice(1.05, 0.0099), bias_advice(0.95, 0.0099)
    assert above.condition.startswith("it is 1.05 with a standard error of 0.0099, 5.1 of them from 1.")
    assert (len(above.remedies), len(below.remedies)) == (1, 2)
    assert bias_advice(1.0, 0.0) == bias_advice(math.nan, 1.0) == []


def test_variance_vetoes_and_rejections_of_a_batch_are_found() -> None:
    """A sequence ratio of 4 beside one of 1, with threshold 5; the other's token below the veto."""
    values = {"rollout_is": "sequence", "rollout_is_threshold": 5.0, "rollout_token_veto_threshold": 1e-4}
    spec = RolloutCorrectionConfig.model_validate(values).spec
    found = advice_of(make_report(make_step((2 * LN2,), (-12.0,)), configured=spec))
    configured = "with the configured rollout_correction"
    assert found["warning: High variance in IS weights"].endswith(configured)
    assert found["warning: Too many sequences vetoed"] == f"rollout_is_veto_fraction 0.5 > 0.1, {configured}"
    assert "warning: Too much data discarded" not in found
    values = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.9_1.1"}
    spec = RolloutCorrectionConfig.model_validate(values).spec
    found = advice_of(make_report(make_step((1.0, 0.0), (1.0,)), configured=spec))
    assert found["warning: Too much data discarded"] == f"rollout_rs_masked_fraction 0.6667 > 0.5, {configured}"


def test_the_guides_basic_configuration_is_looked_at_where_none_is_configured() -> None:
    found = advice_of(make_report(make_step((-3.0, -3.0), (-3.0,))))
    assert found["warning: Mean IS weight far from 1"] == (
        "rollout_is_mean 0.04979 < 0.5, with the guide's basic configuration (decoupled_token_is), since none is "
        "configured"
    )


RAW = SamplingParams(temperature=0.5, top_p=0.9, top_k=0, logprobs_mode="raw")


def test_log_probabilities_of_another_distribution_are_a_problem() -> None:
    condition = advice_of(make_report(make_step((0.0,), (0.1,), sampling=RAW)))[
        "problem: Log-probabilities of another distribution"
    ]
    assert condition.startswith("rollouts were sampled at temperature 0.5, and training computes at 1")
    assert "logprobs_mode is raw at temperature 0.5" in condition


def test_without_a_configuration_only_what_is_wrong_in_any_case_is_said() -> None:
    unknown = TrainingSide(source="x", temperature=None, restricts_vocabulary=None, correction=None)
    step = make_step((0.0,), (0.1,), sampling=RAW)
    condition = advice_of(make_report(step, training=unknown))["problem: Log-probabilities of another distribution"]
    assert condition.startswith("logprobs_mode is raw at temperature 0.5")
    fine = make_step((0.0,), (0.1,), sampling=SamplingParams(**{**_plain(), "temperature": 0.5}))
    assert advice_of(make_report(fine, training=unknown)) == {}


def _plain() -> dict[str, object]:
    return {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs_mode": "processed"}


def test_fillers_positive_ones_and_nan_are_problems() -> None:
    step = make_step((0.1, 0.1), (0.1, 0.1))
    logprobs = step.batch.rollout_logprobs.clone()
    logprobs[:2] = 0.0
    filled = replace(step, batch=replace(step.batch, rollout_logprobs=logprobs))
    condition = advice_of(make_report(filled))["problem: Missing log-probabilities"]
    assert condition.startswith("step 0: 1 row of 2 with log-probabilities of exactly 0.0 alone")
    logprobs[:2] = 0.5
    positive = replace(step, batch=replace(step.batch, rollout_logprobs=logprobs))
    report = make_report(positive)
    assert advice_of(report)["problem: Log-probabilities above 0"] == "2 tokens of rollout"
    assert (report.steps[0].positive, report.steps[0].zeros) == (2, 0)
    above = advice_of(make_report(make_step((2.5, 0.0), (0.0,))))
    assert above["problem: Log-probabilities above 0"] == "1 token of training"
    unknown = advice_of(make_report(make_step((math.nan, 0.0), (0.0,))))
    assert unknown["problem: Training log-probabilities that are not finite"] == "1 response token"


def test_tokens_that_a_column_marks_are_a_note() -> None:
    step = make_step((0.1, 1.5), (0.0,), step=4, valid=[[True, False], [True]])
    assert advice_of(make_report(step)) == {
        "note: Tokens without a rollout log-probability": "1 response token at step 4, as the column "
        "rollout_logprobs_valid says"
    }


def test_a_correction_that_would_stop_training_says_so() -> None:
    values = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.9_1.1", "max_rejected_fraction": 0.25}
    spec = RolloutCorrectionConfig.model_validate(values).spec
    found = advice_of(make_report(make_step((1.0, 0.0), (0.0,)), configured=spec))
    assert found["problem: Training would stop"] == (
        "step 0: 33.3% of response tokens would be rejected, above max_rejected_fraction 0.25"
    )
    error = RolloutCorrectionConfig.model_validate({"rollout_is": "token", "nan_policy": "error"}).spec
    found = advice_of(make_report(make_step((math.nan, 0.0), (0.0,)), configured=error))
    assert "1 of 3 response tokens have no finite log-probability" in found["problem: Training would stop"]


def test_a_healthy_batch_has_no_advice() -> None:
    assert advice_of(make_report(make_step((0.01, -0.01), (0.005,)), training=TRAINING)) == {}
