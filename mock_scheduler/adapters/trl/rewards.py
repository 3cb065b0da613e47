"""Reward functions whose values are recorded with the rollout, and given back in its replay without a call.

What a function logs through TRL's ``log_extra`` and ``log_metric`` is recorded with its values, and logged again.
Reward models (``nn.Module``, or the name of one) are part of the training's own computation: they stay live.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from mock_scheduler.adapters.plain_values import from_json, to_json
from mock_scheduler.batch.columns import RowValue
from mock_scheduler.errors import BatchError
from mock_scheduler.proxy.effects import is_async
from mock_scheduler.support.digests import JSON

#: Synchronous or asynchronous; it gives one value per row.
RewardFunction: TypeAlias = Callable[..., Any]

_LOGGERS = ("log_extra", "log_metric")


class LateStore(Protocol):
    """Where the values of the current rollout are kept."""

    def late_values(self, name: str) -> list[RowValue] | None:
        """Return the recorded values of a replayed rollout; None where it was played."""

    def add_late_values(self, name: str, values: Sequence[RowValue]) -> None:
        """Record values of a rollout that was played."""


def name_rewards(functions: Sequence[object]) -> dict[int, str]:
    """Name each function whose values can be recorded, by its place among all of them."""
    return {
        index: f"reward/{index}/{name_of(function)}"
        for index, function in enumerate(functions)
        if callable(function) and not isinstance(function, torch.nn.Module)
    }


def name_of(function: object) -> str:
    """Name a reward function as TRL's log does, with the characters that a column may have."""
    if isinstance(function, str):
        return function
    config = getattr(function, "config", None)
    name = str(getattr(config, "_name_or_path", None) or getattr(function, "__name__", type(function).__name__))
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_.-") else "_" for letter in name)


def freeze(function: RewardFunction, name: str, store: LateStore) -> RewardFunction:
    """Return a reward function that is called where a rollout is live, and answered where it is replayed."""

    def recorded(options: dict[str, Any]) -> list[Any] | None:
        items = store.late_values(name)
        return None if items is None else _give_back(items, options)

    def keep(values: Sequence[Any], logged: list[JSON]) -> list[Any]:
        store.add_late_values(name, _as_items(list(values), logged, name))
        return list(values)

    def asked(*arguments: object, **options: object) -> list[Any]:
        found = recorded(options)
        if found is not None:
            return found
        watched, logged = _watch(options)
        return keep(function(*arguments, **watched), logged)

    async def asked_on_a_loop(*arguments: object, **options: object) -> list[Any]:
        found = recorded(options)
        if found is not None:
            return found
        watched, logged = _watch(options)
        return keep(await function(*arguments, **watched), logged)

    # TRL looks at the function itself for whether it must be awaited.
    frozen: RewardFunction = asked_on_a_loop if is_async(function) else asked
    functools.update_wrapper(frozen, function, updated=())
    frozen.__name__ = getattr(function, "__name__", type(function).__name__)
    return frozen


def _watch(options: dict[str, Any]) -> tuple[dict[str, Any], list[JSON]]:
    """Return the arguments with TRL's loggers replaced by ones that note each call, and the notes."""
    logged: list[JSON] = []

    def noting(name: str, log: Callable[..., None]) -> Callable[..., None]:
        def note(key: str, value: object) -> None:
            logged.append([name, key, to_json(value, f"{name}({key!r})")])
            log(key, value)

        return note

    loggers = {name: noting(name, options[name]) for name in _LOGGERS if callable(options.get(name))}
    return {**options, **loggers}, logged


def _as_items(values: list[Any], logged: list[JSON], name: str) -> list[RowValue]:
    if not values:
        raise BatchError(f"{name}: the reward function returned no values")
    items: list[RowValue] = [{"value": to_json(value, f"{name}, row {row},")} for row, value in enumerate(values)]
    if logged:  # of the whole call, and kept with its first row
        items[0] = {"value": to_json(values[0], f"{name}, row 0,"), "logged": logged}
    return items


def _give_back(items: Sequence[Any], options: dict[str, Any]) -> list[Any]:
    for logger, key, value in [call for item in items for call in item.get("logged", ())]:
        if callable(options.get(logger)):
            options[logger](key, from_json(value))
    return [from_json(item["value"]) for item in items]
