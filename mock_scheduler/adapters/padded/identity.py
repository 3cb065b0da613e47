"""The identities and tags of a framework's rows, from the fields its layout names.

Contract: without such fields a row is its number, with ``group_size`` rows in a row to a group. Groups a framework
names otherwise than by numbers are numbered in the order of their first appearance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch

from mock_scheduler.adapters.padded.fields import Native, raise_problems
from mock_scheduler.adapters.padded.layout import PaddedLayout
from mock_scheduler.batch import SampleIdentity

#: From a framework's batch and a row number to the row's identity.
IdentifyRow: TypeAlias = Callable[[Native, int], SampleIdentity]


def identify_rows(
    native: Native, layout: PaddedLayout, *, num_rows: int, scheduler_id: str, group_size: int | None
) -> list[SampleIdentity]:
    """One identity per row, in the rows' order; raises ``BatchError`` where a field's values cannot make one."""
    if layout.group_ids is None or layout.group_ids not in native:
        size = group_size or 1
        return [_identity(scheduler_id, row // size, 0, (row % size, 0)) for row in range(num_rows)]
    groups = _number_groups(layout.group_ids, _row_values(native, layout.group_ids), layout)
    episodes = _episode_ids(native, layout, num_rows)
    turns = _integers(native, layout.turn_ids, layout, default=[0] * num_rows)
    seen: Counter[tuple[int, int, int]] = Counter()
    counted = []
    for key in zip(groups, episodes, turns, strict=True):
        counted.append(seen[key])
        seen[key] += 1
    envs = _integers(native, layout.env_ids, layout, default=counted)
    return [_identity(scheduler_id, *key) for key in zip(groups, episodes, zip(envs, turns, strict=True), strict=True)]


def read_tags(native: Native, layout: PaddedLayout, num_rows: int) -> tuple[str, ...] | None:
    """The rows' tags; ``None`` where the framework has none, or not a text for each row."""
    if layout.tags is None or layout.tags not in native:
        return None
    values = _row_values(native, layout.tags)
    tags = tuple(value for value in values if type(value) is str)
    return tags if len(tags) == num_rows else None


def _identity(scheduler_id: str, group_id: int, episode_id: int, env_and_turn: tuple[int, int]) -> SampleIdentity:
    env_id, turn = env_and_turn
    return SampleIdentity(scheduler_id=scheduler_id, group_id=group_id, episode_id=episode_id, env_id=env_id, turn=turn)


def _row_values(native: Native, name: str) -> list[object]:
    value = native[name]
    items = value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value
    if not isinstance(items, Sequence):
        return []
    return [item.item() if isinstance(item, np.generic) else item for item in items]


def _number_groups(name: str, values: list[object], layout: PaddedLayout) -> list[int]:
    numbers = [value for value in values if type(value) is int and value >= 0]
    if len(numbers) == len(values):
        return numbers
    unusable = [f"row {row}: {value!r}" for row, value in enumerate(values) if not isinstance(value, str | int | float)]
    if unusable:
        raise_problems([f"{name!r} names no group in {text}; expected a number or a text" for text in unusable], layout)
    index = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return [index[value] for value in values]


def _episode_ids(native: Native, layout: PaddedLayout, num_rows: int) -> list[int]:
    name = layout.trajectory_groups
    if name is None or name not in native:
        return [0] * num_rows
    values = _row_values(native, name)
    parts = [value.rsplit("_", 2) if isinstance(value, str) else [] for value in values]
    raise_problems(
        [
            f"{name!r} is {value!r} in row {row}; expected '{{tag}}_{{group}}_{{episode}}_{{seed}}'"
            for row, (value, part) in enumerate(zip(values, parts, strict=True))
            if len(part) != 3 or not part[1].isdecimal()
        ],
        layout,
        "Give the codec a function for the identities: group_ids=lambda native, row: SampleIdentity(…).",
    )
    return [int(part[1]) for part in parts]


def _integers(native: Native, name: str | None, layout: PaddedLayout, *, default: list[int]) -> list[int]:
    if name is None or name not in native:
        return default
    values = _row_values(native, name)
    raise_problems(
        [
            f"{name!r} is {value!r} in row {row}; expected a number of 0 or more"
            for row, value in enumerate(values)
            if type(value) is not int or value < 0
        ],
        layout,
    )
    return [value for value in values if type(value) is int]
