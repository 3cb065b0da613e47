"""Sketches of a training that nobody told its rows: their indices follow from the rows' identities, modulo 2^64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mock_scheduler.comparison.pairing.sources import FullAsSketches
from mock_scheduler.errors import TraceError
from mock_scheduler.trace.entries import VIRTUAL_TOKENS, RowTable, virtual_start
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.shards import Block, ShardSpec, Split, whole
from mock_scheduler.trace.sketch import sums
from mock_scheduler.trace.sketch.reader import SketchReader, open_sketches
from mock_scheduler.trace.sketch.sketch import add, difference, sketch_piece
from tests.content_traces import HIDDEN, LOSS, save_content_trace
from tests.trace.builders import key
from tests.trace.full.test_rows_by_content import LAYOUTS, STEP

KEYS = [key("tokens", kind="input"), key(HIDDEN, kind="activation"), key(LOSS, kind="loss")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_same_fingerprints(tmp_path: Path, layout: str) -> None:
    one = open_sketches(save_content_trace(tmp_path / "one", STEP, level="sketch"))
    other = open_sketches(save_content_trace(tmp_path / "other", STEP, LAYOUTS[layout], level="sketch"))
    for wanted in KEYS:
        mine, theirs = one.sketch(wanted), other.sketch(wanted)
        assert mine.sketch.is_identical(theirs.sketch)
        assert difference(mine.sketch, theirs.sketch).high == 0.0
        assert (mine.global_shape, mine.missing) == (theirs.global_shape, "")
        assert torch.allclose(mine.sketch.sums, theirs.sketch.sums, rtol=1e-12, atol=1e-12)
    assert one.footer(0).rows == other.footer(0).rows
    assert one.sketch(KEYS[1]).global_shape == (12, 6)


def test_a_changed_value_changes_the_fingerprint(tmp_path: Path) -> None:
    one = open_sketches(save_content_trace(tmp_path / "one", STEP, level="sketch"))
    step = STEP.changed("nine", 3, 2, by=0.5)
    other = open_sketches(save_content_trace(tmp_path / "other", step, LAYOUTS["dp2"], level="sketch"))
    assert one.sketch(KEYS[2]).sketch.is_identical(other.sketch(KEYS[2]).sketch)
    estimate = difference(one.sketch(KEYS[1]).sketch, other.sketch(KEYS[1]).sketch)
    # One element is estimated exactly.
    assert estimate.norm_difference == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("layout", ["dp2", "cp2 zigzag", "tp2 dp2"])
def test_a_trace_of_whole_tensors_read_as_sketches_has_the_same_indices(tmp_path: Path, layout: str) -> None:
    sketches = open_sketches(save_content_trace(tmp_path / "sketch", STEP, LAYOUTS[layout], level="sketch"))
    with open_trace(save_content_trace(tmp_path / "full", STEP)) as reader:
        full = FullAsSketches(reader)
        for wanted in KEYS:
            mine, theirs = full.sketch(wanted), sketches.sketch(wanted)
            assert mine.sketch.is_identical(theirs.sketch)
            assert mine.global_shape == theirs.global_shape
        assert full.footers(0)[0][1].rows == sketches.footer(0).rows


def token_spec(start: int, num_rows: int, width: int) -> ShardSpec:
    return ShardSpec(
        name="x",
        global_shape=(VIRTUAL_TOKENS, width),
        local_shape=(num_rows, width),
        splits=(Split(dim=0, blocks=(Block(local_start=0, global_start=start, length=num_rows),)),),
    )


def wrapping_start(width: int, num_rows: int) -> int:
    """A place whose elements' indices go over a multiple of 2^64 in the middle of the rows."""
    turn = 2**64 // width
    return turn - num_rows // 2


@pytest.mark.parametrize("width", [6, 64, 3000])
def test_indices_are_taken_modulo_2_to_the_64(width: int) -> None:
    """As if each element were sketched by itself, at its index modulo 2^64."""
    num_rows = 5
    start = wrapping_start(width, num_rows)
    values = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(1))
    found = sketch_piece(values, token_spec(start, num_rows, width))
    wrap = (2**64 - start * width) if width != 64 else 2 * width
    first, second = values.flatten()[:wrap], values.flatten()[wrap:]
    assert 0 < len(first) < values.numel()

    def piece(part: torch.Tensor, at: int) -> ShardSpec:
        return ShardSpec(
            name="x",
            global_shape=(2**64,),
            local_shape=(len(part),),
            splits=(Split(dim=0, blocks=(Block(local_start=0, global_start=at, length=len(part)),)),),
        )

    expected = add(
        sketch_piece(first, piece(first, start * width)),
        sketch_piece(second, piece(second, 0)),
    )
    assert found.is_identical(expected)
    assert torch.allclose(found.sums, expected.sums, rtol=1e-12, atol=1e-12)


def test_rows_with_the_same_indices_in_two_turns_are_both_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 2^61 apart coincide at a width of 8: in torch one overwrote the other, amid memory that nobody had set."""
    monkeypatch.setattr(sums, "can_sum", lambda dtype: False)
    width, num_rows, starts = 8, 150, (5 << 22, (5 << 22) + 2**61)
    values = torch.randn(2 * num_rows, width, generator=torch.Generator().manual_seed(3))
    blocks = tuple(
        Block(local_start=index * num_rows, global_start=start, length=num_rows) for index, start in enumerate(starts)
    )
    both = replace(token_spec(0, 2 * num_rows, width), splits=(Split(dim=0, blocks=blocks),))
    halves = values.split(num_rows)
    apart = [sketch_piece(half, token_spec(start, num_rows, width)) for half, start in zip(halves, starts, strict=True)]
    found = sketch_piece(values, both)
    assert found.is_identical(add(*apart))
    assert found.sum_of_squares == pytest.approx(float(values.double().square().sum()), rel=1e-12)


def test_parts_of_wrapping_columns_add_up_to_the_whole() -> None:
    width, num_rows = 3000, 6
    start = wrapping_start(width, num_rows)
    values = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(2))
    expected = sketch_piece(values, token_spec(start, num_rows, width))
    parts = []
    for low, high in ((0, 700), (700, 2999), (2999, 3000)):
        spec = token_spec(start, num_rows, width)
        columns = Split(dim=1, blocks=(Block(local_start=0, global_start=low, length=high - low),))
        spec = replace(spec, local_shape=(num_rows, high - low), splits=(*spec.splits, columns))
        parts.append(sketch_piece(values[:, low:high], spec))
    total = add(add(parts[0], parts[1]), parts[2])
    assert total.is_identical(expected)
    assert difference(total, expected).high == 0.0


def test_the_places_of_rows_are_far_beyond_those_of_a_dense_tensor() -> None:
    values = torch.arange(12.0).view(2, 6)
    dense = sketch_piece(values, whole("x", (2, 6)))
    assert not sketch_piece(values, token_spec(virtual_start("seven"), 2, 6)).is_identical(dense)


def forged(tmp_path: Path, rows: RowTable) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.content_traces.table_of", lambda rank, step: rows)
        patch.setattr("mock_scheduler.trace.sketch.files.check_footer", lambda footer, rank_step: None)
        folder = save_content_trace(tmp_path, STEP, level="sketch")
    with pytest.raises(TraceError) as caught:
        open_sketches(folder)
    return str(caught.value)


def test_a_forged_table_is_refused(tmp_path: Path) -> None:
    honest = RowTable.by_content(list(STEP.tokens), [len(ids) for ids in STEP.tokens.values()])
    short = replace(honest, lengths=(3, *honest.lengths[1:]))
    moved = replace(honest, starts=(5 << 22, *honest.starts[1:]))
    assert "are of no row of the step" in forged(tmp_path / "short", short)
    assert "row seven starts at 20971520; its identity says" in forged(tmp_path / "moved", moved)


def test_ranks_with_other_lengths_of_one_row_are_refused(tmp_path: Path) -> None:
    folder = save_content_trace(tmp_path / "a", STEP, LAYOUTS["tp2"], level="sketch")
    longer = replace(STEP, tokens={**STEP.tokens, "seven": [7, 8, 9, 10, 11]})
    other = save_content_trace(tmp_path / "b", longer, LAYOUTS["tp2"], level="sketch")
    rank_1 = "step_000000/rank_00001.sketch.safetensors"
    (folder / rank_1).write_bytes((other / rank_1).read_bytes())
    with pytest.raises(TraceError, match="row seven has 4 tokens on global rank 0, 5 on global rank 1"):
        open_sketches(folder)


def test_readers_of_sketches_have_the_updates_of_all_ranks(tmp_path: Path) -> None:
    reader: SketchReader = open_sketches(save_content_trace(tmp_path, STEP, LAYOUTS["dp4"], level="sketch"))
    assert reader.footer(0).update_rows == ((0, 1, 2, 3),)
    assert reader.footer(0).rows.identities == ("eight", "nine", "seven", "ten")
