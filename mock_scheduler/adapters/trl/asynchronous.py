"""The proxy at the two seams of TRL's AsyncGRPOTrainer: the rollout worker's queue, and the transfer of weights.

    with AsyncRollouts(rollout_mock, args=args, processing_class=tokenizer, reward_funcs=rewards) as rollouts:
        trainer = AsyncGRPOTrainer(model, reward_funcs=rewards, args=args, ..., **rollouts.arguments())
        rollouts.attach(trainer)
        trainer.train()

Contract: a step is a fixed number of samples, in the order in which the trainer takes them; it is asked for with the
model version that the trainer has then. A replay gives each sample its recorded ``model_version``, so the trainer drops
as stale what it dropped before. Rewards and advantages are in the samples. Only the main process has a queue.
"""

from __future__ import annotations

import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from mock_scheduler.adapters.trl.description import TrlObject, describe_arguments, num_processes, read_sampling
from mock_scheduler.adapters.trl.rewards import name_of
from mock_scheduler.adapters.trl.samples import Sample, SampleCodec
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import ConfigError
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.build import build_scheduler, read_config
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.digests import JSON


class AsyncRollouts:
    """Records the samples that an asynchronous trainer takes, or gives it recorded ones.

    ``rollout_worker``, ``weight_transfer``: make the run's own, for the trainer; None: the trainer makes them. They are
    not called where every answer is replayed. ``samples_per_step``: of one recorded step; None: those of one optimizer
    step. The other arguments are those of ``Rollouts``.
    """

    def __init__(
        self,
        config: RolloutMockConfig | Mapping[str, object],
        *,
        args: TrlObject,
        processing_class: TrlObject,
        reward_funcs: TrlObject = (),
        contract: Mapping[str, JSON] | None = None,
        rollout_worker: Callable[[], TrlObject] | None = None,
        weight_transfer: Callable[[], TrlObject] | None = None,
        samples_per_step: int | None = None,
        ledger: Ledger | None = None,
        **options: TrlObject,
    ) -> None:
        checked = config if isinstance(config, RolloutMockConfig) else read_config(config)
        self.ledger = Ledger() if ledger is None else ledger
        self._replays = checked.modes_in_use == {"mock"}
        if self._replays and args.token_budget is None:
            raise ConfigError(
                "token_budget is not set: the trainer would ask the vLLM server for its limit, which a replay has not. "
                "Set AsyncGRPOConfig(token_budget=...) as it was when the run was recorded"
            )
        self._makers = {"rollout_worker": rollout_worker, "weight_transfer": weight_transfer}
        self._is_main = os.environ.get("RANK", "0") == "0"
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * num_processes()
        self._samples_per_step = samples_per_step or per_step
        self._trainer: TrlObject = None
        self._source: TrlObject = None
        self._version = 0
        self._next_step = 0
        self._taken: list[Sample] = []
        self._is_live = False
        self._timeout: float | None = None
        self._scheduler: ProxyScheduler | None = None
        if not self._is_main:
            return
        functions = [reward_funcs] if callable(reward_funcs) or isinstance(reward_funcs, str) else list(reward_funcs)
        described = describe_arguments(args, processing_class, [name_of(function) for function in functions])
        self._scheduler = build_scheduler(
            checked,
            lambda: self,
            {**described, "trl.samples_per_step": self._samples_per_step, **(contract or {})},
            ledger=self.ledger,
            codec=SampleCodec(sampling=read_sampling(args)),
            **options,
        )

    def arguments(self) -> dict[str, TrlObject]:
        """Return the arguments of AsyncGRPOTrainer that say where samples come from and weights go."""
        if self._replays:
            return {"rollout_worker": ReplayWorker(self), "weight_transfer": SuppressedTransfer(self.ledger)}
        return {name: make() for name, make in self._makers.items() if make is not None}

    def attach(self, trainer: TrlObject) -> None:
        """Stand between a trainer that was just built and its worker's queue."""
        self._trainer = trainer
        if self._is_main and not self._replays:
            self._source = trainer.rollout_queue
            trainer.rollout_queue = SampleQueue(self)

    def get_batch(self, request: RolloutRequest) -> list[Sample]:
        """Take the samples of a step from the worker's queue: the proxy's real scheduler.

        Raises ``queue.Empty`` where they do not come in time; those that came are kept for the next call.
        """
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while len(self._taken) < request.batch_size:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._taken.append(self._source.get(timeout=wait))
        taken, self._taken = self._taken, []
        self._is_live = True
        return taken

    def next_samples(self, timeout: float | None) -> list[Sample]:
        """Return the samples of the next step, of the worker or of the recording."""
        assert self._scheduler is not None  # the main process alone has a queue
        self._timeout, self._is_live = timeout, False
        request = RolloutRequest(
            global_step=self._next_step, batch_size=self._samples_per_step, policy_version=self.model_version
        )
        samples: list[Sample] = self._scheduler.get_batch(request)
        self._next_step += 1
        if not self._is_live:
            for sample in samples:
                sample.enqueued_at = None  # it lay in no queue of this run
        return samples

    @property
    def model_version(self) -> int:
        """The version of the weights, as the trainer counts it."""
        return self._version if self._trainer is None else int(self._trainer.model_version)

    def update_model_version(self, version: int) -> None:
        """Note a new version of the weights, which goes nowhere."""
        self._version = version
        if self._scheduler is not None:
            self._scheduler.update_weights(version)

    def num_waiting(self) -> int:
        """Count the samples that the worker has ready."""
        return len(self._taken) + (0 if self._source is None else int(self._source.qsize()))

    def close(self) -> None:
        """Write the rest, and raise any error of writing."""
        if self._scheduler is not None:
            self._scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._scheduler is not None:
            self._scheduler.__exit__(kind, error, traceback)


class SampleQueue:
    """What the trainer takes its samples from, in the place of the worker's own queue."""

    def __init__(self, owner: AsyncRollouts) -> None:
        self._owner = owner
        self._ready: deque[Sample] = deque()

    def get(self, block: bool = True, timeout: float | None = None) -> Sample:
        """Return the next sample; raises ``queue.Empty`` as a queue does."""
        if not self._ready:
            self._ready.extend(self._owner.next_samples(timeout if block else 0.0))
        return self._ready.popleft()

    def qsize(self) -> int:
        """Count the samples that are there."""
        return len(self._ready) + self._owner.num_waiting()


class ReplayWorker:
    """A rollout worker that starts nothing: its queue is the recording."""

    def __init__(self, owner: AsyncRollouts) -> None:
        self._owner = owner
        self.rollout_buffer = SampleQueue(owner)
        self.metrics_queue: queue.Queue[Any] = queue.Queue()

    def start(self) -> None:
        """Count what is not started."""
        self._owner.ledger.count("suppressed", "engine")

    def stop(self) -> None:
        """Nothing was started."""

    def update_model_version(self, model_version: int) -> None:
        """Pass the version on."""
        self._owner.update_model_version(model_version)

    def check_health(self, stale_after_s: float) -> None:
        """A recording is always well; a step that is missing says so itself."""


class SuppressedTransfer:
    """Takes weights and sends them nowhere."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def init_weight_transfer(self) -> None:
        """There is nobody to reach."""

    def pause(self) -> None:
        """There is no engine to pause."""

    def send_weights(self, iterator: Iterable[object]) -> None:
        """Go through the weights, since making them is collective, and count the transfer."""
        for _ in iterator:
            pass
        self._ledger.count("suppressed", "send_weights")

    def resume(self) -> None:
        """There is no engine to resume."""

    def destroy(self) -> None:
        """There is nothing to release."""
