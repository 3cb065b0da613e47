"""Finished episodes as rows of a batch: one per episode, or one per turn (``rollout_form``).

Every row carries the extras ``success`` (bool), ``optimal_length`` and ``num_invalid_actions`` (int32), and
``layout_digest`` (text). They, the tag and the termination are those of the episode, on each of its rows: a turn's row
says how the episode that it belongs to ended, and the last turn is the one with the largest ``identity.turn``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from mock_scheduler.batch import Trajectory
from mock_scheduler.batch.columns import RowValue
from pipelines.batch_metrics import OPTIMAL_LENGTH_EXTRA, SUCCESS_EXTRA
from pipelines.rollout.episodes import Episode, Turn

NUM_INVALID_EXTRA = "num_invalid_actions"
LAYOUT_DIGEST_EXTRA = "layout_digest"

RolloutForm = Literal["trajectory", "step"]


def episode_rows(episode: Episode, form: RolloutForm, *, policy_version: int) -> list[Trajectory]:
    """The rows of a finished episode, in the order of its turns; an episode without a turn is one row of its prompt.

    ``trajectory``: all tokens in one row. ``step``: a row per turn, of all tokens up to the turn's last sampled one;
    what comes before the turn's own tokens is the row's prompt.
    Raises ``RuntimeError`` for an episode that has not ended.
    """
    whole = _row(episode, episode.turns, policy_version=policy_version)
    if form == "trajectory" or not episode.turns:
        return [whole]
    return [
        replace(
            _row(episode, [turn], policy_version=policy_version),
            identity=replace(episode.plan.identity, turn=number),
            prompt_length=turn.start,
        )
        for number, turn in enumerate(episode.turns)
    ]


def _row(episode: Episode, turns: Sequence[Turn], *, policy_version: int) -> Trajectory:
    """The tokens up to the last one that these turns, which follow one another, sampled; all where there are none."""
    if episode.termination is None:
        raise RuntimeError(f"episode {episode.plan.identity} has not ended")
    tokens = episode.tokens[: turns[-1].stop] if turns else episode.tokens
    response_mask = torch.zeros(len(tokens), dtype=torch.bool)
    for turn in turns:
        response_mask[turn.start : turn.stop] = True
    num_before = sum(turn.num_tokens for turn in episode.turns if turns and turn.stop <= turns[0].start)
    num_sampled = sum(turn.num_tokens for turn in turns)
    logprobs = episode.sampled_logprobs[num_before : num_before + num_sampled]
    return Trajectory(
        identity=episode.plan.identity,
        tokens=torch.tensor(tokens, dtype=torch.int32),
        response_mask=response_mask,
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        turn_rewards=torch.tensor([turn.reward for turn in turns], dtype=torch.float32),
        policy_versions=torch.full((len(turns),), policy_version, dtype=torch.int32),
        termination=episode.termination,
        prompt_length=episode.prompt_length,
        tag=episode.plan.tag,
        extras=_extras(episode),
    )


def _extras(episode: Episode) -> dict[str, RowValue]:
    return {
        SUCCESS_EXTRA: torch.tensor(episode.is_success),
        OPTIMAL_LENGTH_EXTRA: torch.tensor(episode.optimal_length, dtype=torch.int32),
        NUM_INVALID_EXTRA: torch.tensor(episode.num_invalid_actions, dtype=torch.int32),
        LAYOUT_DIGEST_EXTRA: episode.layout_digest,
    }
