"""Reads a trace of level ``sketch``: gives the sketch of each whole tensor, whatever layout wrote it.

Ranks holding the same elements must have the same fingerprint and count once; ranks holding other elements add up.
Whether they hold all that there is, and nothing twice, is known from the headers alone. The format is in
``sketch.files``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.support.tensor_bytes import DTYPES
from mock_scheduler.trace.entries import STEP_KINDS, DimName, RankPlace, StepFooter, TraceKey
from mock_scheduler.trace.geometry import ElementSet, count_union, find_cover
from mock_scheduler.trace.replicas import SketchConflict
from mock_scheduler.trace.rows import is_virtual
from mock_scheduler.trace.sketch.opening import RankSketches, StoredSketch, open_sketch_steps
from mock_scheduler.trace.sketch.sketch import Sketch, add, difference


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MergedSketch:
    """Holds the sketch of a whole tensor from all ranks' parts; among conflicting replicas the lowest rank's counts.

    ``sketch.num_elements`` is less than the shape says for a token tensor with tokens left out of training, and
    in a trace of some ranks only. ``global_shape``: without the places between rows by content.
    ``missing``: as of ``MergedTensor``.
    """

    sketch: Sketch
    dtype: torch.dtype
    global_shape: tuple[int, ...]
    conflicts: tuple[SketchConflict, ...]
    dims: tuple[DimName, ...] = ()
    is_masked: bool = False
    missing: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Part:
    """Holds the same elements as several ranks hold them, by global rank."""

    elements: ElementSet
    holders: tuple[tuple[RankPlace, Sketch], ...]

    @property
    def place(self) -> RankPlace:
        """Returns the lowest rank."""
        return self.holders[0][0]

    @property
    def sketch(self) -> Sketch:
        """Returns the sketch of the lowest rank."""
        return self.holders[0][1]


def open_sketches(trace_dir: Path) -> SketchReader:
    """Read every file of a trace of sketches, and check that they are complete and fit together.

    Raises ``TraceError`` listing everything wrong with a step, and at once where there is no trace, or a
    file is unreadable or was changed.
    """
    return SketchReader(open_sketch_steps(trace_dir))


class SketchReader:
    """Reads an opened trace of sketches, all of it in memory: a few hundred bytes for each tensor, step and rank."""

    def __init__(self, steps: dict[int, tuple[RankSketches, ...]]) -> None:
        self._steps = steps
        self._held: dict[int, dict[TraceKey, list[tuple[RankPlace, StoredSketch]]]] = {}

    @property
    def steps(self) -> tuple[int, ...]:
        """Returns the traced steps, ascending."""
        return tuple(sorted(self._steps))

    def ranks(self, step: int) -> tuple[RankPlace, ...]:
        """Returns the ranks that wrote ``step``, by global rank."""
        return tuple(rank.place for rank in self._steps[step])

    def is_complete(self, step: int) -> bool:
        """Whether all ranks of the run wrote ``step``; otherwise sketches may be of parts of the tensors."""
        return len(self._steps[step]) == self._steps[step][0].world_size

    def is_by_content(self, step: int) -> bool:
        """Whether the places of rows follow from their identities."""
        return bool(self.footer(step).rows.starts)

    def keys(self, step: int) -> frozenset[TraceKey]:
        """Returns every tensor of any rank at ``step``."""
        return frozenset(self._by_key(step))

    def has(self, key: TraceKey) -> bool:
        """Whether any rank wrote this tensor."""
        return key.step in self._steps and key in self._by_key(key.step)

    def footer(self, step: int) -> StepFooter:
        """The first rank's statements about the whole step; rows and selection are the same on every rank."""
        return self._steps[step][0].footer

    def footers(self, step: int) -> tuple[tuple[RankPlace, StepFooter], ...]:
        """Each rank's statements, by global rank: ledgers are its own."""
        return tuple((rank.place, rank.footer) for rank in self._steps[step])

    def holders(self, key: TraceKey) -> tuple[RankPlace, ...]:
        """Returns the ranks holding elements of a tensor, by global rank."""
        return tuple(place for place, stored in self._stored(key) if stored.part)

    def sketch(self, key: TraceKey, *, may_lack_tokens: bool = False) -> MergedSketch:
        """Returns the sketch of the whole tensor, and disagreeing replicas.

        Raises ``TraceError`` where no rank holds the tensor, ranks disagree on its form, or their parts overlap
        without being the same; and where all ranks of the run wrote, also where elements are held by none. Of a token
        tensor without a mask, only the elements of the update's rows count. ``may_lack_tokens``: of a run that is
        judged, tokens held by no rank are a finding, told by ``missing``, and no error.
        """
        stored = self._stored(key)
        _check_agreement(key, stored)
        first = stored[0][1]
        parts = _parts(stored)
        num_elements = count_union([rectangle for part in parts for rectangle in part.elements])
        missing = self._describe_missing(key, first, stored, num_elements)
        if missing and not (may_lack_tokens and first.dims[:1] == ("token",) and num_elements):
            raise TraceError(f"{key.describe()}: {missing}")
        whole, conflicts = _merge(key, parts, num_elements) if parts else (first.sketch, [])
        return MergedSketch(
            sketch=whole,
            dtype=DTYPES[first.dtype],
            global_shape=self._dense_shape(key, first),
            conflicts=tuple(conflicts),
            dims=first.dims,
            is_masked=first.is_masked,
            missing=missing,
        )

    def _stored(self, key: TraceKey) -> list[tuple[RankPlace, StoredSketch]]:
        if not self.has(key):
            raise TraceError(f"no rank wrote the {key.describe()}")
        return self._by_key(key.step)[key]

    def _by_key(self, step: int) -> Mapping[TraceKey, list[tuple[RankPlace, StoredSketch]]]:
        """Returns the sketches of a step by tensor, ascending by rank: each rank is looked through once."""
        if step not in self._held:
            held = self._held[step] = {}
            for rank in self._steps[step]:
                for key, stored in rank.tensors.items():
                    held.setdefault(key, []).append((rank.place, stored))
        return self._held[step]

    def _dense_shape(self, key: TraceKey, stored: StoredSketch) -> tuple[int, ...]:
        """Returns the shape of the whole tensor without places between rows by content."""
        if is_virtual(stored.dims, stored.global_shape):
            return self.footer(key.step).rows.num_tokens, *stored.global_shape[1:]
        return stored.global_shape

    def _describe_missing(
        self, key: TraceKey, first: StoredSketch, stored: Sequence[tuple[RankPlace, StoredSketch]], num_elements: int
    ) -> str:
        """Elements held by no rank, in words; empty where all are held, or some may be lacking."""
        expected = _count_expected(key, first, self._dense_shape(key, first), self.footer(key.step))
        is_exact = self.is_complete(key.step) and not first.is_masked
        ranks = ", ".join(str(place.global_rank) for place, _ in stored)
        text = f"{num_elements} elements are held, where there are {expected}; parts come from global rank {ranks}"
        if num_elements > expected:
            raise TraceError(f"{key.describe()}: {text}")
        return text if is_exact and num_elements < expected else ""


def _count_expected(key: TraceKey, stored: StoredSketch, shape: tuple[int, ...], footer: StepFooter) -> int:
    """Elements of the whole tensor of this shape; of a token tensor the elements of its step's or update's rows."""
    if stored.dims[:1] != ("token",) or key.kind in STEP_KINDS or not footer.update_rows:
        return math.prod(shape)
    rows = footer.update_rows[key.update] if key.update < len(footer.update_rows) else ()
    return sum(footer.rows.lengths[row] for row in rows) * math.prod(shape[1:])


def _parts(stored: Sequence[tuple[RankPlace, StoredSketch]]) -> list[_Part]:
    """Groups ranks by the elements they hold; ranks without an element are in no group."""
    by_elements: dict[ElementSet, list[tuple[RankPlace, Sketch]]] = {}
    for place, item in stored:
        if item.part:
            by_elements.setdefault(item.part, []).append((place, item.sketch))
    return [_Part(elements=elements, holders=tuple(holders)) for elements, holders in by_elements.items()]


def _merge(key: TraceKey, parts: list[_Part], num_elements: int) -> tuple[Sketch, list[SketchConflict]]:
    """Adds up one set of parts holding everything once; every other such set must give the same sum."""
    conflicts = [conflict for part in parts for conflict in _replica_conflicts(key, part)]
    # Replicas count once: one cover is summed, and every further one is compared with it.
    chosen = _take_cover(key, parts, parts, num_elements)
    whole = reduce(add, (part.sketch for part in chosen))
    left = _without(parts, chosen)
    while left:
        others = _take_cover(key, left, parts, num_elements)
        again = reduce(add, (part.sketch for part in others))
        if not whole.is_identical(again):
            conflicts.append(_conflict(key, (chosen, whole), (others, again)))
        left = _without(left, others)
    return whole, conflicts


def _without(parts: Sequence[_Part], taken: Sequence[_Part]) -> list[_Part]:
    gone = set(map(id, taken))
    return [part for part in parts if id(part) not in gone]


def _take_cover(key: TraceKey, left: list[_Part], parts: list[_Part], num_elements: int) -> list[_Part]:
    cover = find_cover([part.elements for part in left], num_elements)
    if cover is None:
        ranks = ", ".join(str(place.global_rank) for part in parts for place, _ in part.holders)
        raise TraceError(
            f"{key.describe()}: what global ranks {ranks} hold overlaps without being the same, so sketches cannot be "
            "put together; trace this tensor with trace.level=full"
        )
    return [left[index] for index in cover]


def _replica_conflicts(key: TraceKey, part: _Part) -> list[SketchConflict]:
    first = ([part], part.sketch)
    return [
        _conflict(key, first, ([_Part(elements=part.elements, holders=(holder,))], holder[1]))
        for holder in part.holders[1:]
        if not part.sketch.is_identical(holder[1])
    ]


def _conflict(
    key: TraceKey, first: tuple[Sequence[_Part], Sketch], second: tuple[Sequence[_Part], Sketch]
) -> SketchConflict:
    sides = [
        sorted((part.place for part in parts), key=lambda place: place.global_rank) for parts, _ in (first, second)
    ]
    return SketchConflict(
        key=key,
        first=sides[0][0],
        second=sides[1][0],
        first_ranks=tuple(place.global_rank for place in sides[0]),
        second_ranks=tuple(place.global_rank for place in sides[1]),
        relative=difference(first[1], second[1]).relative,
    )


def _check_agreement(key: TraceKey, stored: Sequence[tuple[RankPlace, StoredSketch]]) -> None:
    """All ranks holding the tensor say the same whole shape and dtype."""
    # Reversed, so that the lowest rank of each form is the one that is named.
    forms = {(item.dtype, item.global_shape): place.global_rank for place, item in reversed(stored)}
    if len(forms) > 1:
        found = ", ".join(f"global rank {rank}: {dtype} {list(shape)}" for (dtype, shape), rank in forms.items())
        raise TraceError(f"{key.describe()}: ranks disagree on dtype or whole shape ({found})")
