"""Checks one run against itself: all copies of a tensor on several ranks must agree, and so must their collectives.

Copies are counted by the axes on which their ranks stand apart, and a run without any copy is not said to
agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.comparison.pairing.ledgers import check_groups
from mock_scheduler.comparison.pairing.order import order_keys
from mock_scheduler.comparison.pairing.selection import EVERYTHING, Selection, find_unmatched
from mock_scheduler.comparison.tensors import LedgerComparison
from mock_scheduler.comparison.walk.steps import OnKey
from mock_scheduler.comparison.walk.traces import trace_level
from mock_scheduler.errors import ConfigError
from mock_scheduler.run_folder.inputs import ComparedInput, check_steps, find_read_steps, find_trace
from mock_scheduler.support.fetched_folders import find_location, name_locations
from mock_scheduler.support.spread import Spread
from mock_scheduler.trace.entries import RankPlace, TraceKey
from mock_scheduler.trace.full.reader import Piece, ReplicaConflict, TraceReader, open_trace
from mock_scheduler.trace.remote import open_location, open_trace_location
from mock_scheduler.verdict.results import ReplicaResult

#: Parts of a trace that are shared out; enough for the nodes to be busy to the end.
_NUM_PARTS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class _Copies:
    """Holds the copies of some tensors, and where they differ."""

    copies: Counter[str]
    conflicts: tuple[ReplicaConflict, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _CopiesTask:
    """Compares the copies of some tensors, in whatever process."""

    location: str
    keys: tuple[TraceKey, ...]

    def __call__(self) -> _Copies:
        steps = {key.step for key in self.keys}
        with open_trace_location(self.location, steps=steps) as folder, open_trace(folder, steps=steps) as reader:
            return _read_copies(reader, self.keys)


def _read_copies(reader: TraceReader, keys: Sequence[TraceKey]) -> _Copies:
    copies: Counter[str] = Counter()
    conflicts: list[ReplicaConflict] = []
    for key in keys:
        copies += count_copies(reader.pieces(key))
        conflicts.extend(reader.merge(key).conflicts)
    return _Copies(copies=copies, conflicts=tuple(conflicts))


@dataclass(frozen=True, kw_only=True, slots=True)
class _SharedKeys:
    """Shares the tensors of a trace out to other processes: a ``ReadCopies``."""

    location: str
    spread: Spread

    def __call__(self, keys: Sequence[TraceKey]) -> Iterator[tuple[int, _Copies]]:
        size = max(math.ceil(len(keys) / _NUM_PARTS), 1)
        parts = [tuple(keys[start : start + size]) for start in range(0, len(keys), size)]
        found = self.spread([_CopiesTask(location=self.location, keys=part) for part in parts])
        yield from zip(map(len, parts), found, strict=True)


#: Reads the copies of tensors; yields them in order, with the number of tensors in each part.
ReadCopies = Callable[[Sequence[TraceKey]], Iterator[tuple[int, _Copies]]]


def check_replicas(
    reader: TraceReader,
    path: str,
    *,
    selection: Selection = EVERYTHING,
    on_key: OnKey | None = None,
    read_apart: ReadCopies | None = None,
) -> ReplicaResult:
    """Compare all copies of every selected tensor bit for bit, and the collectives of each group of ranks.

    ``path``: of the run, for the report. ``read_apart``: reads the copies elsewhere; ``None``: here. Raises
    ``TraceError`` where a file is damaged or incomplete.
    """
    steps = tuple(step for step in reader.steps if selection.has_step(step))
    keys = [
        key
        for step in steps
        for key in order_keys(reader.keys(step))
        if selection.has_kind(key.kind) and selection.has_name(key.name)
    ]
    copies: Counter[str] = Counter()
    conflicts: list[ReplicaConflict] = []
    done = 0
    read_here = ((1, _read_copies(reader, (key,))) for key in keys)
    for num_keys, found in read_here if read_apart is None else read_apart(keys):
        done += num_keys
        copies += found.copies
        conflicts.extend(found.conflicts)
        if on_key is not None:
            on_key(done, len(keys))
    ledgers: list[LedgerComparison] = []
    # Calls in another order need not show in any tensor.
    if selection.has_kind("collective"):
        ledgers = [ledger for step in steps if (ledger := check_groups(reader, step)) is not None]
    return ReplicaResult(
        path=path,
        steps=steps,
        num_tensors=len(keys),
        num_copies=dict(sorted(copies.items())),
        conflicts=tuple(conflicts),
        ledgers=tuple(ledgers),
        unmatched=find_unmatched(selection, keys, {ledger.kind for ledger in ledgers}),
    )


def count_copies(pieces: tuple[Piece, ...]) -> Counter[str]:
    """How many pieces are copies of another rank's, by the axes on which the two stand apart: ``tp``, ``dp pp``."""
    first: dict[tuple[object, ...], RankPlace] = {}
    copies: Counter[str] = Counter()
    for piece in pieces:
        place = piece.spec.elements
        # An empty piece agrees with anything: it is no copy.
        if place in first and piece.record.size_bytes:
            copies[" ".join(first[place].axes_apart(piece.place)) or "ranks"] += 1
        # Every further holder is compared with the first, so n holders are n - 1 copies.
        first.setdefault(place, piece.place)
    return copies


def check_replicas_at(
    location: str | Path,
    *,
    selection: Selection = EVERYTHING,
    verify: bool = False,
    on_key: OnKey | None = None,
    spread: Spread | None = None,
) -> ReplicaResult:
    """Check all copies within one run or trace bit for bit.

    Args:
        location: Its folder, or a URL such as ``s3://bucket/runs/tp2``.
        spread: Shares the tensors out to processes that open the trace by this location; ``None``: this one reads them.
        verify: First read all of the trace, whatever is selected, and check every SHA-256.

    Raises:
        ConfigError: There is no trace of whole tensors, or none of the chosen steps is present.
        TraceError: A file cannot be read or was changed.
    """
    with open_location(location, has_step=find_read_steps(selection.steps)) as path:
        trace_dir = find_trace(path)
        if trace_level(trace_dir) != "full":
            raise ConfigError(
                f"{trace_dir} has only sketches, and replicas reads whole tensors; trace the run with trace.level=full"
            )
        side = ComparedInput(name=name_locations(str(path)), path=trace_dir, kind="trace", level="full", run=None)
        check_steps([side], selection.steps)
        with open_trace(trace_dir) as reader:
            if verify:
                reader.verify()
            read_apart = None
            if spread is not None:
                read_apart = _SharedKeys(location=find_location(trace_dir.absolute()), spread=spread)
            shown = name_locations(str(path))
            return check_replicas(reader, shown, selection=selection, on_key=on_key, read_apart=read_apart)
