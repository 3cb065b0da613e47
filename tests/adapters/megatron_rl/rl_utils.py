"""Stand-ins for megatron/rl after Megatron-LM's sources of August 2026 (d98e8a64): the classes of ``types/rollout.py``
with all their fields, and the functions of ``rl_utils.py`` by their signatures, on one process without a model.

``tests/integrations/test_megatron_rl.py`` has the real ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from pydantic import BaseModel

calls: list[str] = []
args = SimpleNamespace()


class AgentBaseModel(BaseModel, extra="allow"):
    pass


class Rollout(AgentBaseModel):
    trajectory: list[str]
    prompt_length: list[int] | None = None
    reward: float | None = None
    env_id: str = ""
    problem_id: str | None = None
    rollout_status: str = "ok"
    failure_reason: str | None = None


class TokenRollout(AgentBaseModel):
    trajectory: list[list[int]]
    reward: list[float] | float
    generation_mask: list[list[bool]] | None = None
    logprobs: list[list[float]] | None = None
    env_id: str = ""
    problem_id: str | None = None
    completion_ids: list[str] = []
    generation_cap: int | None = None
    rollout_status: str = "ok"
    failure_reason: str | None = None


class RolloutGroup(AgentBaseModel):
    rollouts: list[TokenRollout | Rollout]
    batch_id: int = 0
    index_in_batch: int = 0
    uid: str | None = None

    def __iter__(self) -> Any:
        return iter(self.rollouts)

    def __len__(self) -> int:
        return len(self.rollouts)


@dataclass
class FinishedRequestRecord:
    policy_epoch: list[tuple[int, int]] | None
    kv_cache_epoch: list[tuple[int, int]] | None
    num_evictions: int


def get_args() -> SimpleNamespace:
    return args


def play(iteration: int, n_prompts: int, samples_per_group: int) -> tuple[list[RolloutGroup], dict[str, Any]]:
    """Two turns each, with a token that the engine ended on."""
    groups, ledger = [], {}
    for prompt in range(n_prompts):
        rollouts: list[TokenRollout | Rollout] = []
        for sample in range(samples_per_group):
            ids = [f"chatcmpl-{iteration}-{prompt}-{sample}-{turn}" for turn in range(2)]
            first = [1, 2, 10 + sample, 11]
            second = [*first, 3, 20 + iteration, 0]
            rollouts.append(
                TokenRollout(
                    trajectory=[first, second],
                    reward=float(sample),
                    generation_mask=[[False, False, True, True], [False] * 5 + [True, True]],
                    logprobs=[[-0.5, -0.25], [-0.125 * (sample + 1)]],
                    env_id="math",
                    problem_id=f"problem-{prompt}",
                    completion_ids=ids,
                )
            )
            for turn, name in enumerate(ids):
                start = max(iteration - 1 + turn, 0)
                ledger[name] = FinishedRequestRecord([(0, start), (3, iteration)], [(0, iteration)], turn)
        groups.append(RolloutGroup(rollouts=rollouts, batch_id=iteration, index_in_batch=prompt, uid=f"u{prompt}"))
    return groups, ledger


def get_environment_rollouts(
    model: Any, inference_model: Any, optimizer: Any, n_prompts: int, samples_per_group: int
) -> tuple[list[RolloutGroup], dict[str, Any]]:
    calls.append(f"collect {args.curr_iteration}")
    return play(args.curr_iteration, n_prompts, samples_per_group)


def get_grpo_data_iterator(model: Any, inference_model: Any, optimizer: Any) -> Any:
    """The caller, who finds the function by its name in this module."""
    return get_environment_rollouts(model, inference_model, optimizer, args.grpo_prompts_per_step, args.grpo_group_size)


def evaluate_and_print_results_rl(data_iterator: Any, model: Any, optimizer: Any, iteration: int) -> None:
    calls.append(f"evaluate {iteration}")


def rl_inference_interface_shutdown() -> None:
    calls.append("shutdown")
