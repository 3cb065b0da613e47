"""Which episodes a request plays, in which blocks, on which replica, and by which numbers."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from mock_scheduler.batch import SampleIdentity
from mock_scheduler.scheduler import RolloutRequest
from pipelines.config.schema import PipelineConfig
from pipelines.environments.seeds import derive_uniform, environment_seed
from pipelines.megatron.process_of_rank import Runtime
from pipelines.rollout.engine import sampling_uniform
from pipelines.rollout.plan import cut_blocks, own_blocks, plan_episodes

CONFIG = PipelineConfig.model_validate(
    {
        "exp_name": "plan",
        "seed": 9,
        "rollout_batch_size": 12,
        "val_batch_size": 12,
        "training": {"global_batch_size": 12, "micro_batch_size": 1},
        "train_env_manager": {"num_env_groups": 3, "group_size": 2, "tags": ["Plain", "Random"]},
        "val_env_manager": {"num_env_groups": 3, "group_size": 2, "tags": ["Random", "Plain"]},
        "custom_envs": {
            "Plain": {"env_type": "sokoban"},
            "Random": {"env_config": {"map_name": None, "held_out_fraction": 0.25}},
        },
    }
)


def request(mode: Literal["train", "val"], step: int) -> RolloutRequest:
    return RolloutRequest(global_step=step, batch_size=12, mode=mode, policy_version=0)


def test_training_episodes_are_numbered_through_the_run_by_episode_group_and_member() -> None:
    plans = plan_episodes(CONFIG, request("train", 3))
    numbers = [(plan.identity.episode_id, plan.identity.group_id, plan.identity.env_id) for plan in plans]
    assert numbers == [
        (6, 0, 0), (6, 0, 1), (6, 1, 2), (6, 1, 3), (6, 2, 4), (6, 2, 5),
        (7, 0, 0), (7, 0, 1), (7, 1, 2), (7, 1, 3), (7, 2, 4), (7, 2, 5),
    ]  # fmt: skip
    assert [plan.tag for plan in plans[:6]] == ["Plain", "Plain", "Random", "Random", "Plain", "Plain"]
    assert {plan.split for plan in plans} == {"train"}


def test_validation_plays_the_same_episodes_in_every_step_and_held_out_layouts_where_there_are_any() -> None:
    plans = plan_episodes(CONFIG, request("val", 0))
    assert plans == plan_episodes(CONFIG, request("val", 7))
    assert [plan.identity.episode_id for plan in plans] == [0] * 6 + [1] * 6
    assert {plan.tag: plan.split for plan in plans} == {"Random": "held_out", "Plain": "all"}


def test_the_members_of_a_group_share_their_seed() -> None:
    plans = plan_episodes(CONFIG, request("train", 0))
    expected = environment_seed(9, tag="Random", mode="train", scheduler_id="default", group_id=1, episode_id=0)
    assert [plan.seed for plan in plans[2:4]] == [expected, expected]
    assert len({plan.seed for plan in plans}) == 6


def test_blocks_are_cut_before_they_are_dealt_to_replicas() -> None:
    plans = plan_episodes(CONFIG, request("train", 0))
    blocks = cut_blocks(plans, rows_per_forward=5)
    assert [len(block) for block in blocks] == [5, 5, 2]
    assert [plan for block in blocks for plan in block] == plans
    dealt = {
        dp_size: [own_blocks(blocks, replica(dp_rank, dp_size)) for dp_rank in range(dp_size)] for dp_size in (1, 2, 4)
    }
    assert dealt[1] == [blocks]
    assert dealt[2] == [[blocks[0], blocks[2]], [blocks[1]]]
    assert dealt[4] == [[blocks[0]], [blocks[1]], [blocks[2]], []]


def replica(dp_rank: int, dp_size: int) -> Runtime:
    return Runtime(
        global_rank=dp_rank, world_size=dp_size, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, dp_rank=dp_rank,
        dp_size=dp_size, device=torch.device("cpu"),
    )  # fmt: skip


@pytest.mark.parametrize(("token_index", "names"), [(0, ()), (1, (1,)), (2, (2,))])
def test_a_turns_first_number_is_named_by_its_turn_alone(token_index: int, names: tuple[int, ...]) -> None:
    """So that what was recorded with one token per turn stays reproducible."""
    uniform = sampling_uniform(5, "val")
    identity = SampleIdentity(scheduler_id="s", group_id=1, episode_id=2, env_id=3, turn=0)
    expected = derive_uniform(5, "sampling", "val", "s", 1, 2, 3, 4, *names)
    assert uniform(identity, 4, token_index) == expected
