"""Answers a step that is missing from the recording: mode mock refuses it, or a recorded step stands in for it.

Contract: pure. Every rank with one configuration, plan and listing of recorded steps chooses alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias

from mock_scheduler.scheduler import RolloutRequest

#: ``rollout_mock.missing_step``.
MissingStep: TypeAlias = Literal["error", "repeat", "repeat_last"]


def choose_recorded_step(step: int, present: Sequence[int], missing_step: MissingStep) -> int:
    """Choose the recorded step to replay as ``step``, out of the steps ``present`` in its folder.

    Returns ``step`` itself where it is recorded, and where nothing may stand in for it: loading it then raises
    ``StepNotFoundError``. ``repeat`` takes the nearest step before it, else the first one; ``repeat_last`` the last.
    """
    if missing_step == "error" or step in present or not present:
        return step
    # An empty recording has nothing to stand in: loading the step itself says so, with the folder.
    if missing_step == "repeat_last":
        return max(present)
    return max((other for other in present if other < step), default=min(present))


def request_stand_in(request: RolloutRequest, step: int) -> RolloutRequest:
    """Make the request by which the recorded ``step`` is loaded in place of the requested one.

    It still asks for the prompts of ``request``: the user waives the step's own data, not the prompts that are given.
    """
    return replace(request, global_step=step)
