"""What a walk over two traces has found so far, and its result."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mock_scheduler.compare.findings import Finding, Side
from mock_scheduler.compare.pairing.order import order_keys
from mock_scheduler.compare.pairing.selection import (
    Absence,
    Selection,
    absence_findings,
    describe_empty_kinds,
    list_not_compared,
)
from mock_scheduler.compare.tensors import ExpertFlips, LedgerComparison, TensorComparison, TensorDifference
from mock_scheduler.trace.full.reader import ReplicaConflict

SIDES: tuple[Side, Side] = ("baseline", "candidate")


@dataclass(kw_only=True)
class Found:
    """As ``TensorComparison`` has it in the end; ``notes`` are the keys of a dict, so that each is there once."""

    findings: list[Finding] = field(default_factory=list)
    differences: list[TensorDifference] = field(default_factory=list)
    unusable: list[Finding] = field(default_factory=list)
    conflicts: tuple[list[ReplicaConflict], list[ReplicaConflict]] = field(default_factory=lambda: ([], []))
    absences: list[Absence] = field(default_factory=list)
    flips: list[ExpertFlips] = field(default_factory=list)
    ledgers: list[LedgerComparison] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    num_located: int = 0

    def result(self, steps: tuple[int, ...], *, level: Literal["full", "sketch"] = "full") -> TensorComparison:
        """All of it."""
        not_compared = list_not_compared(self.absences)
        compared = {difference.key.kind for difference in self.differences}
        return TensorComparison(
            steps=steps,
            differences=tuple(self.differences),
            findings=(*self.findings, *absence_findings(self.absences)),
            baseline_conflicts=tuple(self.conflicts[0]),
            candidate_conflicts=tuple(self.conflicts[1]),
            unusable=tuple(sorted(self.unusable, key=lambda item: (item.step, item.update or 0))),
            level=level,
            not_compared=not_compared,
            flips=tuple(self.flips),
            ledgers=tuple(self.ledgers),
            notes=(*self.notes, *describe_empty_kinds(not_compared, compared)),
            numbers=dict(self.numbers),
            num_located=self.num_located,
        )


def find_missing_steps(baseline: Collection[int], candidate: Collection[int], selection: Selection) -> list[Finding]:
    """Selected steps that only one side has."""
    rows = [(step, *SIDES) for step in set(baseline) - set(candidate)]
    rows += [(step, *SIDES[::-1]) for step in set(candidate) - set(baseline)]
    return [
        Finding(
            kind="step",
            step=step,
            update=None,
            name=f"step {step}",
            message=f"step {step} was traced by the {present} but not by the {absent}",
        )
        for step, present, absent in sorted(rows)
        if selection.has_step(step)
    ]


def in_order(differences: Sequence[TensorDifference]) -> list[TensorDifference]:
    """In the order in which training computes them."""
    position = {key: index for index, key in enumerate(order_keys(item.key for item in differences))}
    return sorted(differences, key=lambda item: position[item.key])
