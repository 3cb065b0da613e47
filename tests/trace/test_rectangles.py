"""Sets of elements as rectangles: unions are counted, and covers are found, whatever their number."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.errors import TraceError
from mock_scheduler.trace.rectangles import ElementSet, Rectangle, count_union, find_cover, join

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
