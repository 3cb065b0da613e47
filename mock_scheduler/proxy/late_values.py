"""Values that the trainer computes from a batch after it got it, such as the rewards of its own reward functions.

They are recorded as further columns of the step, ``late/{name}``, and given back where the step is replayed. Contract:
a step with late values is written, or compared, once they all have come, and not at all where one never comes. Its
batch goes to the pipeline without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.building import build_column
from mock_scheduler.batch.columns import Column, RowValue
from mock_scheduler.errors import BatchError, RecordingError, SchedulerError
from mock_scheduler.proxy.random_states import RecordedStates, States
from mock_scheduler.proxy.real_scheduler import Taken
from mock_scheduler.proxy.routing import RequestKey, Route, request_key
from mock_scheduler.recording.paths import step_folder
from mock_scheduler.scheduler import RolloutRequest

LATE_PREFIX = "late/"

#: Gives each row's reward of all late values by name; None: they are no rewards.
ReadRewards = Callable[[Mapping[str, Sequence[RowValue]]], Sequence[float] | None]


@dataclass(kw_only=True, slots=True)
class AwaitedStep:
    """A live step whose late values have not all come.

    ``metrics``: None where it is compared, not recorded. ``states_before``: of the random generators before the first
    value was computed.
    """

    taken: Taken
    route: Route
    metrics: Mapping[str, float] | None
    columns: dict[str, Column] = field(default_factory=dict)
    states_before: States | None = None

    def complete(self, read_rewards: ReadRewards | None) -> None:
        """Add the late values to the batch, and its rewards where they are these."""
        batch = self.taken.batch
        assert batch is not None  # examined before it is awaited
        rewards = None
        if read_rewards is not None:
            rewards = read_rewards({n.removeprefix(LATE_PREFIX): list(c.rows()) for n, c in self.columns.items()})
        try:
            batch = replace(batch, extras={**batch.extras, **self.columns})
            if rewards is not None:
                batch = replace(batch, rewards=torch.tensor(rewards, dtype=torch.float32))
            self.taken.batch = batch
        except BatchError as error:
            raise BatchError(f"{_named(self.taken.request)}: late values: {error}") from error


@dataclass(kw_only=True, slots=True)
class _ReplayedStep:
    """``states``: to be set once each name of ``waiting`` was given back."""

    key: RequestKey
    columns: Mapping[str, Column]
    waiting: set[str]
    states: RecordedStates | None = None


class LateValues:
    """The late values of the last step of each kind and scheduler, recorded or yet to come; ``names``: all of them.

    ``read_rewards``: the codec's ``late_rewards``, where it has one.
    """

    def __init__(self, names: Sequence[str], read_rewards: ReadRewards | None = None) -> None:
        self.names = tuple(names)
        self._read_rewards = read_rewards
        self._awaited: dict[str, AwaitedStep] = {}
        self._replayed: dict[str, _ReplayedStep] = {}
        self._ended: dict[RequestKey, str] = {}

    def take_out(self, batch: RolloutBatch, request: RolloutRequest, path: str) -> RolloutBatch:
        """Keep the late values of a recorded batch, and return it without them.

        Raises ``RecordingError`` where one that this run computes is not recorded.
        """
        late = {name: column for name, column in batch.extras.items() if name.startswith(LATE_PREFIX)}
        missing = [name for name in self.names if LATE_PREFIX + name not in late]
        if missing:
            recorded = ", ".join(name.removeprefix(LATE_PREFIX) for name in late) or "none"
            raise RecordingError(
                f"[Rollout Mock] {path} was recorded without the late values {', '.join(missing)}, which the run would "
                f"compute after the rollout (recorded: {recorded}). Give the reward functions of the recording, or "
                "record again."
            )
        last = self._replayed.get(_folder(request))
        if last is not None:
            self._ended[last.key] = "was replayed, and another step has been asked for since"
        self._ended.pop(request_key(request), None)
        self._replayed[_folder(request)] = _ReplayedStep(
            key=request_key(request), columns=late, waiting=set(self.names)
        )
        if not late:
            return batch
        return replace(batch, extras={name: column for name, column in batch.extras.items() if name not in late})

    def recorded(self, request: RolloutRequest, name: str) -> list[RowValue] | None:
        """Return the recorded values of a replayed step, one per row; None where the step is not a replayed one.

        Raises ``SchedulerError`` where that step has ended: they are asked for before the next.
        """
        self._check_name(request, name)
        ended = self._ended.get(request_key(request))
        if ended is not None:
            raise SchedulerError(f"{_named(request)}: late values {name!r} come too late: the step {ended}")
        step = self._replayed.get(_folder(request))
        if step is None or step.key != request_key(request):
            return None
        return list(step.columns[LATE_PREFIX + name].rows())

    def restore_after(self, request: RolloutRequest, states: RecordedStates | None) -> None:
        """Keep the states to set once all late values of a replayed step are given back."""
        self._replayed[_folder(request)].states = states

    def give_back(self, request: RolloutRequest, name: str) -> RecordedStates | None:
        """Note that values were given back; returns the states to set after the last ones."""
        step = self._replayed[_folder(request)]
        step.waiting.discard(name)
        if step.waiting:
            return None
        states, step.states = step.states, None
        return states

    def awaited(self, request: RolloutRequest) -> AwaitedStep | None:
        """Return the live step of a request, where its late values are yet to come."""
        step = self._awaited.get(_folder(request))
        return step if step is not None and request_key(step.taken.request) == request_key(request) else None

    def wait(self, step: AwaitedStep) -> bool:
        """Keep a live step until its late values have come; False where there are none to wait for."""
        if self.names:
            self._awaited[_folder(step.taken.request)] = step
        return bool(self.names)

    def add(self, request: RolloutRequest, name: str, values: Sequence[RowValue]) -> AwaitedStep | None:
        """Add the values of one name; returns the step once it has all: ``end`` it when it is written or compared.

        None, too, for a step that is neither recorded nor compared. Where writing failed, the last values may be given
        again. Raises ``SchedulerError`` where they came before, ``BatchError`` where they are no column of the batch.
        """
        self._check_name(request, name)
        step = self.awaited(request)
        if step is None:
            return None
        column = LATE_PREFIX + name
        if column in step.columns and len(step.columns) < len(self.names):
            raise SchedulerError(f"{_named(request)}: the late values {name!r} were given already")
        assert step.taken.batch is not None
        if len(values) != len(step.taken.batch):
            raise BatchError(
                f"{_named(request)}: {len(values)} late values {name!r} were given; expected {len(step.taken.batch)}, "
                "one for each row of the batch, in its order"
            )
        step.columns[column] = build_column(column, values)
        if len(step.columns) < len(self.names):
            return None
        step.complete(self._read_rewards)
        return step

    def end(self, step: AwaitedStep) -> None:
        """Note that a step is written, or compared, with all its values."""
        request = step.taken.request
        del self._awaited[_folder(request)]
        self._ended[request_key(request)] = "has them already"

    def problem(self, folder: str | None = None) -> str | None:
        """Say which steps, of one folder or of all, wait for values; None where none does."""
        waiting = [step for name, step in self._awaited.items() if folder in (None, name)]
        if not waiting:
            return None
        return "; ".join(f"{_named(step.taken.request)} {self._lack(step)}" for step in waiting)

    def _lack(self, step: AwaitedStep) -> str:
        missing = [name for name in self.names if LATE_PREFIX + name not in step.columns]
        return f"waits for its late values {', '.join(missing)}" if missing else "was not written with its late values"

    def refuse_waiting(self, what: str, request: RolloutRequest | None = None) -> None:
        """Raise ``SchedulerError`` where a step before ``request``, or any, still waits: it would never be recorded."""
        problem = self.problem(None if request is None else _folder(request))
        if problem is not None:
            raise SchedulerError(
                f"{what}: {problem}: give them with add_late_values right after the rollout, or do not name them in "
                "build_scheduler(late_values=...)"
            )

    def clear(self) -> None:
        """Forget all: the run goes on from elsewhere."""
        self._awaited.clear()
        self._replayed.clear()
        self._ended.clear()

    def _check_name(self, request: RolloutRequest, name: str) -> None:
        if name not in self.names:
            raise SchedulerError(
                f"{_named(request)}: late values {name!r} are not known; known are {list(self.names)}: name them in "
                "build_scheduler(late_values=...)"
            )


def _folder(request: RolloutRequest) -> str:
    return step_folder(request.mode, request.scheduler_id)


def _named(request: RolloutRequest) -> str:
    return f"{request.mode} step {request.global_step}"
