"""Runs a typer program of many commands, reading the options of none but the one that is run.

Contract: help, messages and results are those of the same program run by typer. typer 0.29 reads the options of every
command for a list that shows none of them: for twenty commands, a quarter of ``--help``.
"""

from __future__ import annotations

import gc
import inspect
from typing import Any

from typer import Typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info, get_command_name


class LazyCommands(TyperGroup):
    """The commands of ``app`` by name; each is only its name and its help until it is run."""

    def __init__(self, app: Typer, **attributes: Any) -> None:  # noqa: ANN401 - typer's own, as text and flags
        self._infos = {}
        for info in app.registered_commands:
            assert info.callback is not None  # a command that was registered by a decorator
            self._infos[info.name or get_command_name(info.callback.__name__)] = info
        self._mode = app.rich_markup_mode
        listed = [TyperCommand(name, help=inspect.getdoc(info.callback)) for name, info in self._infos.items()]
        super().__init__(commands=listed, rich_markup_mode=self._mode, **attributes)

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's
        """Prints the list of commands."""
        # What rich imports and draws is in use until the process ends: to search it for garbage took a tenth.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            super().format_help(ctx, formatter)
        finally:
            if was_enabled:
                gc.enable()

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer's
        """Runs the command; raises ``SystemExit`` with 128 + N where signal N ended it: typer takes all for Ctrl-C."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as ended:
            if not ended.args:
                raise
            raise SystemExit(128 + ended.args[0]) from ended

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:  # noqa: ANN401 - typer's
        """Returns the command that ``args`` begin with, now with its options, and the rest; raises as typer does."""
        name, _, rest = super().resolve_command(ctx, args)
        assert name is not None  # else it was refused
        info = self._infos[name]
        return name, get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=self._mode), rest
