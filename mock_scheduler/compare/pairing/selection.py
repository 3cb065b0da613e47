"""Which tensors are compared, and why a tensor is in one trace only.

A tensor that one run lacks is a finding, with two exceptions that are listed instead: the model does not show it there,
or the trace was written by some ranks only. Where a run was never told to trace it, the finding says so, once for all
tensors of the kind.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mock_scheduler.compare.findings import Finding, Side, other_side
from mock_scheduler.compare.tensors import NotCompared
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.config.trace import LEDGER_KINDS, TRACE_KINDS, LedgerKind, TraceKind
from mock_scheduler.support.text import count_of, list_some
from mock_scheduler.trace.entries import StepFooter, TraceKey

_NUM_NAMED = 3


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

    def describe(self) -> str:
        """What was chosen, as ``steps 5, kinds logits, names decoder.*``; empty where everything is."""
        parts = [] if self.steps is None else [f"steps {self.steps}"]
        if self.kinds is not None:
            parts.append(f"kinds {', '.join(kind for kind in (*TRACE_KINDS, *LEDGER_KINDS) if kind in self.kinds)}")
        if self.patterns != ("*",):
            parts.append(f"names {', '.join(self.patterns)}")
        return ", ".join(parts)


EVERYTHING = Selection()


@dataclass(frozen=True, kw_only=True, slots=True)
class Absence:
    """A tensor that ``side`` does not have. reason: in words. is_fault: whether it is a finding.
    is_selection: whether the side was never told to trace it."""

    key: TraceKey
    side: Side
    reason: str
    is_fault: bool
    is_selection: bool = False


def explain_absence(key: TraceKey, side: Side, footer: StepFooter, *, is_partial: bool) -> Absence:
    """Why ``side``, whose footer of the step is given, has no such tensor; ``is_partial``: only some ranks wrote it."""
    shown = next((item for item in footer.unobserved if (item.kind, item.name) == (key.kind, key.name)), None)
    if shown is not None:
        return Absence(key=key, side=side, reason=shown.reason, is_fault=False)
    if footer.kinds and key.kind not in footer.kinds:
        reason = f"its trace.kinds are {', '.join(footer.kinds)}"
        return Absence(key=key, side=side, reason=reason, is_fault=True, is_selection=True)
    if footer.patterns and not any(fnmatchcase(key.name, pattern) for pattern in footer.patterns):
        reason = f"its trace.patterns are {', '.join(footer.patterns)}"
        return Absence(key=key, side=side, reason=reason, is_fault=True, is_selection=True)
    if any(fnmatchcase(key.name, pattern) for pattern in footer.exclude):
        reason = f"its trace.exclude is {', '.join(footer.exclude)}"
        return Absence(key=key, side=side, reason=reason, is_fault=True, is_selection=True)
    if is_partial:
        ranks = ", ".join(map(str, footer.ranks))
        return Absence(key=key, side=side, reason=f"only global ranks {ranks} wrote this trace", is_fault=False)
    present = other_side(side)
    return Absence(key=key, side=side, reason=f"was traced by the {present} but not by the {side}", is_fault=True)


def absence_findings(absences: Sequence[Absence]) -> list[Finding]:
    """Faults as findings: one for each tensor; of what was not selected, one for each kind, side and reason."""
    findings = []
    groups: dict[tuple[TraceKind, Side, str], list[Absence]] = {}
    for absence in absences:
        if absence.is_selection:
            groups.setdefault((absence.key.kind, absence.side, absence.reason), []).append(absence)
        elif absence.is_fault:
            key = absence.key
            findings.append(
                Finding(
                    kind=key.kind,
                    step=key.step,
                    update=key.update,
                    name=key.name,
                    message=f"{key.describe()} {absence.reason}",
                )
            )
    for (kind, side, reason), items in groups.items():
        first = items[0].key
        what = count_of(len(items), f"tensor of kind {kind}", f"tensors of kind {kind}")
        message = (
            f"{what} of the {other_side(side)} {'is' if len(items) == 1 else 'are'} not traced by the {side}: {reason}"
        )
        findings.append(
            Finding(
                kind=kind, step=first.step, update=first.update, name=first.name, message=message, is_selection=True
            )
        )
    return findings


def list_not_compared(absences: Sequence[Absence]) -> tuple[NotCompared, ...]:
    """What is no fault: one entry for each tensor's name."""
    groups: dict[tuple[TraceKind, str], list[Absence]] = {}
    for absence in absences:
        if not absence.is_fault:
            groups.setdefault((absence.key.kind, absence.key.name), []).append(absence)
    return tuple(
        NotCompared(
            kind=kind,
            name=name,
            sides=tuple(side for side in ("baseline", "candidate") if any(item.side == side for item in items)),
            reason="; ".join(dict.fromkeys(item.reason for item in items)),
            first_step=min(item.key.step for item in items),
            num_steps=len({item.key.step for item in items}),
        )
        for (kind, name), items in groups.items()
    )


def describe_empty_kinds(not_compared: Sequence[NotCompared], compared: Collection[TraceKind]) -> list[str]:
    """For each kind of which nothing was compared though both traces were asked for it: that it proves nothing."""
    names: dict[TraceKind, list[str]] = {}
    for item in not_compared:
        if item.kind not in compared:
            names.setdefault(item.kind, []).append(item.name)
    return [
        f"no {kind.replace('_', ' ')} was compared at all: {list_some(found, _NUM_NAMED, ', ')} "
        f"{'is' if len(found) == 1 else 'are'} not shown by both runs"
        for kind, found in names.items()
    ]
