"""Defines the seam: the training loop's questions to a rollout scheduler, in every mode.

Contract: the loop sees only ``RolloutScheduler``, or ``AsyncRolloutScheduler`` where it is asynchronous. Any object
with ``get_batch`` can stand behind it: its missing methods are answered by ``scheduler_methods`` and nowhere else.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.base import Mode as Mode
from mock_scheduler.errors import SchedulerError
from mock_scheduler.support.digests import JSON as JSON
from mock_scheduler.support.digests import check_json

DEFAULT_SCHEDULER_ID = "default"

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_SHOWN = 80


def whole_number(value: object, what: str, *, least: int = 0) -> int:
    """Returns ``value`` as a plain int: an int, or one of NumPy or a tensor of one integer, of at least ``least``.

    Raises ``SchedulerError``, beginning with ``what``, with the found and the expected value; a bool is no number here.
    """
    try:
        # A tensor of bool has an index, too.
        is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
        number = None if is_bool else operator.index(value)  # type: ignore[arg-type]  # what has none is refused
    except TypeError:
        number = None
    if number is None or number < least:
        raise SchedulerError(f"{what} is {shown(value)}; expected a whole number of at least {least}")
    return number


def shown(value: object) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """One batch the pipeline asks for: ``batch_size`` trajectories for step ``global_step``.

    ``policy_version`` is the number of optimizer updates in the weights that are to play. ``batch_size`` counts the
    whole batch; a process with a ``RowShard`` gets its part of it. ``group_size``: trajectories every group
    must have; None where the pipeline does not say. ``data_cursor``: where the pipeline's data stand, as JSON. A
    recording of another policy version or cursor is refused. ``prompt_digests``: of the prompts the pipeline
    is about to ask for (as in ``RolloutBatch.prompt_digests``), in any order: ``batch_size`` of them, one for each
    trajectory (its first row's), or one for each group, whose trajectories then all have it. A batch of other
    prompts, live or recorded, is refused. None: not checked. ``prompts``: the prompts themselves, as the pipeline
    drew them, for the real scheduler: any object, never recorded nor compared. A codec with ``prompt_problems``
    refuses a batch of other prompts, live or recorded. ``has_open_size``: a batch may be of another number of
    trajectories, as where failed ones are left out; a codec's ``count_problems`` judges it instead.

    Whole numbers of NumPy or torch are held as plain ints. Raises ``SchedulerError`` listing every wrong field.
    """

    global_step: int
    batch_size: int
    mode: Mode = "train"
    scheduler_id: str = DEFAULT_SCHEDULER_ID
    policy_version: int = 0
    group_size: int | None = None
    data_cursor: JSON = None
    prompt_digests: tuple[str, ...] | None = None
    prompts: Any = field(default=None, compare=False, repr=False)
    has_open_size: bool = False

    def __post_init__(self) -> None:
        problems: list[str] = []
        for name, least in (("global_step", 0), ("batch_size", 1), ("policy_version", 0), ("group_size", 1)):
            value = getattr(self, name)
            if name == "group_size" and value is None:
                continue
            try:
                object.__setattr__(self, name, whole_number(value, name, least=least))
            except SchedulerError as error:
                problems.append(str(error))
        if self.mode not in ("train", "val"):
            problems.append(f"mode is {shown(self.mode)}; expected 'train' or 'val'")
        if not isinstance(self.scheduler_id, str) or not self.scheduler_id:
            problems.append(f"scheduler_id is {shown(self.scheduler_id)}; expected a text such as 'math'")
        try:
            check_json(self.data_cursor, "data_cursor")
        except ValueError as error:
            problems.append(str(error))
        if isinstance(self.prompt_digests, list):
            object.__setattr__(self, "prompt_digests", tuple(self.prompt_digests))
        problems += _digest_problems(self.prompt_digests)
        if problems:
            raise SchedulerError(f"request: {'; '.join(problems)}")


def _digest_problems(digests: object) -> list[str]:
    expected = "expected SHA-256 digests as in RolloutBatch.prompt_digests: 64 of 0-9 and a-f each"
    if digests is None:
        return []
    if not isinstance(digests, tuple):
        return [f"prompt_digests is {shown(digests)}; expected a tuple; {expected}"]
    wrong = [
        index for index, digest in enumerate(digests) if not isinstance(digest, str) or not _DIGEST.fullmatch(digest)
    ]
    if not wrong:
        return []
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return [f"prompt_digests[{wrong[0]}] is {shown(digests[wrong[0]])}{more}; {expected}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowShard:
    """This process's part of every batch, where each of ``count`` processes holds its own rows: part ``index``."""

    index: int
    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", whole_number(self.index, "row shard: index", least=-1))
        object.__setattr__(self, "count", whole_number(self.count, "row shard: count"))
        if not 0 <= self.index < self.count:
            raise SchedulerError(f"row shard: index {self.index} must be at least 0 and less than count {self.count}")


#: What a pipeline trains on: a ``RolloutBatch`` or, with a codec, the framework's own batch, whose type the library
#: does not know.
NativeBatch: TypeAlias = Any


class BatchCodec(Protocol):
    """Between a framework's own batches and ``RolloutBatch``; ``decode(encode(x))`` is ``x`` to the bit.

    A codec may also have ``prompt_problems(batch, request)``, which lists the differences between the prompts of a
    batch, live or recorded, and ``request.prompts``, each as one line; it is asked where the request has some. And it
    may have ``count_problems(batch, request)``, which lists what is wrong with the size of a batch where that is open.
    """

    def encode(self, native: NativeBatch, request: RolloutRequest) -> RolloutBatch:
        """The recorded form of a framework's batch; the batch stays as it was; raises ``BatchError``."""

    def decode(self, batch: RolloutBatch) -> NativeBatch:
        """Returns the framework's batch."""


@runtime_checkable
class BatchSource(Protocol):
    """The least a rollout scheduler must have."""

    def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        """Returns the batch for this request."""


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
        """Measurements about the last batch; a real scheduler that returns None has measured nothing."""

    def state_dict(self) -> dict[str, JSON]:
        """The state for a checkpoint, as JSON; a real scheduler that returns None has nothing to keep."""

    def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Go on from a ``state_dict``."""

    def close(self) -> None:
        """Release everything; a second call does nothing."""


class AsyncRolloutScheduler(Protocol):
    """``RolloutScheduler`` for an asynchronous training loop; its methods may run at the same time."""

    async def get_batch(self, request: RolloutRequest) -> RolloutBatch:
        """Returns the batch for this request."""

    async def suspend(self) -> None:
        """Stop generating: the weights are about to change."""

    async def resume(self) -> None:
        """Go on generating."""

    async def update_weights(self, policy_version: int) -> None:
        """The policy now is version ``policy_version``."""

    async def collect_metrics(self) -> dict[str, float]:
        """Returns measurements about the last batch."""

    async def state_dict(self) -> dict[str, JSON]:
        """Returns the state for a checkpoint, as JSON."""

    async def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Go on from a ``state_dict``."""

    async def close(self) -> None:
        """Release everything; a second call does nothing."""


#: A method of a real scheduler, synchronous or asynchronous.
SchedulerMethod: TypeAlias = Callable[..., object]


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerMethods:
    """The methods of ``RolloutScheduler`` by name: a real scheduler's ``own``, and ``substitutes`` for all it lacks.

    ``owner``: its class, for messages.
    """

    owner: str
    own: Mapping[str, SchedulerMethod]
    substitutes: Mapping[str, SchedulerMethod]

    def __getitem__(self, name: str) -> SchedulerMethod:
        return self.own[name] if name in self.own else self.substitutes[name]


def scheduler_methods(real: object) -> SchedulerMethods:
    """Find the methods of ``real``, each synchronous or asynchronous, and substitutes for the others.

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
        owner=type(real).__name__,
        own={"get_batch": real.get_batch, **own},
        substitutes={name: method for name, method in substitutes.items() if name not in own},
    )
