"""Measures how the code is arranged and written: ``python -m benchmarks.house [FOLDER ...]``.

Give the root folders of two checkouts to see both side by side. Tests are left out. Every figure is counted from the
sources alone:

- *files*, *lines*: Python modules of ``mock_scheduler`` and ``pipelines``, and their lines; *lines of code* are those
  that are no docstring, comment or blank.
- *circles*: groups of sibling modules or packages, at any depth, that import each other in a circle.
- *what, which* and *that, those, these, such*: per 1,000 words of docstrings.
- *thresholds outside the table*: float literals other than 0, 0.5, 1 and 2 in ``comparison/``, but for the table,
  ``thresholds.py``.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

PACKAGES = ("mock_scheduler", "pipelines")
_SMALL = 60
_LONG_FUNCTION = 60
_PLAIN_NUMBERS = (0.0, 0.5, 1.0, 2.0)
_CARRIERS = {"what, which": {"what", "which"}, "that, those, these, such": {"that", "those", "these", "such"}}


class Sources:
    """The modules of a checkout, parsed once."""

    def __init__(self, root: Path) -> None:
        paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
        self.root = root
        self.texts = {_module_name(path.relative_to(root)): path.read_text(encoding="utf-8") for path in paths}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}
        self.folders = Counter(path.parent.relative_to(root).as_posix() for path in paths if path.name != "__init__.py")

    def imports(self) -> dict[str, set[str]]:
        """The modules of the checkout that each module imports."""
        found: dict[str, set[str]] = defaultdict(set)
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                    for alias in node.names:
                        full = f"{node.module}.{alias.name}"
                        found[name] |= {full if full in self.trees else node.module} & self.trees.keys()
                elif isinstance(node, ast.Import):
                    found[name] |= {alias.name for alias in node.names} & self.trees.keys()
        return found

    def docstrings(self) -> Iterator[str]:
        """Every docstring."""
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, kinds):
                    yield ast.get_docstring(node) or ""


def measure(root: Path) -> dict[str, str]:
    """All figures of a checkout, by name."""
    sources = Sources(root)
    lines = {name: text.count("\n") for name, text in sources.texts.items()}
    num_lines = sum(lines.values())
    folder, in_folder = sources.folders.most_common(1)[0]
    return {
        "files": f"{len(lines):,}",
        "lines": f"{num_lines:,}",
        "lines of code": f"{_count_code_lines(sources):,}",
        "lines of imports": f"{_count_import_lines(sources) / num_lines:.1%}",
        f"files under {_SMALL} lines": f"{sum(count < _SMALL for count in lines.values()):,}",
        "largest flat folder": f"{in_folder} ({folder})",
        "circles": f"{len(find_circles(sources.imports())):,}",
        "library modules that import pipelines": f"{_count_importers(sources):,}",
        "thresholds outside the table": f"{_count_thresholds(sources):,}",
        **_count_carriers(sources),
        "comments per 100 lines": f"{100 * sum(map(_count_comments, sources.texts.values())) / num_lines:.1f}",
        f"functions over {_LONG_FUNCTION} lines": f"{_count_long_functions(sources):,}",
    }


def find_circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Siblings, at any depth, that import each other in a circle."""
    siblings: dict[str, set[str]] = defaultdict(set)
    for module, targets in imports.items():
        for target in targets:
            here, there = module.split("."), target.split(".")
            depth = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), None)
            if depth:
                siblings[".".join(here[: depth + 1])].add(".".join(there[: depth + 1]))
    return [circle for circle in _strong_components(siblings) if len(circle) > 1]


def _strong_components(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan, 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for target in graph.get(node, ()):
            if target not in order:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], order[target])
        if low[node] == order[node]:
            start = stack.index(node)
            groups.append(sorted(stack[start:]))
            del stack[start:]

    for node in list(graph):
        if node not in order:
            visit(node)
    return groups


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _count_code_lines(sources: Sources) -> int:
    """Lines that are no docstring, comment or blank."""
    docstrings = sum(
        (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
        for tree in sources.trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node) is not None
    )
    # Blank lines within docstrings are counted with these.
    blank = sum(
        not line.strip() or line.strip().startswith("#")
        for text in map(_without_docstrings, sources.texts.values())
        for line in text.splitlines()
    )
    return sum(text.count("\n") for text in sources.texts.values()) - docstrings - blank


def _without_docstrings(text: str) -> str:
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            first = node.body[0]
            for number in range(first.lineno - 1, first.end_lineno or first.lineno):
                lines[number] = "docstring"
    return "\n".join(lines)


def _count_import_lines(sources: Sources) -> int:
    nodes = (node for tree in sources.trees.values() for node in ast.walk(tree))
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
    )


def _count_importers(sources: Sources) -> int:
    return sum(
        name.startswith("mock_scheduler") and any(target.startswith("pipelines") for target in targets)
        for name, targets in sources.imports().items()
    )


def _count_thresholds(sources: Sources) -> int:
    return sum(
        isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value not in _PLAIN_NUMBERS
        for name, tree in sources.trees.items()
        if name.startswith(("mock_scheduler.compare.", "mock_scheduler.comparison."))
        and not name.endswith(".thresholds")
        for node in ast.walk(tree)
    )


def _count_carriers(sources: Sources) -> dict[str, str]:
    words = Counter(word for text in sources.docstrings() for word in re.findall(r"[a-z']+", text.lower()))
    return {
        f"{label} per 1,000 docstring words": f"{1000 * sum(words[word] for word in carriers) / words.total():.1f}"
        for label, carriers in _CARRIERS.items()
    }


def _count_comments(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT and "noqa" not in token.string for token in tokens)


def _count_long_functions(sources: Sources) -> int:
    nodes = (node for tree in sources.trees.values() for node in ast.walk(tree))
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1 > _LONG_FUNCTION
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def main(arguments: list[str]) -> None:
    """Print the figures of each folder in a column; without one, those of this folder."""
    folders = [Path(argument) for argument in arguments] or [Path.cwd()]
    for folder in folders:
        if not any((folder / package).is_dir() for package in PACKAGES):
            sys.exit(f"{folder} is no checkout: it has neither {' nor '.join(PACKAGES)}.\n\n{__doc__}")
    columns = [measure(folder) for folder in folders]
    table = Table("figure", *(folder.resolve().name for folder in folders))
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "") for column in columns))
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
