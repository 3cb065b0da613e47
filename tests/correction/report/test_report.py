"""What the report of rollout correction measures: every number here is worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from mock_scheduler.batch.versions import measure_staleness
from mock_scheduler.correction.config.presets import PRESETS
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from mock_scheduler.correction.report.distributions import count_bars, count_middle_bars
from mock_scheduler.correction.report.presets import list_presets, preset_candidate
from mock_scheduler.correction.report.scored_step import ScoredStep
from mock_scheduler.correction.report.view import Measured
from mock_scheduler.errors import ConfigError
from mock_scheduler.recording.inspection.description import describe_step
from mock_scheduler.recording.inspection.histogram import Bar
from pipelines.batch_metrics import compute_version_metrics
from tests.batches import make_row
from tests.correction.report.reports import make_batch, make_report, make_step
from tests.recording.builders import make_info

LN2 = math.log(2)


def measured_of(*steps: ScoredStep, **options: object) -> Measured:
    measured = make_report(*steps, **options).measured  # type: ignore[arg-type]
    assert measured is not None
    return measured


def test_two_policies_are_measured_as_by_hand() -> None:
    """Ratios 2, 1, ½ in one trajectory and 1 in the other."""
    measured = measured_of(make_step((LN2, 0.0, -LN2), (0.0,)))
    assert (measured.num_tokens, measured.num_sequences, measured.num_unknown, measured.num_equal) == (4, 2, 0, 2)
    assert measured.policies["kl"] == pytest.approx(0.0, abs=1e-15)
    assert measured.policies["k3_kl"] == pytest.approx((2 - 1 - LN2 + 0.5 - 1 + LN2) / 4)
    assert measured.policies["chi2_token"] == pytest.approx((4 + 1 + 0.25 + 1) / 4 - 1)
    assert measured.mean_ratio == pytest.approx(4.5 / 4)
    assert measured.token_ess == pytest.approx(4.5**2 / (4 * 6.25))
    assert measured.sequence_ess == 1.0
    assert measured.quantiles["p50"] == 0.0
    assert measured.quantiles["p100"] == pytest.approx(LN2)


def test_equal_policies_have_nothing_to_correct() -> None:
    report = make_report(make_step((0.0, 0.0), (0.0,)))
    measured = report.measured
    assert measured is not None
    assert (measured.token_ess, measured.sequence_ess, measured.policies["k3_kl"]) == (1.0, 1.0, 0.0)
    assert [item.title for item in report.advice] == ["Nothing to correct"]


def test_sequence_ess_is_of_products_and_does_not_overflow() -> None:
    """Products of ratios e^800 and e^800/3: (1 + ⅓)² / (2·(1 + ⅑)) = 0.8."""
    measured = measured_of(make_step((400.0, 400.0), (800.0 - math.log(3),)))
    assert measured.sequence_ess == pytest.approx(0.8)


def test_steps_are_added_up_and_listed() -> None:
    measured = measured_of(make_step((LN2,), (0.0,), step=3), make_step((-LN2,), (0.0,), step=7))
    assert measured.steps == (3, 7)
    report = make_report(make_step((LN2,), (0.0,), step=3), make_step((-LN2,), (0.0,), step=7))
    assert [step.kl for step in report.steps] == pytest.approx([-LN2 / 2, LN2 / 2])
    assert [step.largest_log_ratio for step in report.steps] == pytest.approx([LN2, 0.0])
    assert measured.policies["kl"] == pytest.approx(0.0, abs=1e-15)


def test_a_step_without_training_log_probabilities_says_what_the_recording_does() -> None:
    step = replace(make_step((0.0, 0.0), (0.0,), policy_version=5, versions=(3, 5)), train_logprobs=None)
    report = make_report(step)
    assert report.measured is None
    health = report.steps[0]
    assert (health.rows, health.response_tokens, health.lag, health.policy_versions) == (2, 3, (0, 2), (3, 5))
    assert (health.kl, health.effective_sample_size) == (None, None)


def test_tokens_are_told_apart_by_position_and_by_lag() -> None:
    first = (0.0,) * 16 + (LN2,)
    measured = measured_of(make_step(first, (-LN2,), versions=(4, 6), policy_version=6))
    assert [(bucket.name, bucket.tokens) for bucket in measured.positions] == [("0-15", 17), ("16-63", 1)]
    assert measured.positions[1].mean_ratio == pytest.approx(2.0)
    assert measured.positions[0].kl == pytest.approx(LN2 / 17)
    assert measured.lags is not None
    assert [(bucket.name, bucket.tokens) for bucket in measured.lags] == [("0", 1), ("2", 17)]
    assert measured.lags[0].mean_ratio == pytest.approx(0.5)


def test_a_trajectory_of_several_rows_is_one_sequence_with_the_turns_of_its_rows() -> None:
    rows = [make_row(0, 0, turn=turn, turn_rewards=(1.0,), tokens=(1, 2, 3, 4 + turn)) for turn in range(2)]
    rows[1] = replace(rows[1], policy_versions=torch.tensor([2], dtype=torch.int32))
    rows.append(make_row(0, 1, turn_rewards=(0.0,)))
    batch = make_batch(rows)
    step = ScoredStep(
        info=make_info(0, policy_version=2),
        batch=batch,
        train_logprobs=batch.rollout_logprobs.double() + torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0]),
    )
    assert step.offsets.tolist() == [0, 4, 6]
    assert step.versions_behind is not None
    assert step.versions_behind.tolist() == [2, 2, 0, 0, 2, 2]
    assert step.rewards.tolist() == [2.0, 0.0]
    worst = measured_of(step).worst_sequences[0]
    assert (worst.identity, worst.length, worst.log_ratio_sum) == ("default/group 0/episode 0/env 0", 4, 1.0)
    assert (worst.worst_token.identity, worst.worst_token.position) == ("default/group 0/episode 0/env 0/turn 1", 3)


def test_turns_are_runs_of_the_mask_where_there_are_as_many() -> None:
    tokens, mask = (1, 2, 3, 4, 5), (False, True, True, False, True)
    row = make_row(tokens=tokens, response=mask, rollout_logprobs=(-1.0, -1.0, -1.0), prompt_length=1)
    step = ScoredStep(info=make_info(), batch=make_batch([row]), train_logprobs=None)
    assert step.tokens.turns is not None
    assert step.tokens.turns.tolist() == [0, 0, 1]
    one = replace(row, turn_rewards=torch.ones(1), policy_versions=torch.zeros(1, dtype=torch.int32))
    step = ScoredStep(info=make_info(), batch=make_batch([one]), train_logprobs=None)
    assert step.tokens.turns is not None
    assert step.tokens.turns.tolist() == [0, 0, 0]
    three = replace(row, turn_rewards=torch.ones(3), policy_versions=torch.tensor([0, 1, 1], dtype=torch.int32))
    step = ScoredStep(info=make_info(), batch=make_batch([three]), train_logprobs=None)
    assert step.tokens.turns is None
    assert step.versions_behind is None


def test_the_planted_token_and_trajectory_are_the_worst_and_are_named() -> None:
    steps = [make_step((0.1, 0.1), (0.0, 0.0), step=0), make_step((0.2, 0.2, 0.2), (-3.0, 3.05), step=1)]
    measured = measured_of(*steps, texts={3: "Left", 4: "Right"})
    token = measured.worst_tokens[0]
    assert (token.step, token.identity, token.position, token.row_position) == (
        1,
        "default/group 0/episode 0/env 1/turn 0",
        1,
        3,
    )
    assert (token.token_id, token.text, token.rollout_logprob) == (4, "Right", -2.0)
    assert (token.train_logprob, token.log_ratio) == (pytest.approx(1.05), pytest.approx(3.05))
    assert [item.log_ratio for item in measured.worst_tokens] == pytest.approx([3.05, -3.0, 0.2])
    sequences = [(item.step, item.identity, item.length) for item in measured.worst_sequences]
    assert sequences[0] == (1, "default/group 0/episode 0/env 0", 3)
    assert measured.worst_sequences[0].log_ratio_mean == pytest.approx(0.2)
    assert [item.log_ratio_sum for item in measured.worst_sequences] == pytest.approx([0.6, 0.2, 0.05])


def test_unknown_tokens_are_in_no_number_and_are_counted() -> None:
    step = make_step((LN2, math.nan, 5.0), (0.0,), valid=[[True, True, False], [True]])
    measured = measured_of(step)
    assert (measured.num_tokens, measured.num_unknown) == (2, 2)
    assert measured.mean_ratio == pytest.approx(1.5)
    assert [token.position for token in measured.worst_tokens] == [0, 0]
    assert measured.worst_sequences[0].length == 1


def test_nothing_known_gives_no_numbers() -> None:
    report = make_report(make_step((math.nan,), (math.nan,)))
    measured = report.measured
    assert measured is not None
    assert (measured.num_tokens, measured.num_unknown, measured.token_bars) == (0, 2, ())
    assert math.isnan(measured.token_ess)
    assert report.steps[0].kl is None
    outcome = measured.outcomes[0]
    assert (outcome.weights, outcome.kept_fraction) == (None, 0.0)


def test_a_preset_does_what_it_does_by_hand() -> None:
    """Ratios 4, 1 and 1/√2, 1, truncated at 2; of the products 4 is beyond [0.5, 2], and 1/√2 is not."""
    step = make_step((2 * LN2, 0.0), (-LN2 / 2, 0.0))
    token, sequence = measured_of(step, presets=("decoupled_token_is", "decoupled_seq_is_rs")).outcomes
    root = 1 / math.sqrt(2)
    assert (token.kept_fraction, token.rejected_sequences) == (1.0, 0.0)
    assert token.weights is not None
    assert token.weights.raw_mean == pytest.approx((6 + root) / 4)
    assert token.weights.mean == pytest.approx((4 + root) / 4)
    assert token.weights.std == pytest.approx(math.sqrt(6.5 / 4 - ((4 + root) / 4) ** 2))
    assert token.weights.largest == pytest.approx(2.0)
    assert token.weights.effective_sample_size == pytest.approx((4 + root) ** 2 / (4 * 6.5))
    assert (sequence.kept_fraction, sequence.rejected_sequences) == (0.5, 0.5)
    assert sequence.weights is not None
    assert sequence.weights.raw_mean == pytest.approx((4 + 4 + root + root) / 4)
    assert sequence.weights.mean == pytest.approx((0 + 0 + root + root) / 4)


def test_all_presets_are_there_and_those_that_compute_the_same_share_a_group() -> None:
    outcomes = measured_of(make_step((0.1, -0.1), (0.3,)), presets=()).outcomes
    assert [outcome.name for outcome in outcomes] == list(PRESETS)
    groups = {outcome.name: outcome.group for outcome in outcomes}
    assert groups["slime_tis"] == groups["aipo"] == groups["decoupled_token_is"]
    assert groups["areal_token_mask"] != groups["trl_token_mask"]
    assert {outcome.name for outcome in outcomes if outcome.is_bypass} >= {"aipo", "bypass_pg_is", "cispo"}
    assert all(outcome.kept_fraction is not None for outcome in outcomes)


def test_the_configured_correction_comes_first() -> None:
    spec = RolloutCorrectionConfig.model_validate({"rollout_is": "token", "rollout_is_threshold": 1.5}).spec
    outcomes = measured_of(make_step((LN2,), (0.0,)), configured=spec).outcomes
    assert [outcome.name for outcome in outcomes] == ["configured", "decoupled_token_is"]
    assert outcomes[0].weights is not None
    assert outcomes[0].weights.largest == 1.5


def test_advantages_are_rewards_less_their_groups_mean() -> None:
    """Off-policy sequence mask: only trajectories of negative advantage are rejected, here the second of the group."""
    step = make_step((-1.0,), (-1.0,), rewards=(1.0, 0.0))
    outcome = measured_of(step, presets=("trl_opsm",)).outcomes[0]
    assert (outcome.kept_fraction, outcome.note) == (0.5, "advantages: reward less its group's mean")


def test_a_preset_that_cannot_be_computed_says_why_and_has_no_numbers() -> None:
    alone = make_step((-1.0,), (-1.0,), group_size=1)
    outcome = measured_of(alone, presets=("trl_opsm",)).outcomes[0]
    assert outcome.kept_fraction is None
    assert outcome.note == "asks for advantages; a group of one trajectory has no mean to compare its reward with"
    row = make_row(tokens=(1, 2, 3, 4), turn_rewards=(0.0, 1.0))
    batch = make_batch([row])
    unclear = ScoredStep(info=make_info(), batch=batch, train_logprobs=batch.rollout_logprobs.double())
    outcome = measured_of(unclear, presets=("roll_segment",)).outcomes[0]
    assert outcome.kept_fraction is None
    assert outcome.note.startswith("asks for turns, and the response mask shows another number of them")


def test_a_release_of_verl_gives_its_own_weights() -> None:
    section = {"rollout_is": "token", "rollout_is_threshold": 2.0, "verl_compat": "0.9.1"}
    spec = RolloutCorrectionConfig.model_validate(section).spec
    outcome = measured_of(make_step((2 * LN2, 0.0), (0.0,)), configured=spec).outcomes[0]
    assert outcome.weights is not None
    assert (outcome.weights.largest, outcome.weights.mean) == (pytest.approx(2.0), pytest.approx(4 / 3))


def test_a_release_of_verl_that_fails_says_what_it_raises() -> None:
    """All ratios beyond [0.9, 1.1] make verl 0.9.1 divide by zero."""
    section = {"rollout_is": "token", "rollout_is_threshold": "0.9_1.1", "verl_compat": "0.9.1"}
    spec = RolloutCorrectionConfig.model_validate(section).spec
    report = make_report(make_step((1.0, 1.0), (1.0,)), configured=spec)
    assert report.measured is not None
    assert report.measured.outcomes[0].note.startswith("verl 0.9.1 raises ZeroDivisionError")
    assert any(item.title == "Training would stop" for item in report.advice)


@pytest.mark.parametrize("name", [*PRESETS])
def test_what_a_line_computes_is_worded_as_the_runs_log_words_it(name: str) -> None:
    """It said weights per geometric and per segment, where the log has sequences by their mean and turns."""
    candidate = preset_candidate(name)
    computation = candidate.spec.describe_computation()
    outcome = measured_of(make_step((0.0,), (0.0,)), presets=(name,)).outcomes[0]
    assert outcome.computation == computation
    assert computation in outcome.description
    units = ("weights per token", "weights per sequence", "weights per turn", "no weights")
    assert computation.startswith(units)


def test_a_releases_line_has_the_bounds_that_it_keeps() -> None:
    section = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_1.25", "verl_compat": "0.9.1"}
    spec = RolloutCorrectionConfig.model_validate(section).spec
    outcome = measured_of(make_step((0.0,), (0.0,)), configured=spec).outcomes[0]
    assert outcome.computation == (
        "as verl 0.9.1 does, with its bugs; no weights; reject tokens whose ratio is outside [0.8, 2]"
    )


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--preset: there is no icepopp \(nearest: icepop\), x; there are: aipo, "):
        list_presets(["icepopp", "aipo", "x"])


def test_bars_are_centred_on_zero_and_count_everything() -> None:
    values = np.array([-1.0, -0.04, 0.0, 0.04, 0.06, 1.0])
    bars = count_bars(values, max_bars=22)
    assert (bars[0].low, bars[-1].high, len(bars)) == (-1.05, 1.05, 21)
    assert bars[10] == Bar(low=-0.05, high=0.05, count=3)
    assert sum(bar.count for bar in bars) == 6
    assert all(first.high == second.low for first, second in pairwise(bars))


def test_bars_of_equal_values_and_of_none() -> None:
    assert count_bars(np.zeros(5)) == (Bar(low=0.0, high=0.0, count=5),)
    assert count_bars(np.empty(0)) == ()
    assert count_middle_bars(np.empty(0)) == ()


def test_the_middle_is_drawn_where_outliers_stretch_the_rest() -> None:
    values = np.linspace(-0.1, 0.1, 1000)
    assert count_middle_bars(values) == ()
    middle = count_middle_bars(np.append(values, [-12.0, 9.0]))
    assert -0.11 < middle[0].low < middle[-1].high < 0.11
    assert sum(bar.count for bar in middle) == 980


def test_inspect_correction_and_metrics_agree_on_the_staleness_of_tokens() -> None:
    """Correction said lag 0 of what inspect called -56."""
    step = make_step((0.0, 0.0, 0.0), (0.1,), (0.2, 0.2), versions=[1, 58, 2], policy_version=2, step=2)
    (health,) = make_report(step).steps
    staleness = measure_staleness(step.batch, 2)
    metrics = compute_version_metrics(step.batch, 2)
    assert staleness is not None
    assert health.lag == (-56, 1) == (staleness.minimum, staleness.maximum)
    assert (metrics["staleness_min"], metrics["staleness_max"]) == (-56.0, 1.0)
    assert metrics["staleness_mean"] == staleness.mean == (3 * 1 - 56 + 2 * 0) / 6
    measured = measured_of(step)
    assert measured.lags is not None
    assert [(bucket.name, bucket.tokens) for bucket in measured.lags] == [("ahead", 1), ("0", 2), ("1", 3)]
    titles = {item.title: item.severity for item in make_report(step).advice}
    assert titles["Policy versions ahead of the policy"] == "problem"


def test_trajectories_of_several_versions_are_counted_alike() -> None:
    rows = [
        replace(
            make_row(0, env, tokens=(1, 2, 3, 4, 5), response=(False, True, False, True, False), prompt_length=1),
            policy_versions=torch.tensor(versions, dtype=torch.int32),
        )
        for env, versions in enumerate([(1, 2), (2, 2), (2, 1)])
    ]
    batch = make_batch(rows)
    step = ScoredStep(info=make_info(0, policy_version=2), batch=batch, train_logprobs=None)
    report = make_report(step)
    assert report.steps[0].mixed_trajectories == 2
    assert compute_version_metrics(batch, 2)["mixed_versions"] == 2.0
    assert describe_step("train", batch, step.info, size_bytes=1).num_mixed_trajectories == 2
    # A version may fall where turns go to several engines, so it is said, and not refused.
    assert ("Policy versions that fall", "warning") in {(item.title, item.severity) for item in report.advice}
