"""Finds the user's own files behind an entry module: the module, and the user's modules behind its imports.

Contract: imports are read from the source, in functions too; nothing is run. Files found by other means (a
name put together at run time, a data file) are not found here. Installed packages, the standard library and the
project's own packages are left where they are, and said.
"""

from __future__ import annotations

import ast
import shutil
import sys
import sysconfig
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.util import resolve_name
from pathlib import Path

from mock_scheduler.errors import ConfigError
from mock_scheduler.launch.entry import find_module

_INSTALLED = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryFiles:
    """module: the entry; root: the folder on the Python path; paths: relative to it, sorted.

    ``left``: why there are none, in words; empty where there are. ``is_own``: whether the reason is that the module is
    part of the project.
    """

    module: str
    root: Path
    paths: tuple[Path, ...]
    left: str = ""
    is_own: bool = False

    def copy_to(self, folder: Path) -> None:
        """Copy all files below ``folder``, under the same names."""
        for path in self.paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.root / path, folder / path)


def find_entry_files(entry: str, own_packages: Collection[str]) -> EntryFiles:
    """Finds the user's files behind ``python -m entry``; raises ``ConfigError`` where there is no module of this name.

    ``own_packages``: packages of the project, whose files are not the user's.
    """
    found = find_module(entry)
    if found is None:
        raise ConfigError(
            f"the entry {entry!r} is not a Python module in the working directory or on the Python path; "
            "run extract in the working directory of the alignment"
        )
    depth = len(entry.split(".")) + (found.name == "__main__.py")
    root = found.parents[depth - 1]
    if entry.partition(".")[0] in own_packages:
        return EntryFiles(module=entry, root=root, paths=(), left=f"{entry} is part of this project", is_own=True)
    if _is_installed(found):
        return EntryFiles(module=entry, root=root, paths=(), left=f"{entry} is of an installed package")
    paths: set[Path] = set()
    _follow(root, found, paths, own_packages)
    return EntryFiles(module=entry, root=root, paths=tuple(sorted(path.relative_to(root) for path in paths)))


def _follow(root: Path, path: Path, paths: set[Path], own_packages: Collection[str]) -> None:
    """Adds a file, the packages around it, and its imports below the root."""
    if path in paths:
        return
    paths.add(path)
    for parent in path.parents:
        if parent == root:
            break
        if (parent / "__init__.py").is_file():
            _follow(root, parent / "__init__.py", paths, own_packages)
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is not Python source: {error}") from error
    for name in _imported(tree, package=".".join(path.relative_to(root).parts[:-1])):
        top = name.partition(".")[0]
        found = None if top in own_packages else _find_below(root, name)
        if found is not None:
            _follow(root, found, paths, own_packages)


def _imported(tree: ast.AST, *, package: str) -> Iterator[str]:
    """Yields the dotted names of all possible modules; of ``from a import b`` both ``a`` and ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = node.module or ""
            if node.level:
                relative = "." * node.level + name
                try:
                    name = resolve_name(relative, package)
                except ImportError:
                    continue  # it would fail where it is run, too
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def _find_below(root: Path, name: str) -> Path | None:
    """Returns the user's file of a module below the root; ``None`` for anything else."""
    top = name.partition(".")[0]
    if not name or top in sys.stdlib_module_names:
        return None
    relative = root.joinpath(*name.split("."))
    places = (relative.with_name(f"{relative.name}.py"), relative / "__init__.py")
    found = next((path for path in places if path.is_file()), None)
    return None if found is None or _is_installed(found) else found


def _is_installed(path: Path) -> bool:
    return not _INSTALLED.isdisjoint(path.parts) or path.is_relative_to(sysconfig.get_path("stdlib"))
