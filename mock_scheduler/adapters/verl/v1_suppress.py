"""What else trainer V1 must not start where its rollouts are replayed: agent loops, and reward models.

Contract: verl's configuration is changed in place, as verl itself changes it, so that the runner, which has the same
object, makes no agent loops either. What is suppressed is counted in the ledger. A reward model scores what was rolled
out: its scores are in the rows, and it gets no GPUs. All else is the plugin's (``suppress``). This module imports no
verl.
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


def refuse_two_recorders(config: DictConfig) -> None:
    """Raise ``ConfigError`` where a trainer of ours has a sampler of ours: each step would be recorded twice."""
    path = str(OmegaConf.select(config, "trainer.v1.sampler.custom_sampler.path") or "")
    if path.endswith("mock_scheduler.adapters.verl.v1_sampler"):
        raise ConfigError(
            f"trainer.v1.sampler.custom_sampler.path is {path}, and a trainer mode mock_… records and replays by "
            "itself: take custom_sampler out"
        )


def quiet(config: DictConfig, ledger: Ledger) -> None:
    """Change a configuration so that nothing is started that only rollouts need."""
    with open_dict(config):
        agent = config.actor_rollout_ref.rollout.agent
        agent.agent_loop_manager_class = _AGENT_LOOPS
        if config.reward.reward_model.enable:
            ledger.count("suppressed", "reward_model")
            config.reward.reward_model.enable = config.reward.reward_model.enable_resource_pool = False


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
