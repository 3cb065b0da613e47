"""Whole tensors of a training that nobody told its rows: one and the same in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.trace.entries import VIRTUAL_TOKENS, RowTable, TraceEntry
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.shards import Block, ShardSpec, Split, blocks_of_indices
from tests.content_traces import (
    HIDDEN,
    LOSS,
    WIDTH,
    ContentRank,
    content_step,
    one_rank,
    save_content_trace,
)
from tests.merged_traces import different_bits, merge_step, tensor_of
from tests.trace.builders import key, refused, refused_merge, reseal

TOKENS = {"seven": [7, 8, 9, 10], "eight": [8, 8], "nine": [9, 1, 2, 3, 4], "ten": [10]}
STEP = content_step(TOKENS)

EVERY = {name: range(len(ids)) for name, ids in TOKENS.items()}


def ranks(*batches: list[list[tuple[str, range | list[int]]]], axis: str = "dp") -> list[ContentRank]:
    return [ContentRank(coordinates={axis: index}, micro_batches=own) for index, own in enumerate(batches)]


def rows(*names: str) -> list[tuple[str, range | list[int]]]:
    return [(name, EVERY[name]) for name in names]


LAYOUTS = {
    "dp2": ranks([rows("ten"), rows("seven")], [rows("nine"), rows("eight")]),
    "dp2 in another order": ranks([rows("eight", "nine")], [rows("seven", "ten")]),
    "packed": ranks([rows("nine", "ten", "eight"), rows("seven")]),
    "dp4": ranks(*([rows(name)] for name in TOKENS)),
    "cp2 zigzag": ranks(
        [[("seven", [0, 3]), ("nine", [0, 4]), ("eight", [0])]],
        [[("seven", [1, 2]), ("nine", [1, 2, 3]), ("eight", [1]), ("ten", [0])]],
        axis="cp",
    ),
    "cp2 contiguous": ranks(
        [[("seven", range(2)), ("nine", range(3)), ("eight", range(1)), ("ten", range(1))]],
        [[("seven", range(2, 4)), ("nine", range(3, 5)), ("eight", range(1, 2))]],
        axis="cp",
    ),
    "tp2": [
        ContentRank(coordinates={"tp": tp}, micro_batches=[rows(*TOKENS)], columns=range(3 * tp, 3 * tp + 3))
        for tp in range(2)
    ],
    "tp2 dp2": [
        ContentRank(coordinates={"tp": tp, "dp": dp}, micro_batches=[rows(*own)], columns=range(tp, WIDTH, 2))
        for dp, own in enumerate([("ten", "nine"), ("seven", "eight")])
        for tp in range(2)
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_same_tensors_bit_for_bit(tmp_path: Path, layout: str) -> None:
    expected = merge_step(save_content_trace(tmp_path / "one", STEP))
    found = merge_step(save_content_trace(tmp_path / "other", STEP, LAYOUTS[layout]))
    assert different_bits(found, expected) == []


def test_rows_lie_one_after_another_sorted_by_identity(tmp_path: Path) -> None:
    folder = save_content_trace(tmp_path, STEP, LAYOUTS["dp2"])
    assert tensor_of(merge_step(folder), "input", "tokens").tolist() == [8, 8, 9, 1, 2, 3, 4, 7, 8, 9, 10, 10]
    with open_trace(folder) as reader:
        footer = reader.footer(0)
        assert footer.rows == RowTable(identities=("eight", "nine", "seven", "ten"), lengths=(2, 5, 4, 1))
        assert footer.update_rows == ((0, 1, 2, 3),)
        assert {own.rows for _, own in reader.footers(0)} == {footer.rows}
        assert reader.is_by_content(0)
        assert [place.global_rank for place in reader.holders(key(HIDDEN, kind="activation"), (3, 0))] == [1]


def test_a_changed_value_is_at_its_row_and_position(tmp_path: Path) -> None:
    step = STEP.changed("nine", 3, 2, by=1.0)
    found = tensor_of(merge_step(save_content_trace(tmp_path / "a", step, LAYOUTS["tp2"])), "activation", HIDDEN)
    expected = tensor_of(merge_step(save_content_trace(tmp_path / "b", STEP)), "activation", HIDDEN)
    assert (found != expected).nonzero().tolist() == [[2 + 3, 2]]


def test_replicas_that_differ_are_found(tmp_path: Path) -> None:
    other = [replace(rank, coordinates={"tp": tp}) for tp, rank in enumerate(2 * one_rank(STEP))]
    folder = save_content_trace(tmp_path, STEP, other)
    changed = save_content_trace(tmp_path / "other", STEP.changed("nine", 3, 2, by=1.0), other)
    rank_1 = "step_000000/rank_00001.part_000.safetensors"
    (folder / rank_1).write_bytes((changed / rank_1).read_bytes())
    with open_trace(folder) as reader:
        merged = reader.merge(key(HIDDEN, kind="activation"))
    assert [(item.axes, item.num_elements, item.max_abs) for item in merged.conflicts] == [
        (("tp",), 1, pytest.approx(1.0, abs=1e-6))
    ]


def test_a_token_that_no_rank_holds_is_named_by_row_and_position(tmp_path: Path) -> None:
    cut = ranks([[("nine", [0, 1, 2, 4])]], [rows("ten")])
    folder = save_content_trace(tmp_path, STEP, cut)
    assert refused_merge(folder, key(LOSS, kind="loss")) == (
        "loss of lm_loss at step 0, update 0: 1 of 6 tokens are held by no rank, the first is position 3 of row nine; "
        "pieces come from global rank 0, 1"
    )


def test_a_row_on_two_dp_places_is_one_row_whose_values_must_agree(tmp_path: Path) -> None:
    folder = save_content_trace(tmp_path, STEP, ranks([rows("ten", "nine")], [rows("nine", "eight")]))
    with open_trace(folder) as reader:
        assert reader.footer(0).rows.identities == ("eight", "nine", "ten")
        merged = reader.merge(key(HIDDEN, kind="activation"))
    assert (len(merged.tensor), merged.conflicts) == (8, ())


def test_a_row_that_a_rank_wrote_twice_is_an_error(tmp_path: Path) -> None:
    folder = save_content_trace(tmp_path, STEP, ranks([rows("ten"), [("nine", [0, 1])], [("nine", [1, 2, 3, 4])]]))
    assert "wrote the element at index [1, 0] twice, position 1 of row nine" in refused_merge(
        folder, key(HIDDEN, kind="activation")
    )


def test_a_rank_is_refused_two_rows_of_one_identity_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = RowTable.by_content([*TOKENS, "nine"], [*map(len, TOKENS.values()), 5])
    monkeypatch.setattr("tests.content_traces.table_of", lambda rank, step: twice)
    with pytest.raises(TraceError, match="row nine is listed twice"):
        save_content_trace(tmp_path, STEP)
    assert list(tmp_path.iterdir()) == []


# --- Headers that lie -------------------------------------------------------------------------------------------------


def header_of(folder: Path, rank: int = 0) -> Path:
    return folder / f"step_000000/rank_{rank:05d}.part_000.safetensors"


def test_ranks_with_other_lengths_of_one_row_are_refused(tmp_path: Path) -> None:
    folder = save_content_trace(tmp_path, STEP, LAYOUTS["tp2"])
    reseal(header_of(folder, 1), lambda content: content["ending"]["footer"]["rows"]["lengths"].__setitem__(0, 9))
    assert "row seven has 4 tokens on global rank 0, 9 on global rank 1" in refused(folder)


@pytest.mark.parametrize("start", [-1, 2**62, 2**64 + 1, 2**200, 0, 1])
def test_a_forged_start_is_refused(tmp_path: Path, start: int) -> None:
    folder = save_content_trace(tmp_path, STEP)
    reseal(header_of(folder), lambda content: content["ending"]["footer"]["rows"]["starts"].__setitem__(0, start))
    assert f"row seven starts at {start}; its identity says" in refused(folder)


@pytest.mark.parametrize("start", [True, 1.0, "1", None, [1]])
def test_a_start_that_is_no_number_is_refused(tmp_path: Path, start: object) -> None:
    folder = save_content_trace(tmp_path, STEP)
    reseal(header_of(folder), lambda content: content["ending"]["footer"]["rows"]["starts"].__setitem__(0, start))
    assert "footer.rows.starts[0] is" in refused(folder)


def test_a_piece_outside_of_the_rows_is_refused(tmp_path: Path) -> None:
    folder = save_content_trace(tmp_path, STEP)
    reseal(header_of(folder), lambda content: content["blocks"][0][0].__setitem__(1, 12))
    assert "places 12 to 16 are of no row of the step" in refused(folder)


def test_a_piece_longer_than_its_row_is_refused(tmp_path: Path) -> None:
    folder = save_content_trace(tmp_path, STEP)
    reseal(header_of(folder), lambda content: content["ending"]["footer"]["rows"]["lengths"].__setitem__(0, 3))
    assert "are of no row of the step" in refused(folder)


def test_a_trace_that_forgot_its_starts_is_refused(tmp_path: Path) -> None:
    folder = save_content_trace(tmp_path, STEP)
    reseal(header_of(folder), lambda content: content["ending"]["footer"]["rows"].pop("starts"))
    assert "has rows by content; no rank lists these rows" in refused(folder)


def dense_entry() -> TraceEntry:
    spec = ShardSpec(
        name="loss", global_shape=(12,), local_shape=(2,), splits=(Split(dim=0, blocks=blocks_of_indices([0, 1])),)
    )
    return TraceEntry(update=0, kind="loss", spec=spec, tensor=torch.ones(2), dims=("token",))


def test_tokens_of_another_numbering_are_refused(tmp_path: Path) -> None:
    folder = save_content_trace(tmp_path, replace(STEP, more=[dense_entry()]))
    assert "loss: 12 tokens, where rows are by content" in refused(folder)


def test_a_wide_tensor_of_many_claimed_tokens_is_refused_without_memory(tmp_path: Path) -> None:
    """The places of a token dimension are 2^62; what is read is as large as the rows say, and that is bounded."""
    rows_of = RowTable.by_content(["seven"], [2**22])
    spec = ShardSpec(
        name=HIDDEN,
        global_shape=(VIRTUAL_TOKENS, 2**30),
        local_shape=(1, 1),
        splits=(
            Split(dim=0, blocks=(Block(local_start=0, global_start=rows_of.starts[0], length=1),)),
            Split(dim=1, blocks=(Block(local_start=0, global_start=0, length=1),)),
        ),
    )
    wide = TraceEntry(
        update=0, kind="activation", spec=spec, tensor=torch.ones(1, 1), dims=("token", "channel"), is_masked=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.content_traces.table_of", lambda rank, step: rows_of)
        folder = save_content_trace(
            tmp_path, replace(STEP, more=[wide]), one_rank(content_step({"seven": [1]})), kinds=()
        )
    assert "has more than 1099511627776 bytes" in refused(folder)
