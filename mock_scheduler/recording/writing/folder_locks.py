"""The rights to write that one writer holds in a recording.

Contract: they end with ``release`` or with the process; a forked child, which has none of its parent's, takes its own.
"""

from __future__ import annotations

from mock_scheduler.recording.paths import shard_stem
from mock_scheduler.recording.storage import Lock, Storage
from mock_scheduler.scheduler import RowShard
from mock_scheduler.support.forks import PerProcess

_CLAIM = ""  # of the whole recording, beside the locks of its folders


class FolderLocks:
    """What one writer holds: its run's claim on the recording, and the locks on the folders into which it writes."""

    def __init__(self, storage: Storage, shard: RowShard | None, *, run_id: str) -> None:
        self._storage = storage
        self._part = None if shard is None else shard_stem(shard)
        self._run_id = run_id
        first: dict[str, Lock | None] = {}
        self._locks = PerProcess(first, remake=lambda: {_CLAIM: storage.claim(run_id)})

    def claim(self) -> None:
        """Keep other runs out; raises ``RecordingError`` naming one that records here."""
        locks = self._locks.get()
        if _CLAIM not in locks:
            locks[_CLAIM] = self._storage.claim(self._run_id)

    def take(self, folder: str) -> None:
        """Lock a folder such as ``train`` unless it is already; raises ``RecordingError`` naming who holds it."""
        locks = self._locks.get()
        if folder not in locks:
            locks[folder] = self._storage.lock(folder, part=self._part)

    def release(self) -> None:
        """Give all back."""
        # A forked child that has taken none gives none back.
        locks = self._locks.get() if self._locks.is_own else {}
        while locks:
            _, lock = locks.popitem()
            if lock is not None:
                lock.release()
