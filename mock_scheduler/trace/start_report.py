"""What an attached run started from, as it stands in its ``start.json``.

Contract: importing this imports no torch. Every rank has the same report; rank 0 writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mock_scheduler.errors import TraceError
from mock_scheduler.support.documents import Count, Document
from mock_scheduler.support.files import load_json_object, save_json
from mock_scheduler.support.foreign_files import describe_failure
from mock_scheduler.support.run_files import START_FILE

StartKind = Literal["initial", "optimizer"]
"""``initial``: parameters and buffers. ``optimizer``: Adam's moments."""

#: The kinds in words.
START_KINDS: Mapping[StartKind, str] = {"initial": "parameters and buffers", "optimizer": "moments of the optimizer"}


@dataclass(frozen=True, kw_only=True, slots=True)
class StartDifference:
    """A tensor in which a run was apart from its baseline; ``relative``: of Frobenius norms, ``None`` beside 0.

    Of a tensor in shards it is the largest of any rank's shard.
    """

    name: str
    relative: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class KindOfStart:
    """The tensors of one kind: whole ones, counted over all ranks. ``first``: the first few that were set, in order."""

    num_equal: Count
    num_set: Count
    first: tuple[StartDifference, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StartReport:
    """Holds what a run started from.

    source: the trace of the baseline; ``None``: the run's own state. step: the first observed one. num_updates: counted
    by the optimizer before it, after the start was set. num_padding_rows: of the vocabulary, by name of the parameter,
    in this layout; baseline_padding_rows: in the baseline's. is_perturbed: every weight was moved by about one rounding
    afterwards. kinds: the compared ones; empty without a source.
    """

    step: Count
    num_updates: Count
    source: str | None = None
    kinds: Mapping[StartKind, KindOfStart] = field(default_factory=dict)
    num_padding_rows: Mapping[str, int] = field(default_factory=dict)
    baseline_padding_rows: Mapping[str, int] = field(default_factory=dict)
    is_perturbed: bool = False

    @property
    def num_set(self) -> int:
        """Counts the tensors that were put in their place."""
        return sum(kind.num_set for kind in self.kinds.values())

    def describe(self) -> str:
        """Returns one sentence for the terminal."""
        return "; ".join([self._describe_state(), *self._describe_padding(), *self._describe_perturbation()]) + "."

    def _describe_state(self) -> str:
        if self.source is None:
            return "Starts with its own parameters"
        if not self.num_set:
            counts = " and ".join(f"{kind.num_equal} {START_KINDS[name]}" for name, kind in self.kinds.items())
            return f"Starts as the baseline does: {counts} were equal already, and nothing was set"
        parts = []
        for name, kind in self.kinds.items():
            total = kind.num_equal + kind.num_set
            first = f" (first {kind.first[0].name})" if kind.first else ""
            parts.append(f"{kind.num_set} of {total} {START_KINDS[name]}{first}")
        return f"Starts from the baseline's state: {' and '.join(parts)} were another and were set"

    def _describe_padding(self) -> list[str]:
        if self.source is None or self.num_padding_rows == self.baseline_padding_rows:
            return []
        here, there = (max(rows.values(), default=0) for rows in (self.num_padding_rows, self.baseline_padding_rows))
        return [
            f"the vocabulary is padded by {here} rows here and by {there} in the baseline, and a loss that counts them "
            "differs"
        ]

    def _describe_perturbation(self) -> list[str]:
        return ["then every weight was moved by about one rounding"] if self.is_perturbed else []


_REPORT = Document[StartReport](StartReport)


def save_start(output_dir: Path, report: StartReport) -> None:
    """Writes ``start.json``."""
    save_json(output_dir / START_FILE, _REPORT.dump(report))


def load_start(output_dir: Path) -> StartReport | None:
    """Reads ``start.json``; ``None`` where a run has none.

    Raises:
        TraceError: the file cannot be read, or is another.
    """
    path = output_dir / START_FILE
    if not path.is_file():
        return None
    try:
        return _REPORT.load(load_json_object(path, inside=output_dir))
    except OSError as error:
        raise TraceError(describe_failure(error, path)) from error
    except ValueError as error:
        raise TraceError(f"{path} {error}") from error
