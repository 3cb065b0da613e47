"""The console of all commands: only its own styles act on a terminal, never the text that it is given.

Each ``Text`` and ``str`` is one line: a line break in it is shown as ``\\n``, as is every other character that a
terminal would obey, hide or move. Markup and emoji codes stay text. Only our code gives styles.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import IO, TextIO

from rich import progress
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, JustifyMethod, OverflowMethod, RenderableType
from rich.file_proxy import FileProxy
from rich.segment import Segment
from rich.status import Status
from rich.style import Style, StyleType
from rich.text import Text

from mock_scheduler.support.terminal_streams import GuardedStream, encodable
from mock_scheduler.support.text import escape_character, find_hostile, printable, printable_lines


class Console(RichConsole):
    """Writes to stdout, stderr or another stream.

    ``file``: ``None`` is stdout, or stderr with ``stderr``. ``width``: in columns; ``None`` is the terminal's.
    """

    def __init__(
        self,
        *,
        file: IO[str] | None = None,
        stderr: bool = False,
        width: int | None = None,
        force_terminal: bool | None = None,
        highlight: bool = True,
    ) -> None:
        super().__init__(
            file=file,
            stderr=stderr,
            width=width,
            force_terminal=force_terminal,
            highlight=highlight,
            markup=False,
            emoji=False,
        )

    @property
    def file(self) -> IO[str]:
        """Returns the stream that this console writes to, behind guards and progress bars."""
        stream = super().file
        while isinstance(stream, GuardedStream | FileProxy):
            stream = stream.rich_proxied_file
        return stream

    @file.setter
    def file(self, stream: IO[str]) -> None:
        self._file = stream

    def status(
        self,
        status: RenderableType,
        *,
        spinner: str = "dots",
        spinner_style: StyleType = "status.spinner",
        speed: float = 1.0,
        refresh_per_second: float = 12.5,
    ) -> Status:
        """Shows a text beside a spinner, as rich does, but reads no markup from it."""
        return _Status(
            Text(printable(status)) if isinstance(status, str) else status,
            console=self,
            spinner=spinner,
            spinner_style=spinner_style,
            speed=speed,
            refresh_per_second=refresh_per_second,
        )

    def render_str(
        self,
        text: str,
        *,
        style: str | Style = "",
        justify: JustifyMethod | None = None,
        overflow: OverflowMethod | None = None,
        emoji: bool | None = None,
        markup: bool | None = None,
        highlight: bool | None = None,
        highlighter: Callable[[str | Text], Text] | None = None,
    ) -> Text:
        """Makes a ``Text`` of a str as rich does, but reads neither markup nor emoji codes from it."""
        return super().render_str(
            printable(text),
            style=style,
            justify=justify,
            overflow=overflow,
            emoji=False,
            markup=False,
            highlight=highlight,
            highlighter=highlighter,
        )

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Renders as rich does, each text printable and in one line."""
        if isinstance(renderable, Text):
            renderable = printable_text(renderable)
        yield from super().render(renderable, options)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        # The net under ``render``: texts that a renderable made itself. Rich alone makes control segments.
        checked = [item if item.control else Segment(printable_lines(item.text), item.style) for item in buffer]
        return encodable(super()._render_buffer(checked), self.encoding)


def printable_text(text: Text) -> Text:
    """Makes a styled text printable, in one line; the styles stay where they are."""
    places = find_hostile(text.plain)
    if not places:
        return text
    shown = text.blank_copy()
    cuts = sorted({0, len(text), *places, *(place + 1 for place in places)})
    hostile = set(places)
    for (start, _), piece in zip(pairwise(cuts), text.divide(cuts[1:-1]), strict=True):
        shown.append_text(_escape_piece(piece) if start in hostile else piece)
    return shown


def _escape_piece(piece: Text) -> Text:
    """Escapes a text of one character; the longer text has its styles all over."""
    escaped = Text(escape_character(piece.plain), style=piece.style)
    for span in piece.spans:
        escaped.stylize(span.style)
    return escaped


class _Status(Status):
    def start(self) -> None:
        super().start()
        _guard_proxies()


class ProgressBar(progress.Progress):
    """A progress bar; while it is shown, printed texts go above it, printable."""

    def start(self) -> None:
        """Show the bar."""
        super().start()
        _guard_proxies()


def _guard_proxies() -> None:
    sys.stdout, sys.stderr = map(_guard_proxy, (sys.stdout, sys.stderr))


def _guard_proxy(stream: TextIO) -> TextIO:
    # Rich's proxy reads escape sequences of the text as styles, so they have to be text before.
    return GuardedStream(stream, by_line=True) if isinstance(stream, FileProxy) else stream  # type: ignore[return-value]
