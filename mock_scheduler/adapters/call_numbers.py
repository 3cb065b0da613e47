"""Numbers rollouts whose framework may ask for several in one of its steps."""

from __future__ import annotations

from collections.abc import Mapping

from mock_scheduler.config.base import Mode
from mock_scheduler.errors import SchedulerError


class CallNumbers:
    """The number of a rollout: the framework's step times the most rollouts that a step may have, and those before it.

    ``per_step``: the most, in training and in validation.
    """

    def __init__(self, per_step: Mapping[Mode, int]) -> None:
        self._per_step = per_step
        self._last: dict[Mode, tuple[int, int]] = {}

    def next(self, mode: Mode, step: int) -> int:
        """Give the number of the next rollout of a step; raises ``SchedulerError`` where the step has too many."""
        last, place = self._last.get(mode, (-1, -1))
        place = place + 1 if last == step else 0
        most = self._per_step[mode]
        if place >= most:
            raise SchedulerError(
                f"{mode} step {step} asked for more than {most} rollouts, the most that this adapter numbers for it: a "
                "trainer that has several steps played at once is not recorded"
            )
        self._last[mode] = step, place
        return step * most + place
