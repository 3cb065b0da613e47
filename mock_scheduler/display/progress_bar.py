"""A progress bar for work that takes longer than a moment.

Contract: drawn on stderr, only where that is a terminal, and gone when the work is done: no output changes with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def show_progress(
    what: str, *, console: Console | None = None, delay_s: float = 1.0
) -> Iterator[Callable[[int, int], None]]:
    """Gives a function to call with how many are done, of how many; the bar appears after ``delay_s``.

    ``console``: ``None`` is this process's stderr.
    """
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True)
    task = progress.add_task(what, total=None)
    started_s = time.monotonic()
    is_drawn = False

    def update(done: int, total: int) -> None:
        nonlocal is_drawn
        progress.update(task, completed=done, total=total)
        if console.is_terminal and not is_drawn and time.monotonic() - started_s >= delay_s:
            is_drawn = True
            progress.start()

    try:
        yield update
    finally:
        if is_drawn:
            progress.stop()
