"""The rows of a supervised start: which questions they ask, and answers that cannot be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mock_scheduler.batch import Termination
from mock_scheduler.errors import ConfigError
from mock_scheduler.scheduler import RolloutRequest
from pipelines.config.schema import PipelineConfig
from pipelines.environments.base import ResetRequest, ResetResult, StepResult
from pipelines.rollout.plan import plan_episodes, planned_requests
from pipelines.rollout.supervised import answer_all

CONFIG = PipelineConfig.model_validate(
    {
        "exp_name": "x",
        "max_steps": 3,
        "sequence_length": 16,
        "rollout_batch_size": 8,
        "sft": {"steps": 2, "lr": 2e-3},
        "training": {"global_batch_size": 4, "micro_batch_size": 2, "lr": 4e-4, "lr_decay_style": "linear"},
        "train_env_manager": {"num_env_groups": 2, "group_size": 4, "tags": ["A", "B"]},
        "val_env_manager": {"num_env_groups": 2, "group_size": 64, "tags": ["A", "B"]},
        "actor_infer": {"max_new_tokens": 4},
        "model": {"vocab_size": 9},
        "text": {"tokenizer": "somewhere"},
        "custom_envs": {
            tag: {"env_type": "reasoning_gym", "env_config": {"dataset": "chain_sum"}} for tag in ("A", "B")
        },
    }
)


class Pool:
    """Prompts of five tokens with the same answer, judged as told."""

    def __init__(self, answer: Sequence[int], *, is_right: bool = True) -> None:
        self._answer, self._is_right = list(answer), is_right

    def reset_many(self, requests: Sequence[ResetRequest]) -> list[ResetResult]:
        assert all(request.shows_answer for request in requests)
        return [
            ResetResult(observation=[5] * 5, optimal_length=-1, layout_digest="d", answer=self._answer)
            for _ in requests
        ]

    def step_many(self, turns: Sequence[tuple[int, Sequence[int]]]) -> list[StepResult]:
        assert [list(tokens) for _, tokens in turns] == [self._answer] * len(turns)
        values: dict[str, Any] = {"observation": [], "terminated": True, "truncated": False, "is_valid": True}
        return [StepResult(reward=0.5, is_success=self._is_right, **values) for _ in turns]


def requests(step: int) -> RolloutRequest:
    return next(found for found in planned_requests(CONFIG, first_step=0) if found.global_step == step)


def test_its_steps_ask_as_many_questions_as_a_step_has_rows_and_none_of_them_again() -> None:
    plans = {step: plan_episodes(CONFIG, requests(step)) for step in (0, 1, 2)}
    assert [requests(step).group_size for step in (0, 1, 2)] == [1, 1, 4]
    assert [len({plan.seed for plan in plans[step]}) for step in (0, 1, 2)] == [8, 8, 2]
    assert len({plan.seed for step in plans for plan in plans[step]}) == 18
    assert [plan.tag for plan in plans[0]] == ["A", "B"] * 4
    assert {plan.split for plan in plans[1]} == {"train"}


def test_a_row_is_the_prompt_and_the_answer_whose_log_probabilities_nobody_knows() -> None:
    rows = answer_all(plan_episodes(CONFIG, requests(1)), Pool([7, 8, 2]), CONFIG, step=1)  # type: ignore[arg-type]
    row = rows[3]
    assert (row.tokens.tolist(), row.prompt_length) == ([5, 5, 5, 5, 5, 7, 8, 2], 5)
    assert row.response_mask.tolist() == [False] * 5 + [True] * 3
    assert (row.turn_rewards.tolist(), row.policy_versions.tolist()) == ([0.5], [1])
    assert row.termination is Termination.TERMINATED
    assert row.extras["rollout_logprobs_valid"].values.tolist() == [False] * 3  # type: ignore[union-attr]


def test_answers_that_do_not_fit_or_are_not_right_are_refused() -> None:
    plans = plan_episodes(CONFIG, requests(0))
    with pytest.raises(ConfigError, match=r"has 5 tokens, and a turn has room for 4: raise actor_infer.max_new_tokens"):
        answer_all(plans, Pool([7] * 5), CONFIG, step=0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"does not take its own answer .* as right \(reward 0.5\)"):
        answer_all(plans, Pool([7], is_right=False), CONFIG, step=0)  # type: ignore[arg-type]


def test_its_rate_moves_to_that_of_the_rollouts_whose_schedule_has_their_updates_alone() -> None:
    assert [CONFIG.sft_rate(update) for update in (0, 2, 4)] == pytest.approx([2e-3, 1.2e-3, 4e-4])
    assert CONFIG.lr_decay_updates() == 2
