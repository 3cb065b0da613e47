"""Parses the command line of a module started by ``python -m``, with typer or argparse.

Contract: every wrong argument is a ``ConfigError``, so it exits with 5 like any other bad input; typer's own exit code,
2, is a verdict here. Importing this costs typer (25 ms), so a module that starts light imports it where it parses.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import typer
from typer.exceptions import TyperException

from mock_scheduler.errors import ConfigError, ExitCode

T = TypeVar("T")


class ArgumentParser(argparse.ArgumentParser):
    """Ends the process with 5 for a wrong argument, in place of argparse's own 2."""

    def error(self, message: str) -> NoReturn:
        """Says what is wrong and how the program is called."""
        self.print_usage(sys.stderr)
        self.exit(int(ExitCode.USAGE), f"{self.prog}: error: {message}\n")


def parse_arguments(command: Callable[..., T], arguments: Sequence[str], *, prog: str) -> T:
    """Parse ``arguments``, without the program's name, and return the value of ``command`` called with them.

    ``command`` states its options as typer takes them; they may stand anywhere among its arguments. ``prog``: how the
    program is started, for messages. ``--help`` prints the options and ends the process with 0. Raises ``ConfigError``.
    """
    values: list[T] = []

    @functools.wraps(command)
    def call(*given: object, **named: object) -> None:
        values.append(command(*given, **named))

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(call)
    try:
        app(list(arguments), prog_name=prog, standalone_mode=False)
    except TyperException as error:
        raise ConfigError(f"{error.format_message()}\nTry '{prog} --help'.") from error
    if not values:  # --help printed the options
        raise SystemExit(0)
    return values[0]
