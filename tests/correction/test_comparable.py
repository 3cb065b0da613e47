"""Log-probabilities that cannot be compared with those that training computes are named with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from mock_scheduler.batch import RolloutBatch, SamplingParams
from mock_scheduler.batch.columns import JsonColumn, Ragged, TensorColumn
from mock_scheduler.batch.plausibility import VALID_COLUMN, made_up_rows, valid_logprobs
from mock_scheduler.correction.comparable import (
    comparison_problems,
    logprob_problems,
)
from tests.batches import SAMPLING, make_row

RAW = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="raw")


def make_batch(*rows: Sequence[float], valid: Sequence[Sequence[bool]] | None = None) -> RolloutBatch:
    """Rows of two prompt tokens and one response token for each of these log-probabilities."""
    made = [
        make_row(
            0,
            number,
            tokens=[1, 2, *[3] * len(logprobs)],
            response=[False, False, *[True] * len(logprobs)],
            rollout_logprobs=logprobs,
            turn_rewards=(0.0,),
        )
        for number, logprobs in enumerate(rows)
    ]
    if valid is not None:
        columns = [Ragged(torch.tensor(flags, dtype=torch.bool)) for flags in valid]
        made = [replace(row, extras={VALID_COLUMN: column}) for row, column in zip(made, columns, strict=True)]
    return RolloutBatch.from_trajectories(made, sampling=SAMPLING, group_size=None)


@pytest.mark.parametrize("restricts_vocabulary", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_processed_log_probabilities_of_the_trained_distribution_are_comparable(
    temperature: float, restricts_vocabulary: bool
) -> None:
    sampling = replace(SAMPLING, temperature=temperature)
    problems = comparison_problems(sampling, temperature=temperature, restricts_vocabulary=restricts_vocabulary)
    assert problems == []


def test_raw_ones_are_comparable_at_temperature_1_over_the_whole_vocabulary() -> None:
    assert comparison_problems(RAW, temperature=1.0, restricts_vocabulary=False) == []
    truncated = replace(RAW, top_p=0.9, top_k=20)
    assert comparison_problems(truncated, temperature=1.0, restricts_vocabulary=False) == []


def test_raw_ones_at_another_temperature_or_of_a_restricted_vocabulary_are_named() -> None:
    problems = comparison_problems(replace(RAW, temperature=0.5), temperature=0.5, restricts_vocabulary=True)
    assert problems == [
        "logprobs_mode is raw at temperature 0.5: raw log-probabilities are of the logits themselves, not of logits / "
        "temperature; record processed ones",
        "logprobs_mode is raw, and training restricts the vocabulary: raw log-probabilities are of all tokens, not of "
        "those that may be chosen; record processed ones",
    ]


def test_processed_ones_of_a_truncated_distribution_are_named_with_their_bias() -> None:
    problems = comparison_problems(replace(SAMPLING, top_p=0.95, top_k=50), temperature=1.0, restricts_vocabulary=False)
    assert problems == [
        "logprobs_mode is processed with top_p 0.95 and top_k 50: log-probabilities are of the kept tokens alone, so "
        "that each is too high by -log(kept mass); sample with top_p 1 and top_k 0, or record raw ones"
    ]


def test_another_temperature_is_named_with_both() -> None:
    problems = comparison_problems(replace(SAMPLING, temperature=0.7), temperature=1.0, restricts_vocabulary=False)
    assert problems == [
        "rollouts were sampled at temperature 0.7, and training computes at 1: set "
        "actor_infer.generating_args.temperature to that of the recording"
    ]


def test_log_probabilities_with_some_zeros_are_no_problem() -> None:
    assert logprob_problems(make_batch((0.0, -0.5), (-0.25, 0.0))) == []
    assert logprob_problems(make_batch((), ())) == []


def test_a_batch_of_zeros_is_missing_its_log_probabilities() -> None:
    assert logprob_problems(make_batch((0.0, -0.0), (0.0,))) == [
        "all of 3 rollout log-probabilities are exactly 0.0: they are missing, and 0 was filled in; have the engine "
        "return them (verl: actor_rollout_ref.rollout.calculate_log_probs true)"
    ]


def test_a_row_of_zeros_is_named() -> None:
    assert logprob_problems(make_batch((-0.5, -0.25), (0.0, 0.0), (-1.0,))) == [
        "1 row of 3 with log-probabilities of exactly 0.0 alone, filled in for missing ones: default/group 0/episode "
        "0/env 1/turn 0; have the engine return them (verl: actor_rollout_ref.rollout.calculate_log_probs true), or "
        f"give the column {VALID_COLUMN}"
    ]


def test_a_row_of_one_certain_token_is_chance() -> None:
    assert made_up_rows(make_batch((0.0,), (-0.5, -0.25))) == {}


def test_rows_of_certain_tokens_are_chance_where_certain_tokens_are_usual() -> None:
    """Half of the other tokens are certain: 2^-19 is above 1e-6, 2^-20 is below."""
    other = (0.0, -0.5) * 10
    assert made_up_rows(make_batch((0.0,) * 19, other)) == {}
    assert made_up_rows(make_batch((0.0,) * 20, other)) == {0: 0.0}


def test_a_column_says_what_is_valid_and_rows_are_not_looked_at() -> None:
    batch = make_batch((0.0, 0.0), (-0.5,), valid=[[False, True], [True]])
    assert logprob_problems(batch) == []
    valid = valid_logprobs(batch)
    assert valid is not None
    assert valid.tolist() == [False, True, True]
    assert valid_logprobs(make_batch((-0.5,))) is None


def test_a_batch_of_which_nothing_is_valid_is_missing_its_log_probabilities() -> None:
    (problem,) = logprob_problems(make_batch((-0.5, -0.5), valid=[[False, False]]))
    assert problem.startswith(f"none of 2 rollout log-probabilities is valid, as the column {VALID_COLUMN} says; have")


def test_zeros_that_are_all_marked_valid_are_missing_all_the_same() -> None:
    (problem,) = logprob_problems(make_batch((0.0, 0.0), (0.0,), valid=[[True, True], [True]]))
    assert problem.startswith("all of 3 rollout log-probabilities are exactly 0.0")


_EXPECTED = f"extra {VALID_COLUMN!r}: expected a ragged bool column with one entry per response token"


@pytest.mark.parametrize(
    ("column", "found"),
    [
        (JsonColumn(items=(True, True)), "; it is JSON"),
        (TensorColumn(values=torch.ones(2, dtype=torch.bool)), "; it is dense torch.bool [2] on cpu"),
        (
            TensorColumn(values=torch.ones(3, dtype=torch.uint8), offsets=torch.tensor([0, 2, 3])),
            "; it is ragged torch.uint8 [3] on cpu",
        ),
        (
            TensorColumn(values=torch.ones(3, 1, dtype=torch.bool), offsets=torch.tensor([0, 2, 3])),
            "; it is ragged torch.bool [3, 1] on cpu",
        ),
        (
            TensorColumn(values=torch.ones(3, dtype=torch.bool), offsets=torch.tensor([0, 1, 3])),
            "; of another length in 2 rows: default/group 0/episode 0/env 0/turn 0: 1 for 2 response tokens; "
            "default/group 0/episode 0/env 1/turn 0: 2 for 1 response tokens",
        ),
    ],
)
def test_a_malformed_column_is_named(column: JsonColumn | TensorColumn, found: str) -> None:
    batch = replace(make_batch((-0.5, -0.25), (-1.0,)), extras={VALID_COLUMN: column})
    assert logprob_problems(batch) == [_EXPECTED + found]
