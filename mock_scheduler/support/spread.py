"""Work that is shared out to other processes: the seam between a comparison and whatever carries its parts out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Spread(Protocol):
    """Carries tasks out anywhere, each once or, where its process was lost, again; tasks can be pickled."""

    def __call__(self, tasks: Sequence[Callable[[], T]]) -> Iterator[T]:
        """Yields the results in the order of the tasks; raises the error of a task that failed."""
        ...
