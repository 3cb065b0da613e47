"""Numbers, lists and foreign texts as short printable text, for messages and reports; and numbers read from text.

Foreign text is the names and texts of files and of peers. It shows what it holds, and acts on nothing: a terminal obeys
control characters, hides others, and turns the order of a line round. Each such character is written as in a Python
literal: ``\\x1b``, ``\\n``, ``\\u202e``. Letters, marks and signs of every language stay.

Contract: standard library only. A printable text stays as it is, so a text may go through here more than once. Numbers
of JSON and YAML may be larger than any float.
"""

from __future__ import annotations

import re
import shlex
import sys
import unicodedata
from collections.abc import Collection, Sequence
from itertools import islice
from typing import TypeGuard

#: A line of a message is cut to so many characters.
MAX_LINE = 4_000
#: A message is cut to so many lines.
MAX_LINES = 1_000

_INDENT = "  "
_UNUSUAL = re.compile(r"[^ -~]+")
# Signs that no terminal draws, though Unicode calls them letters or marks: joiners, fillers, variation selectors.
_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\uffa0\ufe00-\ufe0f\U000e0100-\U000e01ef]")
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str, *, limit: int | None = None) -> str:
    """Makes a name, or any text of one line, printable; a line break in it becomes ``\\n``.

    Args:
        text: the foreign text.
        limit: the most characters to give back, with an ellipsis where there are more; ``None`` keeps all.
    """
    if limit is not None and len(text) > limit:
        return f"{_escape(text[:limit])[: limit - 1]}…"
    return _escape(text)


def printable_lines(text: str) -> str:
    """Makes a text of several lines printable; its line breaks stay."""
    return text if _is_plain(text) else "\n".join(map(_escape, text.split("\n")))


def printable_message(text: str) -> str:
    """Makes a message printable: only its first line begins a line, so no line break in it fakes a message.

    The lines below are indented, unless they are already, and enormous ones are cut.
    """
    lines = text.rstrip("\n").split("\n")
    rest = len(lines) - MAX_LINES
    shown = [printable(line, limit=MAX_LINE) for line in lines[:MAX_LINES]]
    shown += [f"and {rest:,} more lines"] if rest > 0 else []
    # All or none of them: indented lines may be YAML, for the reader to copy.
    indent = "" if all(line.startswith(" ") for line in shown[1:] if line) else _INDENT
    return "\n".join([shown[0], *(f"{indent}{line}" if line else "" for line in shown[1:])])


def is_hostile(character: str) -> bool:
    """Says whether a terminal may obey, hide or move a character instead of showing it."""
    # Spaces of other widths (Zs) are no letters to Python, yet they stand in ordinary text.
    return _INVISIBLE.match(character) is not None or not (
        character.isprintable() or unicodedata.category(character) == "Zs"
    )


def find_hostile(text: str) -> list[int]:
    """Finds the places of all characters that are not printable."""
    if _is_plain(text):
        return []
    runs = _UNUSUAL.finditer(text)
    return [place for run in runs for place in range(*run.span()) if is_hostile(text[place])]


def escape_character(character: str) -> str:
    """Writes one character as in a Python literal."""
    code = ord(character)
    if character in _NAMED:
        return _NAMED[character]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _is_plain(text: str) -> bool:
    return text.isprintable() and (text.isascii() or _INVISIBLE.search(text) is None)


def _escape(text: str) -> str:
    return text if _is_plain(text) else _UNUSUAL.sub(_escape_run, text)


def _escape_run(match: re.Match[str]) -> str:
    return "".join(escape_character(item) if is_hostile(item) else item for item in match[0])


# Also a backslash before a sign, which would take that sign's own away, and what Markdown of GitHub makes a link of.
_MARKUP = re.compile(r"\\(?=[!-/:-@\[-`{-~])|[<>\[\]&|@]|:(?=//)|(?<=www)\.")


def in_prose(text: str) -> str:
    """Gives a foreign text as one line of Markdown without markup in it: no link, no picture, no HTML."""
    return _MARKUP.sub(lambda found: f"\\{found[0]}", printable(text))


def in_code(text: str) -> str:
    """Gives a foreign text as a span of code in one line of Markdown, which no text can end."""
    shown = printable(text)
    mark = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    pad = " " if shown[:1] in ("", "`") or shown.endswith("`") else ""
    return f"{mark}{pad}{shown}{pad}{mark}"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def count_of(count: int, noun: str, plural: str | None = None) -> str:
    """``1 row``, ``12,800 rows``; ``plural``: ``None`` adds an s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def on_one_line(text: object) -> str:
    """Writes a text, or an error's, with a space for each stretch of white space in it."""
    return " ".join(str(text).split())


def in_words(name: str) -> str:
    """Writes a name of the code as words: ``activation gradient`` for ``activation_gradient``."""
    return name.replace("_", " ")


def format_range(low: int, high: int) -> str:
    """Returns ``3``, ``0..2``."""
    return str(low) if low == high else f"{low}..{high}"


def format_bytes(size_bytes: float) -> str:
    """Returns ``512 B``, ``1.4 KiB``, ``300 GiB``: up to three digits, units of 1024."""
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


#: A number in a name has at most so many digits; a longer one is text.
MAX_DIGITS = 18


def natural_part(text: str) -> tuple[int, str]:
    """Gives a part of a name its place in natural order: ``layer.2`` comes before ``layer.10``."""
    return (int(text), "") if text.isdecimal() and len(text) <= MAX_DIGITS else (-1, text)


def is_real(value: object) -> TypeGuard[int | float]:
    """Says whether a value is a number that a float can hold: ``float(value)`` succeeds. A bool is none."""
    if isinstance(value, bool):
        return False
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)
