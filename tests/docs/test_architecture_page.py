"""The page on the house is true of the code: its paths and names exist, and rooms import in its order."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TEXT = (DOCS / "architecture.md").read_text(encoding="utf-8")
PACKAGES = ("mock_scheduler", "pipelines")

_DEFINED = re.compile(r"`((?:mock_scheduler|pipelines)/[\w/]+\.py)`((?:(?:,\s+|\s+and\s+)`[A-Za-z_][\w.]*`)+)")
_ROW = re.compile(r"^\| (`[^|]+`) \| ([^|]+) \|(?: ([^|]*)\|)?$", re.MULTILINE)


def test_every_name_stands_in_the_file_before_it() -> None:
    found = _DEFINED.findall(TEXT)
    absent = {
        f"{path}: {name}"
        for path, names in found
        for name in re.findall(r"`([\w.]+)`", names)
        if name not in _definitions(path)
    }
    assert absent == set()
    assert len(found) > 60


def test_a_name_that_is_not_there_is_found() -> None:
    assert "ProxyCore.get_batch" in _definitions("mock_scheduler/proxy/core.py")
    assert "ProxyCore.get_batches" not in _definitions("mock_scheduler/proxy/core.py")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_with_python_files_is_on_the_map(package: str) -> None:
    folders = {path.parent.relative_to(ROOT / package).as_posix() for path in (ROOT / package).rglob("*.py")} - {"."}
    named = {name.rstrip("/") for name, _ in _rows(package) if name.endswith("/")}
    assert named == folders


@pytest.mark.parametrize("package", PACKAGES)
def test_every_file_beside_the_rooms_is_on_the_map(package: str) -> None:
    files = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py"}
    assert {name for name, _ in _rows(package) if name.endswith(".py")} == files


@pytest.mark.parametrize("package", PACKAGES)
def test_a_room_imports_only_rooms_above_it(package: str) -> None:
    rooms = [_room(name) for name, _ in _rows(package) if "/" not in name.rstrip("/")]
    below = {
        f"{room} imports {imported}"
        for place, room in enumerate(rooms)
        for imported in _imports(package, room)
        if imported not in rooms[: place + 1]
    }
    assert below == set()


def test_the_map_says_the_imports_of_every_room() -> None:
    """``errors`` and ``support`` are said once for all; the last rooms may import every room."""
    wrong = {}
    for name, imports in _rows("mock_scheduler"):
        room = _room(name)
        if "/" in name.rstrip("/") or imports == "every room above" or room in ("errors", "support"):
            continue
        said = set(re.findall(r"`(\w+)`", imports))
        found = _imports("mock_scheduler", room) - {"errors", "support", room}
        if said != found:
            wrong[room] = (sorted(said - found), sorted(found - said))
    assert wrong == {}, "by room: said and not found, found and not said"


def _rows(package: str) -> list[tuple[str, str]]:
    """The rows of a package's map: each room's name, and the text of its imports."""
    section = TEXT.split(f"## The rooms of `{package}/`")[1].split("\n## ")[0]
    return [
        (name, imports.strip()) for cell, _, imports in _ROW.findall(section) for name in re.findall(r"`([^`]+)`", cell)
    ]


def _room(name: str) -> str:
    return name.rstrip("/").removesuffix(".py")


@functools.cache
def _imports(package: str, room: str) -> frozenset[str]:
    """The rooms of the same package that a room's files import."""
    place = ROOT / package / room
    files = list(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    found = {name.split(".")[1] for file in files for name in _imported(file) if name.startswith(f"{package}.")}
    return frozenset(found - {"__version__"})


def _imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in PACKAGES:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@functools.cache
def _definitions(path: str) -> frozenset[str]:
    """The names that a file defines at its top, and the members of its classes."""
    found: set[str] = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        names = set(_targets(node))
        found |= names
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{member}" for inner in node.body for member in _targets(inner)}
    return frozenset(found)


def _targets(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
