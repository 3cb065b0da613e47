"""Scale errors in a backward pass behind a forward pass equal to the last bit.

Perturbed weights reach gradients through their forward pass. Where a candidate's is equal, their noise is no measure of
its gradients: these differ by the roundings of the backward pass alone, without a common sign, and an error of scale
hidden by the noise of perturbed runs (0.3 % in bfloat16) stands out. *All gradients of an update*: with m the median of
s - 1 and z = m / (1.4826 · MAD / √n), as in ``slopes``, an error of scale is where |z| > 5. *One tensor*: where 90 % of
||a - b||² is (s - 1) · a, which rounding in 16 or more elements is not by chance. Both are at least 4 roundings of
accumulation, since one number all gradients are multiplied by may be rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mock_scheduler.comparison.bounds.measured import NoiseBounds
from mock_scheduler.comparison.explain.ratios import name_factor
from mock_scheduler.comparison.noise.slopes import robust_z, slope_of, suspect_scale
from mock_scheduler.comparison.noise.suspicions import ScaledGradients, Suspicion
from mock_scheduler.comparison.tensors import SLOPE_KINDS, TensorDifference
from mock_scheduler.comparison.thresholds import ENOUGH, FEWEST_ELEMENTS, FEWEST_SLOPES, LARGEST_Z
from mock_scheduler.trace.entries import PHASES, Phase


def judge_behind_equal_forward(
    differences: Sequence[TensorDifference], noise: NoiseBounds, *, numbers: Mapping[str, float]
) -> list[Suspicion]:
    """Finds tensors of another scale there, in the order of computation.

    ``numbers``: of the layouts, by which a ratio may be named.
    """
    found: list[Suspicion] = []
    for items in _find_behind(differences):
        together = _judge_together(items, noise, numbers)
        # Gradients told of together need not be told of one by one.
        alone = [item for item in items if _is_scaled(item, noise) and not (together and item.key.kind == "gradient")]
        found += [together] if together else []
        found += suspect_scale(alone, numbers, limit=noise.smallest, is_behind_equal_forward=True)
    return found


def _find_behind(differences: Sequence[TensorDifference]) -> list[list[TensorDifference]]:
    """Finds tensors with a slope behind each forward pass with some compared tensors, all of them equal."""
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
    if len(gradients) < FEWEST_SLOPES:
        return None
    middle, spread, z = robust_z([slope_of(item) - 1.0 for item in gradients])
    # Behind equal forward passes all slopes may be equal, with a spread of 0.
    limit = max(LARGEST_Z * spread, noise.smallest)
    if abs(middle) <= limit:
        return None
    key, ratio = gradients[0].key, 1.0 + middle
    return Suspicion(
        test="slope",
        step=key.step,
        update=key.update,
        name="",
        value=abs(middle),
        limit=limit,
        fact=ScaledGradients(
            ratio=ratio, factor=name_factor(ratio, numbers), num_tensors=len(gradients), z=z, noise_z=None
        ),
    )


def _is_scaled(item: TensorDifference, noise: NoiseBounds) -> bool:
    off = abs(slope_of(item) - 1.0)
    # (s - 1)² ||a||² is the part of ||a - b||² a change of size accounts for.
    is_enough = off * off >= ENOUGH * item.relative * item.relative
    return not item.exceeds and off > noise.smallest and is_enough and item.num_elements >= FEWEST_ELEMENTS
