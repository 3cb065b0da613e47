"""Foreign text becomes printable: names and texts of files and of peers show what they hold, and act on nothing.

A terminal obeys control characters, hides others, and turns the order of a line round. Each such character is written
as in a Python literal: ``\\x1b``, ``\\n``, ``\\u202e``. Letters, marks and signs of every language stay.

Contract: standard library only. A printable text stays as it is, so a text may go through here more than once.
"""

from __future__ import annotations

import re
import unicodedata

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
