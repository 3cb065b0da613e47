"""Where in a tensor a difference is concentrated: a token, a head, a channel, an expert, a row, one rank's piece.

Contract: for each index of a dimension, ||a - b||² and ||a||² are summed in float64 over all other dimensions. An index
stands out where both the relative difference and the mean square of the difference are far above the median index's: 5
times as a norm, and more where few elements make up an index's difference, so that normally distributed rounding stands
out by chance once in a million tensors. Indices standing out must also differ by more than all others, since where
sizes vary widely some always have a large difference and a small value. Rounding alone (8 units in the last place of
the dtype) is not reported. Memory beyond the tensors is a few chunks. A tensor of more than 4 Mi elements is searched
dimension by dimension, with all indices of it and evenly spaced ones of the others; ``Locality.sample`` says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Literal

import torch

from mock_scheduler.comparison.residuals import Locality, Sample
from mock_scheduler.comparison.thresholds import (
    ABOVE_MEDIAN,
    ABOVE_OTHERS,
    EXPLAINED_ROUNDING_UNITS,
    FEW_ABOVE_MEDIAN,
    FEWEST_PLACE_ELEMENTS,
    MOST_LOCALITIES,
    MOST_RUNS,
    NARROWER,
    PLACE_DEVIATIONS,
    PLACE_SAMPLE_ELEMENTS,
    SCATTERED_PART,
    SCATTERED_SHARE,
    SMALLEST_SHARE,
    TILE_ELEMENTS,
)
from mock_scheduler.trace.entries import DimName


def find_localities(
    baseline: torch.Tensor,
    candidate: torch.Tensor,
    *,
    dims: tuple[DimName, ...],
    present: torch.Tensor | None = None,
    boundaries: Mapping[int, Sequence[int]] | None = None,
) -> tuple[Locality, ...]:
    """Finds the parts holding more of the difference than rounding explains, largest share first; none where it is
    spread.

    Args:
        baseline: Any shape.
        candidate: Of the same shape.
        dims: What each dimension counts.
        present: bool, broadcast to the shape: elements that count.
        boundaries: By dimension, the indices where pieces of ranks begin. A locality says whether it is made of such
            pieces, or begins or ends with one.

    Raises:
        ValueError: ``dims`` does not fit the shape.
    """
    if len(dims) != baseline.dim():
        raise ValueError(f"dims {list(dims)} do not name the dimensions of shape {list(baseline.shape)}")
    if baseline.numel() <= PLACE_SAMPLE_ELEMENTS:
        found = _search(_Sides(baseline, candidate, present), dims, boundaries or {}, sample=None)
    else:
        found = []
        for dim in range(baseline.dim()):
            sides = _thin(_Sides(baseline, candidate, present), dim)
            sample = Sample(num_seen=sides.baseline.numel(), num_elements=baseline.numel())
            found += _search(sides, dims, boundaries or {}, sample=sample, only=dim)
    return tuple(sorted(found, key=lambda item: -item.share)[:MOST_LOCALITIES])


@dataclass(frozen=True, slots=True)
class _Sides:
    """Holds baseline, candidate and the mask of elements that count."""

    baseline: torch.Tensor
    candidate: torch.Tensor
    present: torch.Tensor | None


def _thin(sides: _Sides, dim: int) -> _Sides:
    """Takes all indices of one dimension, and evenly spaced ones of the others, so few elements are left."""
    # The last dimensions are thinned most, as rows and tokens are what places are made of.
    room = max(PLACE_SAMPLE_ELEMENTS // max(sides.baseline.shape[dim], 1), 1)
    index = [slice(None)] * sides.baseline.dim()
    for other, size in enumerate(sides.baseline.shape):
        if other != dim:
            index[other] = slice(None, None, max(math.ceil(size / room), 1))
            room = max(room // max(len(range(size)[index[other]]), 1), 1)
    place = tuple(index)
    present = None if sides.present is None else sides.present.expand(sides.baseline.shape)[place]
    return _Sides(sides.baseline[place], sides.candidate[place], present)


def _search(
    sides: _Sides,
    dims: tuple[DimName, ...],
    boundaries: Mapping[int, Sequence[int]],
    *,
    sample: Sample | None,
    only: int | None = None,
) -> list[Locality]:
    """Finds localities along all dimensions, or along one; ``sample``: how much of the tensor ``sides`` are."""
    is_floating = sides.baseline.is_floating_point()
    # Integers have no rounding, so any difference of them may stand out.
    floor = torch.finfo(sides.baseline.dtype).eps * EXPLAINED_ROUNDING_UNITS if is_floating else 0.0
    found: list[Locality] = []
    sums = _sum_energies(sides.baseline, sides.candidate, sides.present)
    if not sums or sums[0].total == 0.0 or float(sums[0].counts.sum()) < FEWEST_PLACE_ELEMENTS:
        return found
    # If the energy is a product over dimensions, an index of one is worth the product over the others.
    equivalent = math.prod(energies.num_equivalent for energies in sums)
    for dim, energies in enumerate(sums):
        if energies.size > 1 and only in (None, dim):
            others = equivalent / energies.num_equivalent
            starts = boundaries.get(dim, ())
            search = _DimSearch(dims[dim], energies, floor=floor, others=others, boundaries=starts)
            found += [replace(item, sample=sample) for item in search.find()]
    return found


def parameter_dims(name: str, shape: Sequence[int]) -> tuple[DimName, ...]:
    """Returns what the dimensions of a parameter, its gradient or its optimizer's moment count.

    ``name``: canonical. A value head has one output, and no vocabulary.
    """
    rank = len(shape)
    first: DimName = "row"
    if "word_embeddings" in name or ("output_layer" in name and (rank == 0 or shape[0] > 1)):
        first = "vocab"
    elif ".router." in name:
        first = "expert"
    elif "norm" in name and rank == 1:
        first = "channel"
    rest: DimName = "column" if first == "row" and "embedding" not in name else "channel"
    return (first, *([rest] * (rank - 1)))[:rank]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Energies:
    """float64 ``[n]`` each: ||a - b||², ||a||² and the number of elements, by index of a dimension or by block."""

    difference: torch.Tensor
    baseline: torch.Tensor
    counts: torch.Tensor

    @property
    def size(self) -> int:
        return self.difference.numel()

    @property
    def total(self) -> float:
        return float(self.difference.sum())

    @property
    def num_equivalent(self) -> float:
        """How many equal indices the difference is worth: (Σe)² / Σe²."""
        # Kish (1965): the effective number of equal shares; n for a flat difference, 1 where one index holds all.
        return self.total**2 / float(self.difference.square().sum())

    def blocks(self, edges: Sequence[int]) -> _Energies:
        """Sums them between neighbouring edges."""
        lengths = [stop - start for start, stop in pairwise(edges)]
        difference, baseline, counts = (
            torch.stack([part.sum() for part in torch.split(values, lengths)])
            for values in (self.difference, self.baseline, self.counts)
        )
        return _Energies(difference=difference, baseline=baseline, counts=counts)

    def find_outliers(self, *, floor: float, others: float, among_different: bool = False) -> torch.Tensor:
        """Returns bool ``[n]``: where the difference stands out from the median index.

        Args:
            floor: Relative difference of rounding.
            others: Elements an index's difference is worth.
            among_different: Only unequal indices have a say in the median, so that a few scattered differences of one
                size do not stand out from all the equal ones.
        """
        # Indices without any element, as experts without tokens, would make the median 0.
        live = (self.counts > 0) & (self.difference > 0 if among_different else self.difference + self.baseline > 0)
        if not bool(live.any()):
            return live
        relative = self.difference / self.baseline
        mean = self.difference / self.counts
        # An index cannot be worth more elements than it has.
        others = min(float(self.counts[live].median()), others)
        chance = _chance_ratio(others)
        if others * int(live.sum()) < FEWEST_PLACE_ELEMENTS:  # then the median itself may be small by chance
            # Then the median itself may be small by chance, so its square is asked for.
            chance = max(chance**2, FEW_ABOVE_MEDIAN)
        threshold = max(ABOVE_MEDIAN, chance)
        found = live & (relative > floor**2)
        # Both: a relative difference is large where values are small, a mean square where they are large.
        for values in (relative, mean):
            found &= values > threshold * values[live].median()
        # The largest of the others rather than their median, as some sizes always are extreme.
        usual = mean[live & ~found].max() if bool((live & ~found).any()) else torch.zeros(())
        if not bool(found.any()):
            return found
        return found & (mean[found].mean() > max(ABOVE_OTHERS, chance) * usual)


def _chance_ratio(num_elements: float) -> float:
    """Returns how far the mean square of so many normally distributed numbers may be above its median by chance.

    The quantile of chi-squared over its median, by Wilson and Hilferty (1931).
    """
    # Wilson and Hilferty: the cube root of chi-squared / n is normal with variance 2 / (9n).
    spread = 2 / (9 * max(num_elements, 1.0))
    return ((1.0 - spread + PLACE_DEVIATIONS * math.sqrt(spread)) / (1.0 - spread)) ** 3


def _sum_energies(
    baseline: torch.Tensor, candidate: torch.Tensor, present: torch.Tensor | None
) -> tuple[_Energies, ...]:
    """Sums the energies of every dimension."""
    shape = tuple(baseline.shape)
    sums = [torch.zeros(3, size, dtype=torch.float64) for size in shape]
    mask = None if present is None else present.expand(shape)
    if mask is None:
        for total in sums:
            # Without a mask every index has the same number of elements, so nothing is counted.
            total[2] = baseline.numel() / max(total.shape[1], 1)
    for tile in _tiles(shape):
        left, right = baseline[tile].double(), candidate[tile].double()
        if mask is not None:
            left, right = left.where(mask[tile], 0.0), right.where(mask[tile], 0.0)
        parts = [(left - right).square_(), left.square()]
        if not all(bool(part.sum().isfinite()) for part in parts):
            # NaN and infinity are findings by themselves, and would drown every index of their row.
            parts = [part.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0) for part in parts]
        if mask is not None:
            parts.append(mask[tile].double())
        for row, part in enumerate(parts):
            _add_marginals(part, [total[row, indices] for total, indices in zip(sums, tile, strict=True)])
    return tuple(_Energies(difference=total[0], baseline=total[1], counts=total[2]) for total in sums)


def _add_marginals(values: torch.Tensor, totals: Sequence[torch.Tensor]) -> None:
    """Adds to each dimension's totals the sums over all other dimensions; the last dimension is summed away first."""
    for total in reversed(totals):
        total += values.reshape(-1, total.numel()).sum(0)
        # Each pass over what is left is shorter by a dimension, so that all marginals cost about one pass.
        values = values.sum(-1)


def _tiles(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yields parts of a tensor of at most a chunk of elements each, in order."""
    room, lengths = TILE_ELEMENTS, list(shape)
    for dim in reversed(range(len(shape))):
        lengths[dim] = max(min(shape[dim], room), 1)
        room //= lengths[dim]
    ranges = (range(0, size, length) for size, length in zip(shape, lengths, strict=True))
    for starts in product(*ranges):
        yield tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Holds indices ``first`` to ``last`` of a dimension, ``count`` of them, and their share of ||a - b||²."""

    first: int
    last: int
    count: int
    share: float


class _DimSearch:
    """Searches along one dimension."""

    def __init__(
        self, dim: DimName, energies: _Energies, *, floor: float, others: float, boundaries: Sequence[int]
    ) -> None:
        self._dim = dim
        self._energies = energies
        self._floor = floor
        self._others = others
        # A boundary at either end cuts nothing: a dimension that no rank splits has one piece, the whole.
        inner = {start for start in boundaries if 0 < start < energies.size}
        self._is_split = bool(inner)
        self._edges = (0, *sorted(inner), energies.size)

    def find(self) -> list[Locality]:
        """Finds pieces of ranks and runs of indices, or a set of indices far apart."""
        runs = self._runs(self._energies.find_outliers(floor=self._floor, others=self._others))
        pieces = [piece for piece in self._pieces() if not _has_narrower(piece, runs)]
        # A run inside a reported piece would say the same twice.
        runs = [run for run in runs if not any(piece.first <= run.first <= piece.last for piece in pieces)]
        if len(runs) > MOST_RUNS:
            # Too many runs: the differences may be scattered, each of one size, among indices that are all equal.
            runs = self._scattered()
        chosen = [run for run in (*pieces, *runs) if run.share >= SMALLEST_SHARE]
        return [self._locate(run) for run in sorted(chosen, key=lambda run: -run.share)[:MOST_RUNS]]

    def _run(self, first: int, last: int) -> _Run:
        share = float(self._energies.difference[first : last + 1].sum()) / self._energies.total
        return _Run(first=first, last=last, count=last - first + 1, share=share)

    def _runs(self, outliers: torch.Tensor) -> list[_Run]:
        """Finds unbroken runs of indices standing out."""
        places = outliers.nonzero().squeeze(1)
        breaks = (places.diff() > 1).nonzero().squeeze(1) + 1
        parts = torch.tensor_split(places, breaks.tolist()) if places.numel() else ()
        return [self._run(int(part[0]), int(part[-1])) for part in parts]

    def _pieces(self) -> list[_Run]:
        """Finds pieces of ranks standing out as a whole."""
        if not self._is_split:
            return []
        blocks = self._energies.blocks(self._edges)
        # A piece holds several indices, so that fewer pieces than indices share the difference.
        others = self._others * self._energies.num_equivalent / blocks.num_equivalent
        outliers = blocks.find_outliers(floor=self._floor, others=others).tolist()
        return [
            self._run(start, stop - 1)
            for (start, stop), stands_out in zip(pairwise(self._edges), outliers, strict=True)
            if stands_out
        ]

    def _scattered(self) -> list[_Run]:
        """Finds indices far apart: a few runs of them, or all as one set."""
        outliers = self._energies.find_outliers(floor=self._floor, others=self._others, among_different=True)
        runs = self._runs(outliers)
        if len(runs) <= MOST_RUNS:
            return runs
        share, count = sum(run.share for run in runs), int(outliers.sum())
        # Many indices, or few holding little, are noise rather than a place.
        if share < SCATTERED_SHARE or count > SCATTERED_PART * self._energies.size:
            return []
        return [_Run(first=runs[0].first, last=runs[-1].last, count=count, share=share)]

    def _locate(self, run: _Run) -> Locality:
        num_pieces, edge = self._meet_pieces(run)
        return Locality(
            dim=self._dim,
            first=run.first,
            last=run.last,
            share=run.share,
            num_indices=run.count,
            dim_size=self._energies.size,
            num_pieces=num_pieces,
            edge=edge,
        )

    def _meet_pieces(self, run: _Run) -> tuple[int, Literal["begins", "ends"] | None]:
        """Counts the ranks' pieces that a run consists of; where it is none, says which end it shares with one."""
        begins, ends = run.first in self._edges, run.last + 1 in self._edges
        # A scattered set ends where it ends by chance, so its ends say nothing of pieces.
        if not self._is_split or run.count <= run.last - run.first:
            return 0, None
        if begins and ends:
            return self._edges.index(run.last + 1) - self._edges.index(run.first), None
        if begins and run.first:
            return 0, "begins"
        return 0, "ends" if ends and run.last + 1 < self._energies.size else None


def _has_narrower(piece: _Run, runs: Sequence[_Run]) -> bool:
    """Whether one run of indices within a piece holds nearly all of its difference."""
    return any(
        piece.first <= run.first and run.last <= piece.last and run.share >= NARROWER * piece.share for run in runs
    )
