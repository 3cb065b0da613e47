"""Files of sketches: ranks add up or repeat each other, and whatever is missing, doubled or damaged is named."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.errors import TraceError
from mock_scheduler.support.digests import canonical_json, open_sealed, seal
from mock_scheduler.support.tensor_bytes import compute_tensor_digest
from mock_scheduler.trace.entries import RankPlace, RowTable, StepFooter, TraceEntry, TraceKey
from mock_scheduler.trace.shards import ShardSpec, Split, blocks_of_indices, cut_shard, even_split, whole
from mock_scheduler.trace.sketch.files import SketchSink, has_full, has_sketches, sketch_path
from mock_scheduler.trace.sketch.opening import METADATA_KEY
from mock_scheduler.trace.sketch.reader import SketchReader, open_sketches
from mock_scheduler.trace.sketch.sketch import difference, sketch_of
from tests.rank_traces import save_rank_trace

W = "decoder.layers.0.mlp.linear_fc1.weight"
ROWS = RowTable(identities=("a", "b", "c"), lengths=(3, 2, 4))


def key(name: str = W, *, kind: TraceKind = "gradient", update: int = 0) -> TraceKey:
    return TraceKey(step=0, update=update, kind=kind, name=name)


def entry(
    spec: ShardSpec, tensor: torch.Tensor, *, kind: TraceKind = "gradient", update: int = 0, is_masked: bool = False
) -> TraceEntry:
    dims = ("token", "channel") if kind == "activation" else ()
    return TraceEntry(update=update, kind=kind, spec=spec, tensor=tensor, dims=dims, is_masked=is_masked)


def open_sink(trace_dir: Path, rank: int, world_size: int, **coordinates: int) -> SketchSink:
    place = RankPlace(global_rank=rank, coordinates=coordinates or {"tp": rank, "pp": 0, "dp": 0})
    return SketchSink(trace_dir, step=0, place=place, world_size=world_size)


def save(
    trace_dir: Path,
    entries_by_rank: Sequence[Sequence[TraceEntry]],
    *,
    footer: StepFooter | None = None,
    axis: str = "tp",
) -> None:
    for rank, entries in enumerate(entries_by_rank):
        sink = open_sink(trace_dir, rank, len(entries_by_rank), **{axis: rank, "pp": 0})
        for item in entries:
            sink.add(item)
        sink.close(footer or StepFooter())


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def split(shape: tuple[int, ...], dim: int, rank: int, num_ranks: int = 2, num_parts: int = 1) -> ShardSpec:
    splits = even_split(dim, size=shape[dim], rank=rank, num_ranks=num_ranks, num_parts=num_parts)
    local = tuple(size // num_ranks if index == dim else size for index, size in enumerate(shape))
    return ShardSpec(name=W, global_shape=shape, local_shape=local, splits=splits)


def tokens(indices: list[int], *, channels: int = 5) -> ShardSpec:
    return ShardSpec(
        name=W,
        global_shape=(9, channels),
        local_shape=(len(indices), channels),
        splits=(Split(dim=0, blocks=blocks_of_indices(indices)),),
    )


def test_shards_of_all_ranks_are_the_whole_and_replicas_count_once(tmp_path: Path) -> None:
    tensor = normal(1, 8, 6)
    specs = [split((8, 6), 0, rank % 2, num_parts=2) for rank in range(4)]
    save(tmp_path, [[entry(spec, cut_shard(tensor, spec))] for spec in specs])
    reader = open_sketches(tmp_path)
    merged = reader.sketch(key())
    assert merged.sketch.is_identical(sketch_of(tensor))
    assert merged.conflicts == ()
    assert (merged.dtype, merged.global_shape, merged.sketch.num_elements) == (torch.float32, (8, 6), 48)
    assert [place.global_rank for place in reader.holders(key())] == [0, 1, 2, 3]


def test_the_reader_says_what_is_there(tmp_path: Path) -> None:
    footer = StepFooter(rows=ROWS, update_rows=((0, 2),), kinds=("gradient",))
    save(tmp_path, [[entry(whole(W, (3,)), torch.ones(3))], []], footer=footer)
    reader = open_sketches(tmp_path)
    assert reader.steps == (0,)
    assert [place.describe() for place in reader.ranks(0)] == ["global rank 0 (pp0 tp0)", "global rank 1 (pp0 tp1)"]
    assert reader.keys(0) == {key()}
    assert reader.has(key())
    assert not reader.has(key("other"))
    assert reader.footer(0) == footer
    assert [rank_footer for _, rank_footer in reader.footers(0)] == [footer, footer]
    assert reader.is_complete(0)
    with pytest.raises(TraceError, match=r"no rank wrote the gradient of other at step 0, update 0"):
        reader.sketch(key("other"))


def test_a_sketch_trace_compares_with_a_full_one(tmp_path: Path) -> None:
    tensor = normal(2, 30, 20)
    save(tmp_path / "sketch", [[entry(whole(W, (30, 20)), tensor)]])
    save_rank_trace(
        tmp_path / "full",
        step=0,
        global_rank=0,
        world_size=1,
        coordinates={},
        entries=[entry(whole(W, (2,)), tensor[0, :2])],
    )
    merged = open_sketches(tmp_path / "sketch").sketch(key())
    estimate = difference(merged.sketch, sketch_of(tensor * 1.5))
    assert estimate.low < 0.5 < estimate.high
    assert (has_sketches(tmp_path / "sketch"), has_full(tmp_path / "sketch")) == (True, False)
    assert (has_sketches(tmp_path / "full"), has_full(tmp_path / "full")) == (False, True)
    assert not has_sketches(tmp_path / "none")


def test_micro_batches_of_one_rank_equal_those_of_a_replica_that_cut_them_otherwise(tmp_path: Path) -> None:
    tensor = normal(3, 9, 5)
    cuts = [[[0, 1, 2], [5, 6, 7, 8]], [[5, 6], [7, 8, 0, 1, 2]], [[3, 4]]]
    save(
        tmp_path,
        [[entry(tokens(own), tensor[own], kind="activation") for own in rank] for rank in cuts],
        footer=StepFooter(rows=ROWS, update_rows=((0, 1, 2),)),
    )
    merged = open_sketches(tmp_path).sketch(key(kind="activation"))
    assert merged.sketch.is_identical(sketch_of(tensor))
    assert merged.conflicts == ()


def test_flat_ranges_that_two_stages_cut_otherwise_count_once(tmp_path: Path) -> None:
    """Tied embeddings under a distributed optimizer on both stages."""
    tensor = normal(4, 10, 3)
    ranges = [(0, 14), (14, 30), (0, 7), (7, 30)]
    specs = [ShardSpec(name=W, global_shape=(10, 3), local_shape=(10, 3), flat_range=span) for span in ranges]
    pieces = [tensor.view(-1)[slice(*span)] for span in ranges]
    save(tmp_path / "same", [[entry(spec, piece)] for spec, piece in zip(specs, pieces, strict=True)])
    merged = open_sketches(tmp_path / "same").sketch(key())
    assert merged.sketch.is_identical(sketch_of(tensor))
    assert merged.conflicts == ()
    changed = [*pieces[:3], pieces[3] * 2]
    save(tmp_path / "other", [[entry(spec, piece)] for spec, piece in zip(specs, changed, strict=True)])
    conflict = open_sketches(tmp_path / "other").sketch(key()).conflicts[0]
    assert (conflict.first_ranks, conflict.second_ranks) == ((0, 1), (2, 3))
    assert "ranks global 0+1 and global 2+3 hold different bits of the gradient of" in conflict.describe()


def test_an_empty_flat_range_holds_nothing(tmp_path: Path) -> None:
    specs = [ShardSpec(name=W, global_shape=(4,), local_shape=(4,), flat_range=span) for span in ((0, 4), (4, 4))]
    save(tmp_path, [[entry(specs[0], torch.ones(4))], [entry(specs[1], torch.ones(0))]])
    reader = open_sketches(tmp_path)
    assert reader.sketch(key()).sketch.is_identical(sketch_of(torch.ones(4)))
    assert [place.global_rank for place in reader.holders(key())] == [0]


def test_a_replica_with_one_other_bit_is_named_with_its_axis(tmp_path: Path) -> None:
    tensor = normal(5, 40)
    changed = tensor.clone()
    changed[7] = torch.nextafter(changed[7], torch.tensor(9.0))
    spec = whole(W, (40,))
    save(tmp_path, [[entry(spec, tensor)], [entry(spec, tensor)], [entry(spec, changed)]], axis="dp")
    merged = open_sketches(tmp_path).sketch(key())
    assert merged.sketch.is_identical(sketch_of(tensor))
    (conflict,) = merged.conflicts
    assert conflict.axes == ("dp",)
    assert (conflict.first.global_rank, conflict.second.global_rank) == (0, 2)
    assert 0 < conflict.relative < 1e-6
    assert conflict.describe().startswith(
        f"{W}: ranks dp0 and dp2 hold different bits of the gradient of {W} at step 0, update 0 (by about "
    )


def test_a_missing_shard_is_found(tmp_path: Path) -> None:
    tensor = normal(6, 8, 6)
    save(tmp_path, [[entry(split((8, 6), 1, 0), cut_shard(tensor, split((8, 6), 1, 0)))], []])
    with pytest.raises(TraceError) as caught:
        open_sketches(tmp_path).sketch(key())
    assert str(caught.value) == (
        f"gradient of {W} at step 0, update 0: 24 elements are held, where there are 48; parts come from global rank 0"
    )


def _read_tokens(trace_dir: Path, own: list[int], *, is_masked: bool) -> SketchReader:
    item = entry(tokens(own), torch.ones(len(own), 5), kind="activation", is_masked=is_masked)
    save(trace_dir, [[item]], footer=StepFooter(rows=ROWS, update_rows=((0, 2),)))
    return open_sketches(trace_dir)


def test_of_a_token_tensor_the_updates_rows_must_be_there(tmp_path: Path) -> None:
    own = [0, 1, 2, 5, 6, 7, 8]
    merged = _read_tokens(tmp_path / "all", own, is_masked=False).sketch(key(kind="activation"))
    assert merged.sketch.num_elements == 35
    with pytest.raises(TraceError, match=r"30 elements are held, where there are 35"):
        _read_tokens(tmp_path / "less", own[:-1], is_masked=False).sketch(key(kind="activation"))
    with pytest.raises(TraceError, match=r"45 elements are held, where there are 35"):
        _read_tokens(tmp_path / "more", list(range(9)), is_masked=False).sketch(key(kind="activation"))
    masked = _read_tokens(tmp_path / "masked", own[:-1], is_masked=True).sketch(key(kind="activation"))
    assert (masked.is_masked, masked.sketch.num_elements) == (True, 30)


def test_parts_that_overlap_without_being_the_same_are_refused(tmp_path: Path) -> None:
    specs = [ShardSpec(name=W, global_shape=(9,), local_shape=(9,), flat_range=span) for span in ((0, 6), (3, 9))]
    save(tmp_path, [[entry(spec, torch.ones(6))] for spec in specs])
    with pytest.raises(TraceError, match=r"what global ranks 0, 1 hold overlaps .* trace.level=full"):
        open_sketches(tmp_path).sketch(key())


def test_ranks_that_disagree_on_the_dtype_are_refused(tmp_path: Path) -> None:
    spec = whole(W, (2,))
    save(tmp_path, [[entry(spec, torch.ones(2))], [entry(spec, torch.ones(2).bfloat16())]])
    with pytest.raises(TraceError) as caught:
        open_sketches(tmp_path).sketch(key())
    assert str(caught.value) == (
        f"gradient of {W} at step 0, update 0: ranks disagree on dtype or whole shape "
        "(global rank 1: bfloat16 [2], global rank 0: float32 [2])"
    )


def test_a_missing_rank_is_found(tmp_path: Path) -> None:
    save(tmp_path, [[entry(whole(W, (2,)), torch.ones(2))], [], []])
    sketch_path(tmp_path, step=0, global_rank=1).unlink()
    with pytest.raises(
        TraceError, match=r"step_000000: no file of global rank 1 of 3 \(rank_00001.sketch.safetensors\)$"
    ):
        open_sketches(tmp_path)


def test_a_trace_of_some_ranks_may_have_gaps(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, 1, 2)
    sink.add(entry(split((8, 6), 0, 1), torch.ones(4, 6)))
    sink.close(StepFooter(ranks=(1,)))
    reader = open_sketches(tmp_path)
    assert not reader.is_complete(0)
    assert reader.sketch(key()).sketch.num_elements == 24


def test_files_of_other_ranks_steps_and_selections_are_found(tmp_path: Path) -> None:
    save(tmp_path, [[], []])
    first, second = (sketch_path(tmp_path, step=0, global_rank=rank) for rank in range(2))
    second.write_bytes(first.read_bytes())
    with pytest.raises(TraceError, match=r"rank_00001.sketch.safetensors holds step 0 of global rank 0"):
        open_sketches(tmp_path)
    second.unlink()
    open_sink(tmp_path, 1, 2).close(StepFooter(kinds=("gradient",)))
    with pytest.raises(TraceError, match=r"global rank 1 says other kinds than global rank 0"):
        open_sketches(tmp_path)


def test_no_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no trace here; run with trace.level=sketch"):
        open_sketches(tmp_path)
    (tmp_path / "step_000000").mkdir()
    with pytest.raises(TraceError, match=r"no sketches; the run ended before any rank wrote this step"):
        open_sketches(tmp_path)


@pytest.mark.parametrize("table", ["sums", "squares", "counts"])
def test_a_changed_table_is_found(tmp_path: Path, table: str) -> None:
    save(tmp_path, [[entry(whole(W, (3,)), torch.ones(3))]])
    path = sketch_path(tmp_path, step=0, global_rank=0)
    with safe_open(path, framework="pt") as handle:
        metadata = handle.metadata()
    tables = load_file(path)
    tables[table].view(-1)[0] += 1
    save_file(tables, path, metadata=metadata)
    with pytest.raises(TraceError, match=rf"table {table} does not match its digest; the file was changed or damaged"):
        open_sketches(tmp_path)


def test_a_changed_header_another_format_and_another_file_are_found(tmp_path: Path) -> None:
    save(tmp_path, [[entry(whole(W, (3,)), torch.ones(3))]])
    path = sketch_path(tmp_path, step=0, global_rank=0)
    with safe_open(path, framework="pt") as handle:
        header = json.loads(handle.metadata()["mock_scheduler.sketch"])
    tables = load_file(path)
    save_file(tables, path, metadata={"mock_scheduler.sketch": json.dumps({**header, "world_size": 2})})
    with pytest.raises(TraceError, match=r"the metadata does not match its digest"):
        open_sketches(tmp_path)
    save_file(tables, path, metadata={"other": "1"})
    with pytest.raises(TraceError, match=r"no metadata key 'mock_scheduler.sketch'; this is no file of sketches"):
        open_sketches(tmp_path)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(TraceError, match=r"not a readable safetensors file"):
        open_sketches(tmp_path)


def _rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]) -> None:
    """Change header and tables of a file, and give both digests that fit, as a forger would."""
    with safe_open(path, framework="pt") as handle:
        content = open_sealed(handle.metadata()[METADATA_KEY])
    tables = load_file(path)
    change(content, tables)
    content["tables"] = {name: compute_tensor_digest(table) for name, table in tables.items()}
    save_file(tables, path, metadata={METADATA_KEY: canonical_json(seal(content))})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda content, _: content.update(world_size=10**15),
            "world_size is 1000000000000000: expected at most 1048576",
        ),
        (lambda content, _: content["parts"][0].append([[0], [4]]), "does not lie in its shape"),
        (lambda content, _: content["parts"].__setitem__(0, [[[10**9, 0], [2, 3]]]), "does not lie in its shape"),
        (lambda content, _: content["tensors"][0].__setitem__(2, [W]), f"tensors[0][2] is ['{W}']: expected a text"),
        (lambda _, tables: tables["squares"].fill_(-1.0), "a sum of squares of -1.0, and 0 of 6 not finite"),
        (lambda _, tables: tables["counts"][:, 1].fill_(7), "and 7 of 6 not finite"),
        (lambda _, tables: tables.update(sums=tables["sums"].float()), "expected {'sums': (torch.float64, 2)"),
        (lambda _, tables: tables.update(sums=tables["sums"][0].contiguous()), "expected {'sums': (torch.float64, 2)"),
    ],
    ids=["ranks", "dims", "beyond", "name", "squares", "counts", "dtype", "flat"],
)
def test_a_forged_file_is_a_trace_error(
    tmp_path: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object], problem: str
) -> None:
    """Digests fit. It was listed for hours, read as another tensor, or ended in a ValueError at the first merge."""
    save(tmp_path, [[entry(whole(W, (2, 3)), normal(1, 2, 3))]])
    path = sketch_path(tmp_path, step=0, global_rank=0)
    _rewrite(path, change)
    with pytest.raises(TraceError) as caught:
        open_sketches(tmp_path)
    assert str(caught.value).startswith(f"{path}: the metadata is not that of sketches: ")
    assert problem in str(caught.value)


def test_a_step_that_is_given_up_writes_nothing(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, 0, 1)
    sink.add(entry(whole(W, (2, 3)), normal(1, 2, 3)))
    sink.abandon()
    with pytest.raises(TraceError, match="the trace of this step is closed"):
        sink.close(StepFooter())
    assert not list(tmp_path.iterdir())


def test_equal_content_gives_equal_bytes_in_any_order_and_a_file_stays_small(tmp_path: Path) -> None:
    entries = [entry(whole(f"w{index}", (300,)), normal(index, 300)) for index in range(50)]
    save(tmp_path / "a", [entries])
    save(tmp_path / "b", [entries[::-1]])
    first, second = (sketch_path(tmp_path / name, step=0, global_rank=0).read_bytes() for name in "ab")
    assert first == second
    assert len(first) / 50 < 700


def test_nan_is_counted_through_files(tmp_path: Path) -> None:
    tensor = torch.tensor([1.0, math.nan, math.inf])
    save(tmp_path, [[entry(whole(W, (3,)), tensor)]])
    found = open_sketches(tmp_path).sketch(key()).sketch
    assert (found.num_nan, found.num_infinite, found.norm) == (1, 1, 1.0)


def test_a_sink_refuses_what_is_given_twice_or_does_not_fit(tmp_path: Path) -> None:
    sink = open_sink(tmp_path, 0, 1)
    sink.add(entry(whole(W, (3,)), torch.ones(3)))
    with pytest.raises(TraceError) as caught:
        sink.add(entry(whole(W, (3,)), torch.ones(3)))
    assert str(caught.value) == f"step 0, global rank 0: gradient of {W} is given twice"
    with pytest.raises(TraceError) as caught:
        sink.add(entry(whole("v", (3,)), torch.ones(4)))
    assert str(caught.value) == ("step 0, global rank 0: gradient of v: v has shape [4], its shard spec says [3]")
    with pytest.raises(TraceError, match=r"the shard spec contradicts itself"):
        sink.add(entry(ShardSpec(name="u", global_shape=(3,), local_shape=(2,)), torch.ones(2)))
    sink.add(entry(tokens([0, 1]), torch.ones(2, 5), kind="activation"))
    with pytest.raises(TraceError, match=r"has pieces of different form"):
        sink.add(entry(tokens([2]), torch.ones(1, 5).double(), kind="activation"))
    sink.add(entry(tokens([1, 2]), torch.ones(2, 5), kind="activation"))
    with pytest.raises(TraceError, match=r"global rank 0: 5 elements of the activation of .* are given twice"):
        sink.close(StepFooter())
    assert not has_sketches(tmp_path)


def test_a_step_is_written_once_and_a_closed_sink_takes_nothing(tmp_path: Path) -> None:
    sink, late = open_sink(tmp_path, 0, 1), open_sink(tmp_path, 0, 1)
    sink.close(StepFooter())
    with pytest.raises(TraceError, match=r"step 0, global rank 0: the trace of this step is closed"):
        sink.add(entry(whole(W, (3,)), torch.ones(3)))
    for action in (lambda: late.close(StepFooter()), lambda: open_sink(tmp_path, 0, 1)):
        with pytest.raises(TraceError, match=r"exists: this step is traced already; choose another output_dir"):
            action()


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "step_000000").write_text("in the way")
    with pytest.raises(TraceError, match=r"the trace cannot be written"):
        open_sink(tmp_path, 0, 1).close(StepFooter())
