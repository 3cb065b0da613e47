"""Numbers that decide stand in one table, each with its unit, reason and source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from mock_scheduler.comparison import thresholds

FOLDER = Path(thresholds.__file__).parent
#: What is no threshold: nothing, one, a pair, a half, and the other sign.
PLAIN = (0, 1, 2, 0.5)


def number_of(node: ast.expr) -> int | float | None:
    is_number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
    return node.value if is_number else None  # type: ignore[attr-defined, no-any-return]


def find_deciding(source: str) -> Iterator[str]:
    """Numbers in comparisons and in constants of a module or class, and all floats anywhere, but for plain ones."""
    tree = ast.parse(source)
    places: list[ast.AST] = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    for owner in (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))):
        places += [item.value for item in owner.body if isinstance(item, ast.Assign | ast.AnnAssign) and item.value]
    deciding = {id(node): node for place in places for node in ast.walk(place) if isinstance(node, ast.expr)}
    deciding |= {
        id(node): node for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is float
    }
    for node in deciding.values():
        value = number_of(node)
        if value is not None and value not in PLAIN:
            yield f"line {node.lineno}: {value}"


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER)))
def test_no_number_decides_outside_the_table(path: Path) -> None:
    if path.name != "thresholds.py":
        assert list(find_deciding(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("ENOUGH = 0.9", ["line 1: 0.9"]),
        ("MOST = 1 << 20", ["line 1: 20"]),
        ("def f(x):\n    return x < 16", ["line 2: 16"]),
        ("def f(x, y):\n    return x > 0.1 * y", ["line 2: 0.1"]),
        ("def f(x):\n    return max(x, 1e-6)", ["line 2: 1e-06"]),
        ("class A:\n    limit: float = 3.0", ["line 2: 3.0"]),
        ("def f(x):\n    return x[3] if -1 < x < 2 else 0.5 * len(x) ** 3", []),
    ],
)
def test_a_planted_threshold_is_found(source: str, found: list[str]) -> None:
    assert sorted(set(find_deciding(source))) == found


def test_every_threshold_is_told_and_used() -> None:
    code = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in (FOLDER, FOLDER.parent / "verdict", FOLDER.parent / "correction", FOLDER.parents[1] / "pipelines")
        for path in folder.rglob("*.py")
        if path.name != "thresholds.py"
    )
    for name, threshold in thresholds.TABLE.items():
        assert getattr(thresholds, name) == threshold.value
        assert min(map(len, (threshold.unit, threshold.reason, threshold.source))) >= 4
        assert name in code
