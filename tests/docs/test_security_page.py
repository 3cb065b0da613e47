"""Every statement of the page on security names the tests that prove it, and these exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/security.md").read_text(encoding="utf-8")

_WITHOUT_PROOF = ("What is trusted", "What is not promised")
_PROOF = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_statement_names_its_tests() -> None:
    unproved = [statement for statements in _sections().values() for statement in statements if not _proofs(statement)]
    assert unproved == []


def test_every_named_test_exists() -> None:
    proofs = {proof for statements in _sections().values() for text in statements for proof in _proofs(text)}
    assert {proof for proof in proofs if not _exists(*proof)} == set()


def test_a_statement_without_a_test_is_found() -> None:
    assert _proofs("- A file of 1 KB takes no more than 10 MB.") == []
    assert not _exists("tests/docs/test_security_page.py", "test_of_nothing")
    assert not _exists("tests/docs/test_of_nothing.py", "test_every_named_test_exists")


@pytest.mark.parametrize("name", _WITHOUT_PROOF)
def test_the_sections_without_proofs_are_there(name: str) -> None:
    assert f"\n## {name}\n" in TEXT


def _sections() -> dict[str, list[str]]:
    """The statements of each section that promises something: its list items, each a line of its own when joined."""
    sections = dict(part.split("\n", maxsplit=1) for part in TEXT.split("\n## ")[1:])
    return {
        name: [" ".join(item.split()) for item in re.split(r"^- ", body, flags=re.MULTILINE)[1:]]
        for name, body in sections.items()
        if name not in _WITHOUT_PROOF
    }


def _proofs(statement: str) -> list[tuple[str, str]]:
    return _PROOF.findall(statement)


def _exists(path: str, name: str) -> bool:
    file = ROOT / path
    if not file.is_file():
        return False
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name for node in ast.walk(tree)
    )
