"""Metrics of rollout correction, each worked out by hand; their names and values in releases are golden cases."""

from __future__ import annotations

import math

import pytest
import torch

from mock_scheduler.correction import CorrectionInputs, CorrectionStates, compute_correction, correction_metrics
from mock_scheduler.correction.config.rules import CorrectionSpec, Rule
from mock_scheduler.correction.config.section import RolloutCorrectionConfig

LOG2, LOG3 = math.log(2.0), math.log(3.0)


def section(**values: object) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig.model_validate(values)


def metrics_of(
    train: list[list[float]],
    spec: CorrectionSpec,
    *,
    rollout: list[list[float]] | None = None,
    mask: list[list[int]] | None = None,
    **tensors: torch.Tensor,
) -> dict[str, float]:
    """Without the prefix of the newest names; the rollout policy's log-probabilities are 0 by default."""
    inputs = CorrectionInputs(
        train_logprobs=torch.tensor(train, dtype=torch.float64),
        rollout_logprobs=torch.tensor(rollout or [[0.0] * len(row) for row in train], dtype=torch.float64),
        response_mask=torch.tensor(mask or [[1] * len(row) for row in train]),
        **tensors,
    )
    found = correction_metrics(compute_correction(inputs, spec).states, spec)
    return {name.removeprefix("rollout_corr/"): value for name, value in found.items()}


def test_raw_bounded_and_applied_weights() -> None:
    """Ratios 1, 2, 3 and 6, truncated at 4; the token of ratio 6 is rejected; the mean of 1, 2, 3 and 4 is 5/2."""
    spec = section(
        rollout_is="token",
        rollout_is_threshold=4.0,
        rollout_is_batch_normalize=True,
        rules=[{"level": "token", "action": "reject_token", "upper": 5.0}],
    ).spec
    metrics = metrics_of([[0.0, LOG2, LOG3, LOG2 + LOG3]], spec)
    expected = {
        "rollout_is_raw_mean": 3.0,
        "rollout_is_raw_max": 6.0,
        "rollout_is_raw_eff_sample_size": 144.0 / (4.0 * 50.0),
        "rollout_is_mean": 5.0 / 2.0,
        "rollout_is_max": 4.0,
        "rollout_is_eff_sample_size": 100.0 / (4.0 * 30.0),
        "rollout_is_batch_norm_factor": 5.0 / 2.0,
        # 1, 2, 3 and 0, times 2/5.
        "rollout_is_applied_mean": 6.0 / 4.0 * 2.0 / 5.0,
        "rollout_is_applied_max": 6.0 / 5.0,
        "rollout_is_applied_min": 0.0,
        "rollout_is_applied_eff_sample_size": 36.0 / (4.0 * 14.0),
        # Of the raw weights, above 4 and below 1/4.
        "rollout_is_ratio_fraction_high": 0.25,
        "rollout_is_ratio_fraction_low": 0.0,
        "kept_fraction": 0.75,
        "rollout_rs_token_ratio_masked_fraction": 0.25,
        "rollout_rs_token_ratio_mean": -(LOG2 + LOG3) / 2.0,
        "rollout_rs_token_ratio_max": 0.0,
        "rollout_rs_token_ratio_min": -(LOG2 + LOG3),
        # k3 = ρ − 1 − ln ρ.
        "rejected_k3_kl": 5.0 - LOG2 - LOG3,
        "kept_k3_kl": (3.0 - LOG2 - LOG3) / 3.0,
        "kl": -(LOG2 + LOG3) / 2.0,
        "chi2_token": (1.0 + 4.0 + 9.0 + 36.0) / 4.0 - 1.0,
        "chi2_seq": 36.0**2 - 1.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("weight", [1.1, 0.3, 1e-7])
def test_equal_weights_have_a_sample_size_of_exactly_1(weight: float) -> None:
    """Rounded sums of ten equal weights are not ten times one; tiny ones are where verl had 34."""
    spec = section(rollout_is="token", rollout_is_threshold="inf").spec
    metrics = metrics_of([[math.log(weight)] * 7, [math.log(weight)] * 7], spec)
    assert metrics["rollout_is_eff_sample_size"] == 1.0
    assert metrics["rollout_is_applied_eff_sample_size"] == 1.0


def test_sample_size_of_weights_far_apart() -> None:
    """e^20 and e^-20: one token counts, of two."""
    spec = section(rollout_is="token", rollout_is_threshold="inf").spec
    assert metrics_of([[30.0, -30.0]], spec)["rollout_is_eff_sample_size"] == pytest.approx(0.5, rel=1e-12)


def test_rejected_tokens_have_no_applied_weight() -> None:
    spec = section(rollout_is="token", rollout_rs="token", rollout_rs_threshold=1.5).spec
    metrics = metrics_of([[LOG2, LOG2]], spec)
    assert metrics["all_rejected"] == 1.0
    assert metrics["kept_fraction"] == 0.0
    assert metrics["rollout_is_applied_eff_sample_size"] == 0.0
    assert metrics["rollout_is_mean"] == pytest.approx(2.0)
    assert metrics["rejected_k3_kl"] == metrics["k3_kl"]
    assert "kept_k3_kl" not in metrics


def test_buckets_by_position_and_by_lag() -> None:
    """17 tokens: the last is in the second bucket of positions, and of the policy of five versions before."""
    versions = torch.tensor([[0] * 8 + [4] * 8 + [5]])
    spec = section(rollout_is="token", rollout_is_threshold=1.5, rollout_rs="token", rollout_rs_threshold=1.9).spec
    metrics = metrics_of([[0.0] * 16 + [LOG2]], spec, versions_behind=versions)
    buckets = {name: value for name, value in metrics.items() if name.startswith("by_")}
    zero = {"kl": 0.0, "k3_kl": 0.0, "rollout_is_mean": 1.0, "masked_fraction": 0.0}
    last = {"tokens": 1.0, "kl": -LOG2, "k3_kl": 1.0 - LOG2, "rollout_is_mean": 1.5, "masked_fraction": 1.0}
    expected = {
        "by_position/0-15": {"tokens": 16.0, **zero},
        "by_position/16-63": last,
        "by_lag/0": {"tokens": 8.0, **zero},
        "by_lag/3-4": {"tokens": 8.0, **zero},
        "by_lag/5-8": last,
    }
    flat = {f"{bucket}/{name}": value for bucket, values in expected.items() for name, value in values.items()}
    assert buckets == pytest.approx(flat, rel=1e-15)


def test_positions_count_tokens_that_are_not_known() -> None:
    """The seventeenth response token is in the second bucket, whatever is known of those before it."""
    train = [[float("nan")] + [0.0] * 16]
    metrics = metrics_of(train, section().spec)
    assert metrics["by_position/16-63/tokens"] == 1.0
    assert metrics["by_position/0-15/tokens"] == 15.0
    masked = metrics_of(train, section().spec, mask=[[0] + [1] * 16])
    assert "by_position/16-63/tokens" not in masked


def test_given_positions_are_used() -> None:
    metrics = metrics_of([[0.0, 0.0]], section().spec, positions=torch.tensor([[15, 70000]]))
    assert metrics["by_position/0-15/tokens"] == 1.0
    assert metrics["by_position/65536+/tokens"] == 1.0


def test_differences_of_probabilities() -> None:
    """π_train 1/2, 1/4 and 1/8; π_rollout 1/4, 1/4 and 1/2: by 1/4, 0 and 3/8."""
    train = [[-LOG2, -2.0 * LOG2, -3.0 * LOG2]]
    rollout = [[-2.0 * LOG2, -2.0 * LOG2, -LOG2]]
    metrics = metrics_of(train, section().spec, rollout=rollout)
    assert metrics["probs_diff_mean"] == pytest.approx(5.0 / 24.0)
    assert metrics["probs_diff_max"] == pytest.approx(3.0 / 8.0)
    assert metrics["probs_diff_std"] == pytest.approx(math.sqrt((16.0 + 36.0) / 256.0 / 3.0 - 25.0 / 576.0))
    # Deviations from the means 7/24 and 1/3, in 1/24: 5, −1, −4 and −2, −2, 4.
    assert metrics["probs_pearson_corr"] == pytest.approx(-24.0 / math.sqrt(42.0 * 24.0))


def test_sequences_without_response_tokens_are_in_no_mean() -> None:
    metrics = metrics_of([[-1.0, -3.0], [-9.0, -9.0]], section().spec, mask=[[1, 1], [0, 0]])
    assert metrics["num_sequences"] == 1.0
    assert metrics["num_tokens"] == 2.0
    assert metrics["training_ppl"] == pytest.approx(math.exp(2.0))
    assert metrics["training_log_ppl"] == 2.0
    assert metrics["log_ppl_diff_min"] == 2.0


def test_metrics_of_nothing_say_how_much_there_is() -> None:
    assert metrics_of([[0.0]], section(rollout_is="token").spec, mask=[[0]]) == {
        "num_tokens": 0.0,
        "num_sequences": 0.0,
        "kept_fraction": 0.0,
        "all_rejected": 0.0,
        "rollout_nan_fraction": 0.0,
    }


def test_policies_far_apart_have_infinite_metrics_and_no_warning() -> None:
    """exp(1000) is beyond float64: the perplexity is infinite; what is clamped at ± 20 is not."""
    metrics = metrics_of([[-1000.0]], section(rollout_is="token", rollout_is_threshold="inf").spec)
    assert metrics["training_ppl"] == math.inf
    assert metrics["rollout_is_raw_min"] == pytest.approx(math.exp(-20.0))
    assert metrics["kl"] == 1000.0
    assert metrics_of([[1000.0]], section().spec)["k3_kl"] == math.inf


def test_a_rule_named_veto_that_rejects_nothing_is_no_veto() -> None:
    rule = Rule(level="token", action="zero_weight", upper=1.5, name="veto")  # the configuration refuses such a name
    spec = CorrectionSpec(weight="token", rules=(rule,))
    metrics = metrics_of([[0.0, LOG2]], spec)
    assert metrics["rollout_is_veto_fraction"] == 0.0
    assert metrics["rollout_is_oob_ratio"] == 0.5


def test_every_metric_of_a_merge_is_a_float() -> None:
    spec = section(rollout_is="sequence", rollout_rs="token_k2", rollout_rs_threshold=0.1).spec
    inputs = CorrectionInputs(
        train_logprobs=torch.tensor([[0.1]]), rollout_logprobs=torch.zeros(1, 1), response_mask=torch.ones(1, 1)
    )
    states = compute_correction(inputs, spec).states
    metrics = correction_metrics(CorrectionStates.merge([states, states]), spec)
    assert {type(value) for value in metrics.values()} == {float}
    assert {name.split("/")[0] for name in metrics} == {"rollout_corr", "mismatch"}
