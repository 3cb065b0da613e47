"""Reads what a real scheduler tells of itself: its metrics and its state.

Contract: None counts as nothing to tell, since many schedulers return nothing; all else that is not what was asked for
is a ``SchedulerError`` naming the class, the method and the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mock_scheduler.errors import SchedulerError
from mock_scheduler.scheduler import RolloutRequest, shown


def read_metrics(told: object, owner: str, request: RolloutRequest | None) -> dict[str, float]:
    """Metrics by name, as floats, from what ``collect_metrics`` of class ``owner`` returned after ``request``."""
    metrics: dict[str, float] = {}
    wrong: list[str] = []
    for name, value in _as_dict(told, f"{owner}.collect_metrics", request, "a dict of names and numbers").items():
        if not isinstance(name, str):
            wrong.append(f"key {shown(name)} is no text")
        elif isinstance(value, str | bytes | bytearray):  # which float() would read
            wrong.append(f"{name!r} is {shown(value)}")
        else:
            try:
                metrics[name] = float(value)  # any scalar, as of torch or NumPy
            except (TypeError, ValueError, RuntimeError, OverflowError):
                wrong.append(f"{name!r} is {shown(value)}")
    if wrong:
        raise SchedulerError(
            f"{_after(request)}: {owner}.collect_metrics gave what is no number: {'; '.join(wrong)}; expected a dict "
            "of names and numbers"
        )
    return metrics


def read_state(told: object, owner: str, request: RolloutRequest | None) -> dict[str, Any]:
    """The state by key, from what ``state_dict`` of class ``owner`` returned after ``request``."""
    state = _as_dict(told, f"{owner}.state_dict", request, "a dict of what a checkpoint must keep, as JSON")
    wrong = [f"key {shown(key)} is no text" for key in state if not isinstance(key, str)]
    if wrong:
        raise SchedulerError(f"{_after(request)}: {owner}.state_dict: {'; '.join(wrong)}")
    return dict(state)


def _as_dict(told: object, method: str, request: RolloutRequest | None, expected: str) -> Mapping[Any, Any]:
    if told is None:
        return {}
    if not isinstance(told, Mapping):
        raise SchedulerError(f"{_after(request)}: {method} returned {shown(told)}; expected {expected}, or None")
    return told


def _after(request: RolloutRequest | None) -> str:
    return "before the first step" if request is None else f"{request.mode} step {request.global_step}"
