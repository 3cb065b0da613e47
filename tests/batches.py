"""Small batches for the tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mock_scheduler.batch import RolloutBatch, SampleIdentity, SamplingParams, Termination, Trajectory

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")


def make_identity(group_id: int, env_id: int, *, turn: int = 0) -> SampleIdentity:
    return SampleIdentity(scheduler_id="default", group_id=group_id, episode_id=0, env_id=env_id, turn=turn)


def make_row(
    group_id: int = 0,
    env_id: int = 0,
    *,
    tokens: Sequence[int] = (1, 2, 3, 4),
    response: Sequence[bool] = (False, False, True, True),
    rollout_logprobs: Sequence[float] = (-0.5, -0.25),
    turn_rewards: Sequence[float] = (0.0, 1.0),
    prompt_length: int = 2,
    tag: str = "FrozenLake",
    turn: int = 0,
) -> Trajectory:
    return Trajectory(
        identity=make_identity(group_id, env_id, turn=turn),
        tokens=torch.tensor(tokens, dtype=torch.int32),
        response_mask=torch.tensor(response, dtype=torch.bool),
        rollout_logprobs=torch.tensor(rollout_logprobs, dtype=torch.float32),
        turn_rewards=torch.tensor(turn_rewards, dtype=torch.float32),
        policy_versions=torch.zeros(len(turn_rewards), dtype=torch.int32),
        termination=Termination.TERMINATED,
        prompt_length=prompt_length,
        tag=tag,
    )


def make_rows(num_groups: int, group_size: int, *, seed: int = 0) -> list[Trajectory]:
    """Rows of different lengths and content, in identity order."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(num_groups * group_size):
        length = 3 + index % 4
        logprobs = (-torch.randn(length - 2, generator=generator).abs()).tolist()
        rows.append(
            make_row(
                index // group_size,
                index % group_size,
                tokens=torch.randint(0, 1000, (length,), generator=generator).tolist(),
                response=[False, False] + [True] * (length - 2),
                rollout_logprobs=logprobs,
                turn_rewards=torch.randn(1 + index % 2, generator=generator).tolist(),
            )
        )
    return rows


def make_batch(num_groups: int = 2, group_size: int = 2, *, seed: int = 0) -> RolloutBatch:
    rows = make_rows(num_groups, group_size, seed=seed)
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=group_size)
