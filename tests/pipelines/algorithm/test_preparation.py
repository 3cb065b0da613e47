"""Which rollouts a step refuses to correct, and how a batch's trajectories are the sequences of its correction."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mock_scheduler.batch import SamplingParams
from mock_scheduler.batch.columns import TensorColumn
from mock_scheduler.errors import CorrectionError
from pipelines.algorithm.correction import (
    BatchCorrector,
    check_correctable,
    correction_spec,
    with_known_logprobs,
)
from pipelines.algorithm.training_values import ResponseScores, ValueMaker, needed_scores
from pipelines.config.schema import PipelineConfig
from tests.batches import make_batch


def config_of(correction: object, **values: object) -> PipelineConfig:
    training = {"micro_batch_size": 2, "global_batch_size": 8}
    algorithm = {"rollout_correction": correction}
    return PipelineConfig.model_validate({"exp_name": "x", "training": training, "algorithm": algorithm, **values})


TOKEN_TIS = {"rollout_is": "token", "rollout_is_threshold": 1.5}


def scores_of(logprobs: torch.Tensor) -> ResponseScores:
    return ResponseScores(old_logprobs=logprobs.double())


def test_the_scores_that_are_asked_for_follow_from_the_kind_of_correction() -> None:
    assert needed_scores(config_of(None)) == ()
    assert needed_scores(config_of(TOKEN_TIS)) == ("old_logprobs",)
    assert needed_scores(config_of({"bypass_mode": True})) == ()
    both = config_of(TOKEN_TIS, kl_in_reward={"coef": 0.1})
    assert needed_scores(both) == ("old_logprobs", "ref_logprobs")


def test_equal_policies_have_weights_of_exactly_one_and_keep_all() -> None:
    batch = make_batch(4, 2)
    values, metrics = ValueMaker(config_of(TOKEN_TIS)).make(batch, scores_of(batch.rollout_logprobs), policy_version=0)
    assert values.weights is not None
    assert values.kept is not None
    assert values.weights.tolist() == [1.0] * len(batch.rollout_logprobs)
    assert bool(values.kept.all())
    assert metrics["rollout_corr/kl"] == 0.0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 1.0


def test_a_truncated_weight_is_that_of_its_token() -> None:
    batch = make_batch(4, 2)
    old = batch.rollout_logprobs.clone()
    old[3] += 1.0
    old[5] -= 1.0
    values, metrics = ValueMaker(config_of(TOKEN_TIS)).make(batch, scores_of(old), policy_version=0)
    assert values.weights is not None
    assert values.weights[3] == pytest.approx(1.5)
    assert values.weights[5] == pytest.approx(0.36787944, rel=1e-6)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / len(old))


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        ({"logprobs_mode": "raw", "temperature": 0.6}, "logprobs_mode is raw at temperature 0.6"),
        ({"top_p": 0.9}, "logprobs_mode is processed with top_p 0.9"),
        ({"top_k": 20}, "logprobs_mode is processed with top_k 20"),
        ({"temperature": 0.6}, "rollouts were sampled at temperature 0.6, and training computes at 1"),
    ],
)
def test_log_probabilities_of_another_distribution_are_refused(sampling: dict[str, object], problem: str) -> None:
    values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs_mode": "processed", **sampling}
    batch = replace(make_batch(4, 2), sampling=SamplingParams(**values))  # type: ignore[arg-type]
    with pytest.raises(CorrectionError, match="cannot compare these rollouts") as caught:
        ValueMaker(config_of(TOKEN_TIS)).make(batch, scores_of(batch.rollout_logprobs), policy_version=0)
    assert problem in str(caught.value)


def test_missing_log_probabilities_are_refused() -> None:
    batch = make_batch(4, 2)
    batch = replace(batch, rollout_logprobs=torch.zeros_like(batch.rollout_logprobs))
    with pytest.raises(CorrectionError, match=r"exactly 0\.0: they are missing"):
        check_correctable(batch, config_of(TOKEN_TIS))


def test_a_token_without_a_valid_log_probability_is_rejected() -> None:
    batch = make_batch(4, 2)
    valid = torch.ones(len(batch.rollout_logprobs), dtype=torch.bool)
    valid[2] = False
    column = TensorColumn(values=valid, offsets=batch.response_offsets)
    batch = replace(batch, extras={**batch.extras, "rollout_logprobs_valid": column})
    values, metrics = ValueMaker(config_of(TOKEN_TIS)).make(batch, scores_of(batch.rollout_logprobs), policy_version=0)
    assert values.kept is not None
    assert values.weights is not None
    assert values.kept.tolist() == valid.tolist()
    assert values.weights[2] == 0.0
    assert metrics["rollout_corr/rollout_nan_fraction"] == pytest.approx(1 / len(valid))


def test_policy_lag_is_counted_in_versions_behind_the_policy_under_training() -> None:
    batch = make_batch(4, 2)
    turns_of_row = batch.turn_offsets.diff()
    versions = torch.repeat_interleave(torch.arange(len(batch), dtype=torch.int32) % 2, turns_of_row)
    batch = replace(batch, policy_versions=versions)
    spec = correction_spec(config_of(TOKEN_TIS))
    assert spec is not None
    corrected = BatchCorrector(batch, spec, policy_version=3).correct(batch.rollout_logprobs)
    assert corrected.states.lags is not None
    tokens_by_lag = corrected.states.lags[:, :, 0].sum(axis=0)
    of_even_rows = int(batch.response_lengths[::2].sum())  # version 0 under version 3: three behind; the others two
    assert tokens_by_lag[4] == of_even_rows
    assert tokens_by_lag[3] == len(batch.rollout_logprobs) - of_even_rows


def test_fillers_are_in_no_ratio_of_the_loss() -> None:
    """In bypass a kept token's ratio had the filler of a missing log-probability as its denominator."""
    batch = make_batch(4, 2)
    valid = torch.ones(len(batch.rollout_logprobs), dtype=torch.bool)
    valid[2] = valid[7] = False
    column = TensorColumn(values=valid, offsets=batch.response_offsets)
    batch = replace(batch, extras={**batch.extras, "rollout_logprobs_valid": column})
    policy = batch.rollout_logprobs - 0.5
    known = with_known_logprobs(batch, policy)
    assert known.rollout_logprobs[2] == policy[2]
    assert torch.equal(known.rollout_logprobs[valid], batch.rollout_logprobs[valid])
    some = with_known_logprobs(batch, policy[5:], slice(5, len(policy)))
    assert some.rollout_logprobs[2] == batch.rollout_logprobs[2]
    assert some.rollout_logprobs[7] == policy[7]
    assert with_known_logprobs(make_batch(4, 2), policy).rollout_logprobs.tolist() == batch.rollout_logprobs.tolist()
