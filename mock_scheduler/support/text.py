"""Numbers and lists as short text, for messages and reports.

Contract: standard library only.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from itertools import islice

from mock_scheduler.support.foreign_text import printable

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def count_of(count: int, noun: str, plural: str | None = None) -> str:
    """``1 row``, ``12,800 rows``; ``plural``: ``None`` adds an s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_range(low: int, high: int) -> str:
    """``3``, ``0..2``."""
    return str(low) if low == high else f"{low}..{high}"


def format_bytes(size_bytes: float) -> str:
    """``512 B``, ``1.4 KiB``, ``300 GiB``: up to three digits, units of 1024."""
    for unit in _UNITS:
        if size_bytes < 1000 or unit == _UNITS[-1]:
            break
        size_bytes /= 1024
    return f"{size_bytes:.0f} {unit}" if unit == "B" or size_bytes >= 100 else f"{size_bytes:.1f} {unit}"


def shorten(text: str, width: int) -> str:
    """The text, cut to ``width`` characters with an ellipsis where it is longer."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def join_words(words: Sequence[str]) -> str:
    """A command line for a POSIX shell, as ``shlex.join`` gives it, but with the quotes a person reads best.

    A word with single quotes in it stands in double ones where nothing in it means anything there.
    """
    return " ".join(map(_quote_word, words))


def _quote_word(word: str) -> str:
    is_plain = not any(character in word for character in '"$`!') and not re.search(r"\\(\\|\n|$)", word)
    return f'"{word}"' if "'" in word and is_plain else shlex.quote(word)


def list_some(items: Collection[str], limit: int, separator: str = "; ") -> str:
    """The first ``limit`` items in one line, and how many more there are: ``a; b; and 3 more``."""
    rest = len(items) - limit
    return separator.join([*map(printable, islice(items, limit)), *([f"and {rest:,} more"] if rest > 0 else [])])


def bullet_list(problems: Collection[str], limit: int | None = 20) -> str:
    """The first ``limit`` problems, each on an indented line after a line break, and how many more there are.

    To be appended to the line naming the fault; empty where there is no problem. ``limit``: ``None`` lists all,
    for lists bounded by themselves.
    """
    rest = 0 if limit is None else len(problems) - limit
    listed = [*islice(problems, limit), *([f"and {rest:,} more"] if rest > 0 else [])]
    # A problem is one line: a line break in a name of a file may fake none.
    return "".join(f"\n  - {printable(problem)}" for problem in listed)
