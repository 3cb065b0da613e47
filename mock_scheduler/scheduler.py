"""The seam: what the training loop asks a rollout scheduler for, in every mode.

Contract: the loop sees only ``RolloutScheduler``, or ``AsyncRolloutScheduler`` where it is asynchronous. Any object
with ``get_batch`` can stand behind it: what it lacks is answered here, in ``scheduler_methods``, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.schema import Mode as Mode
from mock_scheduler.digests import JSON as JSON
from mock_scheduler.errors import SchedulerError

DEFAULT_SCHEDULER_ID = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """One batch that the pipeline asks for: ``batch_size`` trajectories for step ``global_step``.

    ``policy_version`` is the number of optimizer updates in the weights that are to play. ``batch_size`` counts the
    whole batch, of which a process with a ``RowShard`` gets its part. ``group_size``: trajectories that every group
    must have; None where the pipeline does not say. ``data_cursor``: where the pipeline's data stand, as JSON. A
    recording of another policy version or cursor is refused. ``prompt_digests``: those of the prompts that the pipeline
    is about to ask for (as in ``RolloutBatch.prompt_digests``), in any order: ``batch_size`` of them, one for each
    trajectory (that of its first row), or one for each group, whose trajectories then all have it. A batch of other
    prompts, live or recorded, is refused. None: not checked.
    """

    global_step: int
    batch_size: int
    mode: Mode = "train"
    scheduler_id: str = DEFAULT_SCHEDULER_ID
    policy_version: int = 0
    group_size: int | None = None
    data_cursor: JSON = None
    prompt_digests: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.global_step < 0 or self.batch_size <= 0:
            raise SchedulerError(
                f"request: global_step {self.global_step} must be at least 0, batch_size {self.batch_size} at least 1"
            )
        if self.mode not in ("train", "val"):
            raise SchedulerError(f"request: mode is {self.mode!r}; expected 'train' or 'val'")


@dataclass(frozen=True, kw_only=True, slots=True)
class RowShard:
    """This process's part of every batch, where each of ``count`` processes holds its own rows: part ``index``."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise SchedulerError(f"row shard: index {self.index} must be at least 0 and less than count {self.count}")


#: What a pipeline trains on: a ``RolloutBatch`` or, with a codec, the framework's own batch, whose type the library
#: does not know.
NativeBatch: TypeAlias = Any


class BatchCodec(Protocol):
    """Between a framework's own batches and ``RolloutBatch``; ``decode(encode(x))`` is ``x`` to the bit."""

    def encode(self, native: NativeBatch, request: RolloutRequest) -> RolloutBatch:
        """The recorded form of a framework's batch, which stays as it was; raises ``BatchError``."""

    def decode(self, batch: RolloutBatch) -> NativeBatch:
        """The framework's batch."""


@runtime_checkable
class BatchSource(Protocol):
    """The least that a rollout scheduler must have."""

    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        """The batch for this request."""


@runtime_checkable
class RolloutScheduler(BatchSource, Protocol):
    """Gives the pipeline one batch per step. Every rank calls the same methods in the same order."""

    def suspend(self) -> None:
        """Stop generating: the weights are about to change."""

    def resume(self) -> None:
        """Go on generating."""

    def update_weights(self, policy_version: int) -> None:
        """The policy now is version ``policy_version``."""

    def collect_metrics(self) -> dict[str, float]:
        """What the scheduler measured about its last batch."""

    def state_dict(self) -> dict[str, JSON]:
        """What a checkpoint must keep, as JSON."""

    def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Go on from a ``state_dict``."""

    def close(self) -> None:
        """Release everything; a second call does nothing."""


class AsyncRolloutScheduler(Protocol):
    """``RolloutScheduler`` for an asynchronous training loop; its methods may run at the same time."""

    async def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        """The batch for this request."""

    async def suspend(self) -> None:
        """Stop generating: the weights are about to change."""

    async def resume(self) -> None:
        """Go on generating."""

    async def update_weights(self, policy_version: int) -> None:
        """The policy now is version ``policy_version``."""

    async def collect_metrics(self) -> dict[str, float]:
        """What the scheduler measured about its last batch."""

    async def state_dict(self) -> dict[str, JSON]:
        """What a checkpoint must keep, as JSON."""

    async def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Go on from a ``state_dict``."""

    async def close(self) -> None:
        """Release everything; a second call does nothing."""


#: A method of a real scheduler, synchronous or asynchronous.
SchedulerMethod: TypeAlias = Callable[..., object]


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerMethods:
    """The methods of ``RolloutScheduler`` by name: a real scheduler's ``own``, and ``substitutes`` for all it lacks."""

    own: Mapping[str, SchedulerMethod]
    substitutes: Mapping[str, SchedulerMethod]

    def __getitem__(self, name: str) -> SchedulerMethod:
        return self.own[name] if name in self.own else self.substitutes[name]


def scheduler_methods(real: object) -> SchedulerMethods:
    """The methods that ``real`` has, each synchronous or asynchronous, and what stands in for those that it lacks.

    A scheduler without a method has nothing to suspend, measure, store or release. Raises ``SchedulerError`` where it
    has no ``get_batch``.
    """
    if not isinstance(real, BatchSource):
        raise SchedulerError(f"{type(real).__name__} is no rollout scheduler: it has no method get_batch(request)")

    def refuse_state(state: Mapping[str, JSON]) -> None:
        if state:
            raise SchedulerError(
                f"{type(real).__name__} has no load_state_dict, but the checkpoint holds its state "
                f"{sorted(state)}: it would be lost"
            )

    substitutes: dict[str, SchedulerMethod] = {
        "suspend": lambda: None,
        "resume": lambda: None,
        "update_weights": lambda policy_version: None,
        "collect_metrics": dict,
        "state_dict": dict,
        "load_state_dict": refuse_state,
        "close": lambda: None,
    }
    own = {name: getattr(real, name) for name in substitutes if hasattr(real, name)}
    return SchedulerMethods(
        own={"get_batch": real.get_batch, **own},
        substitutes={name: method for name, method in substitutes.items() if name not in own},
    )
