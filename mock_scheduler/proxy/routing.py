"""Decides for each request whether the real scheduler or the recording answers, and whether it is recorded or compared.

A step that is missing from the recording is refused in mode mock, or a recorded step stands in for it.

Contract: pure bookkeeping. Every rank built with the same configuration, plan and listing decides alike; the listing of
recorded steps is taken once, so no rank is led by steps that another one writes later.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, TypeAlias

from mock_scheduler.config.base import RolloutMode
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import SchedulerError
from mock_scheduler.recording.paths import step_folder
from mock_scheduler.recording.retention import is_train
from mock_scheduler.scheduler import RolloutRequest

RequestKey: TypeAlias = tuple[str, int]
_LIVE_MODES = frozenset({"real", "dump", "verify"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """How one request is answered.

    ``mode``: as configured. ``replayed_step``: the recorded step to answer with; None where the real scheduler answers.
    ``is_recorded``, ``is_verified``: the further way of a live answer.
    """

    mode: RolloutMode
    replayed_step: int | None = None
    is_recorded: bool = False

    @property
    def is_live(self) -> bool:
        """Whether the real scheduler answers."""
        return self.replayed_step is None

    @property
    def is_verified(self) -> bool:
        """Whether the live answer is compared with the recording."""
        return self.mode == "verify"


class Outlook(Enum):
    """The answers still to come, as far as known: all live, all replayed, or neither."""

    LIVE = "live"
    REPLAYED = "replayed"
    UNKNOWN = "unknown"


def modes_to_prepare(config: RolloutMockConfig, plan: Sequence[RolloutRequest]) -> frozenset[RolloutMode]:
    """List the modes of the run's plan, or without a plan all modes allowed by the configuration."""
    if not plan or not config.schedule:
        return config.modes_in_use
    return frozenset(_mode_of(config, request) for request in plan)


def needs_listing(config: RolloutMockConfig, modes: frozenset[RolloutMode]) -> bool:
    """Whether the steps present decide any route in these modes."""
    return "cache" in modes or ("mock" in modes and config.missing_step != "error")


def request_key(request: RolloutRequest) -> RequestKey:
    """Return the folder and step of a request, unique in a run."""
    return step_folder(request.mode, request.scheduler_id), request.global_step


def _mode_of(config: RolloutMockConfig, request: RolloutRequest) -> RolloutMode:
    return config.mode_of(step=request.global_step, kind=request.mode, scheduler_id=request.scheduler_id)


class Router:
    """Decides how requests are answered, from the steps ``present`` in each folder when the proxy was built.

    ``present`` may be empty where no route depends on it (``needs_listing``).
    """

    def __init__(
        self, config: RolloutMockConfig, plan: Sequence[RolloutRequest], present: Mapping[str, Sequence[int]]
    ) -> None:
        self._config = config
        self._present = present
        self._modes = modes_to_prepare(config, plan)
        self._later: dict[RequestKey, Outlook] = {}
        self._planned = self._steps_to_record(plan)
        if plan:
            self.outlook = self._read_plan(plan)
        else:
            self.outlook = self._outlook_of_modes()

    def route(self, request: RolloutRequest) -> Route:
        """Decide how ``request`` is answered; raises ``SchedulerError`` where its mode was not prepared for."""
        mode = _mode_of(self._config, request)
        if mode not in self._modes:
            raise SchedulerError(
                f"{request.mode} step {request.global_step} of scheduler {request.scheduler_id!r} is in mode {mode}, "
                f"but it is not in the plan, all of which is in mode {', '.join(sorted(self._modes))}: nothing was "
                f"prepared for {mode}. Give build_scheduler a plan with every request that will come."
            )
        if mode == "mock":
            return Route(mode=mode, replayed_step=self._replayed_step(request))
        # Present when the run began: a step that this run records is played.
        if mode == "cache" and _holds(self._present_steps(request), request.global_step):
            return Route(mode=mode, replayed_step=request.global_step)
        is_recorded = mode in ("dump", "cache") and self._config.records_step(request.global_step)
        return Route(mode=mode, is_recorded=is_recorded)

    def advance(self, request: RolloutRequest) -> None:
        """Update the outlook after the answer to ``request``, by the plan."""
        self.outlook = self._later.get(request_key(request), self.outlook)

    def _present_steps(self, request: RolloutRequest) -> Sequence[int]:
        return self._present.get(step_folder(request.mode, request.scheduler_id), ())

    def last_trained(self, request: RolloutRequest | None) -> tuple[str, int] | None:
        """Returns the last training step present that came before ``request``, or before any, with its folder.

        Raises ``SchedulerError`` where that is not known, since several schedulers recorded.
        """
        folders = [folder for folder in self._present if is_train(folder)]
        if request is not None:
            folders = [step_folder("train", request.scheduler_id)]
        if len(folders) > 1:
            raise SchedulerError(
                f"state_dict: this process was started again, and it is not known which of the schedulers in "
                f"{', '.join(sorted(folders))} it was: ask it for a batch first"
            )
        # A validation of a step comes before or after its training.
        is_before = None if request is None else request.global_step + (request.mode == "val")
        steps = [
            (folder, step)
            for folder in folders
            for step in self._present.get(folder, ())
            if is_before is None or step < is_before
        ]
        return max(steps, key=lambda one: one[1], default=None)

    def is_own(self, request: RolloutRequest) -> bool:
        """Whether this run itself records the step, by its plan."""
        return request.global_step in self._planned.get(step_folder(request.mode, request.scheduler_id), ())

    def _steps_to_record(self, plan: Sequence[RolloutRequest]) -> dict[str, list[int]]:
        """List by folder the steps that this run will add to the recording."""
        planned: dict[str, list[int]] = {}
        for request in plan if self._modes & {"dump", "cache"} else ():
            if _mode_of(self._config, request) != "mock" and self.route(request).is_recorded:
                planned.setdefault(step_folder(request.mode, request.scheduler_id), []).append(request.global_step)
        return planned

    def _replayed_step(self, request: RolloutRequest) -> int:
        """Choose the recorded step for a request in mode mock.

        A step recorded earlier in this run counts, by the plan, like one present at its beginning.
        """
        step, folder = request.global_step, step_folder(request.mode, request.scheduler_id)
        present = self._present_steps(request)
        own = [other for other in self._planned.get(folder, ()) if other < step]
        return choose_recorded_step(step, sorted([*present, *own]) if own else present, self._config.missing_step)

    def _read_plan(self, plan: Sequence[RolloutRequest]) -> Outlook:
        """Note the outlook after each planned request but the last; returns the outlook of the whole plan."""
        if self._modes == {"mock"} or self._modes <= _LIVE_MODES:  # the same after each of 100,000
            return self._outlook_of_modes()
        # Backwards: the outlook after a request is made of the answers to all later ones.
        later: set[bool] = set()
        for request in reversed(plan):
            if later:
                self._later.setdefault(request_key(request), _outlook_of(later))
            later.add(self.route(request).is_live)
        return _outlook_of(later)

    def _outlook_of_modes(self) -> Outlook:
        # Without a plan any prepared mode may come next.
        answers = {mode in _LIVE_MODES for mode in self._modes if mode != "cache"}
        if "cache" in self._modes:
            # Any step may be missing from a cache, and be played; replayed ones come only where some are recorded.
            answers |= {True, bool(not self._present)}
        return _outlook_of(answers)


def _outlook_of(are_live: set[bool]) -> Outlook:
    if are_live == {True}:
        return Outlook.LIVE
    return Outlook.REPLAYED if are_live == {False} else Outlook.UNKNOWN


#: ``rollout_mock.missing_step``.
MissingStep: TypeAlias = Literal["error", "repeat", "repeat_last"]


def choose_recorded_step(step: int, present: Sequence[int], missing_step: MissingStep) -> int:
    """Choose the recorded step to replay as ``step``, out of the steps ``present`` in its folder, in ascending order.

    Returns ``step`` itself where it is recorded, and where nothing may stand in for it: loading it then raises
    ``StepNotFoundError``. ``repeat`` takes the nearest step before it, else the first one; ``repeat_last`` the last.
    """
    # An empty recording has nothing to stand in: loading the step itself says so, with the folder.
    if missing_step == "error" or not present or _holds(present, step):
        return step
    if missing_step == "repeat_last":
        return present[-1]
    return present[max(bisect_left(present, step) - 1, 0)]


def _holds(present: Sequence[int], step: int) -> bool:
    """Whether the step is among these, which are in ascending order: a long run asks for each of its steps."""
    index = bisect_left(present, step)
    return index < len(present) and present[index] == step


def request_stand_in(request: RolloutRequest, step: int) -> RolloutRequest:
    """Make the request by which the recorded ``step`` is loaded in place of the requested one.

    It still asks for the prompts of ``request``: the user waives the step's own data, not the prompts that are given.
    """
    return replace(request, global_step=step)
