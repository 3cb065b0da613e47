"""Which tensors are compared, and why a tensor is in one trace only.

A tensor that one run lacks is a finding, with two exceptions that are listed instead: the model does not show it there,
or the trace was written by some ranks only. Where a run was never told to trace it, the finding says so, once for all
tensors of the kind.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mock_scheduler.compare.findings import (
    SIDES,
    Finding,
    KindNotCompared,
    NotCompared,
    NotSelected,
    NotShown,
    NotTraced,
    NotWritten,
    OnlyIn,
    finding,
    other_side,
)
from mock_scheduler.compare.residuals import Side
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.trace.entries import StepFooter, TraceKey
from mock_scheduler.trace.kinds import LedgerKind, TraceKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """What is compared. steps, kinds: ``None`` is all. patterns: globs of canonical names, of which one must match."""

    steps: StepRanges | None = None
    kinds: frozenset[TraceKind | LedgerKind] | None = None
    patterns: tuple[str, ...] = ("*",)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Absence:
    """A tensor that ``side`` does not have; ``reason``: ``None`` where nothing explains it."""

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
    return NotWritten(ranks=tuple(footer.ranks)) if is_partial else None


def find_faults(absences: Sequence[Absence]) -> list[Finding]:
    """Finds faults: one for each tensor; of what was not selected, one for each kind, side and reason."""
    findings = []
    groups: dict[tuple[TraceKind, Side, NotTraced], list[Absence]] = {}
    for absence in absences:
        if isinstance(absence.reason, NotTraced):
            groups.setdefault((absence.key.kind, absence.side, absence.reason), []).append(absence)
        elif absence.reason is None:
            findings.append(finding(absence.key, OnlyIn(side=other_side(absence.side))))
    for (_, side, reason), items in groups.items():
        findings.append(finding(items[0].key, NotSelected(side=side, num_tensors=len(items), reason=reason)))
    return findings


def list_not_compared(absences: Sequence[Absence]) -> tuple[NotCompared, ...]:
    """Lists what is no fault: one entry for each tensor's name."""
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
    """Finds kinds of which nothing was compared though both traces were asked for them, so that they prove nothing."""
    names: dict[TraceKind, list[str]] = {}
    for item in not_compared:
        if item.kind not in compared:
            names.setdefault(item.kind, []).append(item.name)
    return [KindNotCompared(kind=kind, names=tuple(found)) for kind, found in names.items()]
