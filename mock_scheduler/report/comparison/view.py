"""Holds the contents of all reports of a comparison: the sides' names, counts by tier, tensors and metrics to show.

Contract: plain data out of results, without a terminal or a page; text, JSON and HTML say the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mock_scheduler.comparison.findings import Finding
from mock_scheduler.comparison.tensors import (
    TensorComparison,
    TensorDifference,
    Tier,
)
from mock_scheduler.comparison.walk.metrics import MetricComparison, MetricDifference
from mock_scheduler.config.instruments import TRACE_KINDS, TraceKind
from mock_scheduler.display.terminal import shortest_names
from mock_scheduler.support.text import count_of
from mock_scheduler.verdict.results import ComparisonResult
from mock_scheduler.verdict.verdict import VerdictKind

#: How a verdict's word looks in a terminal.
VERDICT_STYLES: Mapping[VerdictKind, str] = {
    VerdictKind.IDENTICAL: "bold green",
    VerdictKind.EMULATED: "bold green",
    VerdictKind.ROUNDING: "green",
    VerdictKind.SUSPECT: "bold yellow",
    VerdictKind.DIVERGED: "bold red",
    VerdictKind.INCOMPARABLE: "bold yellow",
    VerdictKind.UNVERIFIED: "bold yellow",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TierCounts:
    """How many tensors of one kind are how far apart, over all steps and updates.

    identical, ulp, tolerance, undecided, diverged: of the compared ones, by ``TensorDifference.tier``; for the
    undecided ones sketches cannot tell the side of the bound. missing: findings: one side lacks the tensor, or the two
    cannot be subtracted (another shape, NaN on one side). unobserved: names not shown by one or both runs, for a reason
    without fault. unjudged: of the compared ones, how many are no larger than rounding.
    """

    kind: TraceKind
    identical: int
    ulp: int
    tolerance: int
    undecided: int
    diverged: int
    missing: int
    unobserved: int
    unjudged: int

    @property
    def compared(self) -> int:
        """Returns the number of compared tensors."""
        return self.identical + self.ulp + self.tolerance + self.undecided + self.diverged


def tier_of(difference: TensorDifference) -> Tier | Literal["undecided"]:
    """Say in one word how far the two are apart, or ``undecided``."""
    return "undecided" if difference.is_undecided else difference.tier


def name_sides(result: ComparisonResult) -> tuple[str, str]:
    """Name the baseline and the candidate: by the ends of their paths where both have the same name."""
    sides = (result.baseline, result.candidate)
    if sides[0].name != sides[1].name:
        return sides[0].name, sides[1].name
    baseline, candidate = shortest_names([Path(side.url) if side.url else side.path.absolute() for side in sides])
    return baseline, candidate


def tensor_anchor(step: int, update: int, kind: str, name: str) -> str:
    """Returns a tensor's address in a page, the same in every run: ``0.1/gradient/decoder.final_layernorm.weight``."""
    return re.sub(r"\s", "-", f"{step}.{update}/{kind}/{name}")


def count_tiers(tensors: TensorComparison) -> tuple[TierCounts, ...]:
    """Count every kind of either run, in the order of computation."""
    tiers = Counter((item.key.kind, tier_of(item)) for item in tensors.differences)
    unjudged = Counter(item.key.kind for item in tensors.differences if not item.is_judged)
    missing = Counter(finding.kind for finding in (*tensors.findings, *tensors.unusable) if not finding.is_selection)
    unobserved = Counter(item.kind for item in tensors.not_compared)
    kinds = {kind for kind, _ in tiers} | missing.keys() | unobserved.keys()
    return tuple(
        TierCounts(
            kind=kind,
            identical=tiers[kind, "identical"],
            ulp=tiers[kind, "ulp"],
            tolerance=tiers[kind, "tolerance"],
            undecided=tiers[kind, "undecided"],
            diverged=tiers[kind, "diverged"],
            missing=missing[kind],
            unobserved=unobserved[kind],
            unjudged=unjudged[kind],
        )
        for kind in TRACE_KINDS
        if kind in kinds
    )


def tensors_to_show(tensors: TensorComparison) -> tuple[str, tuple[TensorDifference, ...]]:
    """Choose a heading and the tensors under it: any beyond their bound, in the order of computation.

    Where none is: any that a sketch cannot decide, else the nearest to their bound, worst first; none where all
    are identical.
    """
    counted = f"of {count_of(len(tensors.differences), 'tensor')}, as computed"
    if tensors.exceeding:
        return f"Beyond their bound: {len(tensors.exceeding):,} {counted}", tensors.exceeding
    if tensors.undecided:
        return f"Not decided by sketches: {len(tensors.undecided):,} {counted}", tensors.undecided
    apart = [item for item in tensors.differences if not item.bit_equal and item.is_judged and item.relative > 0]
    if not apart:
        return "", ()
    return "Nearest to their bound, worst first", tuple(sorted(apart, key=lambda item: item.margin))


def metrics_to_show(metrics: MetricComparison) -> tuple[MetricDifference, ...]:
    """List metrics with a difference: beyond tolerance as they first are, then the others, largest first."""
    exceeding = metrics.exceeding
    names = {item.name for item in exceeding}
    others = [item for item in metrics.differences if not item.bit_equal and item.name not in names]
    return (*exceeding, *sorted(others, key=lambda item: -item.max_relative))


def describe_equal_metrics(metrics: MetricComparison) -> str:
    """Say how many metrics are equal; empty where there are none."""
    num_equal = sum(item.bit_equal for item in metrics.differences)
    if not num_equal:
        return ""
    steps = count_of(len(metrics.steps), "step")
    return f"{num_equal} of {count_of(len(metrics.differences), 'metric')} equal to the last bit over {steps}"


def unmatched(metrics: MetricComparison | None, tensors: TensorComparison | None) -> tuple[Finding, ...]:
    """List findings without a number, missing on one side or not subtractable; metrics first, then as computed."""
    found = [] if metrics is None else list(metrics.findings)
    if tensors is not None:
        found += [finding for finding in tensors.findings if not finding.is_selection]
        found += tensors.unusable
    return tuple(found)
