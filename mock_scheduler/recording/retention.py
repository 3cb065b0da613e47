"""Decides the recorded steps that stay on the disk, and keeps the file that tells removed steps and replay starts.

Contract: ``retention.json`` is written before the first removal it tells of, and steps go in ascending order. So
after a crash every step from the cut on is there, some earlier ones may be, and the next checkpoint removes them. A
step on the disk counts as present, whatever the file says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from mock_scheduler.config.rollout_mock import RetentionConfig
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.recording.paths import RETENTION_NAME, list_folders, locate_steps, parse_folder
from mock_scheduler.recording.sealed import SealedFile
from mock_scheduler.recording.storage import Storage, locked
from mock_scheduler.support.documents import Count

RETENTION_FORMAT = "rollout-retention"
RETENTION_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionRecord:
    """Holds the content of ``retention.json``.

    ``start_points``: steps a saved checkpoint continues with, ascending; 0 needs none. ``removed``: steps that
    were removed, per folder (``train``, ``val``, ``train.{scheduler_id}``); one present was recorded again.
    """

    start_points: tuple[int, ...] = (0,)
    removed: Mapping[str, StepRanges] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredRetention:
    """A ``RetentionRecord`` as the file has it; removed steps as text like ``0-3, 7``."""

    start_points: tuple[Count, ...]
    removed: dict[str, str]


_FILE = SealedFile[_StoredRetention](
    _StoredRetention, format_name=RETENTION_FORMAT, version=RETENTION_VERSION, noun="retention record"
)


def load_retention(storage: Storage) -> RetentionRecord:
    """Read ``retention.json``; where there is none, nothing was removed. Raises ``CorruptRecordingError``."""
    try:
        stored = _FILE.load(storage, RETENTION_NAME)
    except FileNotFoundError:
        return RetentionRecord()
    try:
        removed = {folder: StepRanges.parse(steps) for folder, steps in stored.removed.items()}
    except ValueError as error:
        raise _FILE.corrupt(error, source=storage.path(RETENTION_NAME)) from error
    return RetentionRecord(start_points=tuple(sorted(set(stored.start_points))), removed=removed)


def save_retention(storage: Storage, record: RetentionRecord) -> None:
    """Write ``retention.json`` in place of the older one, whole or not at all."""
    removed = {folder: str(steps) for folder, steps in record.removed.items()}
    storage.replace(RETENTION_NAME, _FILE.encode(_StoredRetention(start_points=record.start_points, removed=removed)))


def find_removable(
    steps: Mapping[str, Sequence[int]], start_points: Sequence[int], retention: RetentionConfig
) -> dict[str, list[int]]:
    """Folder -> steps that may go: those before the latest start point that ``keep_last`` train steps follow.

    ``steps``: the present ones, per folder. Validation steps go with the train steps beside them; pinned ones stay.
    """
    if retention.keep_last is None:
        return {}
    trained = {step for folder, found in steps.items() if is_train(folder) for step in found}
    # Only a start point may be the cut: a replay that began anywhere else would have no checkpoint.
    fitting = [start for start in start_points if sum(step >= start for step in trained) >= retention.keep_last]
    cut = max(fitting, default=0)
    pinned = StepRanges(()) if retention.pin_steps is None else retention.pin_steps
    removable = {
        folder: [step for step in sorted(found) if step < cut and step not in pinned] for folder, found in steps.items()
    }
    return {folder: found for folder, found in removable.items() if found}


def note_checkpoint(storage: Storage, next_step: int, retention: RetentionConfig) -> dict[str, list[int]]:
    """Note that a saved checkpoint continues with ``next_step``, and remove the steps that ``retention`` lets go.

    All steps before it must be on the disk. Several writers of a recording may do this at once. Returns the steps
    removed, per folder; does nothing where everything is kept.
    """
    if retention.keep_last is None:
        return {}
    with locked(storage):
        record = load_retention(storage)
        start_points = tuple(sorted({*record.start_points, next_step}))
        located = {folder: locate_steps(storage, folder) for folder in list_folders(storage)}
        removable = find_removable({folder: list(found) for folder, found in located.items()}, start_points, retention)
        removed = {
            folder: StepRanges.parse([record.removed.get(folder, StepRanges(())), *removable.get(folder, [])])
            for folder in sorted({*record.removed, *removable})
        }
        # The note first: after a crash a step may be noted and present, never removed without a note.
        save_retention(storage, RetentionRecord(start_points=start_points, removed=removed))
        for folder, found in removable.items():
            for step in found:  # ascending, so that the present steps have no gap
                storage.remove(located[folder][step])
    return removable


def replay_starts(record: RetentionRecord, steps: Mapping[str, Sequence[int]]) -> list[int]:
    """Steps a saved checkpoint continues with, a train step is present after, and no removal comes after.

    ``steps``: the present ones, per folder. Steps recorded again after their removal do not count.
    """
    removed = [last for gone in record.removed.values() for first, last in gone.ranges if last is not None]
    # A start point after the last step leads nowhere; one before a removal would meet the gap.
    latest = max((step for folder, found in steps.items() if is_train(folder) for step in found), default=-1)
    return [start for start in record.start_points if max(removed, default=-1) < start <= latest]


def num_more_kept(
    steps: Mapping[str, Sequence[int]], num_remaining: int, *, record: RetentionRecord, retention: RetentionConfig
) -> int:
    """How many more steps than now will lie on the disk at most, when ``num_remaining`` more are recorded.

    Between two checkpoints steps gather: up to two of the widest distances between start points, beside ``keep_last``.
    Before the first checkpoint that distance is not known, and taken as 0.
    """
    if retention.keep_last is None:
        return num_remaining
    distance = max((later - earlier for earlier, later in pairwise(record.start_points)), default=0)
    pins = () if retention.pin_steps is None else retention.pin_steps
    num_present = sum(step not in pins for found in steps.values() for step in found)
    return min(num_remaining, max(0, retention.keep_last + 2 * distance - num_present))


def is_train(folder: str) -> bool:
    """Whether training steps lie in a folder of this name."""
    parsed = parse_folder(folder)
    return parsed is not None and parsed[0] == "train"
