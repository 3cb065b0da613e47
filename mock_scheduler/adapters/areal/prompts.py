"""AReaL's data loader, of which a replay draws as many batches of prompts as the live rollout did.

AReaL draws ahead of what it trains on, by a generator that goes on over the ends of epochs. Contract: both the live
rollout and the replay draw through this object, so that one goes on where the other one stood.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class PromptLoader:
    """Stands before a data loader, and counts the batches that are drawn of it: ``drawn``."""

    def __init__(self, loader: Any) -> None:  # noqa: ANN401 - AReaL's
        self.loader = loader
        self.batch_size = loader.batch_size
        self.drawn = 0
        self._epoch = 0
        self._running: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Go on to the end of the epoch that is under way."""
        if self._running is None:
            set_epoch = getattr(getattr(self.loader, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)
            self._running = iter(self.loader)
        for batch in self._running:
            self.drawn += 1
            yield batch
        self._running = None
        self._epoch += 1

    def draw(self, count: int) -> None:
        """Draw batches that a live rollout drew."""
        for _ in range(count):
            while next(iter(self), None) is None:  # the end of an epoch
                pass
