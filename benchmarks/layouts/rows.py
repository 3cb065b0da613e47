"""Makes a rollout batch of random rows, to compare layouts without playing an episode."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from mock_scheduler.batch import RolloutBatch, SampleIdentity, SamplingParams, Termination, Trajectory
from pipelines.seeds import derive_seed

NUM_GROUPS, GROUP_SIZE = 4, 4
NUM_ACTIONS, VOCAB_SIZE = 4, 62
_UNIFORM_LOGPROB = -float(np.log(NUM_ACTIONS))


def random_batch(seed: int, *, longest: int, form: Literal["trajectory", "step"] = "trajectory") -> RolloutBatch:
    """Make 16 trajectories in 4 groups, of 1 to 4 turns and very different lengths, up to ``longest`` tokens.

    Every turn is an observation of random tokens and one action, with the logprob of a uniform policy. ``form``: one
    row per trajectory, or one per turn with everything before it as its prompt.
    """
    generator = np.random.Generator(np.random.Philox(key=derive_seed(seed, "layout-rows")))
    rows: list[Trajectory] = []
    for group in range(NUM_GROUPS):
        for member in range(GROUP_SIZE):
            rows += _random_rows(generator, group, member, longest=longest, form=form)
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
    return RolloutBatch.from_trajectories(rows, sampling=sampling, group_size=GROUP_SIZE)


def _random_rows(
    generator: np.random.Generator, group: int, member: int, *, longest: int, form: Literal["trajectory", "step"]
) -> list[Trajectory]:
    num_turns = int(generator.integers(1, 5))
    per_turn = int(generator.integers(3, longest // num_turns))
    tokens: list[int] = []
    for _ in range(num_turns):
        tokens += generator.integers(2 + NUM_ACTIONS, VOCAB_SIZE, per_turn - 1).tolist()
        tokens.append(int(generator.integers(2, 2 + NUM_ACTIONS)))
    reward = float(generator.integers(0, 2))
    turns_of_rows = [range(num_turns)] if form == "trajectory" else [range(turn, turn + 1) for turn in range(num_turns)]
    return [
        _row(
            tokens[: turns[-1] * per_turn + per_turn],
            [(turn + 1) * per_turn - 1 for turn in turns],
            identity=SampleIdentity(
                scheduler_id="default", group_id=group, episode_id=0, env_id=group * GROUP_SIZE + member, turn=turns[0]
            ),
            reward=reward if turns[-1] == num_turns - 1 else 0.0,
        )
        for turns in turns_of_rows
    ]


def _row(tokens: list[int], actions: list[int], *, identity: SampleIdentity, reward: float) -> Trajectory:
    """Make a row with actions at these positions; its last turn gets the reward."""
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    mask[actions] = True
    return Trajectory(
        identity=identity,
        tokens=torch.tensor(tokens, dtype=torch.int32),
        response_mask=mask,
        rollout_logprobs=torch.full((len(actions),), _UNIFORM_LOGPROB, dtype=torch.float32),
        turn_rewards=torch.tensor([0.0] * (len(actions) - 1) + [reward], dtype=torch.float32),
        policy_versions=torch.zeros(len(actions), dtype=torch.int32),
        termination=Termination.TERMINATED,
        prompt_length=actions[0],
        tag="random",
    )
