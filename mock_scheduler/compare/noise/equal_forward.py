"""Scale errors in a backward pass whose forward pass is equal to the last bit.

What perturbed weights do to gradients goes through their forward pass. Where a candidate's is equal, their noise is no
measure of its gradients: these differ by the roundings of the backward pass alone, which have no common sign, and an
error of scale that hides in the noise of perturbed runs (0.3 % in bfloat16) stands out. *All gradients of an update*:
with m the median of s - 1 and z = m / (1.4826 · MAD / √n), as in ``slopes``, an error of scale is where |z| > 5. *One
tensor*: where 90 % of ||a - b||² is (s - 1) · a, which rounding in 16 or more elements is not by chance. Both are at
least 4 roundings of what accumulates, since one number that all are multiplied by may be rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mock_scheduler.compare.bounds.measured import NoiseBounds
from mock_scheduler.compare.noise.slopes import LARGEST_Z, describe_ratio, robust_z, slope_of, suspect_scale
from mock_scheduler.compare.noise.suspicions import Suspicion
from mock_scheduler.compare.tensors import SLOPE_KINDS, TensorDifference
from mock_scheduler.support.text import count_of
from mock_scheduler.trace.entries import PHASES, Phase

_FEWEST_TENSORS = 8
_FEWEST_ELEMENTS = 16
#: Of ||a - b||² that a change of size must account for.
_ENOUGH = 0.9
_WHY = "the forward pass before it is equal to the last bit, so that only roundings of the backward pass may differ"


def judge_behind_equal_forward(
    differences: Sequence[TensorDifference], noise: NoiseBounds, *, numbers: Mapping[str, float]
) -> list[Suspicion]:
    """What has another scale there, in the order of computation. numbers: of the layouts, by which it may be named."""
    found: list[Suspicion] = []
    for items in _find_behind(differences):
        together = _judge_together(items, noise, numbers)
        alone = [item for item in items if _is_scaled(item, noise) and not (together and item.key.kind == "gradient")]
        found += [together] if together else []
        found += _describe_alone(alone, noise, numbers)
    return found


def _find_behind(differences: Sequence[TensorDifference]) -> list[list[TensorDifference]]:
    """What has a slope behind each forward pass of which something was compared, all of it being equal."""
    is_equal: dict[tuple[int, int], bool] = {}
    behind: dict[tuple[int, int], list[TensorDifference]] = {}
    for item in differences:
        key = item.key
        place = (key.step, key.update)
        if PHASES[key.kind] is Phase.FORWARD:
            is_equal[place] = is_equal.get(place, True) and item.bit_equal
        elif key.kind in SLOPE_KINDS and item.slope is not None and math.isfinite(item.slope):
            behind.setdefault(place, []).append(item)
    return [behind[place] for place, equal in is_equal.items() if equal and place in behind]


def _judge_together(
    items: Sequence[TensorDifference], noise: NoiseBounds, numbers: Mapping[str, float]
) -> Suspicion | None:
    gradients = [item for item in items if item.key.kind == "gradient" and item.size and not item.exceeds]
    if len(gradients) < _FEWEST_TENSORS:
        return None
    middle, spread, z = robust_z([slope_of(item) - 1.0 for item in gradients])
    limit = max(LARGEST_Z * spread, noise.smallest)
    if abs(middle) <= limit:
        return None
    key, ratio = gradients[0].key, describe_ratio(1.0 + middle, numbers)
    return Suspicion(
        test="slope",
        step=key.step,
        update=key.update,
        name="",
        value=abs(middle),
        limit=limit,
        text=(
            f"step {key.step}, update {key.update}: the candidate's gradients together are {ratio} (median of "
            f"{count_of(len(gradients), 'slope')}; z {z:.1f}); {_WHY}"
        ),
    )


def _is_scaled(item: TensorDifference, noise: NoiseBounds) -> bool:
    off = abs(slope_of(item) - 1.0)
    is_enough = off * off >= _ENOUGH * item.relative * item.relative
    return not item.exceeds and off > noise.smallest and is_enough and item.num_elements >= _FEWEST_ELEMENTS


def _describe_alone(
    items: Sequence[TensorDifference], noise: NoiseBounds, numbers: Mapping[str, float]
) -> list[Suspicion]:
    """The first one, with how many others there are."""
    if not items:
        return []
    first = items[0]
    others = f"; so {'are' if len(items) > 2 else 'is'} {count_of(len(items) - 1, 'other')}" if len(items) > 1 else ""
    ratio = describe_ratio(slope_of(first), numbers)
    text = f"{first.key.describe()} is {ratio} and differs by nothing else{others}; {_WHY}"
    return [suspect_scale(first, limit=noise.smallest, text=text)]
