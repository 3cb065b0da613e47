"""Locks by name, made when they are asked for and gone when no one holds or awaits them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

L = TypeVar("L")


class LockTable(Generic[L]):
    """``make_lock`` makes one; any thread may ask."""

    def __init__(self, make_lock: Callable[[], L]) -> None:
        self._make_lock = make_lock
        self._locks: WeakValueDictionary[Hashable, L] = WeakValueDictionary()
        self._guard = threading.Lock()

    def of(self, name: Hashable) -> L:
        """The lock of this name: the same one as long as anyone uses it."""
        with self._guard:
            lock = self._locks.get(name)
            if lock is None:
                lock = self._locks[name] = self._make_lock()
            return lock
