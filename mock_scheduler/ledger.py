"""Counts everything that a run built, called, answered from a recording, suppressed and recorded, where it happens.

Contract: counts only grow, from any thread; an engine or environment counts itself when it is built, so a 0 here was
measured.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Literal, get_args

from mock_scheduler.errors import SchedulerError
from mock_scheduler.support.files import save_json

Category = Literal["built", "called", "answered", "suppressed", "recording"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
#: Always present among what was built, so that a zero is shown.
BUILT_NAMES = ("engine", "environment", "scheduler")


class Ledger:
    """Counts of events by category and name.

    ``built``: a costly object was made (``engine``, ``environment``, ``scheduler``); ``called``: a call reached the
    real scheduler; ``answered``: a call was answered from the recording; ``suppressed``: a call had no effect.
    ``recording``: uses of the recording: ``recorded_steps`` and ``recorded_bytes`` this process wrote,
    ``present_steps`` it found written already, ``removed_steps`` its retention let go, ``repeated_steps``
    given in the place of absent ones, ``verified_steps`` equal to the played batch and ``different_steps`` that were
    not, ``cache_hits`` and ``cache_misses``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Category, dict[str, int]] = {category: {} for category in CATEGORIES}
        self._counts["built"] = dict.fromkeys(BUILT_NAMES, 0)

    def count(self, category: Category, name: str, n: int = 1) -> None:
        """Add ``n`` events; raises ``SchedulerError`` for an unknown category or a negative ``n``."""
        # A name that was misspelt would be a zero that nobody measured.
        if category not in CATEGORIES:
            raise SchedulerError(f"ledger: unknown category {category!r}; known: {', '.join(CATEGORIES)}")
        if n < 0:
            raise SchedulerError(f"ledger: {category} {name} cannot be counted {n} times")
        with self._lock:
            self._counts[category][name] = self._counts[category].get(name, 0) + n

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Returns a copy of the counts: category -> name -> count."""
        with self._lock:
            return {category: dict(names) for category, names in self._counts.items()}

    def render(self) -> str:
        """Returns a short plain-text table: things built, one line each, then the counts of each other category."""
        counts = self.as_dict()
        lines = ["Ledger"]
        lines += [f"  {name}s built: {count}" for name, count in sorted(counts["built"].items())]
        for category, title in (
            ("called", "calls to the real scheduler"),
            ("answered", "calls answered from the recording"),
            ("suppressed", "calls suppressed"),
            ("recording", "recording"),
        ):
            listed = ", ".join(f"{name} {count}" for name, count in sorted(counts[category].items()))
            lines.append(f"  {title}: {listed or 'none'}")
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write the counts as JSON, replacing an older file."""
        save_json(Path(path), self.as_dict())
