"""Values belonging to one process: a forked child makes its own.

Threads, the connections of clients and locks of files do not live on in a forked child, though the objects that stand
for them do. Whoever holds such an object holds it here, and nothing else need know of forks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value of this process; ``remake`` makes another one at the first use in a forked child."""

    def __init__(self, value: T, *, remake: Callable[[], T]) -> None:
        self._value = value
        self._remake = remake
        self._process_id = os.getpid()

    def get(self) -> T:
        """Gives this process's own value."""
        if not self.is_own:
            self._value, self._process_id = self._remake(), os.getpid()
        return self._value

    @property
    def is_own(self) -> bool:
        """Whether this process has a value already; false in a forked child that has not used it yet."""
        return self._process_id == os.getpid()
