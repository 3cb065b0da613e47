"""Rows by content: places follow from identities, tables of ranks are united, and lies in a table are found."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from mock_scheduler.errors import TraceError
from mock_scheduler.trace.entries import (
    ROW_PLACES,
    VIRTUAL_TOKENS,
    RankPlace,
    RowTable,
    StepFooter,
    virtual_start,
)
from mock_scheduler.trace.full.header import check_footer, footer_as_json, parse_footer
from mock_scheduler.trace.full.pieces import RankStep, Shared
from mock_scheduler.trace.rows import MAX_ROWS, DensePlaces, check_rows, open_gaps, spread_tokens, unite_footers
from mock_scheduler.trace.shards import Block, ShardSpec, Split
from tests.trace.builders import ROWS


def footer(*rows: tuple[str, int], updates: tuple[tuple[int, ...], ...] = ((0,),)) -> StepFooter:
    table = RowTable.by_content([name for name, _ in rows], [length for _, length in rows])
    return StepFooter(rows=table, update_rows=updates)


def test_a_start_is_the_upper_forty_bits_of_the_identity_s_digest() -> None:
    for identity in ("a", "train/0", "Zeile 3 ü", ""):
        word = int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "big")
        assert virtual_start(identity) == (word >> 24) << 22
        assert 0 <= virtual_start(identity) <= VIRTUAL_TOKENS - ROW_PLACES
    # BLAKE2b-64 of "a" is 40f89e395b66422f: the traces of all releases must agree.
    assert virtual_start("a") == 0x40F89E395B << 22


def test_a_token_is_found_by_its_place() -> None:
    table = RowTable.by_content(["b", "a"], [3, 5])
    assert table.find(table.starts[1] + 4) == (1, 4)
    assert table.find(table.starts[0]) == (0, 0)
    assert (table.num_tokens, table.num_places) == (8, VIRTUAL_TOKENS)
    with pytest.raises(IndexError, match=f"token {table.starts[0] + 3} of 8"):
        table.find(table.starts[0] + 3)


def test_rows_without_starts_are_found_and_stored_as_ever() -> None:
    assert [ROWS.find(token) for token in (0, 2, 3, 5, 8)] == [(0, 0), (0, 2), (1, 0), (2, 0), (2, 3)]
    assert (ROWS.first_places, ROWS.num_places) == ((0, 3, 5), 9)
    stored = footer_as_json(StepFooter(rows=ROWS))
    assert stored["rows"] == {"identities": list(ROWS.identities), "lengths": list(ROWS.lengths)}
    assert parse_footer(stored, Shared()).rows == ROWS


def test_rows_with_starts_are_stored_and_read_back() -> None:
    one = footer(("b", 2), ("a", 3), updates=((1,), (0, 1)))
    assert parse_footer(footer_as_json(one), Shared()) == one


def lie(table: RowTable, case: str) -> RowTable:
    first, *rest = table.starts
    starts = {
        "another start": (first + ROW_PLACES, *rest),
        "negative": (-first, *rest),
        "beyond 2^62": (VIRTUAL_TOKENS, *rest),
        "beyond 2^64": (first + 2**64, *rest),
        "within a row": (first + 1, *rest),
        "another row's": (rest[0], *rest),
        "too few": tuple(rest),
    }
    return replace(table, starts=starts[case])


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("another start", "row x starts at"),
        ("negative", "row x starts at -"),
        ("beyond 2^62", "row x starts at 4611686018427387904"),
        ("beyond 2^64", "row x starts at"),
        ("within a row", "row x starts at"),
        ("another row's", "row x starts at"),
        ("too few", "2 rows have 1 starts"),
    ],
)
def test_a_start_that_does_not_follow_from_the_identity_is_refused(case: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_rows(lie(RowTable.by_content(["x", "y"], [2, 3]), case))


@pytest.mark.parametrize("start", ["true", '"7"', "1.5", "null"])
def test_a_start_that_is_no_whole_number_is_refused(start: str) -> None:
    stored = footer_as_json(footer(("x", 2)))
    stored["rows"]["starts"] = [{"true": True, '"7"': "7", "1.5": 1.5, "null": None}[start]]  # type: ignore[index, call-overload]
    with pytest.raises(ValueError, match=r"footer\.rows\.starts\[0\] is .*: expected a whole number"):
        parse_footer(stored, Shared())


def test_a_row_longer_than_its_places_is_refused() -> None:
    check_rows(RowTable.by_content(["x"], [ROW_PLACES]))
    with pytest.raises(ValueError, match=f"row x has {ROW_PLACES + 1} tokens; expected at most {ROW_PLACES}"):
        check_rows(RowTable.by_content(["x"], [ROW_PLACES + 1]))


def test_a_row_listed_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="row x is listed twice"):
        check_rows(RowTable.by_content(["x", "y", "x"], [2, 3, 2]))


def test_two_rows_at_one_place_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mock_scheduler.trace.rows.virtual_start", lambda identity: 5 * ROW_PLACES)
    table = RowTable(identities=("x", "y"), lengths=(2, 3), starts=(5 * ROW_PLACES,) * 2)
    with pytest.raises(ValueError, match="rows x and y have one place, by chance; give the rows ids"):
        check_rows(table)


def test_a_table_of_a_million_rows_is_refused_before_anything_is_computed() -> None:
    names = ("x",) * 2**20
    table = RowTable(identities=names, lengths=(1,) * len(names))
    # Starts that are no numbers: whoever looked at one would fail otherwise.
    with pytest.raises(ValueError, match=f"1048576 rows have 1048576 starts; expected at most {MAX_ROWS}"):
        check_rows(replace(table, starts=(None,) * len(names)))  # type: ignore[arg-type]


def test_the_rows_of_all_ranks_are_united_by_identity() -> None:
    united, problems = unite_footers(
        {
            0: footer(("c", 1), ("a", 3), updates=((0,), (1,))),
            1: footer(("b", 2), updates=((0,), ())),
            2: footer(("a", 3), ("c", 1), updates=((1,), (0,))),
            3: StepFooter(update_rows=((), ())),  # a rank that met no token
        }
    )
    assert problems == []
    table = RowTable.by_content(["a", "b", "c"], [3, 2, 1])
    assert {one.rows for one in united.values()} == {table}
    assert {one.update_rows for one in united.values()} == {((1, 2), (0,))}


def test_tables_without_starts_are_left_alone() -> None:
    footers = {0: StepFooter(rows=ROWS, update_rows=((0,),)), 1: StepFooter(rows=ROWS, update_rows=((1,),))}
    assert unite_footers(footers) == (footers, [])


def test_ranks_that_disagree_about_rows_are_named() -> None:
    plain = StepFooter(rows=ROWS, update_rows=((0,),))
    two_updates = footer(("a", 3), updates=((0,), (0,)))
    others = {1: footer(("a", 4)), 2: plain, 3: two_updates}
    found = [unite_footers({0: footer(("a", 3)), rank: other})[1] for rank, other in others.items()]
    assert found == [
        ["row a has 3 tokens on global rank 0, 4 on global rank 1"],
        ["global rank 2 says no starts of its rows, where other ranks do"],
        ["global rank 3 says 2 updates, global rank 0 says 1"],
    ]


def token_spec(*blocks: Block) -> ShardSpec:
    length = sum(block.length for block in blocks)
    return ShardSpec(
        name="x", global_shape=(VIRTUAL_TOKENS,), local_shape=(length,), splits=(Split(dim=0, blocks=blocks),)
    )


def test_gaps_between_rows_are_closed_and_opened_again() -> None:
    table = RowTable.by_content(["a", "b"], [3, 2])
    places = DensePlaces.of(table)
    spec = token_spec(
        Block(local_start=0, global_start=table.starts[1], length=2),
        Block(local_start=2, global_start=table.starts[0] + 1, length=2),
    )
    dense = places.move(spec)
    assert (dense.global_shape, dense.splits[0].blocks) == (
        (5,),
        (Block(local_start=0, global_start=3, length=2), Block(local_start=2, global_start=1, length=2)),
    )
    assert open_gaps(places.rows) == table
    assert spread_tokens("x", (5, 4), places.rows).splits[0].blocks == (
        Block(local_start=0, global_start=table.starts[0], length=3),
        Block(local_start=3, global_start=table.starts[1], length=2),
    )


@pytest.mark.parametrize("offset", [2, 3, -1, ROW_PLACES])
def test_tokens_of_no_row_are_refused(offset: int) -> None:
    table = RowTable.by_content(["a", "b"], [3, 2])
    start = table.starts[0] + offset
    with pytest.raises(ValueError, match=f"x: places {start} to {start + 2} are of no row of the step"):
        DensePlaces.of(table).move(token_spec(Block(local_start=0, global_start=start, length=2)))


def test_trace_errors_name_the_step_and_the_rank() -> None:
    rank_step = RankStep(step=4, place=RankPlace(global_rank=3, coordinates={}), world_size=8)
    with pytest.raises(TraceError, match="step 4, global rank 3: row x is listed twice"):
        check_footer(footer(("x", 1), ("x", 1)), rank_step)
