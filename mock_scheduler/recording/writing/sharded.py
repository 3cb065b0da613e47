"""The common work of a sharded step's writers: wait for all shards and commit; clear shards that were never committed.

Contract: the writer of shard 0 clears, under resume, before it writes anything, and it alone commits. So every shard it
commits was written after that by writers of this run, none of whom may write before shard 0's writer is open (in
training a collective lies between).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import RecordingError
from mock_scheduler.recording.paths import commit_name, list_shard_files, parse_step_stem
from mock_scheduler.recording.shards import commit_shards, missing_shards
from mock_scheduler.recording.storage import Storage

logger = logging.getLogger("mock_scheduler.rollout_mock")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_SAID_AFTER_S, _SAID_EVERY_S = 5.0, 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long to wait for the other processes of a run, by a clock (seconds, monotonic), and how to pause.

    A condition is looked at before the first pause, and once more when the time is over.
    """

    timeout_s: float = 600.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def wait_until(self, condition: Callable[[], bool], *, describe: Callable[[], str]) -> bool:
        """Look at ``condition`` until it holds, with pauses that grow to a second; whether it did in time.

        ``describe``: the awaited event, like ``shard 3 of 4 of train step 0``; a wait that takes long says so, in a
        warning after 5 s and then every 30 s.
        """
        started_s, pause_s = self.clock(), _FIRST_PAUSE_S
        deadline_s, said_next_s = started_s + self.timeout_s, started_s + _SAID_AFTER_S
        while not condition():
            now_s = self.clock()
            if now_s >= deadline_s:
                return False
            if now_s >= said_next_s:
                said_next_s = now_s + _SAID_EVERY_S
                logger.warning(
                    "[Rollout Mock] Waiting for %s, for at most %g s (%.0f s so far)",
                    *(describe(), self.timeout_s, now_s - started_s),
                )
            self.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True


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
    """Remove, in these folders (like ``train``), the shards of steps an ended run did not commit."""
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
