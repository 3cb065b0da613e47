"""Tensors and metrics in words: how far two runs are apart in one of them, where, who held it, and short numbers.

Contract: every report takes its texts from here, so that terminal, page and JSON say the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mock_scheduler.comparison.findings import NotCompared
from mock_scheduler.comparison.tensors import (
    ExpertFlips,
    LedgerComparison,
    TensorComparison,
    TensorDifference,
    WorstElement,
)
from mock_scheduler.comparison.walk.metrics import MetricDifference
from mock_scheduler.config.instruments import LEDGER_KINDS, TraceKind
from mock_scheduler.support.text import count_of, in_words, list_some
from mock_scheduler.trace.entries import RankPlace
from mock_scheduler.verdict.wording.findings import describe_finding, describe_ledger, describe_note, describe_reasons
from mock_scheduler.verdict.wording.residuals import describe_locality, describe_residual

INFINITE = "∞"
_MANY = 1e6
_WHOLE_PERCENT = 0.01
_LARGEST_SLOPE = 1000
_NUM_NAMES = 3
_NUM_RANKS = 4
_COUNTED: dict[TraceKind, str] = {
    "initial": "initial parameter",
    "activation": "activation",
    "activation_gradient": "activation gradient",
    "gradient": "gradient",
    "gradient_norm": "gradient norm",
    "parameter": "parameter",
    "weight": "weight",
}


def describe_tensor(difference: TensorDifference) -> str:
    """Returns size, look and place of a difference: ``gradient of w differs by 0.57 (bound 0.0001): …``."""
    key = difference.key
    amount = f"differs by {difference.relative:.3g} (bound {difference.tolerance:.2g})"
    if difference.low is not None and difference.high is not None:
        amount = (
            f"differs by about {difference.relative:.3g} ({difference.low:.3g} to {difference.high:.3g}; bound "
            f"{difference.tolerance:.2g})"
        )
    details = [
        *([describe_residual(difference.residual)] if difference.residual is not None else []),
        *([describe_locality(difference.localities[0])] if difference.localities else []),
        *_describe_worst(difference),
    ]
    return f"{name_kind(key.kind)} of {key.name} {amount}{': ' if details else ''}{', '.join(details)}"


def describe_metric(difference: MetricDifference) -> str:
    """A metric beyond its bound: since when, by how much, and where it is furthest beyond."""
    return (
        f"{difference.name} from step {difference.first_exceeding_step} on: relative difference up to "
        f"{difference.max_relative:.3g}, |a-b| {difference.times_bound:.3g} times its bound of {difference.bound:.2g} "
        f"at step {difference.nearest_step}"
    )


def _describe_worst(difference: TensorDifference) -> list[str]:
    """Sample, token and index of the worst element, and who held it."""
    worst = None if difference.figures is None else difference.figures.worst
    # Of numbers of experts none is the largest: the residual names the first token.
    if worst is None or (difference.residual is not None and difference.residual.kind == "choice"):
        return []
    where = f"largest at index {list(worst.index)}"
    if worst.sample is not None:
        where += f" (sample {worst.sample}, token {worst.position})"
    ranks = describe_ranks(worst.baseline_ranks, worst.candidate_ranks)
    return [f"{where}{f', held by {ranks}' if ranks else ''}"]


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
    """``global rank 0 (tp0) in the baseline and global rank 3 (tp1) in the candidate``; empty where nobody is known."""
    sides = [list_some([place.describe() for place in places], _NUM_RANKS, ", ") for places in (baseline, candidate)]
    if sides[0] == sides[1]:
        return f"{sides[0]} in both runs" if sides[0] else ""
    named = zip(("in the baseline", "in the candidate"), sides, strict=True)
    return " and ".join(f"{places} {side}" for side, places in named if places)


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


def describe_margin(difference: TensorDifference) -> str:
    """Returns ``1,300 times below its bound of 1.0e-04``; ``31 times its bound …`` beyond it."""
    bound = f"its bound of {difference.tolerance:.1e}"
    if not difference.exceeds:
        return f"{format_times(difference.margin)} times below {bound}"
    times = math.inf if difference.tolerance == 0 else difference.relative / difference.tolerance
    return f"{format_times(times)} times {bound}" if math.isfinite(times) else f"beyond {bound}"


def describe_flips(flips: ExpertFlips) -> str:
    """Returns ``router of decoder.layers.0.mlp.router at step 0, update 0: 2 of 64 tokens; …``."""
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
        f"{in_words(kind)} of {list_some([item.name for item in items], _NUM_NAMES, ', ')}, not in the "
        f"{' and the '.join(sides)}: {reason}"
        for (reason, kind, sides), items in groups.items()
    ]
    selected = [describe_finding(finding) for finding in tensors.findings if finding.is_selection]
    return [*lines, *selected, *map(describe_note, tensors.notes)]


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


def name_kind(kind: TraceKind) -> str:
    """Returns ``activation gradient``."""
    return _COUNTED.get(kind, in_words(kind))


def name_kinds(kind: TraceKind) -> str:
    """Returns ``activation gradients``, ``logits``, ``loss tensors``."""
    if kind == "logits":
        return kind
    return f"{_COUNTED[kind]}s" if kind in _COUNTED else f"{name_kind(kind)} tensors"


def count_kind(count: int, kind: TraceKind) -> str:
    """Returns ``1 gradient``, ``12 activations``, ``3 logits tensors``."""
    return count_of(count, _COUNTED.get(kind, f"{name_kind(kind)} tensor"))


def join_and(names: Sequence[str]) -> str:
    """Returns ``a, b and c``."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def format_relative(difference: TensorDifference) -> str:
    """``3.1e-03``; ``~3.1e-03 (2.6e-03 to 3.7e-03)`` where it is estimated; 0 where the bits are equal."""
    if difference.low is None or difference.high is None:
        return "0" if difference.bit_equal else format_size(difference.relative)
    bar = f"{format_size(difference.low)} to {format_size(difference.high)}"
    return f"~{format_size(difference.relative)} ({bar})"


def format_size(value: float) -> str:
    """Returns ``3.1e-03``, ``0``, ``inf``."""
    return "0" if value == 0 else f"{value:.1e}" if math.isfinite(value) else str(value)


def format_short_size(value: float) -> str:
    """Returns ``3.1e-3``: as ``format_size``, in the fewest characters."""
    if value == 0 or not math.isfinite(value):
        return format_size(value)
    return np.format_float_scientific(value, precision=1, unique=False, exp_digits=1)


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


def bound_ratio(difference: TensorDifference | None) -> float:
    """The difference in shares of its bound: 0 of equal tensors, infinite without a number or with a bound of 0."""
    if difference is None or math.isnan(difference.relative):
        return math.inf
    if difference.relative == 0:
        return 0.0
    return difference.relative / difference.tolerance if difference.tolerance else math.inf


def format_times(times: float) -> str:
    """Returns ``3.1``, ``1,300``, ``2.4e+09``."""
    return f"{times:.1f}" if times < 10 else f"{times:,.0f}" if times < _MANY else f"{times:.1e}"


def format_share(ratio: float) -> str:
    """Returns a difference in shares of its bound, in few characters: ``=``, ``<1%``, ``12%``, ``31×``, ``∞``."""
    if ratio == 0:
        return "="
    if not math.isfinite(ratio):
        return INFINITE
    if ratio > 1:
        return f"{format_times(ratio)}×"
    return "<1%" if ratio < _WHOLE_PERCENT else f"{ratio:.0%}"


def describe_times(ratio: float) -> str:
    """Returns a difference in shares of its bound: ``12% of its bound``, ``31 times its bound``."""
    if ratio > 1:
        return f"{format_times(ratio) if math.isfinite(ratio) else INFINITE} times its bound"
    return f"{format_share(ratio)} of its bound" if ratio else "equal"


def describe_ratio(difference: TensorDifference) -> str:
    """``12% of its bound``, ``31 times its bound``; or it says: not judged."""
    if not difference.is_judged:
        return "not judged: no larger than rounding"
    return describe_times(bound_ratio(difference))
