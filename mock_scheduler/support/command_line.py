"""Remembers the command that this process carries out, so that its reports can repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from mock_scheduler.errors import redact
from mock_scheduler.support.text import printable

_words: ContextVar[tuple[str, ...]] = ContextVar("command", default=())


@contextmanager
def noting_command(words: Sequence[str]) -> Iterator[None]:
    """Remember the words behind ``mock-scheduler`` within the block."""
    token = _words.set(tuple(words))
    try:
        yield
    finally:
        _words.reset(token)


def describe_command() -> str:
    """Return the command as a shell takes it, without passwords; empty where none runs, as in a notebook."""
    words = _words.get()
    return printable(redact(shlex.join(("mock-scheduler", *words)))) if words else ""
