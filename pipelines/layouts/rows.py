"""A rollout batch of random rows, so that layouts can be compared without playing any episode."""

from __future__ import annotations

import numpy as np
import torch

from mock_scheduler.batch import RolloutBatch, SampleIdentity, SamplingParams, Termination, Trajectory
from pipelines.seeds import derive_seed

NUM_GROUPS, GROUP_SIZE = 4, 4
NUM_ACTIONS, VOCAB_SIZE = 4, 62


def random_batch(seed: int, *, longest: int) -> RolloutBatch:
    """16 rows in 4 groups, of 1 to 4 turns and very different lengths, up to ``longest`` tokens.

    Every turn is an observation of random tokens and one action; the logprobs are those of a uniform policy.
    """
    generator = np.random.Generator(np.random.Philox(key=derive_seed(seed, "layout-rows")))
    rows = [
        _random_row(generator, group, member, longest=longest)
        for group in range(NUM_GROUPS)
        for member in range(GROUP_SIZE)
    ]
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
    return RolloutBatch.from_trajectories(rows, sampling=sampling, group_size=GROUP_SIZE)


def _random_row(generator: np.random.Generator, group: int, member: int, *, longest: int) -> Trajectory:
    num_turns = int(generator.integers(1, 5))
    per_turn = int(generator.integers(3, longest // num_turns))
    tokens: list[int] = []
    mask: list[bool] = []
    for _ in range(num_turns):
        tokens += [*generator.integers(2 + NUM_ACTIONS, VOCAB_SIZE, per_turn - 1).tolist(), 0]
        tokens[-1] = int(generator.integers(2, 2 + NUM_ACTIONS))
        mask += [False] * (per_turn - 1) + [True]
    rewards = [0.0] * (num_turns - 1) + [float(generator.integers(0, 2))]
    return Trajectory(
        identity=SampleIdentity(
            scheduler_id="default", group_id=group, episode_id=0, env_id=group * GROUP_SIZE + member, turn=0
        ),
        tokens=torch.tensor(tokens, dtype=torch.int32),
        response_mask=torch.tensor(mask),
        rollout_logprobs=torch.full((num_turns,), -float(np.log(NUM_ACTIONS)), dtype=torch.float32),
        turn_rewards=torch.tensor(rewards, dtype=torch.float32),
        policy_versions=torch.zeros(num_turns, dtype=torch.int32),
        termination=Termination.TERMINATED,
        prompt_length=per_turn - 1,
        tag="random",
    )
