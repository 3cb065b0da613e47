"""Traces of many ranks: what opening and merging them asks for grows with the parts alone, and no handle stays open."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.run_folder.inputs import open_inputs
from mock_scheduler.trace.entries import RankPlace, RowTable, StepFooter, TraceKey
from mock_scheduler.trace.full import part, reader
from mock_scheduler.trace.full.files import part_name, sketch_name
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.shards import ShardSpec, even_split, whole
from mock_scheduler.trace.sketch.files import SketchSink
from mock_scheduler.trace.sketch.opening import RankSketches, StoredSketch, open_sketch_steps
from mock_scheduler.trace.sketch.reader import SketchReader
from tests.trace.builders import NORM, entry, key, save

NUM_TENSORS = 3
CUT = "decoder.layers.0.mlp.linear_fc2.weight"
FOOTER = StepFooter(rows=RowTable(identities=("train/0", "train/1"), lengths=(2, 3)), update_rows=((0, 1),))


def cut_spec(rank: int, num_ranks: int) -> ShardSpec:
    """A matrix of 64 rows that ranks share."""
    splits = even_split(0, size=64, rank=rank, num_ranks=num_ranks)
    return ShardSpec(name=CUT, global_shape=(64, 2), local_shape=(64 // num_ranks, 2), splits=splits)


def save_ranks(trace_dir: Path, num_ranks: int) -> Path:
    """A step in which each rank has copies of two vectors, and its share of a matrix."""
    matrix = torch.arange(128.0).view(64, 2)
    for rank in range(num_ranks):
        spec = cut_spec(rank, num_ranks)
        entries = [entry(whole(f"{NORM}.{number}", (4,)), torch.ones(4)) for number in range(NUM_TENSORS - 1)]
        rows = slice(rank * 64 // num_ranks, (rank + 1) * 64 // num_ranks)
        save(trace_dir, rank, num_ranks, [*entries, entry(spec, matrix[rows])], footer=FOOTER)
    return trace_dir


@dataclass
class Opened:
    """How many files were opened, and the most that were mapped at once."""

    num_opens: int = 0
    num_mapped: int = 0
    most_mapped: int = 0


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Counts what readers of traces open from here on."""
    found = Opened()
    real = part.safe_open

    class Counted:
        def __init__(self, *arguments: object, **options: object) -> None:
            self.inner = real(*arguments, **options)
            found.num_opens += 1

        def __enter__(self) -> object:
            found.num_mapped += 1
            found.most_mapped = max(found.most_mapped, found.num_mapped)
            return self.inner.__enter__()

        def __exit__(self, *arguments: object) -> None:
            found.num_mapped -= 1
            self.inner.__exit__(*arguments)

    monkeypatch.setattr(part, "safe_open", Counted)
    return found


@pytest.mark.parametrize("num_ranks", [8, 32])
def test_each_header_is_read_once_and_each_file_mapped_once(tmp_path: Path, opened: Opened, num_ranks: int) -> None:
    save_ranks(tmp_path, num_ranks)
    with open_trace(tmp_path) as trace:
        assert opened.num_opens == num_ranks + 1  # the first one tells which ranks there are
        for wanted in trace.keys(0):
            trace.merge(wanted)
        assert opened.num_opens == 2 * num_ranks + 1
    assert opened.num_mapped == 0


def test_no_more_files_are_mapped_than_a_process_may_have(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_ranks(tmp_path, 16)
    monkeypatch.setattr(reader, "_MAX_MAPPED_FILES", 4)
    with open_trace(tmp_path) as trace:
        merged = trace.merge(key(CUT))
        assert (opened.num_mapped, opened.most_mapped) == (4, 4)
    assert torch.equal(merged.tensor, torch.arange(128.0).view(64, 2))
    assert opened.num_mapped == 0


def test_ranks_share_what_they_say_alike(tmp_path: Path) -> None:
    save_ranks(tmp_path, 4)
    with open_trace(tmp_path) as trace:
        rows = [footer.rows for _, footer in trace.footers(0)]
        norms = trace.pieces(key(f"{NORM}.0"))
    assert rows[0] == FOOTER.rows
    assert all(table is rows[0] for table in rows)
    assert len(norms) == 4
    assert all(piece.record.key is norms[0].record.key and piece.spec is norms[0].spec for piece in norms)


def save_one_of(trace_dir: Path, *, world_size: int, missing: int) -> Path:
    """Rank 0 of many, beside files of all but one other, that are empty: reading any of them would be an error."""
    save(trace_dir, 0, world_size, [entry(whole(NORM, (4,)), torch.ones(4))])
    for rank in range(1, world_size):
        if rank != missing:
            (trace_dir / "step_000000" / part_name(rank)).touch()
    return trace_dir


def test_a_missing_rank_among_thousands_is_named_before_the_others_are_read(tmp_path: Path, opened: Opened) -> None:
    save_one_of(tmp_path, world_size=8192, missing=5170)
    with pytest.raises(TraceError) as caught:
        open_trace(tmp_path)
    problem = f"no file of global rank 5170 of 8192 ({part_name(5170)})"
    assert str(caught.value) == f"{tmp_path / 'step_000000'}: {problem}"
    assert opened.num_opens == 1


def save_any(trace_dir: Path, rank: int, world_size: int, *, is_sketch: bool) -> Path:
    """One rank's file, in which a vector lies."""
    place = RankPlace(global_rank=rank, coordinates={"tp": rank})
    kind = SketchSink if is_sketch else FullSink
    sink = kind(trace_dir, step=0, place=place, world_size=world_size)
    sink.add(entry(whole(NORM, (4,)), torch.ones(4)))
    sink.close(FOOTER)
    return trace_dir / "step_000000" / (sketch_name(rank) if is_sketch else part_name(rank))


def refusal(trace_dir: Path, *, is_sketch: bool) -> str:
    open_steps: Callable[[Path], object] = open_sketch_steps if is_sketch else open_trace
    with pytest.raises(TraceError) as caught:
        open_steps(trace_dir)
    return str(caught.value)


@pytest.mark.parametrize("is_sketch", [False, True])
def test_a_file_that_is_misplaced_is_said_beside_the_rank_that_lacks_one(tmp_path: Path, is_sketch: bool) -> None:
    """Only "no file of global rank 1" was said of one that had been renamed."""
    for rank in range(2):
        last = save_any(tmp_path / "renamed", rank, 2, is_sketch=is_sketch)
    other = last.rename(last.with_name(last.name.replace("00001", "00002")))
    text = refusal(tmp_path / "renamed", is_sketch=is_sketch)
    assert other.name in text
    assert "of global rank 1" in text
    for rank, world_size in ((0, 4), (1, 2)):
        save_any(tmp_path / "stale", rank, world_size, is_sketch=is_sketch)
    text = refusal(tmp_path / "stale", is_sketch=is_sketch)
    assert "files of runs with different world sizes [2, 4]" in text
    assert "no file of global rank 2, 3 of 4" in text


@pytest.mark.parametrize("is_sketch", [False, True])
def test_a_folder_of_a_step_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sketch: bool
) -> None:
    folder = save_any(tmp_path, 0, 1, is_sketch=is_sketch).parent
    listed = Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path == folder:
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert refusal(tmp_path, is_sketch=is_sketch) == f"{folder}: cannot be looked into: Permission denied"


def test_missing_ranks_of_both_sides_are_said_at_once(tmp_path: Path) -> None:
    sides = [save_one_of(tmp_path / name, world_size=64, missing=rank) for name, rank in (("a", 3), ("b", 60))]
    with pytest.raises(TraceError) as caught:
        open_inputs((sides[0], sides[1]))
    problems = [
        f"{side / 'step_000000'}: no file of global rank {rank} of 64 ({part_name(rank)})"
        for side, rank in zip(sides, (3, 60), strict=True)
    ]
    assert str(caught.value) == "\n".join(problems)


def test_a_rank_begins_a_step_without_listing_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 0, 2, [])

    def refuse(*_: object) -> Iterator[str]:
        raise AssertionError("a thousand ranks would list the files of a thousand")

    monkeypatch.setattr("os.listdir", refuse)
    monkeypatch.setattr("os.scandir", refuse)
    save(tmp_path, 1, 2, [])
    with pytest.raises(TraceError, match=r"rank_00000\.part_000\.safetensors exists"):
        save(tmp_path, 0, 2, [])


class CountedTensors(dict[TraceKey, StoredSketch]):
    """The sketches of a rank; counts how often they are gone through, or looked into."""

    num_looks = 0

    def items(self) -> ItemsView[TraceKey, StoredSketch]:
        """Counts one look."""
        self.num_looks += 1
        return super().items()

    def __contains__(self, wanted: object) -> bool:
        self.num_looks += 1
        return super().__contains__(wanted)


def test_sketches_of_each_rank_are_gone_through_once(tmp_path: Path) -> None:
    for rank in range(4):
        place = RankPlace(global_rank=rank, coordinates={"tp": rank})
        sink = SketchSink(tmp_path, step=0, place=place, world_size=4)
        for number in range(NUM_TENSORS):
            sink.add(entry(whole(f"{NORM}.{number}", (4,)), torch.ones(4)))
        sink.close(StepFooter())
    steps: Mapping[int, tuple[RankSketches, ...]] = open_sketch_steps(tmp_path)
    ranks = tuple(replace(rank, tensors=CountedTensors(rank.tensors)) for rank in steps[0])
    trace = SketchReader({0: ranks})
    assert {trace.sketch(wanted).sketch.num_elements for wanted in trace.keys(0)} == {4}
    assert not trace.has(key("absent"))
    assert [rank.tensors.num_looks for rank in ranks if isinstance(rank.tensors, CountedTensors)] == [1] * 4
