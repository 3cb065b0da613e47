"""The console that commands print their results on."""

from __future__ import annotations

import os

from rich.console import Console

_PLAIN_WIDTH = 120


def build_console() -> Console:
    """A console on stdout; as wide as the terminal or as ``COLUMNS`` says, or 120 columns where there is neither."""
    console = Console()
    is_width_known = console.is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    return console if is_width_known else Console(width=_PLAIN_WIDTH)
