"""Reads several steps at once where each answer takes a round trip."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from mock_scheduler.recording.storage import Storage

T = TypeVar("T")
R = TypeVar("R")

#: How many are read at once; each is in memory as a whole.
_NUM_READERS = 8


def map_steps(storage: Storage, read: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Gives what ``read`` returns of each item, in their order, and raises what it raises.

    Of a remote storage the next ones are read meanwhile, as few as are read at once.
    """
    if not storage.is_remote:
        yield from map(read, items)
        return
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="rollout-check") as pool:
        begun: deque[Future[R]] = deque()
        try:
            for item in items:
                begun.append(pool.submit(read, item))
                if len(begun) >= _NUM_READERS:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()
