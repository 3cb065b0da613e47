"""Writes ``docs/commands.md`` from the definitions of the command line: each command, its options, its exit codes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, Literal, get_args, get_origin

import typer.main

from mock_scheduler.cli import app
from mock_scheduler.errors import SIGNAL_CODES, ExitCode
from tests.docs.made.docstrings import in_a_cell, paragraphs, table

_HEAD = """# Commands

*For whoever looks up a command or an option; to look things up.*

Every command of `mock-scheduler`, with its options. This page is written by `launch/docs.sh` from the definitions in
`mock_scheduler/cli.py`; `mock-scheduler COMMAND --help` prints the same.

Overrides, `a.b=c` in Hydra's grammar, stand anywhere among the arguments of a command that takes a configuration.
`--json FILE` writes the result beside what is printed; where it says so, `--json -` prints JSON instead.
"""


def render_exit_codes() -> str:
    """Returns the one table of exit codes."""
    rows = [(f"{code}", in_a_cell(code.meaning)) for code in ExitCode]
    rows += [(f"{code}", in_a_cell(meaning)) for code, meaning in SIGNAL_CODES.items()]
    return table(("exit code", "meaning"), [*rows, ("128 + N", "ended by signal N")])


def render_commands() -> str:
    """Returns the page."""
    group: Any = typer.main.get_command(app)  # typer has its own copy of click, without types
    parts = [
        _HEAD,
        "## Exit codes\n",
        "Every command, script and module program of this project ends with one of them:\n",
    ]
    parts.append(render_exit_codes() + "\n")
    for name, command in group.commands.items():
        parts += _describe(name, command)
    return "\n".join(parts).rstrip() + "\n"


def _describe(name: str, command: Any) -> Iterator[str]:
    arguments = [item for item in command.params if type(item).__name__ == "TyperArgument"]
    options = [item for item in command.params if item not in arguments and item.name != "help"]
    usage = " ".join(["mock-scheduler", name, *map(_show_argument, arguments), *(["[OPTIONS]"] if options else [])])
    yield f"## `{name}`\n\n{paragraphs(command.help)}\n\n```text\n{usage}\n```\n"
    if command.epilog:
        yield f"{paragraphs(command.epilog)}\n"
    rows = [
        *((f"`{_label(item)}`", _value(item), _default(item), in_a_cell(item.help or "")) for item in arguments),
        *((_names(item), _value(item), _default(item), in_a_cell(item.help or "")) for item in options),
    ]
    if rows:
        yield table(("argument or option", "value", "default", "meaning"), rows) + "\n"


def _label(argument: Any) -> str:
    return str(argument.name).upper()


def _show_argument(argument: Any) -> str:
    label = _label(argument)
    label = f"{label} ..." if argument.nargs == -1 else label
    return label if argument.required else f"[{label}]"


def _names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])


def _value(item: Any) -> str:
    kind = item.type_descriptor.annotation
    several = get_origin(kind) is list or getattr(item, "multiple", False)
    kind = get_args(kind)[0] if get_origin(kind) is list else kind
    if kind is bool:
        return ""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    name = "path" if isinstance(kind, type) and issubclass(kind, PurePath) else {str: "text", int: "integer"}.get(kind)
    name = name or "number"
    name += f" ≥ {item.min}" if item.min is not None else ""
    return f"{name}, repeatable" if several else name


def _default(item: Any) -> str:
    if item.required:
        return "required"
    if item.default is None or isinstance(item.default, bool):
        return ""
    return f"`{item.default}`"
