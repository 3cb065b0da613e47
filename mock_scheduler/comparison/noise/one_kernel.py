"""What one kernel's rounding can do to a tensor whose inputs are equal to the last bit.

Perturbed weights reach a tensor through everything before it, so their noise is no measure of a tensor whose inputs are
equal: an error that hides in the noise of bfloat16 stands out there. One kernel rounds its result, and perhaps a few
values on the way, to its own precision. So with the unit roundoff u of that precision

- *size*: ``||a - b|| / ||a||`` is at most a few u;
- *element*: no element is further away than a few u of its own size, or of a large element's, whichever is larger;
- *scale*: ``<a, b> / <a, a>`` is 1 but for the mean of independent roundings; and less far from 1 where nearly all
  rows, and all columns, are moved to the same side, as by a factor near 1 and never by rounding;
- *rows*: a kernel of less than float32 rounds all tokens; where it moves many elements of some tokens, it leaves no
  others, and no piece of another rank, as they are (*piece*);
- *choice*: experts chosen by equal scores and biases are the same;
- *copy*: a look-up of embeddings copies rows, and rounds nothing; what was recorded is given to training as it is;
- *update*: parameters and moments are made in float32 of equal gradients, so their change is equal but for rounding.

The norm of the gradients is added in float32 too. Whatever the forward pass makes in float32 inside of a model of
bfloat16 (a router, log-probabilities, the loss) is held to float32, as the mantissas of the baseline show it.

Contract: pure. A tensor without figures (level ``sketch``) is judged by its size alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from mock_scheduler.comparison.explain.narrowing import stored_bits
from mock_scheduler.comparison.tensors import TensorDifference
from mock_scheduler.comparison.thresholds import (
    FACTOR_ROUNDING,
    FEWEST_ELEMENTS,
    KERNEL_ACCUMULATION,
    KERNEL_DENSITY,
    KERNEL_DIRECTION,
    KERNEL_EQUAL_ROWS,
    KERNEL_EVIDENCE,
    KERNEL_LARGE_ELEMENT,
    KERNEL_ROUNDINGS,
    KERNEL_ROWS,
    KERNEL_SHARED,
    KERNEL_UPDATE,
    LARGEST_Z,
)
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.trace.entries import PHASES, Phase
from mock_scheduler.trace.names import EMBEDDING, is_choice

#: Whose own bits are those of the kernel that made them; gradients are sums of narrower numbers.
_FORWARD_KINDS: frozenset[TraceKind] = frozenset({"advantage", "activation", "router", "logits", "output", "loss"})
_BY_TOKEN: frozenset[TraceKind] = frozenset({"activation", "logits", "activation_gradient"})

#: Bits of mantissa: of bfloat16, and of float16, which TF32 has too.
_TYPES_OF_FACTORS = tuple(stored_bits(dtype) for dtype in (torch.bfloat16, torch.float16))

KernelTest = Literal["size", "element", "scale", "rows", "piece", "choice", "copy", "update"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelExcess:
    """More than one kernel's rounding: the ``value`` of a test, and the most that rounding makes of it.

    ``input_bits``: the bits of mantissa that the factors of a product would be rounded to for a difference of this
    size and spread, where that is a type's number of bits.
    """

    test: KernelTest
    value: float
    limit: float
    input_bits: int | None = None

    @property
    def relative_limit(self) -> float:
        """The most that ``||a - b|| / ||a||`` may be: the limit of its own test, or 0 where another one failed."""
        return self.limit if self.test in ("size", "update") else 0.0


def find_kernel_excess(item: TensorDifference, *, unit: float) -> KernelExcess | None:
    """Judges a tensor whose inputs are equal to the last bit; ``None`` where its difference is rounding.

    ``unit``: u of the precision that the run computes in.
    """
    if item.bit_equal:
        return None
    if is_choice(item.key):
        return KernelExcess(test="choice", value=item.relative, limit=0.0)
    if item.key.kind == "input" or (item.key.kind == "activation" and item.key.name == EMBEDDING):
        # Not by bits: tensor-parallel ranks add zeros, which makes 0 of -0.
        return _beyond("copy", item.relative, 0.0)
    if PHASES[item.key.kind] is Phase.UPDATE:
        return _beyond("update", item.relative if item.low is None else item.low, KERNEL_UPDATE)
    # The norm of all gradients is added in float32, whatever the model computes in.
    is_norm = PHASES[item.key.kind] is Phase.NORM
    unit = _own_unit(item, unit)
    least = KERNEL_ACCUMULATION if is_norm else max(KERNEL_ROUNDINGS * unit, KERNEL_ACCUMULATION)
    size = _beyond("size", item.relative if item.low is None else item.low, least)
    if size is not None:
        return replace(size, input_bits=_find_input_bits(item, unit))
    return _judge_elements(item, least) or _judge_scale(item, unit) or _judge_spread(item, unit)


def _find_input_bits(item: TensorDifference, unit: float) -> int | None:
    """Finds the type whose numbers as factors would move every element, and none to one side, by as much."""
    spread = item.spread
    if spread is None or spread.num_equal_rows or spread.direction_z > KERNEL_DIRECTION or not item.relative:
        return None
    if spread.density <= 1.0 - KERNEL_DENSITY:
        return None
    bits = round(math.log2(FACTOR_ROUNDING / item.relative))
    # Not of the run's own type: that is what its kernels round to.
    return bits if bits in _TYPES_OF_FACTORS and 2.0 ** -(bits + 1) > unit else None


def _own_unit(item: TensorDifference, unit: float) -> float:
    """Returns the unit of what the forward pass makes by the bits of its numbers; else the run's."""
    if item.key.kind not in _FORWARD_KINDS or item.spread is None:
        return unit
    return min(unit, 2.0 ** -(item.spread.num_bits + 1))


def _judge_elements(item: TensorDifference, least: float) -> KernelExcess | None:
    figures = item.figures
    if figures is None or figures.worst is None:
        return None
    typical = item.size / math.sqrt(max(item.num_elements, 1))
    # Sums cancel: a small element has the rounding of the large values that it is the sum of.
    scale = max(abs(figures.worst.baseline), KERNEL_LARGE_ELEMENT * typical)
    # One element is the worst of all, where the size is a mean.
    return _beyond("element", figures.max_abs / scale if scale else math.inf, 2.0 * least)


def _judge_scale(item: TensorDifference, unit: float) -> KernelExcess | None:
    figures = item.figures
    if figures is None or figures.num_elements < FEWEST_ELEMENTS or not math.isfinite(figures.slope):
        return None
    # The elements of a row share roundings, so that about the root of all elements round by themselves.
    limit = max(LARGEST_Z * unit / math.sqrt(math.sqrt(figures.num_elements)), KERNEL_ACCUMULATION)
    if item.spread is not None and item.spread.direction_z > KERNEL_DIRECTION:
        limit = KERNEL_ACCUMULATION
    return _beyond("scale", abs(figures.slope - 1.0), limit)


def _judge_spread(item: TensorDifference, unit: float) -> KernelExcess | None:
    """Judges whether some tokens, or the pieces of some ranks, were computed otherwise and others were not."""
    spread = item.spread
    # In float32 another order of a few sums, as of the last tile, moves many elements of its rows by a unit.
    is_by_token = item.key.kind in _BY_TOKEN
    if spread is None or not is_by_token or unit < KERNEL_ACCUMULATION or spread.density < KERNEL_DENSITY:
        return None
    num_other = spread.num_rows - spread.num_equal_rows
    if spread.num_equal_parts and num_other >= KERNEL_ROWS:
        return KernelExcess(test="piece", value=spread.num_equal_parts / spread.num_parts, limit=0.0)
    share = spread.num_equal_rows / spread.num_rows
    # Elements of a row share roundings: so many fewer of them round on their own.
    by_chance = (1.0 - spread.density) ** (spread.row_size / KERNEL_SHARED)
    if share < KERNEL_EQUAL_ROWS or by_chance >= share:
        return None
    # The chance of so many equal rows is below exp(-rows * divergence): Chernoff's bound of a binomial's tail.
    divergence = share * math.log(share / max(by_chance, math.ulp(0.0)))
    if share < 1.0:
        divergence += (1.0 - share) * math.log((1.0 - share) / (1.0 - by_chance))
    if spread.num_rows * divergence <= KERNEL_EVIDENCE:
        return None
    return KernelExcess(test="rows", value=share, limit=by_chance)


def _beyond(test: KernelTest, value: float, limit: float) -> KernelExcess | None:
    # Written as "not within", so that NaN, of which every comparison is false, is beyond.
    return None if value <= limit else KernelExcess(test=test, value=value, limit=limit)
