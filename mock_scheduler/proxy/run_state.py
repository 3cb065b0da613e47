"""How far a run has come: the part of the proxy's ``state_dict`` that all modes share."""

from __future__ import annotations

from collections.abc import Mapping

from mock_scheduler.errors import SchedulerError
from mock_scheduler.recording.paths import step_folder
from mock_scheduler.recording.retention import is_train
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.digests import JSON


class ProxyState:
    """Progress of a run. ``mode``: how the last batch came: ``real``, ``dump``, ``verify``, or ``mock`` (replayed)."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.policy_version = 0
        self._last_steps: dict[str, int] = {}
        self._newest: dict[str, tuple[int, int]] = {}
        self._updated: int | None = None

    def earlier_request(self, request: RolloutRequest) -> tuple[str, int] | None:
        """The request of an earlier step of its kind with the newest policy, and its version; None where none was made.

        Requests may overlap, so one for a step before is no earlier one.
        """
        step, version = self._newest.get(step_folder(request.mode, request.scheduler_id), (request.global_step + 1, 0))
        return (f"{request.mode} step {step}", version) if step <= request.global_step else None

    @property
    def earlier_update(self) -> tuple[str, int] | None:
        """Returns the last update of weights and its version; None before the first."""
        return None if self._updated is None else ("the update before", self._updated)

    def updated(self, version: int) -> None:
        """Note that the weights are of a version."""
        self.policy_version = self._updated = version

    def advance(self, request: RolloutRequest, mode: str) -> None:
        """Note that ``request`` was answered in ``mode``."""
        self.mode = mode
        self.policy_version = request.policy_version
        folder = step_folder(request.mode, request.scheduler_id)
        self._last_steps[folder] = request.global_step
        if request.policy_version >= self._newest.get(folder, (0, 0))[1]:
            self._newest[folder] = (request.global_step, request.policy_version)

    def take_over(self, folder: str, step: int, version: int) -> None:
        """Note the last step of a folder that a process before this one answered."""
        self._last_steps.setdefault(folder, step)
        self.policy_version = max(self.policy_version, version)

    @property
    def last_train_step(self) -> int | None:
        """Returns the latest training step given to the pipeline; None before the first."""
        return max((step for folder, step in self._last_steps.items() if is_train(folder)), default=None)

    def as_state(self, scheduler_state: Mapping[str, JSON]) -> dict[str, JSON]:
        """Return the proxy's state, with the real scheduler's under ``scheduler``."""
        return {
            "mode": self.mode,
            "policy_version": self.policy_version,
            "last_steps": dict(self._last_steps),
            "scheduler": dict(scheduler_state),
        }

    def load(self, state: Mapping[str, JSON]) -> Mapping[str, JSON]:
        """Take over a state of any mode and return the real scheduler's part of it; raises ``SchedulerError``."""
        version, steps, scheduler_state = (state.get(key) for key in ("policy_version", "last_steps", "scheduler"))
        # type(): True is an int, too.
        if type(version) is not int or not isinstance(steps, Mapping) or not isinstance(scheduler_state, Mapping):
            raise SchedulerError(
                f"state of the rollout scheduler cannot be loaded: it has {sorted(state)}; expected "
                "['last_steps', 'mode', 'policy_version', 'scheduler']"
            )
        last_steps = {str(folder): step for folder, step in steps.items() if type(step) is int and step >= 0}
        if len(last_steps) != len(steps):
            wrong = {folder: step for folder, step in steps.items() if folder not in last_steps}
            raise SchedulerError(
                f"state of the rollout scheduler cannot be loaded: last_steps has {wrong}; expected a step, a whole "
                "number of at least 0, for each folder"
            )
        self.policy_version = version
        self._last_steps = last_steps
        self._newest.clear()
        self._updated = None
        return scheduler_state
