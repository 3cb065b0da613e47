"""What a step's learner decides besides the models: whose micro-batches, what goes on after a resume, differences."""

from __future__ import annotations

import math

import pytest
import torch

from pipelines.algorithm.kl import AdaptiveKl
from pipelines.algorithm.training_values import ValueMaker
from pipelines.batching.plan import MicroBatch
from pipelines.config.algorithm import CriticConfig
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.execution import Execution
from pipelines.megatron.layers.router_ledger import router_weight
from pipelines.megatron.learner import Learner, sum_and_max_difference
from pipelines.megatron.process_of_rank import Runtime
from pipelines.megatron.trainer import needs_reference
from tests.batches import make_batch
from tests.pipelines.step_plans import build_step_plan

HOST = torch.device("cpu")


def runtime(dp_rank: int, dp_size: int) -> Runtime:
    return Runtime(
        global_rank=dp_rank, world_size=dp_size, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, dp_rank=dp_rank,
        dp_size=dp_size, device=HOST,
    )  # fmt: skip


def micro_batches(config: PipelineConfig, *, count_multiple: int = 1) -> tuple[MicroBatch, ...]:
    batch = make_batch(4, 2)
    values = torch.zeros(int(batch.response_mask.sum()), dtype=torch.float64)
    plan = build_step_plan(batch, values, values, config.training, count_multiple=count_multiple, dtype=torch.float32)
    return plan.micro_batches


def config_of(**values: object) -> PipelineConfig:
    training = {"micro_batch_size": 2, "global_batch_size": 8, **dict(values.pop("training", {}))}  # type: ignore[call-overload]
    return PipelineConfig.model_validate({"exp_name": "x", "training": training, **values})


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_replicas_share_the_micro_batches_of_an_update_between_them(dp_size: int) -> None:
    batches = micro_batches(config_of())
    assert [batch.index for batch in batches] == [0, 1, 2, 3]
    owned = []
    for dp_rank in range(dp_size):
        learner = object.__new__(Learner)
        learner.runtime = runtime(dp_rank, dp_size)
        learner._execution = Execution.of_layout(learner.runtime)
        owned.append([own.batch.index for own in learner._owned(batches)])
    assert owned == [list(range(dp_rank, 4, dp_size)) for dp_rank in range(dp_size)]


@pytest.mark.parametrize(
    ("own", "saved", "expected"),
    [
        (AdaptiveKl(coef=0.5, target=0.1, horizon=64), AdaptiveKl(coef=0.7, target=0.1, horizon=64), 0.7),
        (AdaptiveKl(coef=0.5, target=0.1, horizon=64), AdaptiveKl(coef=0.7, target=0.2, horizon=64), 0.5),
        (AdaptiveKl(coef=0.5, target=0.1, horizon=64), AdaptiveKl(coef=0.7), 0.5),
        (AdaptiveKl(coef=0.5), AdaptiveKl(coef=0.0), 0.5),
    ],
    ids=["the same controller", "another target", "fixed before", "fixed now"],
)
def test_a_resumed_coefficient_goes_on_only_where_it_adapts_to_the_same_target(
    own: AdaptiveKl, saved: AdaptiveKl, expected: float
) -> None:
    """The checkpoint's controller replaced the configuration's: a run without KL went on without, whatever was set."""
    maker = ValueMaker(config_of())
    maker.kl_controller = own
    maker.load_state_dict({"kl_in_reward": dict(saved.state_dict())})
    assert maker.kl_controller == AdaptiveKl(coef=expected, target=own.target, horizon=own.horizon)


def test_the_policys_schedule_ends_with_the_run_where_the_critic_is_trained_alone_first() -> None:
    """It counted the critic's steps as its own, and never came to its end."""
    config = config_of(
        adv_estimator="gae", max_steps=5, rollout_batch_size=128, critic=CriticConfig(warmup_steps=2), ppo_epochs=2
    )
    per_step = 2 * 128 // 8
    assert config.updates_per_step == per_step
    assert config.first_policy_step == 2
    assert config.lr_decay_updates(first_step=2) == 3 * per_step
    assert config.lr_decay_updates(first_step=0) == 5 * per_step
    assert config_of().first_policy_step == 0
    assert config_of(training={"lr_decay_iters": 7}).lr_decay_updates(first_step=2) == 7


def test_a_reference_is_there_for_a_kl_in_loss_or_reward_alone() -> None:
    assert not needs_reference(config_of())
    assert needs_reference(config_of(use_kl_loss=True))
    assert needs_reference(config_of(kl_in_reward={"coef": 0.1}))


def test_means_of_micro_batches_count_those_that_have_rows() -> None:
    """They were divided by response tokens, whatever the loss was divided by."""
    config = config_of()
    batches = micro_batches(config, count_multiple=8)
    assert len(batches) == 8
    assert router_weight(batches, config.training, num_tokens=21.0) == 21.0
    means = config.training.model_copy(update={"calculate_per_token_loss": False})
    assert router_weight(batches, means, num_tokens=21.0) == 4.0


def test_sum_and_largest_difference_count_response_tokens_alone() -> None:
    one = torch.tensor([[0.0, -1.0, math.inf], [-2.0, -3.0, 0.0]])
    other = torch.tensor([[5.0, -1.5, 0.0], [-2.25, -3.0, 0.0]])
    mask = torch.tensor([[False, True, False], [True, True, False]])
    assert sum_and_max_difference(one, other, mask).tolist() == [0.75, 0.5]
    assert sum_and_max_difference(one, other, torch.zeros_like(mask)).tolist() == [0.0, 0.0]
