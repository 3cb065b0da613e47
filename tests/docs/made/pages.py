"""Reads pages of Markdown as text and fenced blocks, and knows the marks above them.

A mark is an HTML comment on the line above a fence:

- ``<!-- run -->``: ``session`` runs the block; ``<!-- run: exit 1 -->`` expects this exit code of its last command, and
  of a console ``<!-- run: exit 0, 5 -->`` one of each command;
- ``<!-- output -->``: the block is what a run block before it printed, ``…`` for lines that are left out;
- ``<!-- file: PATH -->``: the reader saves the block there;
- ``<!-- tested: tests/x.py::test_y -->``: that test runs the commands, or checks what the block shows;
- ``<!-- not run: REASON -->``: nothing here can run it, or it shows the shape of something.

``<!-- prepare`` and lines for a shell, up to ``-->``, make what the blocks behind it need, and nobody reads them.

``<!-- begin NAME -->`` and ``<!-- end NAME -->`` stand around text that a generator writes (``generators``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"

#: The languages of blocks that are commands, and of blocks that are printed; all others are code or configuration.
COMMANDS = ("bash", "sh", "console")
PRINTED = ("", "text")

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"<!-- (run|output|file|tested|not run)(?::\s+((?:(?!-->).)*?))?\s-->\n *$", re.DOTALL)
_PREPARED = re.compile(r"<!-- prepare\n(.*?)-->", re.DOTALL)
_REGION = re.compile(r"(<!-- begin ([\w-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One fenced block: its language, its text between the fences, the span of that text, and its mark.

    ``mark``: as above, or ``prepare``, or empty. ``said``: the mark's text behind the colon.
    """

    language: str
    text: str
    start: int
    end: int
    line: int
    mark: str
    said: str

    @property
    def needs_mark(self) -> bool:
        """Says whether a block of this language must say how it is kept true."""
        return self.language in (*COMMANDS, *PRINTED)


def list_pages() -> list[Path]:
    """Returns every page that people read on GitHub and on the site."""
    return [ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("frameworks/*.md"))]


def read_blocks(text: str) -> list[Block]:
    """Returns the fenced blocks of a page, and what is prepared for them, in their order."""
    blocks = []
    for found in _FENCE.finditer(text):
        mark = _MARK.search(text, 0, found.start())
        blocks.append(
            Block(
                language=found[2],
                text=found[3],
                start=found.start(3),
                end=found.end(3),
                line=text.count("\n", 0, found.start()) + 1,
                mark=mark[1] if mark else "",
                said=" ".join((mark[2] or "").split()) if mark else "",
            )
        )
    for found in _PREPARED.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        blocks.append(
            Block(
                language="", text=found[1], start=found.start(1), end=found.end(1), line=line, mark="prepare", said=""
            )
        )
    return sorted(blocks, key=lambda block: block.start)


def put_blocks(text: str, changed: Mapping[Block, str]) -> str:
    """Returns the page with the texts of these blocks in place of theirs."""
    for block in sorted(changed, key=lambda item: item.start, reverse=True):
        text = f"{text[: block.start]}{changed[block]}{text[block.end :]}"
    return text


def list_regions(text: str) -> Iterator[str]:
    """Yields the names of the regions that generators write."""
    for found in _REGION.finditer(text):
        yield found[2]


def put_regions(text: str, made: Mapping[str, str]) -> str:
    """Returns the page with each named region's text in its place; other regions stay."""

    def put(found: re.Match[str]) -> str:
        return f"{found[1]}{made[found[2]].strip()}\n{found[3]}" if found[2] in made else found[0]

    return _REGION.sub(put, text)
