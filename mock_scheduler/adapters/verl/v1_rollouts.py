"""The rollouts of a run of verl's V1 trainer: one proxy, before whatever samples out of the TransferQueue.

Contract: live, the batch that verl sampled is returned as it is. A replay writes the recorded rows into the queue under
their own keys and tags, gives them in their recorded order, and samples nothing. It draws as many prompts anew as the
recorded rollout did where groups were filtered out. Rows replayed in another step than their own state its versions.
This module imports no verl.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np
from omegaconf import DictConfig, OmegaConf

from mock_scheduler.adapters.imports.verl_v1 import VERL_NAMES
from mock_scheduler.adapters.settings import describe_keys
from mock_scheduler.adapters.transfer_queue import queue
from mock_scheduler.adapters.transfer_queue.codec import QueueCodec, QueueRows, read_notes
from mock_scheduler.adapters.verl.description import describe_run, group_sizes, read_sampling
from mock_scheduler.adapters.verl.settings import VARIABLE, VerlSettings, load_settings
from mock_scheduler.adapters.verl.suppress import show_lines, this_process
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import ConfigError
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.build import build_scheduler
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.scheduler import Mode, RolloutRequest
from mock_scheduler.support.digests import JSON

#: A ``KVBatchMeta``, and what the sampler measured.
Sampled: TypeAlias = tuple[Any, dict[str, Any]]

#: Keys of trainer V1 that a replay must share, besides those of any run.
_CONTRACT = (
    *("algorithm.filter_groups.enable", "algorithm.filter_groups.metric"),
    *(
        f"trainer.v1.sampler.{name}"
        for name in ("max_off_policy_threshold", "max_off_policy_strategy", "sync_refill_failed_groups")
    ),
)
#: Tags that count policies by the trainer's steps.
_STEP_TAGS = ("global_steps", "min_global_steps", "max_global_steps")


class V1Codec(QueueCodec):
    """Rows of verl, trained on or of a validation.

    The trainer's prompts count only where the step replayed is the one asked for: another one has others.
    """

    def __init__(self, config: DictConfig) -> None:
        sampling = read_sampling(config)
        super().__init__(VERL_NAMES, sampling=sampling["train"])
        self._of_validation = QueueCodec(VERL_NAMES, sampling=sampling["val"])

    def encode(self, native: QueueRows, request: RolloutRequest) -> RolloutBatch:
        """Gives the batch; raises ``BatchError`` listing every row that contradicts itself or cannot be kept."""
        if request.mode == "val":
            return self._of_validation.encode(native, request)
        return super().encode(native, request)

    def prompt_problems(self, batch: RolloutBatch, request: RolloutRequest) -> list[str]:
        """List the prompts of the batch that the trainer did not draw."""
        is_own = read_notes(batch).get("step", request.global_step) == request.global_step
        return super().prompt_problems(batch, request) if is_own else []

    def count_problems(self, batch: RolloutBatch, request: RolloutRequest) -> list[str]:
        """List what is wrong with the number of rollouts: less than all may have ended well."""
        if batch.num_trajectories <= request.batch_size:
            return []
        return [f"the batch has {batch.num_trajectories} rollouts; {request.batch_size} were asked for"]


class V1Rollouts:
    """The rollouts of one run.

    Args:
        config: verl's whole configuration.
        mode: of the trainer: sync, colocate_async or separate_async.
        refill: draws so many prompts more; ``None``: nobody draws in a replay.
        num_val_batches: tells how many batches a validation has; asked when one is sampled.
        settings: of the file; ``None``: it is read.
        store: reads rows out of the TransferQueue, and puts them into it.
    """

    def __init__(
        self,
        config: DictConfig,
        *,
        mode: str,
        refill: Callable[[int], object] | None,
        num_val_batches: Callable[[], int],
        settings: VerlSettings | None = None,
        ledger: Ledger | None = None,
        store: Any = queue,  # noqa: ANN401 - what has fetch and put
    ) -> None:
        self.settings = load_settings() if settings is None else settings
        self.mock = self.settings.mock_config()
        self.ledger = Ledger() if ledger is None else ledger
        self.play: Callable[[], Sampled] | None = None
        self.sampled: Sampled | None = None
        self.global_steps, self.num_refilled = 0, 0
        self.store = store
        self._config, self._mode, self._refill = config, mode, refill
        self._num_val_batches = num_val_batches
        self._per_step = int(OmegaConf.select(config, _per_step_key(mode)) or 1)
        self._scheduler: ProxyScheduler | None = None
        self._drawn: dict[Mode, list[object] | None] = {"train": None, "val": None}
        self._last: dict[Mode, tuple[int, int]] = {}

    @property
    def is_replay_only(self) -> bool:
        """Whether no rollout of this run is ever played."""
        return self.settings.is_replay

    def begin(self) -> ProxyScheduler:
        """Make the proxy, which refuses another run's recording; a second call gives the same one.

        Raises ``ConfigError`` where only some steps would be replayed, or a key of the settings is another trainer's.
        """
        if self._scheduler is None:
            if "real" in self.settings.model_fields_set:
                raise ConfigError(
                    f"real: {self.settings.real} of {VARIABLE} names the manager that plays for trainer V0; V1 plays "
                    "by its own, or by actor_rollout_ref.rollout.agent.agent_loop_manager_class. Take real out"
                )
            show_lines()
            this_process().has_proxy = True
            modes = self.mock.modes_in_use
            if "cache" in modes or ("mock" in modes and not self.is_replay_only):
                raise ConfigError(
                    f"rollout_mock has the modes {', '.join(sorted(modes))}: trainer V1 rolls prompts out before it "
                    "samples, so that a run replays all of its steps (mode mock) or none"
                )
            self._scheduler = build_scheduler(
                self.mock,
                lambda: _Live(self),
                {**describe_configuration(self._config, self._mode), **self.settings.contract},
                codec=V1Codec(self._config),
                ledger=self.ledger,
                resume=self.settings.resume,
                provenance={"framework": "verl"},
            )
        return self._scheduler

    def drew(self, prompts: Sequence[object], kind: Mode = "train") -> None:
        """Note prompts that the trainer drew, in their order."""
        self._drawn[kind] = [*(self._drawn[kind] or ()), *prompts]

    def sample(self, play: Callable[..., Sampled], *, global_steps: int, partition_id: str, batch_size: int) -> Sampled:
        """Answer a call of ``ReplayBuffer.sample``; ``play``: that method of verl's own sampler."""
        kind: Mode = "val" if partition_id == "val" else "train"
        prompts, self._drawn[kind] = self._drawn[kind], None
        request = self._request(kind, global_steps, batch_size, prompts)
        self.sampled, self.global_steps, self.num_refilled = None, global_steps, 0
        self.play = partial(play, global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        scheduler = self.begin()
        rows: QueueRows = scheduler.get_batch(request)
        num_refilled = rows.notes.get("refilled")
        if self.sampled is None and isinstance(num_refilled, int) and num_refilled and self._refill is not None:
            self._refill(num_refilled)
        self._drawn[kind] = None  # what was drawn while sampling is of no later batch
        if self.sampled is not None:
            scheduler.state_dict()  # returns when the step is on disk: a sampler is not told that the run ends
            return self.sampled
        metrics: Any = rows.notes.get("metrics", {})
        return self.store.put(_restate(rows, global_steps)), dict(metrics)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Write the rest; raises ``ConfigError`` where a replay ended well and replayed nothing."""
        if self._scheduler is not None:
            self._scheduler.__exit__(kind, error, traceback)
        if kind is None and self.is_replay_only and not self._last:
            raise ConfigError(
                "the run ended, and no step was replayed. verl resumes the last checkpoint that it finds in "
                "trainer.default_local_dir (trainer.resume_mode=auto): give the replay a folder of its own, or set "
                "trainer.resume_mode=disable"
            )

    def _request(
        self, kind: Mode, global_steps: int, num_prompts: int, prompts: Sequence[object] | None
    ) -> RolloutRequest:
        """A step is an update of the actor, counted from 1 as verl's steps are, or a batch of a validation."""
        last, place = self._last.get(kind, (-1, 0))
        place = place + 1 if last == global_steps else 0
        self._last[kind] = global_steps, place
        is_training = kind == "train"
        group_size = group_sizes(self._config)[kind]
        before = (global_steps - 1) * self._per_step + 1 if is_training else global_steps * self._num_val_batches()
        return RolloutRequest(
            global_step=before + place,
            batch_size=num_prompts * group_size,
            mode=kind,
            # Weights are sent after each step, with its number.
            policy_version=global_steps - 1 if is_training else global_steps,
            # verl trains on what is left where a rollout failed.
            has_open_size=True,
            prompts=prompts,
        )


class _Live:
    """verl's own sampling as a rollout scheduler."""

    def __init__(self, owner: V1Rollouts) -> None:
        self._owner = owner
        self._metrics: dict[str, float] = {}

    def get_batch(self, request: RolloutRequest) -> QueueRows:
        """Sample, and read the rows."""
        owner = self._owner
        assert owner.play is not None  # set before each request
        owner.sampled = owner.play()
        batch, measured = owner.sampled
        self._metrics = {
            str(name): float(value)
            for name, value in measured.items()
            if isinstance(value, int | float | np.number) and math.isfinite(value)
        }
        notes: dict[str, object] = {
            "step": request.global_step,
            "global_steps": owner.global_steps,
            "refilled": owner.num_refilled,
            "metrics": dict(measured),
        }
        rows: QueueRows = owner.store.fetch(batch, notes)
        return rows

    def collect_metrics(self) -> dict[str, float]:
        """Give the numbers that the sampler measured."""
        return self._metrics


def _restate(rows: QueueRows, global_steps: int) -> QueueRows:
    """The rows as they would be after a live rollout of this step: versions count as many steps later."""
    recorded = rows.notes.get("global_steps", global_steps)
    later = global_steps - recorded if isinstance(recorded, int) else 0
    if not later:
        return rows
    tags = [
        {name: value + later if name in _STEP_TAGS and type(value) is int else value for name, value in tag.items()}
        for tag in rows.tags
    ]
    return replace(rows, tags=tags)


def describe_configuration(config: DictConfig, mode: str) -> dict[str, JSON]:
    """Describe what a replay must share with its recording."""
    keys = (*_CONTRACT, _per_step_key(mode))
    return {"verl.trainer.v1.trainer_mode": mode, **describe_keys(config, keys, "verl"), **describe_run(config)}


def _per_step_key(mode: str) -> str:
    return f"trainer.v1.{mode}.parameter_sync_step"
