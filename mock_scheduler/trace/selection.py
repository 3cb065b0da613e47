"""Carries out a trace's configuration: checks its selection, selects the tensors of a training step, and opens the sink
that takes them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from mock_scheduler.config.instruments import LEDGER_KINDS, TRACE_KINDS, LedgerKind, TraceConfig, TraceKind
from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.errors import ConfigError, TraceError
from mock_scheduler.support.text import bullet_list
from mock_scheduler.trace.entries import RankPlace, TraceSink
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.sketch.files import SketchSink

EVERYTHING = "*"

_NUM_NEAREST = 3

_NEAREST_CUTOFF = 0.3


class TraceSelection:
    """The tensors a configuration asks for; nothing at level ``off``.

    ``patterns``: the globs. ``names``: every name that ``wants`` was asked for with a selected kind.
    ``matched``: the globs that selected at least one of them.
    """

    def __init__(self, config: TraceConfig) -> None:
        self.patterns = tuple(config.patterns)
        # Ledgers have no names: where there is nothing else, the glob of everything is not wrong.
        self.matched: set[str] = set() if set(config.kinds) - set(LEDGER_KINDS) else {EVERYTHING}
        chosen = frozenset(config.kinds) if config.level != "off" else frozenset[str]()
        self._exclude = tuple(config.exclude)
        self._kinds: frozenset[TraceKind] = frozenset(kind for kind in TRACE_KINDS if kind in chosen)
        self._ledgers: frozenset[LedgerKind] = frozenset(kind for kind in LEDGER_KINDS if kind in chosen)
        self._ranks = None if config.ranks is None else frozenset(config.ranks)
        self._answers: dict[str, bool] = {}

    @property
    def names(self) -> frozenset[str]:
        """Returns every name asked for with a selected kind."""
        return frozenset(self._answers)

    def wants(self, kind: TraceKind, name: str) -> bool:
        """Whether the tensor of this canonical name is traced."""
        if kind not in self._kinds:
            return False
        if name not in self._answers:
            self._answers[name] = self._selects(name)
        return self._answers[name]

    def wants_kind(self, kind: TraceKind) -> bool:
        """Whether any tensor of this kind may be traced."""
        return kind in self._kinds

    def wants_ledger(self, kind: LedgerKind) -> bool:
        """Whether calls of this kind are listed."""
        return kind in self._ledgers

    def writes(self, global_rank: int) -> bool:
        """Whether this rank writes anything."""
        return bool(self._kinds or self._ledgers) and (self._ranks is None or global_rank in self._ranks)

    def _selects(self, name: str) -> bool:
        matched = [pattern for pattern in self.patterns if fnmatchcase(name, pattern)]
        if any(fnmatchcase(name, pattern) for pattern in self._exclude):
            return False
        self.matched.update(matched)
        return bool(matched)


def describe_unmatched(patterns: Sequence[str], names: Collection[str], *, matched: Collection[str]) -> str:
    """The error for ``patterns`` outside of ``matched``, with the nearest names; empty where there are none.

    ``names``, ``matched``: of all ranks together, as ``TraceSelection`` has them of one.
    """
    lines = []
    for pattern in patterns:
        if pattern not in matched:
            lines.append(f"{pattern!r} selects nothing: {_why_nothing(pattern, names)}")
    if not lines:
        return ""
    return (
        f"trace.patterns do not all select something:{bullet_list(lines)}\n"
        "Correct or remove them, or add the kind that has such names to trace.kinds"
    )


def _why_nothing(pattern: str, names: Collection[str]) -> str:
    if not names:
        return "none of the chosen trace.kinds has a tensor in this run"
    excluded = sorted(name for name in names if fnmatchcase(name, pattern))
    if excluded:
        return f"trace.exclude takes out all that it matches, as {excluded[0]}"
    return f"it matches none of {len(names)} names; the nearest are {', '.join(find_nearest_names(pattern, names))}"


def find_nearest_names(pattern: str, names: Collection[str]) -> tuple[str, ...]:
    """Finds the few names that a glob without a match may have meant; the first ones where none is near."""
    listed = sorted(names)
    nearest = difflib.get_close_matches(pattern, listed, n=_NUM_NEAREST, cutoff=_NEAREST_CUTOFF)
    return tuple(nearest or listed[:_NUM_NEAREST])


def open_sink(config: TraceConfig, trace_dir: Path, *, step: int, place: RankPlace, world_size: int) -> TraceSink:
    """Returns whole tensors for level ``full``, sketches for level ``sketch``.

    Raises ``TraceError`` where this rank's step is traced already, and ``ValueError`` for level ``off``, since
    nothing is to be collected.
    """
    if config.level == "full":
        return FullSink(trace_dir, step=step, place=place, world_size=world_size, part_bytes=config.part_bytes)
    if config.level == "sketch":
        return SketchSink(trace_dir, step=step, place=place, world_size=world_size, num_buckets=config.sketch_buckets)
    raise ValueError("trace.level is off: nothing is traced, so there is nothing to write to")


def check_trace_ranks(trace: TraceConfig, parallel: ParallelConfig) -> None:
    """Refuses ``trace.ranks`` outside the layout.

    Raises:
        ConfigError: with these ranks and the number of processes.
    """
    world_size = parallel.world_size
    beyond = [global_rank for global_rank in trace.ranks or () if global_rank >= world_size]
    if beyond:
        raise ConfigError(
            f"trace.ranks has {', '.join(map(str, beyond))}, but layout {parallel.describe()} has "
            f"{world_size} {'process' if world_size == 1 else 'processes'}: its global ranks are 0 to "
            f"{world_size - 1}. Remove them from trace.ranks, or set it to null for all ranks"
        )


def check_patterns(selection: TraceSelection, ranks: RankGroup) -> None:
    """Refuses globs without any match on any rank in a whole step. Collective: each rank knows the names of its own
    stage.

    Raises:
        TraceError: on every rank, with each unmatched glob and the names nearest to it.
    """
    matched = _gather(selection.matched, ranks)
    if all(pattern in matched for pattern in selection.patterns):
        return
    raise TraceError(describe_unmatched(selection.patterns, _gather(selection.names, ranks), matched=matched))


def _gather(texts: Collection[str], ranks: RankGroup) -> frozenset[str]:
    """Returns the texts of all ranks."""
    payloads = ranks.gather(json.dumps(sorted(texts)).encode())
    return frozenset(text for payload in payloads for text in json.loads(payload))
