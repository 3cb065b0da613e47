"""From differing tensors and grafts to the facts of a localisation.

Contract: pure; every number and name comes from the comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from mock_scheduler.align.localise.decisions import GraftWalk
from mock_scheduler.compare.tensors import TensorComparison
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.verdict.localisation import DifferingTensor, GraftedModule, Localisation, PassName, pass_of

#: The passes in the order of a step.
_ORDER: tuple[PassName, ...] = get_args(PassName)
#: A step's main gradients are made in its backward pass, and its loss ends its forward pass.
_PHASES: dict[PassName, str] = {"gradient": "backward", "loss": "forward"}


def build_localisation(
    origin: DifferingTensor,
    differing: Sequence[DifferingTensor],
    comparison: TensorComparison,
    *,
    walk: GraftWalk | None,
    reductions: Sequence[DifferingTensor],
    is_exact: bool,
    trace_dirs: tuple[Path, Path],
    seconds: float,
) -> Localisation:
    """The facts of one localisation.

    Args:
        origin: The first differing tensor, explained.
        differing: The differing tensors of the origin's step without a graft, in order.
        comparison: Of the same step.
        walk: Through the origin's pass; ``None`` where nothing can be put in.
        reductions: Main gradients with a difference of their own, behind the grafts.
        is_exact: Whether equal means equal bits; else within the bounds.
        trace_dirs: Reference and candidate.
        seconds: All runs and comparisons.
    """
    key, name = origin.key, pass_of(origin.key)
    also = [item for item in differing if pass_of(item.key) == name]
    if name == "gradient":
        also = [item for item in also if item.key.update == key.update]
    bad = {item.key for item in differing}
    upto = [item.key for item in comparison.differences if _is_upto(item.key, key)]
    return Localisation(
        step=key.step,
        update=key.update,
        phase=_PHASES.get(name, name),
        name=key.name,
        origin=origin,
        is_exact=is_exact,
        made_by=_find_maker(key, comparison),
        causes=() if walk is None else _list_causes(walk),
        amplifiers=() if walk is None else _list_amplifiers(walk),
        num_before=_count_before(comparison, key),
        num_others=0 if walk is None else len(walk.before) - len(walk.causes),
        remaining=() if walk is None else tuple(item.key.name for item in walk.remaining),
        end=None if walk is None else walk.end,
        reductions=tuple(reductions),
        also=tuple(also[1:]),
        num_equal=sum(other not in bad for other in upto),
        num_later=sum(not _is_upto(item.key, key) for item in differing),
        trace_dirs=trace_dirs,
        seconds=seconds,
    )


def _list_causes(walk: GraftWalk) -> tuple[GraftedModule, ...]:
    return tuple(
        GraftedModule(
            name=item.key.name,
            kind=walk.kind,
            is_cause=True,
            relative=item.relative,
            tensor=item,
            num_healed=len(healed),
        )
        for item, healed in zip(walk.causes, walk.healed, strict=True)
    )


def _list_amplifiers(walk: GraftWalk) -> tuple[GraftedModule, ...]:
    """Each module mended by a graft before it, in order, compared with the cause."""
    return tuple(
        GraftedModule(
            name=item.key.name,
            kind=walk.kind,
            is_cause=False,
            relative=item.relative,
            cause=cause.key.name,
            growth=item.relative / cause.relative if item.relative is not None and cause.relative else None,
        )
        for cause, healed in zip(walk.causes, walk.healed, strict=True)
        for item in healed
    )


def _find_maker(key: TraceKey, comparison: TensorComparison) -> str:
    """The module whose backward pass comes before a gradient at an output; empty of anything else."""
    if pass_of(key) != "backward":
        return ""
    keys = [item.key for item in comparison.differences if pass_of(item.key) == "backward"]
    same = [other for other in keys if (other.step, other.update) == (key.step, key.update)]
    place = same.index(key) if key in same else 0
    return same[place - 1].name if place else "loss"


def _is_upto(key: TraceKey, origin: TraceKey) -> bool:
    """Whether a tensor is of the origin's pass or one before it, of the origin's step and update."""
    place = (key.update, _ORDER.index(pass_of(key)))
    return key.step == origin.step and place <= (origin.update, _ORDER.index(pass_of(origin)))


def _count_before(comparison: TensorComparison, key: TraceKey) -> int:
    """The compared tensors of the step before this one."""
    keys = [item.key for item in comparison.differences if item.key.step == key.step]
    return keys.index(key) if key in keys else 0
