"""Reads an object of a bucket by ranges, which may be kept on this node for its other processes and for the next run.

Contract: each range is one request, or none where it is kept; ranges of an object of another version are others. What
this node cannot keep, since its disk is full for one, is read from the bucket by each process, and said once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from mock_scheduler.errors import CorruptRecordingError
from mock_scheduler.recording.storage.byte_sources import check_range
from mock_scheduler.support.node_cache import NodeCache
from mock_scheduler.support.object_stores import StoredObject

logger = logging.getLogger("mock_scheduler.rollout_mock")

#: What opening an object reads of it: most steps as a whole, so that they cost one round trip.
FIRST_BYTES = 2**20

Fetch = Callable[[int, int], memoryview]
"""Requests bytes ``start`` to ``stop`` of an object, writable; fewer, where the object has fewer now."""


class KeptRanges:
    """Reads ranges of objects by way of this node's disk.

    Args:
        cache: Of this node.
    """

    def __init__(self, cache: NodeCache) -> None:
        self._cache = cache
        self._has_warned = False

    def reader(self, stored: StoredObject, fetch: Fetch, *, path: str) -> Fetch:
        """Returns what reads one object so; ``path`` names it in messages. Its errors are those of ``fetch``."""
        if not stored.version:
            return fetch

        def read(start: int, stop: int) -> memoryview:
            if stop - start > self._cache.limit_bytes:
                return fetch(start, stop)
            try:
                return self._cache.read(stored, start, stop, fetch)
            except OSError as error:
                data = fetch(start, stop)
                self._warn(path, error)
                return data

        return read

    def _warn(self, path: str, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("[Rollout Mock] %s is read without keeping it on this node: %s", path, error)


class ObjectSource:
    """An object, whose ``first`` bytes are here already; each range of others is fetched when it is read."""

    def __init__(self, fetch: Fetch, *, size_bytes: int, first: memoryview, path: str) -> None:
        self._fetch = fetch
        self._size_bytes = size_bytes
        self._first = first
        self._path = path

    @property
    def size_bytes(self) -> int:
        """Size when it was opened."""
        return self._size_bytes

    def read(self, start: int, stop: int) -> memoryview:
        """Returns bytes ``start`` to ``stop``, writable; raises ``CorruptRecordingError`` where there are fewer."""
        check_range(start, stop, self._size_bytes, path=self._path)
        if stop <= len(self._first):
            return memoryview(bytearray(self._first[start:stop]))
        data = self._fetch(start, stop)
        if len(data) != stop - start:
            raise CorruptRecordingError(
                f"{self._path}: {len(data)} of {stop - start} bytes could be read: it was changed"
            )
        return data
