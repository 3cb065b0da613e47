"""Replicas: ranks holding the same elements of one tensor must hold the same bits; who does not, and by how much.

Contract: bits are compared, never values: -0.0 is not 0.0, and a NaN equals a NaN of the same bits alone. The lowest
rank is the first of a conflict, and its value counts. Readers of whole tensors and of sketches report conflicts alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.support.tensor_bytes import view_as_bits
from mock_scheduler.trace.entries import RankPlace, TraceKey
from mock_scheduler.trace.geometry import canonical_mask
from mock_scheduler.trace.shards import ShardSpec

_PLURALS: Mapping[TraceKind, str] = {
    "initial": "initial parameters",
    "recomputed": "recomputed values",
    "router": "router values",
    "logits": "logits",
    "loss": "loss terms",
    "activation_gradient": "activation gradients",
    "gradient_norm": "gradient norms",
    "optimizer": "optimizer states",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaConflict:
    """Holds two ranks holding different bits for the same elements of one tensor.

    max_abs: the largest absolute difference; 0 where only the sign of a zero differs, nan or inf where one value is.
    """

    key: TraceKey
    first: RankPlace
    second: RankPlace
    num_elements: int
    max_abs: float

    @property
    def axes(self) -> tuple[str, ...]:
        """Returns the axes that tell the two ranks apart."""
        return self.first.axes_apart(self.second)

    def describe(self) -> str:
        """Returns one line: the tensor, the axes with both coordinates, the elements that differ, and when."""
        ranks = _name_pair(self.first, self.second)
        elements = "1 element" if self.num_elements == 1 else f"{self.num_elements} elements"
        update = f", update {self.key.update}" if self.key.update else ""
        kinds = _PLURALS.get(self.key.kind, f"{self.key.kind}s")
        return (
            f"{self.key.name}: ranks {ranks} hold different {kinds} at step {self.key.step}"
            f"{update} ({elements}, by up to {self.max_abs:.3g})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SketchConflict:
    """Ranks whose sketches of the same elements of one tensor have different fingerprints.

    first, second: the lowest rank on either side. first_ranks, second_ranks: all ranks holding these elements
    together, one each where a single rank holds them. relative: about how far the two are apart.
    """

    key: TraceKey
    first: RankPlace
    second: RankPlace
    first_ranks: tuple[int, ...]
    second_ranks: tuple[int, ...]
    relative: float

    @property
    def axes(self) -> tuple[str, ...]:
        """Returns the axes that tell the two ranks apart."""
        return self.first.axes_apart(self.second)

    def describe(self) -> str:
        """Returns one line: the tensor, the axes with both coordinates, and by how much."""
        if len(self.first_ranks) > 1 or len(self.second_ranks) > 1:
            sides = (self.first_ranks, self.second_ranks)
            ranks = " and ".join(f"global {'+'.join(map(str, side))}" for side in sides)
        else:
            ranks = _name_pair(self.first, self.second)
        return (
            f"{self.key.name}: ranks {ranks} hold different bits of the {self.key.describe()} "
            f"(by about {self.relative:.3g} of its norm)"
        )


def _name_pair(first: RankPlace, second: RankPlace) -> str:
    """``tp0 and tp1``, by the axes that tell the two apart; by global rank where there are none."""
    axes = first.axes_apart(second)
    if not axes:
        return f"global {first.global_rank} and global {second.global_rank}"
    return " and ".join(" ".join(f"{axis}{place.coordinates.get(axis)}" for axis in axes) for place in (first, second))


@dataclass(slots=True)
class ConflictTally:
    """Collects the conflicts of one tensor, one for each pair of ranks."""

    key: TraceKey
    _found: dict[tuple[int, int], ReplicaConflict] = field(default_factory=dict)

    def compare(
        self, ranks: tuple[RankPlace, RankPlace], spec: ShardSpec, values: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Compares two ranks' stored pieces of one spec; padding belongs to no element and does not count."""
        mine, other = values
        # As integers: a comparison of floats would call -0.0 and 0.0 equal, and no NaN equal to itself.
        differs = view_as_bits(mine) != view_as_bits(other)
        mask = canonical_mask(spec)
        if mask is not None:
            differs = differs & mask
        if bool(differs.any()):
            self.add(ranks, (mine[differs], other[differs]))

    def add(self, ranks: tuple[RankPlace, RankPlace], values: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Adds elements that differ, at least one: the values of the first rank and of the second."""
        first, second = ranks
        mine, other = (_widest(side) for side in values)
        num_elements, max_abs = mine.numel(), float((mine - other).abs().max())
        pair = first.global_rank, second.global_rank
        earlier = self._found.get(pair)
        if earlier is not None:
            num_elements += earlier.num_elements
            # ``max`` of a NaN depends on the order of its arguments.
            max_abs = math.nan if math.isnan(earlier.max_abs) else max(max_abs, earlier.max_abs)
        self._found[pair] = ReplicaConflict(
            key=self.key, first=first, second=second, num_elements=num_elements, max_abs=max_abs
        )

    def all(self) -> tuple[ReplicaConflict, ...]:
        """Gives all conflicts, ascending by global ranks."""
        return tuple(self._found[pair] for pair in sorted(self._found))


def _widest(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)
