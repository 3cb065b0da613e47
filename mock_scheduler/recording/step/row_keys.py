"""Which rows files hold, as plain keys: enough to order the rows of several files, and to tell trajectories and groups.

Contract: keys compare as ``SampleIdentity`` does, so sorted keys are the order of a batch's rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mock_scheduler.batch.trajectory import RowKey, SampleIdentity, count_groups, partial_group_problems

_MAX_LISTED = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKeys:
    """The rows of one file, in its order, each with the digest of its prompt."""

    keys: tuple[RowKey, ...]
    prompt_digests: tuple[str, ...]


def count_trajectories(keys: Iterable[RowKey]) -> int:
    """Number of different trajectories."""
    return count_groups(key[:4] for key in keys).total()


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
    return _some(partial_group_problems(count_groups(key[:4] for key in sorted(keys)), group_size))


def _name_row(key: RowKey) -> str:
    scheduler_id, group_id, episode_id, env_id, turn = key
    return str(
        SampleIdentity(scheduler_id=scheduler_id, group_id=group_id, episode_id=episode_id, env_id=env_id, turn=turn)
    )


def _some(problems: list[str]) -> list[str]:
    hidden = len(problems) - _MAX_LISTED
    return problems if hidden <= 0 else [*problems[:_MAX_LISTED], f"and {hidden} more"]
