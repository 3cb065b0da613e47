"""The tensors to be compared, and the reasons a tensor is in one trace only.

A tensor missing in one run is a finding, with two exceptions listed instead: the model does not show it there, or only
some ranks wrote the trace. Where a run was never told to trace it, the finding says so, once for all tensors of the
kind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from mock_scheduler.comparison.findings import (
    SIDES,
    AbsentSteps,
    Finding,
    KindNotCompared,
    NotCompared,
    NotSelected,
    NotShown,
    NotTraced,
    NotWritten,
    OnlyIn,
    Unmatched,
    finding,
    other_side,
)
from mock_scheduler.comparison.residuals import Side
from mock_scheduler.config.instruments import LEDGER_KINDS, TRACE_KINDS, LedgerKind, TraceKind
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.trace.entries import StepFooter, TraceKey
from mock_scheduler.trace.selection import find_nearest_names
from mock_scheduler.trace.stated_steps import AbsenceReason, StatedSteps


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Holds the steps, kinds and names to be compared.

    Args:
        steps: ``None`` is all.
        kinds: ``None`` is all.
        patterns: Globs of canonical names, one of which must match.
        has_other_calls: The two runs may issue other collectives by design, so that theirs are not compared.
        stated: The steps that each side states to have: no other one is missing there.
        precisions: That each side states to compute in; empty texts where they are not known.
    """

    steps: StepRanges | None = None
    kinds: frozenset[TraceKind | LedgerKind] | None = None
    patterns: tuple[str, ...] = ("*",)
    has_other_calls: bool = False
    # What the runs say is no choice of the user's.
    stated: tuple[StatedSteps, StatedSteps] = field(default=(StatedSteps(), StatedSteps()), compare=False)
    precisions: tuple[str, str] = field(default=("", ""), compare=False)

    def has_step(self, step: int) -> bool:
        """Whether a step is compared."""
        return self.steps is None or step in self.steps

    def has_kind(self, kind: TraceKind | LedgerKind) -> bool:
        """Whether anything of a kind is compared."""
        return self.kinds is None or kind in self.kinds

    def has_name(self, name: str) -> bool:
        """Whether tensors of a name are compared."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


EVERYTHING = Selection()


def split_missing_steps(
    baseline: Collection[int], candidate: Collection[int], selection: Selection, *, is_traced: bool
) -> tuple[list[tuple[int, Side]], tuple[AbsentSteps, ...]]:
    """Returns the selected steps of one side alone with the side that lacks each, and those that it says it lacks."""
    missing: list[tuple[int, Side]] = []
    explained: dict[tuple[Side, AbsenceReason], list[int]] = {}
    for step, place in _list_missing(baseline, candidate):
        if selection.has_step(step):
            why = selection.stated[place].explain_absence(step, is_traced=is_traced)
            if why is None:
                missing.append((step, SIDES[place]))
            else:
                explained.setdefault((SIDES[place], why), []).append(step)
    absent = (AbsentSteps(side=side, why=why, steps=StepRanges.of(found)) for (side, why), found in explained.items())
    return missing, tuple(absent)


def _list_missing(baseline: Collection[int], candidate: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yields the steps of one side alone, in order, with the place of the other side."""
    ours, theirs = set(baseline), set(candidate)
    yield from sorted([*((step, 1) for step in ours - theirs), *((step, 0) for step in theirs - ours)])


def find_unmatched(
    selection: Selection, keys: Collection[TraceKey], ledgers: Collection[LedgerKind] = ()
) -> tuple[Unmatched, ...]:
    """Finds chosen kinds and patterns that choose nothing: a comparison would prove less than was asked for.

    Args:
        selection: Of the comparison.
        keys: Tensors of both sides, in the chosen steps.
        ledgers: Kinds of ledgers, likewise.
    """
    kinds: set[TraceKind | LedgerKind] = {key.kind for key in keys} | set(ledgers)
    found = [
        Unmatched(what="kind", chosen=kind, nearest=tuple(sorted(kinds)))
        for kind in (*TRACE_KINDS, *LEDGER_KINDS)
        if selection.kinds is not None and kind in selection.kinds and kind not in kinds
    ]
    names = sorted({key.name for key in keys if selection.has_kind(key.kind)})
    for pattern in selection.patterns if selection.patterns != EVERYTHING.patterns else ():
        if not any(fnmatchcase(name, pattern) for name in names):
            found.append(Unmatched(what="pattern", chosen=pattern, nearest=find_nearest_names(pattern, names)))
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Absence:
    """A tensor ``side`` does not have; ``reason``: ``None`` where nothing explains it."""

    key: TraceKey
    side: Side
    reason: NotShown | NotWritten | NotTraced | None


def explain_absence(key: TraceKey, side: Side, footer: StepFooter, *, is_partial: bool) -> Absence:
    """Finds why ``side`` has no such tensor; ``footer``: its, of the step; ``is_partial``: only some ranks wrote it."""
    return Absence(key=key, side=side, reason=_find_reason(key, footer, is_partial=is_partial))


def _find_reason(key: TraceKey, footer: StepFooter, *, is_partial: bool) -> NotShown | NotWritten | NotTraced | None:
    # What the model does not show comes first: it was asked for, so that no setting of the trace is to blame.
    shown = next((item for item in footer.unobserved if (item.kind, item.name) == (key.kind, key.name)), None)
    if shown is not None:
        return NotShown(reason=shown.reason)
    if footer.kinds and key.kind not in footer.kinds:
        return NotTraced(setting="kinds", values=tuple(footer.kinds))
    if footer.patterns and not any(fnmatchcase(key.name, pattern) for pattern in footer.patterns):
        return NotTraced(setting="patterns", values=tuple(footer.patterns))
    if any(fnmatchcase(key.name, pattern) for pattern in footer.exclude):
        return NotTraced(setting="exclude", values=tuple(footer.exclude))
    # Only the settings above explain an absence by intent; ranks that wrote nothing may have had the tensor.
    return NotWritten(ranks=tuple(footer.ranks)) if is_partial else None


def find_faults(absences: Sequence[Absence]) -> list[Finding]:
    """Finds faults: one for each tensor; for tensors not selected, one for each kind, side and reason."""
    findings = []
    groups: dict[tuple[TraceKind, Side, NotTraced], list[Absence]] = {}
    for absence in absences:
        # One setting leaves out thousands of tensors, which are one thing to be told.
        if isinstance(absence.reason, NotTraced):
            groups.setdefault((absence.key.kind, absence.side, absence.reason), []).append(absence)
        elif absence.reason is None:
            findings.append(finding(absence.key, OnlyIn(side=other_side(absence.side))))
    for (_, side, reason), items in groups.items():
        findings.append(finding(items[0].key, NotSelected(side=side, num_tensors=len(items), reason=reason)))
    return findings


def list_not_compared(absences: Sequence[Absence]) -> tuple[NotCompared, ...]:
    """Lists absences without fault: one entry for each tensor's name."""
    reasons: dict[tuple[TraceKind, str], dict[NotShown | NotWritten, None]] = {}
    groups: dict[tuple[TraceKind, str], list[Absence]] = {}
    for absence in absences:
        if isinstance(absence.reason, NotShown | NotWritten):
            place = (absence.key.kind, absence.key.name)
            groups.setdefault(place, []).append(absence)
            reasons.setdefault(place, {})[absence.reason] = None
    return tuple(
        NotCompared(
            kind=kind,
            name=name,
            sides=tuple(side for side in SIDES if any(item.side == side for item in items)),
            reasons=tuple(reasons[kind, name]),
            first_step=min(item.key.step for item in items),
            num_steps=len({item.key.step for item in items}),
        )
        for (kind, name), items in groups.items()
    )


def find_empty_kinds(not_compared: Sequence[NotCompared], compared: Collection[TraceKind]) -> list[KindNotCompared]:
    """Finds kinds without any compared tensor though both traces were asked for them, so they prove nothing."""
    names: dict[TraceKind, list[str]] = {}
    for item in not_compared:
        if item.kind not in compared:
            names.setdefault(item.kind, []).append(item.name)
    return [KindNotCompared(kind=kind, names=tuple(found)) for kind, found in names.items()]
