"""The contents of all reports of a comparison: counts by tier, the tensors to look at, their figures in words.

Contract: plain data out of results, without a terminal or a page, so that text, JSON and HTML say the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mock_scheduler.compare.findings import Finding, NotCompared
from mock_scheduler.compare.tensors import (
    ExpertFlips,
    LedgerComparison,
    TensorComparison,
    TensorDifference,
    Tier,
    WorstElement,
)
from mock_scheduler.compare.walk.metrics import MetricComparison, MetricDifference
from mock_scheduler.display.console import shortest_names
from mock_scheduler.support.text import count_of, list_some
from mock_scheduler.trace.entries import RankPlace
from mock_scheduler.trace.kinds import LEDGER_KINDS, TRACE_KINDS, TraceKind
from mock_scheduler.verdict.results import ComparisonResult
from mock_scheduler.verdict.verdict import VerdictKind
from mock_scheduler.verdict.wording.findings import describe_finding, describe_ledger, describe_note, describe_reasons
from mock_scheduler.verdict.wording.numbers import format_times
from mock_scheduler.verdict.wording.residuals import describe_locality, describe_residual

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

_NUM_RANKS = 3
_NUM_NAMES = 3
_LARGEST_SLOPE = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class TierCounts:
    """How many tensors of one kind are how far apart, over all steps and updates.

    identical, ulp, tolerance, undecided, diverged: of those that were compared, by ``TensorDifference.tier``;
    undecided are those whose sketches cannot tell on which side of their bound they are.
    missing: findings, which are tensors that one side lacks or that cannot be subtracted (another shape, NaN on one
    side). unobserved: names that one or both runs do not show, for a reason that is no fault. unjudged: of the compared
    ones, how many are no larger than rounding.
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
        """All that were compared."""
        return self.identical + self.ulp + self.tolerance + self.undecided + self.diverged


def tier_of(difference: TensorDifference) -> Tier | Literal["undecided"]:
    """Say in one word how far the two are apart, or that a sketch cannot tell."""
    return "undecided" if difference.is_undecided else difference.tier


def name_sides(result: ComparisonResult) -> tuple[str, str]:
    """Name the baseline and the candidate: by the ends of their paths where both have the same name."""
    sides = (result.baseline, result.candidate)
    if sides[0].name != sides[1].name:
        return sides[0].name, sides[1].name
    baseline, candidate = shortest_names([side.path.absolute() for side in sides])
    return baseline, candidate


def count_tiers(tensors: TensorComparison) -> tuple[TierCounts, ...]:
    """Count every kind of either run, in the order in which a step computes them."""
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


def format_relative(difference: TensorDifference) -> str:
    """``3.1e-03``; ``~3.1e-03 (2.6e-03 to 3.7e-03)`` where it is estimated; 0 where the bits are equal."""
    if difference.low is None or difference.high is None:
        return "0" if difference.bit_equal else format_size(difference.relative)
    bar = f"{format_size(difference.low)} to {format_size(difference.high)}"
    return f"~{format_size(difference.relative)} ({bar})"


def format_size(value: float) -> str:
    """``3.1e-03``, ``0``, ``inf``."""
    return "0" if value == 0 else f"{value:.1e}" if math.isfinite(value) else str(value)


def format_slope(slope: float) -> str:
    """``0.998967``, or in three digits where it is far from 1."""
    return f"{slope:.6f}" if abs(slope) < _LARGEST_SLOPE else f"{slope:.2e}"


def format_bound(difference: TensorDifference) -> str:
    """Its bound, or that there is none."""
    return f"{difference.tolerance:.1e}" if difference.is_judged else "not judged"


def format_bound_share(difference: MetricDifference) -> str:
    """How many times its bound a metric's difference is, at the step where it is nearest: ``0.31``, ``not judged``."""
    if difference.bit_equal:
        return "0"
    return f"{difference.times_bound:.2g}" if difference.is_judged else "not judged"


def describe_margin(difference: TensorDifference) -> str:
    """``1,300 times below its bound of 1.0e-04``; ``31 times its bound …`` beyond it."""
    bound = f"its bound of {difference.tolerance:.1e}"
    if not difference.exceeds:
        return f"{format_times(difference.margin)} times below {bound}"
    times = math.inf if difference.tolerance == 0 else difference.relative / difference.tolerance
    return f"{format_times(times)} times {bound}" if math.isfinite(times) else f"beyond {bound}"


def describe_worst(worst: WorstElement) -> str:
    """Describe the place of the largest |a - b|, both values and their ranks.

    ``sample train/g0/e1 token 12, element [40, 3]: 0.123 in the baseline, 0.145 in the candidate; held by …``
    """
    where = f"element {list(worst.index)}"
    if worst.sample is not None:
        where = f"sample {worst.sample} token {worst.position}, {where}"
    values = f"{worst.baseline:.9g} in the baseline, {worst.candidate:.9g} in the candidate"
    ranks = describe_ranks(worst.baseline_ranks, worst.candidate_ranks)
    return f"{where}: {values}{f'; held by {ranks}' if ranks else ''}"


def describe_ranks(baseline: Sequence[RankPlace], candidate: Sequence[RankPlace]) -> str:
    """``the baseline's global rank 0 (tp0) and the candidate's global rank 3 (tp1)``; empty where nobody is known."""
    sides = [list_some([place.describe() for place in places], _NUM_RANKS, ", ") for places in (baseline, candidate)]
    if sides[0] and sides[0] == sides[1]:
        return f"{sides[0]} in both runs"
    named = zip(("baseline's", "candidate's"), sides, strict=True)
    return " and ".join(f"the {whose} {places}" for whose, places in named if places)


def describe_details(difference: TensorDifference) -> list[tuple[str, str]]:
    """Describe one tensor beside its figures, as labels and texts: the place and the look of its difference."""
    rows = [("where", describe_locality(locality)) for locality in difference.localities[:2]]
    if difference.residual is not None:
        rows.append(("looks like", describe_residual(difference.residual)))
    if difference.figures is not None and difference.figures.worst is not None:
        rows.append(("worst", describe_worst(difference.figures.worst)))
    if difference.dtypes is not None:
        rows.append(("dtypes", f"{difference.dtypes[0]} in the baseline, {difference.dtypes[1]} in the candidate"))
    if difference.num_flipped_tokens:
        tokens = count_of(difference.num_flipped_tokens, "token")
        rows.append(("left out", f"{tokens} for which rounding chose other experts"))
    if difference.num_flipped_decisions:
        decisions = count_of(difference.num_decisions, "decision")
        rows.append(("turned", f"{difference.num_flipped_decisions} of {decisions}, up, down or unmoved"))
    if difference.num_excluded:
        share = difference.num_excluded / max(difference.num_elements, 1)
        elements = count_of(difference.num_excluded, "element")
        rows.append(("left out", f"{elements} ({share:.1%}) whose gradients are noise"))
    return rows


def describe_flips(flips: ExpertFlips) -> str:
    """``router of decoder.layers.0.mlp.router at step 0, update 0: 2 of 64 tokens; …``."""
    return (
        f"{flips.key.describe()}: rounding chose other experts for {flips.num_flipped:,} of "
        f"{count_of(flips.num_tokens, 'token')}, between logits that are at most {flips.largest_gap:.1e} apart"
    )


def describe_not_compared(tensors: TensorComparison) -> list[str]:
    """List omissions without fault, one line for each reason, kind and side; then the notes."""
    groups: dict[tuple[str, TraceKind, tuple[str, ...]], list[NotCompared]] = {}
    for item in tensors.not_compared:
        groups.setdefault((describe_reasons(item), item.kind, item.sides), []).append(item)
    lines = [
        f"{kind.replace('_', ' ')} of {list_some([item.name for item in items], _NUM_NAMES, ', ')}, not in the "
        f"{' and the '.join(sides)}: {reason}"
        for (reason, kind, sides), items in groups.items()
    ]
    selected = [describe_finding(finding) for finding in tensors.findings if finding.is_selection]
    return [*lines, *selected, *map(describe_note, tensors.notes)]


def unmatched(metrics: MetricComparison | None, tensors: TensorComparison | None) -> tuple[Finding, ...]:
    """List findings without a number, missing on one side or not subtractable; metrics first, then as computed."""
    found = [] if metrics is None else list(metrics.findings)
    if tensors is not None:
        found += [finding for finding in tensors.findings if not finding.is_selection]
        found += tensors.unusable
    return tuple(found)


def describe_ledgers(ledgers: Sequence[LedgerComparison]) -> list[str]:
    """List differences in the order of steps; then how many calls are equal, one line for each kind."""
    lines = [
        f"{ledger.kind} at step {ledger.step}: {describe_ledger(ledger)}"
        for ledger in ledgers
        if ledger.difference is not None
    ]
    for kind in LEDGER_KINDS:
        equal = [ledger for ledger in ledgers if ledger.kind == kind and ledger.difference is None]
        if equal:
            num_calls = sum(ledger.num_calls for ledger in equal)
            ranks = count_of(max(ledger.num_ranks for ledger in equal), "rank")
            steps = count_of(len(equal), "step")
            lines.append(f"{kind}: all {count_of(num_calls, 'call')} of {steps} on {ranks} equal")
    return lines
