"""Measures seconds of named blocks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class Clock:
    """Seconds by name, for one step and for the run."""

    step: dict[str, float] = field(default_factory=dict)
    total: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the block's seconds to ``time/{name}``."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - started_s
            for table in (self.step, self.total):
                table[name] = table.get(name, 0.0) + elapsed_s

    def take(self) -> dict[str, float]:
        """This step's seconds as metrics, and start the next step's."""
        metrics = {f"time/{name}": seconds for name, seconds in self.step.items()}
        self.step = {}
        return metrics
