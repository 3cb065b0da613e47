"""Rows of the supervised start: every question with its environment's own answer, which no policy has sampled.

A row is as one of a played episode of one turn. Its log-probabilities are not known (the extra
``rollout_logprobs_valid`` is False on every token). The answer is judged as a policy's would be, so that an
environment whose verifier does not take its own answer is found.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mock_scheduler.batch import Termination, Trajectory
from mock_scheduler.batch.columns import Ragged
from mock_scheduler.batch.plausibility import VALID_COLUMN
from mock_scheduler.errors import ConfigError
from pipelines.batch_metrics import OPTIMAL_LENGTH_EXTRA, SUCCESS_EXTRA
from pipelines.config.schema import PipelineConfig
from pipelines.environments.base import ResetRequest, ResetResult, StepResult
from pipelines.environments.workers import EnvironmentPool
from pipelines.rollout.episodes import LAYOUT_DIGEST_EXTRA, NUM_INVALID_EXTRA
from pipelines.rollout.plan import EpisodePlan


def answer_all(
    plans: Sequence[EpisodePlan], pool: EnvironmentPool, config: PipelineConfig, *, step: int
) -> list[Trajectory]:
    """Makes a row of each episode.

    Raises:
        ConfigError: an answer does not fit ``actor_infer.max_new_tokens`` or ``sequence_length``, or is not right.
    """
    requests = [
        ResetRequest(slot=slot, tag=plan.tag, seed=plan.seed, split=plan.split, shows_answer=True)
        for slot, plan in enumerate(plans)
    ]
    started = pool.reset_many(requests)
    for plan, start in zip(plans, started, strict=True):
        _check_room(plan, start, config)
    judged = pool.step_many([(slot, start.answer) for slot, start in enumerate(started)])
    return [_row(*parts, step=step) for parts in zip(plans, started, judged, strict=True)]


def _check_room(plan: EpisodePlan, start: ResetResult, config: PipelineConfig) -> None:
    length, room = len(start.answer), config.sequence_length - len(start.observation)
    if length > min(room, config.actor_infer.max_new_tokens):
        raise ConfigError(
            f"sft: the answer to the question of tag {plan.tag}, seed {plan.seed} has {length} tokens, and a turn has "
            f"room for {min(room, config.actor_infer.max_new_tokens)}: raise actor_infer.max_new_tokens "
            f"({config.actor_infer.max_new_tokens}) or sequence_length ({config.sequence_length}), or choose easier "
            f"questions"
        )


def _row(plan: EpisodePlan, start: ResetResult, judged: StepResult, *, step: int) -> Trajectory:
    if not judged.is_success:
        raise ConfigError(
            f"sft: the verifier of tag {plan.tag} does not take its own answer to the question of seed {plan.seed} as "
            f"right (reward {judged.reward:g}): choose another task, or an answer_tag that the chat template leaves as "
            "it is"
        )
    num_prompt, num_answer = len(start.observation), len(start.answer)
    return Trajectory(
        identity=plan.identity,
        tokens=torch.tensor([*start.observation, *start.answer], dtype=torch.int32),
        response_mask=torch.arange(num_prompt + num_answer) >= num_prompt,
        rollout_logprobs=torch.zeros(num_answer),
        turn_rewards=torch.tensor([judged.reward], dtype=torch.float32),
        policy_versions=torch.tensor([step], dtype=torch.int32),
        termination=Termination.TERMINATED,
        prompt_length=num_prompt,
        tag=plan.tag,
        extras={
            SUCCESS_EXTRA: torch.tensor(True),
            OPTIMAL_LENGTH_EXTRA: torch.tensor(start.optimal_length, dtype=torch.int32),
            NUM_INVALID_EXTRA: torch.tensor(0, dtype=torch.int32),
            LAYOUT_DIGEST_EXTRA: start.layout_digest,
            VALID_COLUMN: Ragged(torch.zeros(num_answer, dtype=torch.bool)),
        },
    )
