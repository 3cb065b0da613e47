"""Data that cannot be true, or seldom are, in batches that keep every rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from mock_scheduler.batch import RolloutBatch, SamplingParams, Trajectory
from mock_scheduler.batch.columns import Ragged
from mock_scheduler.batch.engine_columns import VERSIONS_COLUMN
from mock_scheduler.batch.plausibility import (
    VALID_COLUMN,
    Finding,
    FindingKind,
    find_impossible,
    find_unlikely,
    made_up_rows,
)
from mock_scheduler.batch.versions import Staleness, count_mixed, measure_staleness
from tests.batches import SAMPLING, make_row


def batch_of(*rows: Trajectory, sampling: SamplingParams = SAMPLING) -> RolloutBatch:
    return RolloutBatch.from_trajectories(rows, sampling=sampling, group_size=None)


def with_versions(*versions: int, env: int = 0, turn: int = 0) -> Trajectory:
    """A row of one sampled token for each turn, with an observation between."""
    row = make_row(
        0,
        env,
        tokens=[1, *range(2, 2 + 2 * len(versions))],
        response=[False, *[True, False] * len(versions)],
        rollout_logprobs=[-0.5 - 0.125 * number for number in range(len(versions))],
        turn_rewards=[0.0] * len(versions),
        prompt_length=1,
        turn=turn,
    )
    return replace(row, policy_versions=torch.tensor(versions, dtype=torch.int32))


def with_logprobs(*logprobs: float, env: int = 0) -> Trajectory:
    return make_row(
        0,
        env,
        tokens=[1, *range(2, 2 + len(logprobs))],
        response=[False, *[True] * len(logprobs)],
        rollout_logprobs=logprobs,
        turn_rewards=(0.0,),
        prompt_length=1,
    )


def only(findings: Sequence[Finding]) -> Finding:
    (finding,) = findings
    return finding


# --- Versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [4, 57, 2**31 - 1])
def test_a_version_ahead_of_the_newest_policy_is_impossible(version: int) -> None:
    finding = only(find_impossible(batch_of(with_versions(3, 3), with_versions(3, version, env=1)), latest_version=3))
    assert finding.describe() == (
        "1 turn of 4 with a policy version ahead of the policy: default/group 0/episode 0/env 1/turn 0: version "
        f"{version}, and the newest policy is 3"
    )
    assert finding.is_impossible


@pytest.mark.parametrize("version", [-1, -3, -(2**31)])
def test_a_negative_version_is_impossible(version: int) -> None:
    finding = only(find_impossible(batch_of(with_versions(version, 2)), latest_version=3))
    assert (finding.kind, finding.count, finding.found) == (FindingKind.VERSION_NEGATIVE, 1, version)


def test_older_and_newest_versions_are_possible() -> None:
    assert find_impossible(batch_of(with_versions(0, 2, 3)), latest_version=3) == []
    assert find_unlikely(batch_of(with_versions(0, 2, 3))) == []


def test_a_version_that_falls_within_a_row_is_unlikely() -> None:
    finding = only(find_unlikely(batch_of(with_versions(2, 3, 1), with_versions(1, 2, env=1))))
    assert finding.describe() == (
        "1 trajectory of 2 with a policy version that falls from one turn to the next: default/group 0/episode 0/env "
        "0/turn 0: version 1 in turn 2 of the trajectory, after 3"
    )
    assert not finding.is_impossible


def test_a_version_that_falls_from_one_row_to_the_next_is_unlikely() -> None:
    first, second = with_versions(5, env=1), with_versions(4, env=1, turn=1)
    second = replace(second, tokens=first.tokens, response_mask=first.response_mask)
    finding = only(find_unlikely(batch_of(with_versions(6), first, second)))
    assert (finding.kind, finding.count, finding.position) == (FindingKind.VERSION_FALLS, 1, 1)
    assert (finding.found, finding.expected) == (4, 5)


def test_versions_of_different_trajectories_are_not_compared() -> None:
    assert find_unlikely(batch_of(with_versions(6), with_versions(1, env=1))) == []


def test_staleness_is_signed_and_counted_by_token() -> None:
    long = replace(with_logprobs(-0.5, -0.25, -0.125), policy_versions=torch.tensor([1], dtype=torch.int32))
    batch = batch_of(long, with_versions(58, env=1))
    assert measure_staleness(batch, 2) == Staleness(minimum=-56, mean=(1 + 1 + 1 - 56) / 4, maximum=1)


def test_staleness_of_turns_that_the_mask_does_not_tell_apart_is_not_guessed() -> None:
    row = replace(
        with_logprobs(-0.5, -0.25),
        turn_rewards=torch.zeros(2),
        policy_versions=torch.tensor([1, 2], dtype=torch.int32),
    )
    assert measure_staleness(batch_of(row), 2) is None
    assert count_mixed(batch_of(row)) == 1


def test_trajectories_of_several_versions_are_counted_once() -> None:
    later = with_versions(3, env=2, turn=1)
    batch = batch_of(with_versions(1, 2, 3), with_versions(2, 2, env=1), with_versions(2, env=2), later)
    assert count_mixed(batch) == 2
    assert count_mixed(batch_of(with_versions(1), with_versions(2, env=1))) == 0


def mixed_within_a_turn(*versions: int, env: int = 0) -> Trajectory:
    """A partial rollout: new weights came while the turn was sampled; the turn has the oldest version."""
    row = with_logprobs(*[-0.5 - 0.125 * number for number in range(len(versions))], env=env)
    column = Ragged(torch.tensor(versions, dtype=torch.int32))
    oldest = torch.tensor([min(versions)], dtype=torch.int32)
    return replace(row, policy_versions=oldest, extras={VERSIONS_COLUMN: column})


def test_a_response_of_mixed_versions_is_counted_and_stale_by_token() -> None:
    batch = batch_of(mixed_within_a_turn(1, 1, 2), mixed_within_a_turn(2, 2, env=1))
    assert count_mixed(batch) == 1
    assert measure_staleness(batch, 2) == Staleness(minimum=0, mean=2 / 5, maximum=1)
    assert find_impossible(batch, latest_version=2) == []
    assert only(find_impossible(batch, latest_version=1)).describe() == (
        "3 response tokens of 5 with a policy version ahead of the policy: default/group 0/episode 0/env 0/turn 0: "
        "version 2, and the newest policy is 1"
    )


# --- Log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprob", [0.25, 1e-3, 2e-5])
def test_a_probability_above_1_is_impossible(logprob: float) -> None:
    finding = only(find_impossible(batch_of(with_logprobs(-0.5, logprob)), latest_version=0))
    assert finding.describe() == (
        "1 response token of 2 with a log-probability above 0, of a probability above 1: default/group 0/episode 0/env "
        f"0/turn 0: {logprob:.6g} at response token 1"
    )


def test_rounding_above_0_and_fillers_that_a_column_marks_are_possible() -> None:
    assert find_impossible(batch_of(with_logprobs(-0.5, 5e-6)), latest_version=0) == []
    marked = replace(with_logprobs(-0.5, 1.0), extras={VALID_COLUMN: Ragged(torch.tensor([True, False]))})
    assert find_impossible(batch_of(marked), latest_version=0) == []


@pytest.mark.parametrize("constant", [-1.0, -0.25, -12.5])
def test_rows_of_one_value_are_made_up(constant: float) -> None:
    batch = batch_of(with_logprobs(-0.5, -0.75, -0.1, -0.3), with_logprobs(*[constant] * 12, env=1))
    finding = only(find_unlikely(batch))
    assert finding.describe() == (
        "1 row of 2 with one log-probability for all tokens, more often than chance explains: default/group 0/episode "
        f"0/env 1/turn 0: {constant:g} throughout"
    )


def test_rows_of_zeros_alone_are_made_up_but_not_of_a_greedy_policy() -> None:
    rows = (with_logprobs(-0.5, -0.75), with_logprobs(0.0, 0.0, env=1))
    assert made_up_rows(batch_of(*rows)) == {1: 0.0}
    assert made_up_rows(batch_of(*rows, sampling=replace(SAMPLING, temperature=0.0))) == {}
    assert made_up_rows(batch_of(*rows, sampling=replace(SAMPLING, top_k=1))) == {}


def test_an_even_choice_is_a_policys_own_value() -> None:
    """A policy whose logits are all 0, as before any training, gives each token log(1/n)."""
    for choices in (2, 3, 4, 1000, 50_257):
        assert made_up_rows(batch_of(with_logprobs(*[-math.log(choices)] * 30))) == {}


def test_equal_values_of_a_coarse_type_are_chance() -> None:
    other = with_logprobs(*([-0.5, -0.75] * 20), env=1)
    assert made_up_rows(batch_of(with_logprobs(-0.3, -0.3, -0.3), other)) == {}
    assert made_up_rows(batch_of(with_logprobs(*[-0.5] * 12), other)) == {}


# --- Histories --------------------------------------------------------------------------------------------------------


def turn(number: int, tokens: Sequence[int], prompt: int, env: int = 0) -> Trajectory:
    return make_row(
        0,
        env,
        tokens=tokens,
        response=[False] * prompt + [True] * (len(tokens) - prompt),
        rollout_logprobs=[-0.1 * (place + 1) for place in range(len(tokens) - prompt)],
        turn_rewards=(0.0,),
        prompt_length=prompt,
        turn=number,
    )


FIRST = [1, 2, 50, 51, 52]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ([1, 2, 50, 99, 52, 7, 8, 60], "token 3 was 51, it is 99 now"),
        ([9, 2, 50, 51, 52, 7, 8, 60], "token 0 was 1, it is 9 now"),
        ([1, 2, 50, 51, 53, 7, 8, 60], "token 4 was 52, it is 53 now"),
        ([1, 2, 50, 60], "token 3 was 51, it is 60 now"),
        ([1, 2, 50], "token 3 was 51, its row ends before it"),
    ],
)
def test_a_turn_with_another_history_is_named_with_place_and_tokens(second: list[int], words: str) -> None:
    rows = [turn(0, FIRST, 2, env) for env in range(3)]
    rows += [turn(1, [*FIRST, 7, 8, 60], 7, 0), turn(1, second, min(len(second), 7) - 1, 1), turn(1, second, 2, 2)]
    finding = only(find_unlikely(batch_of(*rows)))
    assert finding.describe() == (
        "2 trajectories of 3 with a turn whose tokens do not begin with those of the turn before: default/group "
        f"0/episode 0/env 1/turn 1: {words}"
    )


def test_the_second_change_of_a_trajectory_counts_it_once() -> None:
    rows = [turn(0, FIRST, 2), turn(1, [1, 2, 3, 4, 5, 6, 7], 6), turn(2, [1, 2, 3, 9, 5, 6, 7, 8], 7)]
    finding = only(find_unlikely(batch_of(*rows)))
    assert (finding.count, finding.total, finding.position) == (1, 1, 2)


def test_turns_that_go_on_and_rows_of_whole_trajectories_have_their_history() -> None:
    going_on = [turn(0, FIRST, 2), turn(1, [*FIRST, 7, 8, 60], 7), turn(3, [*FIRST, 7, 8, 60, 9, 61], 9)]
    assert find_unlikely(batch_of(*going_on)) == []
    assert find_unlikely(batch_of(turn(0, FIRST, 2), turn(0, [9, 9, 9], 2, env=1))) == []
