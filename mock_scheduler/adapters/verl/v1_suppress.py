"""What else must not start where V1's rollouts are replayed: engines, weights sent to them, agent loops, rewards.

Contract: verl's configuration is changed in place, as verl itself changes it, so that the runner, which has the same
object, makes no agent loops either. What is suppressed is counted in the ledger. Reward models and teachers score
what was rolled out: their scores are in the rows, and they are not started. This module imports no verl.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf, open_dict

from mock_scheduler.adapters.transfer_queue import queue
from mock_scheduler.errors import ConfigError, SchedulerError
from mock_scheduler.ledger import Ledger

_AGENT_LOOPS = f"{__name__}.NoAgentLoops"


def refuse_unrecorded(config: DictConfig) -> None:
    """Raise ``ConfigError`` where a value is made behind the sampler, or prompts are drawn beside it."""
    reward_model = OmegaConf.select(config, "reward.reward_model")
    if reward_model is not None and reward_model.enable and not reward_model.enable_resource_pool:
        raise ConfigError(
            "reward.reward_model.enable_resource_pool is false: such a reward model scores rows after they were "
            "sampled, so that their scores are not recorded. Give it a resource pool of its own"
        )
    if OmegaConf.select(config, "distillation.enabled"):
        raise ConfigError(
            "distillation.enabled is true: a replay would start the teachers. Set it to false, or leave mock_… out of "
            "trainer.v1.trainer_mode"
        )
    if OmegaConf.select(config, "trainer.v1.separate_async.hybrid_rollout.enable_switch"):
        raise ConfigError(
            "trainer.v1.separate_async.hybrid_rollout.enable_switch is true: it draws prompts by the time that "
            "rollouts take, which no replay does again. Set it to false"
        )
    if OmegaConf.select(config, "skip.rollout_tq.enable"):
        raise ConfigError("skip.rollout_tq.enable is true, and rollouts are recorded or replayed here: set it to false")


def quiet(config: DictConfig, ledger: Ledger) -> None:
    """Change a configuration so that nothing is started that only rollouts need."""
    with open_dict(config):
        agent = config.actor_rollout_ref.rollout.agent
        agent.agent_loop_manager_class = _AGENT_LOOPS
        config.reward.num_workers = 0
        if config.reward.reward_model.enable:
            ledger.count("suppressed", "reward_model")
            config.reward.reward_model.enable = config.reward.reward_model.enable_resource_pool = False


class NoReplica:
    """Stands for a class of engines; none is ever made."""

    def __init__(self, *_arguments: object, **_options: object) -> None:
        raise SchedulerError("verl starts an engine in a run that only replays: its trainer was not set up as it was")


class NoWeightUpdates:
    """Stands for a manager of engines' weights: there are no engines."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.replicas: list[object] = []

    def update_weights(self, global_steps: int | None = None) -> dict[str, float]:
        """Count the call: weights of a replay are nobody's to sample with."""
        del global_steps
        self._ledger.count("suppressed", "update_weights")
        return {}

    def sleep_replicas(self) -> None:
        """Do nothing."""

    def resume_generation_replicas(self) -> None:
        """Do nothing."""

    def abort_replicas(self, reject_request: bool = False) -> None:
        """Do nothing."""


class NoAgentLoops:
    """Stands for the manager of agent loops. ``drew``: is told the prompts of a validation."""

    drew: Callable[[Sequence[object]], None] | None = None

    @classmethod
    def create(cls, *_arguments: object, **_options: object) -> Self:
        """Make one, without any worker."""
        return cls()

    def generate_sequences(self, prompts: Any) -> None:  # noqa: ANN401 - a TensorDict
        """Roll out nothing: a validation's prompts, which wait in the queue, are taken out of it."""
        if self.drew is None:
            raise SchedulerError("verl sends prompts to agent loops in a run that only replays, before it trains")
        self.drew(read_prompts(prompts))
        queue.clear(list(prompts["uid"]), "val")


def read_prompts(batch: Any) -> list[object]:  # noqa: ANN401 - a TensorDict
    """Read the prompts of a batch that verl drew, in their order."""
    return [getattr(prompt, "data", prompt) for prompt in batch["raw_prompt"]]
