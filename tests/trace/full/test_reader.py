"""Opening a trace: every file that is missing, swapped, doubled or of another run is named; what a trace holds."""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.trace.entries import LedgerCall, RowTable, StepFooter, TraceEntry
from mock_scheduler.trace.full import opening
from mock_scheduler.trace.full.part import Part
from mock_scheduler.trace.full.pieces import Shared
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.shards import ShardSpec, cut_shard, whole
from tests.trace.builders import (
    FC1,
    LOGPROBS,
    NORM,
    ROWS,
    entry,
    flip_last_byte,
    gated_spec,
    key,
    place,
    refused,
    refused_merge,
    save,
    token_piece,
)


def save_ranks(trace_dir: Path, num_ranks: int = 2, *, value: float = 1.0) -> list[Path]:
    """A step of ranks that all hold one number."""
    return [
        save(trace_dir, rank, num_ranks, [entry(whole(NORM, (1,)), torch.full((1,), value))])
        for rank in range(num_ranks)
    ]


def write_parts(trace_dir: Path, entries: Sequence[TraceEntry]) -> list[Path]:
    """One rank's step with a part for each entry, and an empty last one."""
    sink = FullSink(trace_dir, step=0, place=place(0), world_size=1, part_bytes=1)
    for item in entries:
        sink.add(item)
    sink.close(StepFooter())
    return sorted((trace_dir / "step_000000").iterdir())


def test_a_file_that_a_link_leads_to_is_opened_anew_where_it_was_written_again(tmp_path: Path) -> None:
    """The link was looked at, which stayed as it was."""
    trace = tmp_path / "trace"
    (path,) = save_ranks(trace, 1)
    stored = path.rename(trace / "stored")
    path.symlink_to(stored)
    with open_trace(trace) as reader:
        assert {item.name for item in reader.keys(0)} == {NORM}
    save(tmp_path / "other", 0, 1, [entry(whole("other", (1,)), torch.ones(1))]).replace(stored)
    with open_trace(trace) as reader:
        assert {item.name for item in reader.keys(0)} == {"other"}


def test_opened_steps_are_kept_up_to_a_number_of_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were kept by a number of files, whatever these held."""
    monkeypatch.setattr(opening, "_KEPT", opening._KeptSteps())
    monkeypatch.setattr(opening, "_MOST_PIECES_KEPT", 5)
    read: list[Path] = []
    read_part = opening.read_part

    def noted(path: Path, trace_dir: Path, *, shared: Shared | None = None) -> Part:
        if shared is not None:  # not the first look at who writes
            read.append(path)
        return read_part(path, trace_dir, shared=shared)

    monkeypatch.setattr(opening, "read_part", noted)
    two, other, six = (tmp_path / name for name in ("two", "other", "six"))
    for folder, num_ranks in ((two, 2), (other, 2), (six, 6)):
        save_ranks(folder, num_ranks)
    num_read = []
    for folder in (two, other, two, six, two, six):
        read.clear()
        open_trace(folder).close()
        num_read.append(len(read))
    assert num_read == [2, 2, 0, 6, 2, 6]


def test_a_missing_rank_file_is_an_error_naming_the_rank(tmp_path: Path) -> None:
    save_ranks(tmp_path)[1].unlink()
    problem = "no file of global rank 1 of 2 (rank_00001.part_000.safetensors)"
    assert refused(tmp_path) == f"{tmp_path / 'step_000000'}: {problem}"


def test_swapped_rank_files_are_an_error_naming_both(tmp_path: Path) -> None:
    first, second = save_ranks(tmp_path)
    aside = first.rename(tmp_path / "aside")
    second.rename(first)
    aside.rename(second)
    assert refused(tmp_path) == (
        f"{tmp_path / 'step_000000'}: rank_00000.part_000.safetensors holds part 0 of step 0 of global rank 1; "
        "rank_00001.part_000.safetensors holds part 0 of step 0 of global rank 0"
    )


def test_a_rank_file_in_place_of_another_is_an_error_naming_both(tmp_path: Path) -> None:
    first, second = save_ranks(tmp_path)
    shutil.copy(first, second)
    assert refused(tmp_path) == (
        f"{tmp_path / 'step_000000'}: rank_00001.part_000.safetensors holds part 0 of step 0 of global rank 0; "
        "rank_00000.part_000.safetensors and rank_00001.part_000.safetensors are both part 0 of global rank 0; "
        "no file of global rank 1 of 2"
    )


def test_a_rank_file_that_is_there_twice_is_an_error(tmp_path: Path) -> None:
    path = save_ranks(tmp_path, 1)[0]
    shutil.copy(path, path.with_name("rank_000000.part_000.safetensors"))
    assert refused(tmp_path) == (
        f"{path.parent}: rank_00000.part_000.safetensors and rank_000000.part_000.safetensors are both part 0 of "
        "global rank 0"
    )


def test_a_step_in_the_folder_of_another_is_an_error(tmp_path: Path) -> None:
    save_ranks(tmp_path, 1)
    (tmp_path / "step_000000").rename(tmp_path / "step_000004")
    assert refused(tmp_path) == (
        f"{tmp_path / 'step_000004'}: rank_00000.part_000.safetensors holds part 0 of step 0 of global rank 0"
    )


def test_files_of_runs_with_different_world_sizes_are_an_error(tmp_path: Path) -> None:
    save(tmp_path, 0, 1, [])
    save(tmp_path, 1, 2, [])
    assert refused(tmp_path) == f"{tmp_path / 'step_000000'}: files of runs with different world sizes [1, 2]"


def test_a_missing_part_is_an_error_naming_it(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, [entry(whole(name, (1,)), torch.ones(1)) for name in "abc"])
    assert [path.name for path in paths] == [f"rank_00000.part_00{part}.safetensors" for part in range(4)]
    paths[1].unlink()
    paths[2].unlink()
    assert refused(tmp_path) == f"{tmp_path / 'step_000000'}: no part 1, 2 of 4 of global rank 0"


def test_a_missing_last_part_is_an_error(tmp_path: Path) -> None:
    write_parts(tmp_path, [entry(whole(name, (1,)), torch.ones(1)) for name in "ab"])[-1].unlink()
    assert refused(tmp_path) == (
        f"{tmp_path / 'step_000000'}: global rank 0 has no last part, only part 0, 1: it did not end this step, or a "
        "file is lost"
    )


def test_a_part_of_another_run_is_an_error(tmp_path: Path) -> None:
    ours, theirs = (
        write_parts(tmp_path / run, [entry(whole("a", (1,)), torch.full((1,), value))])
        for run, value in (("ours", 1.0), ("theirs", 2.0))
    )
    shutil.copy(theirs[0], ours[0])
    assert refused(tmp_path / "ours") == (
        f"{ours[0].parent}: rank_00000.part_000.safetensors is not of the same run as rank_00000.part_001.safetensors"
    )


def test_a_part_beyond_the_last_is_an_error(tmp_path: Path) -> None:
    ours = write_parts(tmp_path / "ours", [])
    theirs = write_parts(tmp_path / "theirs", [entry(whole(name, (1,)), torch.ones(1)) for name in "ab"])
    shutil.copy(theirs[1], ours[0].parent)
    assert refused(tmp_path / "ours") == (
        f"{ours[0].parent}: rank_00000.part_001.safetensors beyond the 1 parts of global rank 0"
    )


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (StepFooter(rows=RowTable(identities=("a",), lengths=(2,)), update_rows=((0,),)), "rows, update_rows"),
        (StepFooter(kinds=("gradient",), patterns=("*.weight",), exclude=("x",)), "kinds, patterns, exclude"),
    ],
)
def test_ranks_that_do_not_say_the_same_of_a_step_are_an_error(tmp_path: Path, other: StepFooter, what: str) -> None:
    save(tmp_path, 0, 2, [])
    save(tmp_path, 1, 2, [], footer=other)
    assert refused(tmp_path) == f"{tmp_path / 'step_000000'}: global rank 1 says other {what} than global rank 0"


def test_only_the_ranks_that_write_the_trace_must_be_there(tmp_path: Path) -> None:
    footer = StepFooter(ranks=(0, 2))
    for rank in (0, 2):
        save(tmp_path, rank, 4, [], footer=footer)
    with open_trace(tmp_path) as reader:
        assert ([item.global_rank for item in reader.ranks(0)], reader.is_complete(0)) == ([0, 2], False)
    save(tmp_path, 1, 4, [], footer=footer)
    stranger = "a file of global rank 1, where ranks 0, 2 write the trace"
    assert refused(tmp_path) == f"{tmp_path / 'step_000000'}: {stranger}"
    (tmp_path / "step_000000" / "rank_00002.part_000.safetensors").unlink()
    assert refused(tmp_path) == (
        f"{tmp_path / 'step_000000'}: no file of global rank 2 of 4 (rank_00002.part_000.safetensors)"
    )


def test_a_step_that_no_rank_ended_is_an_error(tmp_path: Path) -> None:
    path = save_ranks(tmp_path, 1)[0]
    path.rename(path.with_name(".rank_00000.part_000.safetensors.1.tmp"))
    assert refused(tmp_path) == (
        f"{tmp_path / 'step_000000'}: no rank file; the run ended before any rank wrote this step"
    )


def test_no_trace_is_an_error_that_says_how_to_get_one(tmp_path: Path) -> None:
    assert refused(tmp_path) == f"{tmp_path}: no trace here; run with trace.level=full"


def test_a_rank_without_entries_still_counts(tmp_path: Path) -> None:
    save(tmp_path, 0, 2, [entry(whole(NORM, (1,)), torch.ones(1))])
    save(tmp_path, 1, 2, [])
    with open_trace(tmp_path) as reader:
        assert reader.ranks(0) == (place(0), place(1))
        assert reader.keys(0) == {key(NORM)}
        assert [reader.has(key(NORM)), reader.has(key(FC1)), reader.has(key(NORM, step=7))] == [True, False, False]
    assert refused_merge(tmp_path, key(FC1)) == f"no rank wrote the {key(FC1).describe()}"


def test_steps_updates_and_kinds_are_told_apart_and_no_writing_file_is_left(tmp_path: Path) -> None:
    spec = whole(NORM, ())
    for step in range(2):
        entries = [
            entry(spec, torch.tensor(100.0 * step + 10 * update + position), kind=kind, update=update)
            for update in range(2)
            for position, kind in enumerate(("gradient", "parameter"))
        ]
        save(tmp_path, 0, 1, entries, step=step)
    with open_trace(tmp_path) as reader:
        assert reader.steps == (0, 1)
        assert reader.merge(key(NORM, kind="parameter", step=1, update=1)).tensor.item() == 111.0
        assert reader.merge(key(NORM, step=0, update=1)).tensor.item() == 10.0
    assert [path.name for path in (tmp_path / "step_000000").iterdir()] == ["rank_00000.part_000.safetensors"]


def test_what_a_trace_says_of_a_tensor(tmp_path: Path) -> None:
    tensor = torch.ones(9, 2, dtype=torch.bfloat16)
    for rank in range(2):
        piece = token_piece(tensor, [0, 1, 2], name=LOGPROBS, channels=[rank], is_masked=True)
        norm = ShardSpec(name=NORM, global_shape=(4,), local_shape=(4,), flat_range=(2 * rank, 2 * rank + 2))
        save(tmp_path, rank, 2, [piece, entry(norm, torch.ones(2))], footer=StepFooter(rows=ROWS))
    with open_trace(tmp_path) as reader:
        logprobs = key(LOGPROBS, kind="output")
        assert reader.dtype_and_shape(logprobs) == (torch.bfloat16, (9, 2))
        assert (reader.dims(logprobs), reader.is_masked(logprobs)) == (("token", "channel"), True)
        assert (reader.dims(key(NORM)), reader.is_masked(key(NORM))) == ((), False)
        assert reader.size_bytes(0) == 2 * (3 * 2 + 2 * 4)
        assert [piece.place for piece in reader.pieces(logprobs)] == [place(0), place(1)]
        assert reader.footer(0).rows == ROWS


def test_holders_are_the_ranks_that_have_an_element(tmp_path: Path) -> None:
    for rank, spec in enumerate(
        [gated_spec(0), gated_spec(0, flat_range=(0, 5)), gated_spec(0, flat_range=(5, 12)), gated_spec(1)]
    ):
        save(tmp_path, rank, 4, [entry(spec, cut_shard(torch.zeros(8, 3), spec))])
    with open_trace(tmp_path) as reader:
        # Row 1 of the whole tensor is row 1 of rank 0's local one, and row 4 its row 2, of elements 6 to 8.
        found = {index: reader.holders(key(FC1), index) for index in [(0, 2), (1, 1), (1, 2), (4, 0), (2, 0)]}
    assert {index: [item.global_rank for item in places] for index, places in found.items()} == {
        (0, 2): [0, 1],
        (1, 1): [0, 1],
        (1, 2): [0, 2],
        (4, 0): [0, 2],
        (2, 0): [3],
    }


def test_each_rank_has_a_footer_of_its_own(tmp_path: Path) -> None:
    calls = [(LedgerCall(operation="all_reduce", group=(0, rank), dtype="int64", num_elements=1),) for rank in range(2)]
    footers = [replace(StepFooter(rows=ROWS), ledgers={"collective": call}) for call in calls]
    for rank, footer in enumerate(footers):
        save(tmp_path, rank, 2, [], footer=footer)
    with open_trace(tmp_path) as reader:
        assert reader.footers(0) == tuple((place(rank), footers[rank]) for rank in range(2))


def test_verify_reads_everything_and_names_every_damage(tmp_path: Path) -> None:
    paths = [save(tmp_path, 0, 1, [entry(whole(NORM, (4,)), torch.ones(4))], step=step) for step in range(3)]
    with open_trace(tmp_path) as reader:
        assert reader.verify() == 48
    for path in paths[1:]:
        flip_last_byte(path)
    with open_trace(tmp_path) as reader, pytest.raises(TraceError) as caught:
        reader.verify()
    stored = f"000000/gradient/{NORM} does not match its digest (CRC-32)"
    assert str(caught.value) == (
        f"{paths[1]}: {stored}; {paths[2]}: {stored}; the file was changed or damaged after it was written"
    )


def test_a_damaged_replica_is_found_although_its_digest_is_that_of_the_other(tmp_path: Path) -> None:
    second = save_ranks(tmp_path)[1]
    flip_last_byte(second)
    assert refused_merge(tmp_path, key(NORM)).startswith(f"{second}: 000000/gradient/{NORM} does not match")


def test_merged_tensors_outlive_the_reader_and_writing_to_them_changes_no_file(tmp_path: Path) -> None:
    save_ranks(tmp_path, 1)
    with open_trace(tmp_path) as reader:
        tensor = reader.merge(key(NORM)).tensor
    tensor += 1
    assert tensor.tolist() == [2.0]
    with open_trace(tmp_path) as reader:
        assert reader.merge(key(NORM)).tensor.tolist() == [1.0]


def test_two_traces_are_read_at_once_by_two_threads(tmp_path: Path) -> None:
    names = [f"w{index}" for index in range(20)]
    for run in "ab":
        entries = [entry(whole(name, (64,)), torch.full((64,), float(ord(run)))) for name in names]
        for step in range(2):
            save(tmp_path / run, 0, 1, entries, step=step)

    def read(run: str) -> set[float]:
        with open_trace(tmp_path / run) as reader:
            found = [reader.merge(wanted).tensor for step in range(2) for wanted in reader.keys(step)]
        return {value for tensor in found for value in tensor.tolist()}

    with ThreadPoolExecutor(2) as executor:
        assert list(executor.map(read, "ab")) == [{97.0}, {98.0}]
