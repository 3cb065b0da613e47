"""Writes the page of the public names: ``python -m mock_scheduler.api.page docs/api.md``.

Everything on it comes from the names' own signatures and docstrings; a test sees that the page is as this writes it.
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path

from mock_scheduler.support.versions import PACKAGE

_HEAD = """# The public names

*For somebody who uses it from Python; to look things up.*

`import mock_scheduler as ms` gives these names; each is loaded when it is first used. [python.md](python.md) shows them
at work. Modules beneath are free to change; these names are not. This page is written by
`python -m mock_scheduler.api.page docs/api.md` from their docstrings.
"""


#: An annotation as a module with postponed evaluation has it.
_QUOTED = re.compile(r"'([^']*)'(?=[,)\s]|$)")


def render_page() -> str:
    """Returns the page as Markdown."""
    package = import_module(PACKAGE)
    names: dict[str, dict[str, str]] = package.PUBLIC_NAMES
    parts = [_HEAD]
    for title, homes in names.items():
        parts.append(f"## {title}\n")
        for name in homes:
            parts.append("\n".join(_describe(name, getattr(package, name))))
    return "\n".join(parts).rstrip() + "\n"


def _describe(name: str, value: object) -> Iterator[str]:
    yield f"### `{name}`\n"
    if inspect.isfunction(value):
        yield f"```python\n{_signature(name, value)}\n```\n"
    yield f"```text\n{inspect.getdoc(value)}\n```\n"
    if isinstance(value, type) and issubclass(value, enum.Enum):
        yield f"Members: {', '.join(f'`{member}`' for member in value.__members__)}.\n"
    elif isinstance(value, type) and (methods := list(_list_methods(value))):
        yield "\n".join(methods) + "\n"


def _signature(name: str, value: object) -> str:
    """The signature over several lines where it is long."""
    assert callable(value)
    plain = inspect.signature(value)
    text = _QUOTED.sub(r"\1", f"{name}{plain}")
    if len(text) <= 100:
        return text
    parameters, was_keyword_only = [], False
    for parameter in plain.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not was_keyword_only:
            parameters.append("*")
            was_keyword_only = True
        parameters.append(_QUOTED.sub(r"\1", str(parameter)))
    lines = "".join(f"    {parameter},\n" for parameter in parameters)
    returns = "" if plain.return_annotation is plain.empty else f" -> {plain.return_annotation!s}"
    return f"{name}(\n{lines}){returns}"


def _list_methods(value: type) -> Iterator[str]:
    """The public methods and properties that a class has a docstring for, with its first line."""
    for name, member in inspect.getmembers(value):
        if name.startswith("_") or (is_dataclass(value) and name in value.__dataclass_fields__):
            continue
        home = next((cls for cls in value.__mro__ if name in vars(cls)), object)
        if not home.__module__.startswith(PACKAGE):
            continue
        doc = (inspect.getdoc(member) or "").partition("\n")[0]
        if doc and (inspect.isfunction(member) or inspect.ismethod(member) or isinstance(member, property)):
            yield f"- `{name}{'' if isinstance(member, property) else '()'}`: {doc}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render_page(), encoding="utf-8")
