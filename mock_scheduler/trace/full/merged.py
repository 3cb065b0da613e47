"""What merging a tensor's pieces gives: the whole tensor, and the replicas that disagree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mock_scheduler.trace.coverage import canonical_mask
from mock_scheduler.trace.entries import DimName, RankPlace, TraceKey
from mock_scheduler.trace.full.files import view_as_bits
from mock_scheduler.trace.full.pieces import Piece
from mock_scheduler.trace.kinds import TraceKind

_PLURALS: Mapping[TraceKind, str] = {
    "initial": "initial parameters",
    "router": "router values",
    "logits": "logits",
    "loss": "loss terms",
    "activation_gradient": "activation gradients",
    "gradient_norm": "gradient norms",
    "optimizer": "optimizer states",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaConflict:
    """Two ranks that hold different bits for the same elements of one tensor.

    ``max_abs``: the largest absolute difference; 0 where only the sign of a zero differs, nan or inf where one is.
    """

    key: TraceKey
    first: RankPlace
    second: RankPlace
    num_elements: int
    max_abs: float

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes on which the two ranks stand apart."""
        mine, other = self.first.coordinates, self.second.coordinates
        return tuple(axis for axis in mine if mine[axis] != other.get(axis))

    def describe(self) -> str:
        """One line: the tensor, the axes with both coordinates, what differs and when."""
        axes = self.axes
        if axes:
            first = " ".join(f"{axis}{self.first.coordinates[axis]}" for axis in axes)
            second = " ".join(f"{axis}{self.second.coordinates.get(axis)}" for axis in axes)
        else:
            first, second = f"global {self.first.global_rank}", f"global {self.second.global_rank}"
        elements = "1 element" if self.num_elements == 1 else f"{self.num_elements} elements"
        update = f", update {self.key.update}" if self.key.update else ""
        kinds = _PLURALS.get(self.key.kind, f"{self.key.kind}s")
        return (
            f"{self.key.name}: ranks {first} and {second} hold different {kinds} at step {self.key.step}"
            f"{update} ({elements}, by up to {self.max_abs:.3g})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedTensor:
    """A whole tensor put together from all ranks; among conflicting replicas the lowest rank's value is taken.

    ``present``: bool, where there is a value, of the tensor's shape or ``[T, 1, ...]`` where whole tokens are absent;
    ``None`` where every element is there. ``missing``: tokens that the run should have and no rank holds, in words;
    empty where there are none. ``dims``: what each dimension counts; empty where nobody said.
    ``content``: where the pieces lie, with their SHA-256: two tensors of one content have equal bits, and are present
    at the same elements; ``None`` where pieces overlap.
    """

    tensor: torch.Tensor
    conflicts: tuple[ReplicaConflict, ...]
    present: torch.Tensor | None = None
    missing: str = ""
    dims: tuple[DimName, ...] = ()
    content: tuple[object, ...] | None = None


@dataclass(slots=True)
class ConflictTally:
    """Collects the conflicts of one tensor, one for each pair of ranks."""

    key: TraceKey
    _found: dict[tuple[int, int], ReplicaConflict] = field(default_factory=dict)

    def compare(self, first: Piece, second: Piece, values: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Two pieces at the same places, with their stored elements, among them padding that does not count."""
        mine, other = values
        differs = view_as_bits(mine) != view_as_bits(other)
        mask = canonical_mask(first.spec)
        if mask is not None:
            differs = differs & mask
        if bool(differs.any()):
            self.add(first.place, second.place, (mine[differs], other[differs]))

    def add(self, first: RankPlace, second: RankPlace, values: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Elements that differ: those of the first rank and those of the second, at least one."""
        mine, other = (_widest(side) for side in values)
        num_elements, max_abs = mine.numel(), float((mine - other).abs().max())
        pair = first.global_rank, second.global_rank
        earlier = self._found.get(pair)
        if earlier is not None:
            num_elements += earlier.num_elements
            max_abs = math.nan if math.isnan(earlier.max_abs) else max(max_abs, earlier.max_abs)
        self._found[pair] = ReplicaConflict(
            key=self.key, first=first, second=second, num_elements=num_elements, max_abs=max_abs
        )

    def all(self) -> tuple[ReplicaConflict, ...]:
        """By global ranks."""
        return tuple(self._found[pair] for pair in sorted(self._found))


def _widest(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)
