"""No file of a run, an alignment or a recording is rewritten in place: found by the syntax of every module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for folder in ("mock_scheduler", "pipelines") for path in (ROOT / folder).rglob("*.py"))

#: Modules that write a file by its own name, and why a kill loses nothing.
ALLOWED = {
    "mock_scheduler/alignment/extract/folder.py": "a new folder, which gets its name when it is whole",
    "mock_scheduler/alignment/extract/command.py": "a new folder, which gets its name when it is whole",
    "mock_scheduler/alignment/extract/extraction.py": "the log of a trial, in a folder of its own",
    "pipelines/megatron/checkpoint.py": "a checkpoint's new folder, which counts when its run_state.json is there",
    "pipelines/rollout/engines/weights.py": "a version of an engine's weights, which is given to it when it is whole",
    "mock_scheduler/commands/launch.py": "a copy for the user, whose source is there",
    "mock_scheduler/api/page.py": "a page of the docs",
    "mock_scheduler/support/fetched_folders.py": "a folder that goes with the process",
    "mock_scheduler/support/foreign_files.py": "copies into a folder that is made aside",
    "mock_scheduler/support/files.py": "the functions that write aside",
}

_MODE = re.compile("[rwxabt+]{1,3}")
#: Without one of these words a text has no writer, and need not be parsed.
_WORDS = re.compile(r"\b(?:write_text|write_bytes|save_file|open)\b")
_WRITING = {"write_text", "write_bytes", "save_file"}


def find_writers(text: str) -> Iterator[int]:
    """Yields the line of every call that writes a file under any other name than ``aside``."""
    for node in ast.walk(ast.parse(text)) if _WORDS.search(text) else ():
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        values = (*node.args, *(keyword.value for keyword in node.keywords))
        modes = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
        is_opened = name == "open" and any(_MODE.fullmatch(mode) and set(mode) & set("wx+") for mode in modes)
        if (name in _WRITING or is_opened) and "aside" not in names:
            yield node.lineno


def test_every_file_is_written_aside() -> None:
    """``support.files`` has ``save_json``, ``save_text``, ``written_aside``, ``publish_new`` and ``AppendedLines``."""
    names = {str(path.relative_to(ROOT)): path for path in MODULES}
    found = {name: list(find_writers(path.read_text(encoding="utf-8"))) for name, path in names.items()}
    assert {name: lines for name, lines in found.items() if lines and name not in ALLOWED} == {}


@pytest.mark.parametrize(
    "text",
    [
        "path.write_text('x')",
        "(folder / 'a').write_bytes(b'')",
        "path.open('w')",
        "open(path, mode='wb')",
        "save_file({}, path)",
    ],
)
def test_a_file_that_is_rewritten_in_place_is_found(text: str) -> None:
    assert list(find_writers(text)) == [1]


@pytest.mark.parametrize("text", ["aside.write_text('x')", "path.open('rb')", "path.open('ab')", "open(path)"])
def test_reading_appending_and_writing_aside_are_none(text: str) -> None:
    assert list(find_writers(text)) == []
