"""States of rollout correction: put together in any way they give the same numbers, and of other rules they do not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from mock_scheduler.correction import CorrectionInputs, CorrectionStates, compute_correction, correction_metrics
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from mock_scheduler.correction.engine.states import LAG_EDGES, POSITION_EDGES, bucket_names, exact_sum

SPEC = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0).spec


def states_of(*rows: list[float], versions: list[int] | None = None) -> CorrectionStates:
    """Of log ratios of one row each; lags where versions are given."""
    train = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), -1)
    inputs = CorrectionInputs(
        train_logprobs=train,
        rollout_logprobs=torch.zeros_like(train),
        response_mask=torch.ones_like(train),
        versions_behind=None if versions is None else torch.tensor([versions] * len(rows)),
    )
    return compute_correction(inputs, SPEC).states


def test_sums_are_rounded_once_whatever_their_order() -> None:
    """1 is lost beside 1e16 in a running sum, and 0.1 ten times is not 1."""
    assert exact_sum(np.array([1e16, 1.0, -1e16])) == 1.0
    assert exact_sum(np.array([0.1] * 10)) == 1.0
    assert exact_sum(np.array([], dtype=np.float64)) == 0.0
    assert exact_sum(np.array([math.inf, 1.0])) == math.inf
    assert math.isnan(exact_sum(np.array([math.inf, -math.inf])))
    assert exact_sum(np.array([1e308, 1e308])) == math.inf
    assert math.isnan(exact_sum(np.array([math.nan, 1.0])))


def test_merged_states_have_the_totals_maxima_and_quantiles_of_all() -> None:
    """Never a mean of maxima: of the weights 1, 1 and 2, 3 the largest is 3."""
    first, second = states_of([0.0, 0.0]), states_of([math.log(2.0), math.log(3.0)])
    merged = CorrectionStates.merge([first, second])
    assert merged.num_sequences == 2
    assert merged.total("raw") == pytest.approx(7.0, rel=1e-15)
    assert merged.largest("raw") == pytest.approx(3.0)
    assert merged.smallest("raw") == 1.0
    metrics = correction_metrics(merged, SPEC)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(6.0 / 4.0)
    assert metrics["rollout_corr/rollout_is_raw_mean"] == pytest.approx(7.0 / 4.0)
    assert metrics["rollout_corr/rollout_is_raw_max"] == pytest.approx(3.0)
    assert metrics["rollout_corr/rollout_is_p50"] == pytest.approx(1.5, rel=1e-6)
    assert metrics["rollout_corr/rollout_is_p75"] == pytest.approx(2.25, rel=1e-6)


def test_added_states_are_of_the_same_sequences() -> None:
    """Two halves of one sequence: its perplexity is of the mean of all its tokens."""
    added = CorrectionStates.add([states_of([-1.0]), states_of([-3.0])])
    whole = states_of([-1.0, -3.0])
    assert added.num_sequences == 1
    assert correction_metrics(added, SPEC)["rollout_corr/training_ppl"] == pytest.approx(math.exp(2.0))
    assert added.total("tokens") == whole.total("tokens") == 2.0
    assert added.largest("log_ratio") == -1.0
    assert added.smallest("log_ratio") == -3.0


def test_states_of_nothing_change_nothing() -> None:
    some = states_of([0.5, -0.25])
    nothing = compute_correction(
        CorrectionInputs(
            train_logprobs=torch.zeros(0, 2), rollout_logprobs=torch.zeros(0, 2), response_mask=torch.zeros(0, 2)
        ),
        SPEC,
    ).states
    assert nothing.num_sequences == 0
    assert nothing.largest("raw") == -math.inf
    assert nothing.smallest("raw") == math.inf
    merged = CorrectionStates.merge([nothing, some, nothing])
    assert correction_metrics(merged, SPEC) == correction_metrics(some, SPEC)


def test_states_of_other_rules_are_refused_by_name() -> None:
    plain = RolloutCorrectionConfig().spec
    inputs = CorrectionInputs(
        train_logprobs=torch.zeros(1, 1), rollout_logprobs=torch.zeros(1, 1), response_mask=torch.ones(1, 1)
    )
    other = compute_correction(inputs, plain).states
    with pytest.raises(ValueError, match=r"parts were made by other rules: \['applied', 'applied_squared'"):
        CorrectionStates.merge([states_of([0.0]), other])
    with pytest.raises(ValueError, match=r"parts have \[1, 2\] sequences; expected the same of all"):
        CorrectionStates.add([states_of([0.0]), states_of([0.0], [0.0])])
    with pytest.raises(ValueError, match="there are no parts to put together"):
        CorrectionStates.merge([])


def test_lags_are_known_of_all_or_of_none() -> None:
    known, unknown = states_of([0.0, 0.0], versions=[0, 4]), states_of([0.0, 0.0])
    assert CorrectionStates.merge([known, known]).lags is not None
    assert CorrectionStates.merge([known, unknown]).lags is None


def test_buckets_are_named_by_what_they_hold() -> None:
    assert bucket_names(LAG_EDGES) == ["ahead", "0", "1", "2", "3-4", "5-8", "9+"]
    assert bucket_names(POSITION_EDGES)[:3] == ["0-15", "16-63", "64-255"]
    assert bucket_names(POSITION_EDGES)[-1] == "65536+"


def test_a_lost_sequence_is_found() -> None:
    """Negative control: without one row of one column the totals differ, and by that row."""
    states = states_of([0.5], [0.25])
    rows = {name: column[:1] if name == "log_ratio" else column for name, column in states.sums.items()}
    assert states.total("log_ratio") - replace(states, sums=rows).total("log_ratio") == 0.25
