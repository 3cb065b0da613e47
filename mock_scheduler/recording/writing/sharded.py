"""What the writers of a sharded step do together: wait for all shards and commit; clear what was never committed.

Contract: the writer of shard 0 clears, under resume, before it writes anything, and it alone commits. So what it
commits was written after that by writers of this run, none of whom may write before shard 0's writer is open (in
training a collective lies between).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import RecordingError
from mock_scheduler.recording.paths import commit_name, list_shard_files, parse_step_stem
from mock_scheduler.recording.patience import Patience
from mock_scheduler.recording.shards import commit_shards, missing_shards
from mock_scheduler.recording.storage import Storage

logger = logging.getLogger("mock_scheduler.rollout_mock")


def commit_when_complete(storage: Storage, step: str, *, count: int, patience: Patience) -> int:
    """Wait until all ``count`` shards of ``step`` (as in ``paths.step_name``) are there, and commit them.

    Returns the stored bytes of the step. Raises ``RecordingError`` listing the shards that did not come.
    """
    if not patience.wait_until(
        lambda: not missing_shards(storage, step, count=count), describe=lambda: _awaited(storage, step, count)
    ):
        missing = missing_shards(storage, step, count=count)
        raise RecordingError(
            f"[Rollout Mock] {storage.path(step)} is not committed: after {patience.timeout_s:g} s "
            f"{len(missing)} of {count} shards are missing: {StepRanges.of(missing)}. Their ranks have ended, do "
            "not record this step, or write elsewhere: see their logs."
        )
    commit_shards(storage, step, count=count)
    return storage.size_on_disk(step)


def _awaited(storage: Storage, step: str, count: int) -> str:
    missing = missing_shards(storage, step, count=count)
    folder, _, stem = step.rpartition("/")
    shards = f"shard{'s'[: len(missing) > 1]} {StepRanges.of(missing)}"
    return f"{shards} of {count} (counted from 0) of {folder} step {parse_step_stem(stem)}"


def clear_uncommitted(storage: Storage, folders: Iterable[str]) -> None:
    """Remove, in these folders (such as ``train``), the shards of steps that an ended run did not commit."""
    for folder in folders:
        for name in storage.list_names(folder):
            step = f"{folder}/{name}"
            if parse_step_stem(name) is not None and not storage.exists(commit_name(step)):
                shards = list_shard_files(storage, step)
                logger.info(
                    "[Rollout Mock] %s was not committed when an earlier run ended: its %d shards are removed and the "
                    "step is recorded anew",
                    storage.path(step),
                    len(shards),
                )
                storage.remove(step)
