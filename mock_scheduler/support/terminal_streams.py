"""The two streams of a process, with a guard: no text that is printed there can act on the terminal.

Inside ``guarded_terminal`` everything that Python writes to stdout and stderr (``print``, warnings, log messages,
tracebacks, other libraries) becomes printable, line breaks kept. A rich console writes past the guard, since it makes
colours; ours (``display.console``) makes its own texts printable. ``print_message`` and ``print_output`` are the only
other ways to the terminal; they need no guard.

Contract: standard library only, but for ``redact``.
"""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from mock_scheduler.errors import redact
from mock_scheduler.support.text import printable_lines, printable_message


class GuardedStream(io.TextIOBase):
    """Writes to another stream, and makes every text printable before.

    ``by_line``: gives the other stream one line at a time.
    """

    def __init__(self, stream: TextIO, *, by_line: bool = False) -> None:
        self._stream = stream
        self._by_line = by_line

    @property
    def rich_proxied_file(self) -> TextIO:
        """Returns the stream behind the guard; a rich console looks for it under this name and writes there."""
        return self._stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # typeshed has a plain attribute
        """Returns the encoding of the other stream."""
        return self._stream.encoding or "utf-8"

    @property
    def errors(self) -> str | None:  # type: ignore[override]  # as above
        """Returns the error handler of the other stream."""
        return self._stream.errors

    @property
    def closed(self) -> bool:
        """Whether the other stream is closed."""
        return self._stream.closed

    def write(self, text: str) -> int:
        """Write a text, and return its length as it was given."""
        shown = encodable(printable_lines(text), self.encoding)
        for piece in shown.splitlines(keepends=True) if self._by_line else [shown]:
            self._stream.write(piece)
        return len(text)

    def flush(self) -> None:
        """Flush the other stream."""
        self._stream.flush()

    def isatty(self) -> bool:
        """Say whether the other stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the other stream."""
        return self._stream.fileno()

    def writable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Flush only: the other stream belongs to the process."""
        self.flush()


def encodable(text: str, encoding: str) -> str:
    """Escapes the characters that an encoding lacks; all of UTF-8's stay."""
    if text.isascii():
        return text
    return text.encode(encoding, "backslashreplace").decode(encoding)


def print_message(text: str) -> None:
    """Print a message on stderr without passwords; its first line begins a line, the others are indented."""
    _write(sys.stderr, printable_message(redact(text)))


def print_output(text: str) -> None:
    """Print a command's output on stdout, in the lines it has."""
    _write(sys.stdout, printable_lines(text))


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # Python's own stream where its descriptor is closed
        return
    stream.write(f"{encodable(text, stream.encoding or 'utf-8')}\n")
    stream.flush()


class MessageHandler(logging.Handler):
    """Prints log messages on whatever stderr is at that moment: a progress bar takes it over while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        print_message(self.format(record))


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    text = warnings.formatwarning(message, category, filename, lineno, line).rstrip("\n")
    if file is None:
        print_message(text)
    else:
        _write(file, printable_message(text))


@contextmanager
def guarded_terminal() -> Iterator[None]:
    """Guards stdout and stderr of this process, its warnings, and log messages that no handler takes."""
    before = sys.stdout, sys.stderr, warnings.showwarning, logging.lastResort
    sys.stdout, sys.stderr = map(_guard, (sys.stdout, sys.stderr))
    warnings.showwarning = _show_warning
    logging.lastResort = MessageHandler(logging.WARNING)
    try:
        yield
    finally:
        sys.stdout, sys.stderr, warnings.showwarning, logging.lastResort = before


def _guard(stream: TextIO | None) -> TextIO:
    if stream is None or isinstance(stream, GuardedStream):
        return stream  # type: ignore[return-value]  # None: nobody reads it, and Python prints nothing
    return GuardedStream(stream)  # type: ignore[return-value]
