"""The trainer modes ``mock_sync``, ``mock_colocate_async`` and ``mock_separate_async`` of verl's V1 trainer.

    VERL_USE_EXTERNAL_MODULES=mock_scheduler.adapters.verl.v1 MOCK_SCHEDULER_VERL=mock.yaml \\
        python -m verl.trainer.main_ppo ... trainer.v1.trainer_mode=mock_sync

Contract: each is verl's own trainer of that name, whose sampler records, replays, or lets live batches through. A run
that only replays starts no engine, sends no weights, and rolls no prompt out, while the data loader goes on as in a
live run. Without this module verl refuses the names, and so nothing runs live by mistake. It is the plugin as well
(``suppress``), whether or not verl finds that by its entry point.
"""

from __future__ import annotations

from typing import Any, ClassVar

from omegaconf import DictConfig, open_dict
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.trainer.ppo.v1.trainer_colocate_async import PPOTrainerColocateAsync
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode, PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from mock_scheduler.adapters.transfer_queue import queue
from mock_scheduler.adapters.verl.suppress import prepare_process, tell_suppressed, this_process
from mock_scheduler.adapters.verl.v1_rollouts import V1Rollouts
from mock_scheduler.adapters.verl.v1_sampler import RecordedBuffer
from mock_scheduler.adapters.verl.v1_suppress import (
    NoAgentLoops,
    quiet,
    read_prompts,
    refuse_two_recorders,
    refuse_unrecorded,
)

prepare_process()


class _Recorded(PPOTrainer):  # type: ignore[misc]
    """What the trainers below have before verl's own. ``_mode``: verl's name of it."""

    _mode: ClassVar[str]

    def __init__(self, config: DictConfig) -> None:
        # verl asks the configuration for its own name in many places.
        with open_dict(config):
            config.trainer.v1.trainer_mode = self._mode
        refuse_unrecorded(config)
        refuse_two_recorders(config)
        self.rollouts = V1Rollouts(
            config,
            mode=self._mode,
            refill=self._add_prompts_to_generate,
            num_val_batches=lambda: len(self.val_dataloader),
            ledger=this_process().ledger,
        )
        self.rollouts.begin()  # another run's recording is refused before anything starts
        self._replays = self.rollouts.is_replay_only and not self.rollouts.settings.with_engines
        if self._replays:
            quiet(config, self.rollouts.ledger)
        super().__init__(config)

    def _build_replay_buffer(self) -> RecordedBuffer:
        return RecordedBuffer(super()._build_replay_buffer(), self.rollouts)

    def _setup(self) -> None:
        if not self._replays:
            super()._setup()
            return
        self._enable_hybrid_replicas = False  # no worker has an end of an engine, in whichever environment it runs
        with open_dict(self.config):
            self.config.actor_rollout_ref.rollout.checkpoint_engine.backend = "naive"  # each actor makes one
        self._set_up_without_engines()

    def _set_up_without_engines(self) -> None:
        super()._setup()

    def fit(self, agent_loop_manager: Any) -> None:  # noqa: ANN401 - verl's
        if self.rollouts.is_replay_only:
            # Agent loops that are there, beside engines, are not asked.
            agent_loop_manager = NoAgentLoops()
            agent_loop_manager.drew = lambda prompts: self.rollouts.drew(prompts, "val")
        with self.rollouts:
            super().fit(agent_loop_manager)
            tell_suppressed()

    def _next_train_batch(self, num_prompts: int | None = None) -> Any:  # noqa: ANN401 - a TensorDict
        batch = super()._next_train_batch(num_prompts)
        self.rollouts.drew(read_prompts(batch))
        return batch

    def _add_prompts_to_generate(self, num_prompts: int) -> Any:  # noqa: ANN401 - verl's
        self.rollouts.num_refilled += num_prompts
        return super()._add_prompts_to_generate(num_prompts)

    def _submit_batch_to_rollout(self, batch: Any) -> Any:  # noqa: ANN401 - a TensorDict; a number
        if not self.rollouts.is_replay_only:
            return super()._submit_batch_to_rollout(batch)
        self.rollouts.ledger.count("suppressed", "rollouts")
        return len(batch)

    def _add_async_warmup_batches(self, num_warmup_batches: int | float) -> None:
        # Prompts in flight when a checkpoint was saved were drawn before it; those of a replay are in no queue.
        if not self.rollouts.is_replay_only or self.global_steps == 1:
            super()._add_async_warmup_batches(num_warmup_batches)

    def _reissue_inflight_prompts(self, partition_id: str = "train") -> Any:  # noqa: ANN401 - a number
        if not self.rollouts.is_replay_only:
            return super()._reissue_inflight_prompts(partition_id)
        queue.clear_partition(partition_id)
        return 0


@register_trainer("mock_sync")
class RecordedSync(_Recorded, PPOTrainerSync):  # type: ignore[misc]
    """``sync`` with recorded rollouts."""

    _mode = "sync"


@register_trainer("mock_colocate_async")
class RecordedColocateAsync(_Recorded, PPOTrainerColocateAsync):  # type: ignore[misc]
    """``colocate_async`` with recorded rollouts."""

    _mode = "colocate_async"


@register_trainer("mock_separate_async")
class RecordedSeparateAsync(_Recorded, PPOTrainerSeparateAsync):  # type: ignore[misc]
    """``separate_async`` with recorded rollouts."""

    _mode = "separate_async"

    def _set_up_without_engines(self) -> None:
        PPOTrainer._setup(self)  # its own class would start the engines that are not colocated
        self.standalone_server_manager = self.llm_server_manager
        self.standalone_checkpoint_manager = self.checkpoint_manager
        self.current_mode = HybridEngineMode.TRAINER
