"""Numbers and kinds of tensors as short text: sizes, shares of a bound, counts of a kind."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mock_scheduler.compare.tensors import TensorDifference
from mock_scheduler.support.text import count_of
from mock_scheduler.trace.kinds import TraceKind

INFINITE = "∞"
_MANY = 1e6
_WHOLE_PERCENT = 0.01
_COUNTED: dict[TraceKind, str] = {
    "initial": "initial parameter",
    "activation": "activation",
    "activation_gradient": "activation gradient",
    "gradient": "gradient",
    "gradient_norm": "gradient norm",
    "parameter": "parameter",
    "weight": "weight",
}


def name_kind(kind: TraceKind) -> str:
    """``activation gradient``."""
    return _COUNTED.get(kind, kind.replace("_", " "))


def name_kinds(kind: TraceKind) -> str:
    """``activation gradients``, ``logits``, ``loss tensors``."""
    if kind == "logits":
        return kind
    return f"{_COUNTED[kind]}s" if kind in _COUNTED else f"{name_kind(kind)} tensors"


def count_kind(count: int, kind: TraceKind) -> str:
    """``1 gradient``, ``12 activations``, ``3 logits tensors``."""
    return count_of(count, _COUNTED.get(kind, f"{name_kind(kind)} tensor"))


def join_and(names: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def bound_ratio(difference: TensorDifference | None) -> float:
    """The difference in shares of its bound: 0 of equal tensors, infinite without a number or with a bound of 0."""
    if difference is None or math.isnan(difference.relative):
        return math.inf
    if difference.relative == 0:
        return 0.0
    return difference.relative / difference.tolerance if difference.tolerance else math.inf


def format_times(times: float) -> str:
    """``3.1``, ``1,300``, ``2.4e+09``."""
    return f"{times:.1f}" if times < 10 else f"{times:,.0f}" if times < _MANY else f"{times:.1e}"


def format_share(ratio: float) -> str:
    """A difference in shares of its bound, in few characters: ``=``, ``<1%``, ``12%``, ``31×``, ``∞``."""
    if ratio == 0:
        return "="
    if not math.isfinite(ratio):
        return INFINITE
    if ratio > 1:
        return f"{format_times(ratio)}×"
    return "<1%" if ratio < _WHOLE_PERCENT else f"{ratio:.0%}"


def describe_times(ratio: float) -> str:
    """A difference in shares of its bound: ``12% of its bound``, ``31 times its bound``."""
    if ratio > 1:
        return f"{format_times(ratio) if math.isfinite(ratio) else INFINITE} times its bound"
    return f"{format_share(ratio)} of its bound" if ratio else "equal"


def describe_ratio(difference: TensorDifference) -> str:
    """``12% of its bound``, ``31 times its bound``; or it says: not judged."""
    if not difference.is_judged:
        return "not judged: no larger than rounding"
    return describe_times(bound_ratio(difference))
