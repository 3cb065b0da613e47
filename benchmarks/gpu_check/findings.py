"""Holds what a check found, as facts, and writes each fact to its file at once, so a killed check keeps what it had."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any


class Outcome(StrEnum):
    """What became of a question, or of a whole check.

    ``NOTED``: a value that nothing is held to. ``NOT_RUN``: the machine, or the time, was not there.
    """

    HELD = "held"
    FAILED = "failed"
    NOTED = "noted"
    NOT_RUN = "not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Holds one answer. found: the value seen, or why nothing was seen. expected: empty where nothing is."""

    name: str
    outcome: Outcome
    found: str
    expected: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Holds values in rows; each row has a text for each column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """Holds one check. reason: why it was not run, or not to its end, or failed as a whole. seconds: it took."""

    name: str
    outcome: Outcome = Outcome.NOT_RUN
    reason: str = ""
    seconds: float = 0.0
    limit_s: float = 0.0
    findings: tuple[Finding, ...] = ()
    tables: tuple[Table, ...] = ()

    def count(self, outcome: Outcome) -> int:
        """Counts the findings with an outcome."""
        return sum(item.outcome is outcome for item in self.findings)


@dataclass(slots=True)
class FindingsLog:
    """Takes the findings of a running check; the file at ``path`` always has all of them, and is whole."""

    path: Path
    findings: list[Finding] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def hold(self, name: str, *, is_held: bool, found: object, expected: str) -> None:
        """Adds an answer that is judged."""
        self._add(
            Finding(name=name, outcome=Outcome.HELD if is_held else Outcome.FAILED, found=str(found), expected=expected)
        )

    def note(self, name: str, found: object) -> None:
        """Adds a value that nothing is held to."""
        self._add(Finding(name=name, outcome=Outcome.NOTED, found=str(found)))

    def not_run(self, name: str, reason: str) -> None:
        """Adds a part that could not be run."""
        self._add(Finding(name=name, outcome=Outcome.NOT_RUN, found=reason))

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Adds a table."""
        texts = tuple(tuple(str(value) for value in row) for row in rows)
        self.tables.append(Table(title=title, columns=tuple(columns), rows=texts))
        self._save()

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._save()

    def _save(self) -> None:
        content = {"findings": list(map(asdict, self.findings)), "tables": list(map(asdict, self.tables))}
        write_json(self.path, content)


def write_json(path: Path, content: object) -> None:
    """Writes JSON aside and renames it: the file at ``path`` is whole at any time."""
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)


def read_findings(path: Path) -> tuple[tuple[Finding, ...], tuple[Table, ...]]:
    """Reads a check's file; nothing where it wrote none."""
    if not path.is_file():
        return (), ()
    content = json.loads(path.read_text(encoding="utf-8"))
    findings = [Finding(**{**item, "outcome": Outcome(item["outcome"])}) for item in content["findings"]]
    return tuple(findings), tuple(map(_table_of, content["tables"]))


def read_alignments(folder: Path) -> tuple[Table, ...]:
    """Reads the verdicts so far of every alignment that a check left in its folder, also of one that was ended."""
    columns = ("candidate", "verdict", "reason")
    tables = []
    for path in sorted(folder.glob("*/alignment/align.json")):
        candidates = json.loads(path.read_text(encoding="utf-8"))["candidates"]
        rows = tuple((item["name"], item["verdict"], item["sentence"] or item["reason"]) for item in candidates)
        tables.append(Table(title=f"verdicts of {path.parts[-3]}", columns=columns, rows=rows))
    return tuple(tables)


def _table_of(item: Mapping[str, Any]) -> Table:
    return Table(title=item["title"], columns=tuple(item["columns"]), rows=tuple(map(tuple, item["rows"])))


def conclude(result: CheckResult, *, exit_code: int | None, last_lines: str) -> CheckResult:
    """Gives a check its outcome, of its findings and of how its process ended.

    Args:
        exit_code: Of the process; negative: the signal that ended it; ``None``: it was ended when its time was over.
        last_lines: Of its output; the reason of a process that failed.
    """
    outcome, reason = Outcome.HELD, ""
    if exit_code is None:
        outcome = Outcome.NOT_RUN
        reason = f"stopped after {result.limit_s:.0f} s, its share of the time; what it had found is kept"
    elif exit_code:
        ended = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        outcome, reason = Outcome.FAILED, f"its process ended with {ended}: {last_lines}"
    elif not result.count(Outcome.HELD):
        outcome, reason = Outcome.NOT_RUN, "no part of it could be run"
    if result.count(Outcome.FAILED):
        outcome = Outcome.FAILED
    return replace(result, outcome=outcome, reason=reason)


def exit_code_of(results: Sequence[CheckResult], *, is_partial: bool) -> int:
    """Returns 1 where a check failed, 4 where one, or a part, was not run on a GPU, and 0 where all ran and held.

    is_partial: whatever the checks say, not all was there.
    """
    if any(result.outcome is Outcome.FAILED for result in results):
        return 1
    is_partial |= any(result.outcome is Outcome.NOT_RUN or result.count(Outcome.NOT_RUN) for result in results)
    return 4 if is_partial else 0
