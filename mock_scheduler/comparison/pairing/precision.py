"""Two runs of other precisions: the dtypes that each may have, and the weights that the narrower one starts from.

Contract: a run states its precision itself; a dtype that follows from no statement stays a difference, but for one that
is wider in the candidate alone (a float32 island in a bfloat16 model), which computes no less exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mock_scheduler.comparison.findings import SIDES, RoundedOtherwise, RoundingRule
from mock_scheduler.comparison.measure.changes import Pair
from mock_scheduler.comparison.measure.distance import is_bit_equal
from mock_scheduler.config.instruments import UNIT_ROUNDOFFS, TraceKind
from mock_scheduler.support.tensor_bytes import dtype_name
from mock_scheduler.trace.full.whole import WholeTensor

Precisions = tuple[str, str]
"""The precisions of baseline and candidate, as the runs state them; empty texts where they do not."""

Narrow = tuple[int, torch.dtype]
"""The side that computes in less than the other one, as a place in ``SIDES``, and in what."""

#: What an optimizer reads and writes; at least float32 in every precision.
_STATE: frozenset[TraceKind] = frozenset({"initial", "gradient", "gradient_norm", "optimizer", "parameter"})
#: What a module computes, in whatever precision it chooses.
_COMPUTED: frozenset[TraceKind] = frozenset({"activation", "router", "logits", "output", "activation_gradient", "loss"})


def are_other(precisions: Precisions) -> bool:
    """Whether both runs state a precision, each another one."""
    return all(name in UNIT_ROUNDOFFS for name in precisions) and precisions[0] != precisions[1]


def explains_dtypes(kind: TraceKind, dtypes: Sequence[torch.dtype], precisions: Precisions) -> bool:
    """Whether two dtypes of a tensor follow from the precisions of the runs, or the candidate's is the wider one."""
    if are_other(precisions):
        return all(dtype in _find_dtypes(kind, name) for dtype, name in zip(dtypes, precisions, strict=True))
    mine, other = dtypes
    is_wider = mine.is_floating_point and other.is_floating_point and torch.promote_types(mine, other) is other
    return is_wider and kind in _COMPUTED


def find_narrow(weights: Sequence[torch.dtype | None], precisions: Precisions) -> Narrow | None:
    """Finds the side that computes in less; ``None`` where both compute alike.

    ``weights``: the dtype of each side's own weight beside its parameter; ``None`` where it has none.
    """
    if (weights[0] is None) != (weights[1] is None):
        side = int(weights[0] is None)
        return side, weights[side] or torch.float32
    if any(weights) or not are_other(precisions):
        return None
    # Untraced weights: what the run states of all of them.
    side = max((0, 1), key=lambda place: UNIT_ROUNDOFFS[precisions[place]])
    return side, getattr(torch, precisions[side])


def check_rounded(values: Pair, narrow: Narrow) -> RoundedOtherwise | None:
    """Whether the narrower side starts from the other's values, rounded to nearest; ``None`` where it does.

    ``values``: float32 or float64, of both sides.
    """
    side, dtype = narrow
    own, wide = (WholeTensor.of(values[place]).whole() for place in (side, 1 - side))
    # torch's cast rounds to nearest, ties to even, and so does Megatron's copy into the model's weights.
    rounded = wide.to(dtype)
    expected = rounded.to(own.dtype)
    if is_bit_equal(expected, own):
        return None
    return RoundedOtherwise(
        side=SIDES[side],
        dtype=dtype_name(dtype),
        num_different=int((expected != own).sum()),
        num_elements=own.numel(),
        how=_find_rule(own.double(), wide.double(), rounded),
    )


def _find_rule(own: torch.Tensor, wide: torch.Tensor, rounded: torch.Tensor) -> RoundingRule:
    nearest = rounded.double()
    # The representable number on the value's other side; the nearest itself where it is exact.
    towards = torch.where(nearest < wide, torch.inf, -torch.inf).to(rounded.dtype)
    beyond = torch.where(nearest == wide, nearest, torch.nextafter(rounded, towards).double())
    if not bool(((own == nearest) | (own == beyond)).all()):
        return "other values"
    lower = torch.where(nearest.abs() < beyond.abs(), nearest, beyond)
    return "towards zero" if bool((own == lower).all()) else "to a neighbour"


def _find_dtypes(kind: TraceKind, precision: str) -> set[torch.dtype]:
    own: torch.dtype = getattr(torch, precision)
    wide = torch.promote_types(own, torch.float32)
    return {wide} if kind in _STATE else {own, wide}
