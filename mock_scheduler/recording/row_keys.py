"""Which rows files hold, as plain keys: enough to order the rows of several files, and to tell trajectories and groups.

Contract: keys compare as ``SampleIdentity`` does, so sorted keys are the order of a batch's rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from mock_scheduler.batch import SampleIdentity

#: ``(scheduler_id, group_id, episode_id, env_id, turn)``; the first four are a trajectory, the first three a group.
RowKey: TypeAlias = "tuple[str, int, int, int, int]"

_MAX_LISTED = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKeys:
    """The rows of one file, in its order, each with the digest of its prompt."""

    keys: tuple[RowKey, ...]
    prompt_digests: tuple[str, ...]


def count_trajectories(keys: Iterable[RowKey]) -> int:
    """Number of different trajectories."""
    return len({key[:4] for key in keys})


def overlap_problems(files: Mapping[str, RowKeys]) -> list[str]:
    """Rows that more than one file holds, each with the files' names; the first 20 of them where there are more."""
    holders: dict[RowKey, list[str]] = {}
    for name, rows in files.items():
        for key in rows.keys:
            holders.setdefault(key, []).append(name)
    twice = [(key, names) for key, names in sorted(holders.items()) if len(names) > 1]
    return _some([f"{_name_row(key)} is in {' and in '.join(names)}" for key, names in twice])


def group_problems(keys: Iterable[RowKey], group_size: int) -> list[str]:
    """Groups that have another number of trajectories; the first 20 of them where there are more."""
    sizes = Counter(trajectory[:3] for trajectory in sorted({key[:4] for key in keys}))
    wrong = [(group, size) for group, size in sizes.items() if size != group_size]
    return _some(
        [
            f"{scheduler_id}/group {group_id}/episode {episode_id}: {size} of {group_size} trajectories"
            for (scheduler_id, group_id, episode_id), size in wrong
        ]
    )


def _name_row(key: RowKey) -> str:
    scheduler_id, group_id, episode_id, env_id, turn = key
    return str(
        SampleIdentity(scheduler_id=scheduler_id, group_id=group_id, episode_id=episode_id, env_id=env_id, turn=turn)
    )


def _some(problems: list[str]) -> list[str]:
    hidden = len(problems) - _MAX_LISTED
    return problems if hidden <= 0 else [*problems[:_MAX_LISTED], f"and {hidden} more"]
