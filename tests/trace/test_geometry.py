"""Geometry: every form of a shard says the same elements, unions are counted, and covers are found."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mock_scheduler.errors import TraceError
from mock_scheduler.trace.geometry import (
    ElementSet,
    Rectangle,
    canonical_mask,
    count_cells,
    count_union,
    element_places,
    find_cover,
    holds_element,
    join,
    rectangles_of,
    unflatten,
)
from mock_scheduler.trace.shards import Block, ShardSpec, Split, blocks_of_indices, cut_shard

Box = tuple[int, int, int, int]
BOXES = st.lists(st.tuples(*[st.integers(0, 5)] * 2, *[st.integers(1, 3)] * 2), min_size=1, max_size=5)


def rectangle(box: Box) -> Rectangle:
    return Rectangle(origin=box[:2], sizes=box[2:])


def mask_of(boxes: list[Box]) -> torch.Tensor:
    mask = torch.zeros(8, 8, dtype=torch.bool)
    for row, column, height, width in boxes:
        mask[row : row + height, column : column + width] = True
    return mask


def rows_of(rows: list[int], *, width: int = 4) -> ElementSet:
    """These rows of a tensor, each on its own."""
    return tuple(Rectangle(origin=(row, 0), sizes=(1, width)) for row in rows)


@given(boxes=BOXES)
@settings(max_examples=60, deadline=None)
def test_a_union_counts_each_element_once(boxes: list[Box]) -> None:
    assert count_union([rectangle(box) for box in boxes]) == int(mask_of(boxes).sum())


@given(parts=st.permutations([[0, 2], [1], [3, 4], [0, 1, 2], [2, 3], [0], [1, 2]]))
@settings(max_examples=40, deadline=None)
def test_a_cover_holds_each_element_once(parts: list[list[int]]) -> None:
    chosen = find_cover([rows_of(part) for part in parts], 5 * 4)
    assert chosen is not None
    assert sorted(row for index in chosen for row in parts[index]) == [0, 1, 2, 3, 4]


def test_a_choice_that_leads_nowhere_is_taken_back() -> None:
    """Rows 0 and 1 together are listed first, but only row 0 alone goes on to the others."""
    sets = [rows_of([0, 1]), rows_of([1, 2]), rows_of([0])]
    assert find_cover(sets, 3 * 4) == (2, 1)
    assert find_cover(sets[:2], 3 * 4) is None


def test_a_cover_of_more_sets_than_python_calls_deep_is_found() -> None:
    """Each set took one recursive call, so that a trace of a thousand ranks ended in a RecursionError."""
    sets = [rows_of([row]) for row in range(1200)]
    assert find_cover([*sets, rows_of([0, 1])], 1200 * 4) == tuple(range(1200))


def test_a_cover_of_many_rectangles_takes_no_time() -> None:
    """Every rectangle was compared with every one of every other set, in Python: 9 s for each tensor."""
    sets = [join(rows_of(list(range(rank, 4096, 8)))) for rank in range(8)]
    # One that overlaps all others, so that overlaps are really looked for.
    doubled = join(Rectangle(origin=(row, 0), sizes=(1, 2)) for row in range(0, 4096, 2))
    started_s = time.process_time()
    assert find_cover([*sets, doubled], 4096 * 4) == tuple(range(8))
    assert time.process_time() - started_s < 2.0


def test_a_union_that_would_fill_the_memory_is_refused() -> None:
    """A forged header of a few hundred bytes asked for an array of 10^18 cells."""
    scattered = [Rectangle(origin=(2 * index,) * 6, sizes=(1,) * 6) for index in range(500)]
    with pytest.raises(TraceError, match=r"500 rectangles cut a tensor into 9.* cells; expected at most 268435456"):
        count_union(scattered)


# --- Shards of a matrix: each form says the same elements -------------------------------------------------------------


@st.composite
def shards_of_a_matrix(draw: st.DrawFn) -> ShardSpec:
    """Any choice of rows and columns of an 8x8 matrix, perhaps with a flat range of the local tensor."""
    rows = draw(st.lists(st.integers(0, 7), unique=True, min_size=1))
    columns = draw(st.lists(st.integers(0, 7), unique=True, min_size=1))
    splits = tuple(Split(dim=dim, blocks=blocks_of_indices(held)) for dim, held in enumerate((rows, columns)))
    numel = len(rows) * len(columns)
    ends = draw(st.none() | st.tuples(st.integers(0, numel), st.integers(0, numel)))
    return ShardSpec(
        name="w",
        global_shape=(8, 8),
        local_shape=(len(rows), len(columns)),
        splits=splits,
        flat_range=None if ends is None else (min(ends), max(ends)),
    )


@given(spec=shards_of_a_matrix())
@settings(max_examples=80, deadline=None)
def test_indices_rectangles_and_single_elements_agree(spec: ShardSpec) -> None:
    whole = torch.arange(64).view(8, 8)
    stored = cut_shard(whole, spec)
    if spec.flat_range is not None:
        stored = stored.reshape(-1)[slice(*spec.flat_range)]
    local, places = element_places(spec)
    assert stored.reshape(-1)[local].tolist() == places.tolist()
    by_rectangle = {
        int(value)
        for rectangle, values in rectangles_of(stored, spec)
        for value, expected in zip(values.reshape(-1), whole[_slices(rectangle)].reshape(-1), strict=True)
        if value == expected
    }
    assert by_rectangle == set(places.tolist())
    held = {index for index in range(64) if holds_element(spec, unflatten(index, (8, 8)))}
    assert held == set(places.tolist())


@st.composite
def shards_of_rows_or_columns(draw: st.DrawFn) -> list[ShardSpec]:
    """Each index of one dimension belongs to a shard; or as many to two shards as to none, or more or fewer."""
    dim = draw(st.integers(0, 1))
    holders = draw(st.lists(st.integers(0, 2), min_size=8, max_size=8))
    held = [{index for index, holder in enumerate(holders) if holder == shard} for shard in range(3)]
    for indices in held[: draw(st.integers(0, 2))]:
        indices ^= {draw(st.integers(0, 7))}
    return [
        ShardSpec(
            name="w",
            global_shape=(8, 8),
            local_shape=(len(indices), 8) if dim == 0 else (8, len(indices)),
            splits=(Split(dim=dim, blocks=blocks_of_indices(sorted(indices))),),
        )
        for indices in held
        if indices
    ]


def of_rows(*blocks: tuple[int, int]) -> list[ShardSpec]:
    splits = (Split(dim=0, blocks=(Block(local_start=0, global_start=start, length=size),)) for start, size in blocks)
    return [
        ShardSpec(name="w", global_shape=(8, 8), local_shape=(each.blocks[0].length, 8), splits=(each,))
        for each in splits
    ]


@given(specs=st.lists(shards_of_a_matrix(), min_size=1, max_size=4) | shards_of_rows_or_columns())
@example(specs=of_rows((0, 4), (4, 4)))
@example(specs=of_rows((0, 3), (2, 3), (6, 2)))
@settings(max_examples=80, deadline=None)
def test_cells_count_how_many_shards_hold_an_element(specs: list[ShardSpec]) -> None:
    """Flat ranges are passed over: each shard counts with its whole local tensor."""
    expected = torch.zeros(64, dtype=torch.int64)
    for spec in specs:
        expected[element_places(replace(spec, flat_range=None))[1]] += 1
    coverage = count_cells((8, 8), specs)
    assert torch.equal(coverage.present(), (expected > 0).view(8, 8))
    assert coverage.is_disjoint == bool((expected <= 1).all())
    assert coverage.is_full == bool((expected > 0).all())


def test_padding_belongs_to_no_element() -> None:
    """Rows 0 and 1 of 3 stored ones: the third row is a padded vocabulary's."""
    split = Split(dim=0, blocks=(Block(local_start=0, global_start=4, length=2),))
    spec = ShardSpec(name="w", global_shape=(6, 2), local_shape=(3, 2), splits=(split,))
    mask = canonical_mask(spec)
    assert mask is not None
    assert mask.tolist() == [[True, True], [True, True], [False, False]]
    assert canonical_mask(replace(spec, flat_range=(3, 6))).tolist() == [True, False, False]  # type: ignore[union-attr]


def _slices(rectangle: Rectangle) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(rectangle.origin, rectangle.sizes, strict=True))
