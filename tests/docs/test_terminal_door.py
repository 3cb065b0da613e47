"""Nothing goes to the terminal but through ``display.console`` and ``support.terminal_streams``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_DOOR = {"mock_scheduler/display/console.py", "mock_scheduler/support/terminal_streams.py"}
#: Rich's classes that write by themselves, and read markup.
_RICH = {"Console", "Progress", "Live", "Status", "Panel", "Markdown", "Pretty"}

#: Without any of these words there is no way around, whatever the rest says.
_WORDS = re.compile(r"rich|print|echo|from_markup|from_ansi|StreamHandler|std(out|err)")


def find_ways_around(source: str) -> Iterator[str]:
    """Finds calls and imports that write to a terminal by themselves."""
    if not _WORDS.search(source):
        return
    nodes = list(ast.walk(ast.parse(source)))
    foreign = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rich")
        for alias in node.names
        if alias.name in _RICH
    }
    for node in nodes:
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_print = name in ("print", "pprint", "rich.print", "traceback.print_exc", "click.echo", "typer.secho")
            if is_print or name in foreign or name.endswith((".from_markup", ".from_ansi", ".StreamHandler")):
                yield f"line {node.lineno}: {name}"
        is_write = isinstance(node, ast.Attribute) and node.attr in ("write", "buffer", "writelines")
        if is_write and re.fullmatch(r"sys\.(__)?std(out|err)(__)?", ast.unparse(node.value)):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def test_all_output_goes_through_one_door() -> None:
    sources = [path for folder in ("mock_scheduler", "pipelines") for path in sorted((ROOT / folder).rglob("*.py"))]
    theirs = ROOT / "mock_scheduler/commands/templates"  # a user's files to start from
    names = {path.relative_to(ROOT).as_posix(): path for path in sources if path.parent != theirs}
    found = {name: list(find_ways_around(path.read_text())) for name, path in names.items() if name not in _DOOR}
    assert {name: ways for name, ways in found.items() if ways} == {}


@pytest.mark.parametrize(
    "source",
    [
        "print(name)",
        "import sys\nsys.stderr.write(name)",
        "import sys\nsys.stdout.buffer.write(name)",
        "from rich.console import Console\nConsole().print(name)",
        "from rich.console import Console as C\nC().print(name)",
        "Text.from_markup(name)",
        "traceback.print_exc()",
    ],
)
def test_a_way_around_the_door_is_found(source: str) -> None:
    assert list(find_ways_around(source))
