"""The samplers of verl's V1 trainer, with recorded rollouts, for ``trainer.v1.sampler.custom_sampler``:

    path: pkg://mock_scheduler.adapters.verl.v1_sampler
    name: RecordedReplayBuffer        (RecordedReplayBufferAsync: trainer modes colocate_async, separate_async)

They record under any trainer of verl. A replay needs the trainer modes of ``mock_scheduler.adapters.verl.v1``, since a
sampler is made beside engines that run: under another trainer it is refused before any of them starts.
"""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from mock_scheduler.adapters.verl.suppress import check_process
from mock_scheduler.adapters.verl.v1_rollouts import Sampled, V1Rollouts
from mock_scheduler.adapters.verl.v1_suppress import refuse_unrecorded
from mock_scheduler.errors import ConfigError


class RecordedBuffer:
    """A sampler of verl's own, with rollouts before it. All else is the sampler's."""

    def __init__(self, real: Any, rollouts: V1Rollouts) -> None:  # noqa: ANN401 - a ReplayBuffer
        self._real, self._rollouts = real, rollouts

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Sampled:
        """Answer by the rollouts."""
        return self._rollouts.sample(
            self._real.sample, global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of a ReplayBuffer
        return getattr(self._real, name)


class _Recorded:
    """What the two classes below have before verl's own."""

    _mode: str

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - verl's
        refill = options["refill_fn"]
        trainer: Any = getattr(refill, "__self__", None)
        if trainer is None:
            raise ConfigError(
                "refill_fn is no method of a trainer, whose configuration is needed: this release of verl"
            )
        rollouts = V1Rollouts(
            trainer.config,
            mode=str(options["trainer_mode"]),
            refill=None,  # its engines run, and draw for themselves
            num_val_batches=lambda: len(trainer.val_dataloader),
        )
        mode = options["trainer_mode"]
        remedy = f"take custom_sampler out, and set trainer.v1.trainer_mode=mock_{mode}"
        if "mock" in rollouts.mock.modes_in_use and not rollouts.settings.with_engines:
            raise ConfigError(
                f"rollout_mock has mode mock, and trainer.v1.trainer_mode={mode} would start engines beside it: "
                f"{remedy}; or with_engines: true where they are meant to run"
            )
        check_process(rollouts.settings)
        refuse_unrecorded(trainer.config)
        if OmegaConf.select(trainer.config, "algorithm.filter_groups.enable"):
            raise ConfigError(
                f"algorithm.filter_groups.enable is true, and verl tells no custom sampler of it: {remedy}, which "
                "records as well"
            )

        def refill_and_count(num_prompts: int) -> object:
            rollouts.num_refilled += num_prompts
            return refill(num_prompts)

        super().__init__(**{**options, "refill_fn": refill_and_count})
        rollouts.begin()
        self._rollouts = rollouts

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Sampled:
        """Answer by the rollouts."""
        real: Any = super()
        return self._rollouts.sample(
            real.sample, global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
        )


class RecordedReplayBuffer(_Recorded, ReplayBuffer):  # type: ignore[misc]
    """``ReplayBuffer`` with recorded rollouts."""


class RecordedReplayBufferAsync(_Recorded, ReplayBufferAsync):  # type: ignore[misc]
    """``ReplayBufferAsync`` with recorded rollouts."""
