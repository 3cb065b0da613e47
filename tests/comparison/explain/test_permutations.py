"""Orders in words: how many, by which blocks, and whose parts; worked out by hand."""

from __future__ import annotations

import pytest
import torch

from mock_scheduler.comparison.explain.permutations import (
    Holders,
    block_size,
    find_blocks,
    find_holders_fault,
    find_row_order,
)
from mock_scheduler.comparison.residuals import Reorder
from mock_scheduler.trace.entries import DimName
from mock_scheduler.verdict.wording.residuals import describe_reorder

STRAIGHT = torch.arange(24)


def describe_order(order: torch.Tensor, dim: DimName, holders: Holders | None) -> str:
    return describe_reorder(Reorder(dim=dim, order=find_blocks(order), holders=find_holders_fault(order, holders)))


def held(*indices: list[int], axis: str = "tp", num_parts: int = 2) -> Holders:
    return Holders(
        axis=axis,
        names=tuple(f"{axis}{place}" for place in range(len(indices))),
        indices=tuple(torch.tensor(item) for item in indices),
        part_names=("gate", "up") if num_parts == 2 else (),
        num_parts=num_parts,
    )


def runs(*ranges: range) -> list[int]:
    return [index for each in ranges for index in each]


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (STRAIGHT.flip(0), "candidate has the rows of the baseline reversed"),
        (STRAIGHT.roll(12), "candidate has rows 0 to 11 and 12 to 23 of the baseline exchanged"),
        (STRAIGHT.roll(-8), "candidate has the rows of the baseline rotated: it begins with 8 of 24"),
        (STRAIGHT.roll(8), "candidate has the rows of the baseline rotated: it begins with 16 of 24"),
        (
            STRAIGHT.view(2, 4, 3).transpose(0, 1).reshape(-1),
            "candidate has blocks of 3 rows of the baseline interleaved, one of each of its 2 parts in turn",
        ),
        (
            STRAIGHT.view(4, 2, 3).transpose(0, 1).reshape(-1),
            "candidate has blocks of 3 rows of the baseline interleaved, one of each of its 4 parts in turn",
        ),
        (
            STRAIGHT.view(6, 4)[[0, 3, 5, 1, 4, 2]].reshape(-1),
            "candidate has 16 of 24 rows of the baseline in another order, in blocks of 4",
        ),
        (
            torch.tensor([2, 0, 1, 4, 3, *range(5, 24)]),
            "candidate has 5 of 24 rows of the baseline in another order",
        ),
    ],
)
def test_an_order_is_described_by_its_blocks(order: torch.Tensor, text: str) -> None:
    assert describe_order(order, "row", None) == text


@pytest.mark.parametrize(
    ("order", "size"),
    [([0, 1, 2, 3], 4), ([2, 3, 0, 1], 2), ([1, 0, 3, 2], 1), ([1, 2, 3, 0], 1), ([4, 5, 2, 3, 0, 1], 2)],
)
def test_blocks_are_the_largest_that_move_as_a_whole(order: list[int], size: int) -> None:
    assert block_size(torch.tensor(order)) == size


def test_two_shards_in_each_others_place_are_told_with_their_ranks() -> None:
    order = STRAIGHT.view(3, 8)[[0, 2, 1]].reshape(-1)
    holders = held(runs(range(8)), runs(range(8, 16)), runs(range(16, 24)), num_parts=1)
    assert describe_order(order, "column", holders) == (
        "candidate has columns 8 to 15 and 16 to 23 of the baseline exchanged: the shards of tp1 and tp2 are swapped, "
        "each holds the other's part"
    )


def test_swapped_shards_of_several_parts_are_told() -> None:
    """Each rank holds a half of gate rows 0 to 11 and of up rows 12 to 23."""
    holders = held(runs(range(6), range(12, 18)), runs(range(6, 12), range(18, 24)))
    order = torch.tensor(runs(range(6, 12), range(6), range(18, 24), range(12, 18)))
    assert describe_order(order, "row", holders) == (
        "candidate has 24 of 24 rows of the baseline in another order, in blocks of 6: the shards of tp0 and tp1 are "
        "swapped, each holds the other's part"
    )


def test_shards_that_went_round_are_told_with_whose_each_is() -> None:
    holders = held(runs(range(8)), runs(range(8, 16)), runs(range(16, 24)), num_parts=1)
    assert describe_order(STRAIGHT.roll(-8), "row", holders) == (
        "candidate has the rows of the baseline rotated: it begins with 8 of 24: shards are at the wrong rank, tp0 "
        "that of tp1, tp1 that of tp2, tp2 that of tp0"
    )


def test_parts_that_were_cut_in_one_piece_are_told() -> None:
    """Rank 0 got all of gate, rank 1 all of up."""
    holders = held(runs(range(6), range(12, 18)), runs(range(6, 12), range(18, 24)))
    order = torch.tensor(runs(range(6), range(12, 18), range(6, 12), range(18, 24)))
    assert order[holders.in_turn].tolist() == STRAIGHT.tolist()
    assert describe_order(order, "row", holders) == (
        "candidate has rows 6 to 11 and 12 to 17 of the baseline exchanged: it was cut over tp in one piece, where "
        "gate and up are each cut over tp"
    )


def test_one_piece_that_was_cut_in_parts_is_told() -> None:
    """Rank 0 got rows 0 to 5 and 12 to 17, in the place of 0 to 11."""
    holders = held(runs(range(12)), runs(range(12, 24)), num_parts=1)
    order = torch.tensor(runs(range(6), range(12, 18), range(6, 12), range(18, 24)))
    assert describe_order(order, "row", holders) == (
        "candidate has rows 6 to 11 and 12 to 17 of the baseline exchanged: 2 parts of it were each cut over tp, where "
        "it is cut in one piece"
    )


def test_an_order_within_shards_has_no_word_of_ranks() -> None:
    holders = held(runs(range(12)), runs(range(12, 24)), num_parts=1)
    order = torch.tensor([1, 0, *range(2, 24)])
    assert describe_order(order, "row", holders) == "candidate has rows 0 and 1 of the baseline exchanged"


def test_holders_of_another_number_of_rows_have_no_word() -> None:
    order = STRAIGHT.roll(12)
    assert describe_order(order, "row", held(runs(range(5)), runs(range(5, 10)))) == describe_order(order, "row", None)


LENGTHS = (3, 2, 4, 2)


def by_row(*values: float) -> torch.Tensor:
    return torch.tensor(values).repeat_interleave(torch.tensor(LENGTHS))


def test_rows_of_the_batch_that_hold_each_others_value_are_found() -> None:
    """Rows were sorted by length on the way, and what was computed of each stayed in the order before."""
    order = find_row_order(by_row(0.5, -1.0, 1.5, 0.0), by_row(1.5, -1.0, 0.5, 0.0), LENGTHS, present=None)
    assert order is not None
    assert order.tolist() == [2, 1, 0, 3]
    twice = find_row_order(by_row(0.5, -1.0, 0.5, 2.0), by_row(0.5, 0.5, -1.0, 2.0), LENGTHS, present=None)
    assert twice is not None
    assert twice.tolist() == [0, 2, 1, 3]  # the first 0.5 has not moved


def test_rows_without_a_token_that_counts_are_left_out() -> None:
    present = by_row(1, 1, 0, 1).bool()
    present[0] = False  # a prompt
    order = find_row_order(by_row(1, 2, 7, 3), by_row(2, 1, 8, 3), LENGTHS, present=present)
    assert order is not None
    assert order.tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("baseline", "candidate"),
    [
        (by_row(1, 2, 3, 4), by_row(1, 2, 3, 5)),
        (by_row(1, 0, 1, 0), by_row(0, 1, 1, 0)),
        (torch.arange(11.0), torch.arange(11.0).flip(0)),
    ],
    ids=["other values", "two values alone", "several values of a row"],
)
def test_what_is_no_order_of_rows_is_not_called_one(baseline: torch.Tensor, candidate: torch.Tensor) -> None:
    assert find_row_order(baseline, candidate, LENGTHS, present=None) is None
