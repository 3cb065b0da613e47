"""Writing beside the training: parts, bounded memory, and no error is lost."""

import threading
from pathlib import Path

import pytest
import torch

import mock_scheduler.trace.full.writing as writing
from mock_scheduler.config.instruments import TraceConfig
from mock_scheduler.errors import TraceError
from mock_scheduler.trace.entries import StepFooter, TraceSink
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.selection import open_sink
from mock_scheduler.trace.shards import whole
from mock_scheduler.trace.sketch.files import SketchSink
from tests.rank_traces import save_rank_trace
from tests.trace.builders import LOGPROBS, NORM, entry, key, place, refused, save_one, token_piece


def open_full(trace_dir: Path, *, part_bytes: int = 1 << 20) -> FullSink:
    return FullSink(trace_dir, step=0, place=place(0), world_size=1, part_bytes=part_bytes)


def part_names(trace_dir: Path) -> list[str]:
    return sorted(path.name for path in (trace_dir / "step_000000").iterdir())


def test_a_part_is_ended_when_it_has_its_size(tmp_path: Path) -> None:
    """16 bytes each: two fill a part of 24, so of five the parts have 2, 2 and 1."""
    sink = open_full(tmp_path, part_bytes=24)
    for index in range(5):
        sink.add(entry(whole(f"w{index}", (4,)), torch.full((4,), float(index))))
    sink.close(StepFooter(kinds=("gradient",)))
    assert part_names(tmp_path) == [f"rank_00000.part_00{part}.safetensors" for part in range(3)]
    with open_trace(tmp_path) as reader:
        by_part = [reader.pieces(key(f"w{index}"))[0].path.name[-15:-12] for index in range(5)]
        values = [reader.merge(key(f"w{index}")).tensor.tolist() for index in range(5)]
        assert reader.footer(0).kinds == ("gradient",)
    assert by_part == ["000", "000", "001", "001", "002"]
    assert values == [[float(index)] * 4 for index in range(5)]


def test_a_part_is_ended_when_it_has_many_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_MAX_PIECES", 2)
    sink = open_full(tmp_path)
    for index in range(3):
        sink.add(entry(whole(f"w{index}", ()), torch.tensor(0.0)))
    sink.close(StepFooter())
    assert len(part_names(tmp_path)) == 2


def test_micro_batches_in_several_parts_merge(tmp_path: Path) -> None:
    tensor = torch.arange(9.0)
    sink = open_full(tmp_path, part_bytes=12)
    for tokens in ([5, 6, 7, 8], [0, 1], [2, 3, 4]):
        sink.add(token_piece(tensor, tokens))
    sink.close(StepFooter())
    assert len(part_names(tmp_path)) == 3
    with open_trace(tmp_path) as reader:
        assert torch.equal(reader.merge(key(LOGPROBS, kind="output")).tensor, tensor)


def test_what_was_given_may_change_at_once(tmp_path: Path) -> None:
    sink = open_full(tmp_path)
    tensor = torch.arange(6.0).reshape(2, 3).T
    sink.add(entry(whole(NORM, (3, 2)), tensor))
    tensor.zero_()
    sink.close(StepFooter())
    with open_trace(tmp_path) as reader:
        assert reader.merge(key(NORM)).tensor.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_one_part_has_the_bytes_that_writing_it_at_once_gives(tmp_path: Path) -> None:
    entries = [entry(whole(name, (2,)), torch.ones(2)) for name in "ab"]
    sink = open_full(tmp_path / "a")
    for item in entries:
        sink.add(item)
    sink.close(StepFooter())
    path = save_rank_trace(
        tmp_path / "b", step=0, global_rank=0, world_size=1, coordinates=place(0).coordinates, entries=entries
    )
    assert (tmp_path / "a" / "step_000000" / path.name).read_bytes() == path.read_bytes()


def test_at_most_two_parts_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first part is being written a second one can be filled, but not a third be begun."""
    may_write, has_begun = threading.Event(), threading.Event()
    write_part = writing.write_part

    def slow_write(*args: object, **kwargs: object) -> str:
        has_begun.set()
        assert may_write.wait(10)
        return write_part(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(writing, "write_part", slow_write)
    sink = open_full(tmp_path, part_bytes=8)
    sink.add(entry(whole("a", (2,)), torch.ones(2)))
    assert has_begun.wait(10)
    sink.add(entry(whole("b", (1,)), torch.ones(1)))
    filler = threading.Thread(target=sink.add, args=(entry(whole("c", (1,)), torch.ones(1)),))
    filler.start()
    filler.join(0.2)
    assert filler.is_alive()
    may_write.set()
    filler.join(10)
    sink.close(StepFooter())
    assert len(part_names(tmp_path)) == 3


def break_folder(trace_dir: Path) -> None:
    """Put a file where the step's folder would be made, so that nothing can be written."""
    trace_dir.mkdir(exist_ok=True)
    (trace_dir / "step_000000").write_text("", encoding="utf-8")


def add_two(sink: FullSink) -> None:
    """Two parts: the second waits for the one that is being written."""
    for index in range(2):
        sink.add(entry(whole(f"b{index}", (1,)), torch.ones(1)))


def test_a_failed_background_write_surfaces_at_the_next_call_and_stays(tmp_path: Path) -> None:
    break_folder(tmp_path)
    sink = open_full(tmp_path, part_bytes=4)
    sink.add(entry(whole("a", (1,)), torch.ones(1)))
    message = r"rank_00000\.part_000\.safetensors: the trace cannot be written: .*step_000000"
    with pytest.raises(TraceError, match=message):
        add_two(sink)
    with pytest.raises(TraceError, match=message):
        sink.add(entry(whole("c", (1,)), torch.ones(1)))
    with pytest.raises(TraceError, match=message):
        sink.close(StepFooter())


def test_a_failed_last_write_surfaces_when_closed(tmp_path: Path) -> None:
    break_folder(tmp_path)
    sink = open_full(tmp_path)
    sink.add(entry(whole("a", (1,)), torch.ones(1)))
    with pytest.raises(TraceError, match="the trace cannot be written"):
        sink.close(StepFooter())


def test_a_disk_that_fills_up_leaves_nothing_and_the_step_can_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts before the one that did not fit stayed, so that the step was neither whole nor could be repeated."""
    sink = open_full(tmp_path, part_bytes=4)
    sink.add(entry(whole("a", (1,)), torch.ones(1)))
    sink.add(entry(whole("b", (1,)), torch.ones(1)))

    def full(tensors: dict[str, torch.Tensor], path: Path, **_: object) -> None:
        path.write_bytes(b"half of a part")
        raise OSError(28, "No space left on device")

    sink._jobs.flush()
    assert part_names(tmp_path) == ["rank_00000.part_000.safetensors", "rank_00000.part_001.safetensors"]
    with monkeypatch.context() as patched:
        patched.setattr("mock_scheduler.trace.full.files.save_file", full)
        with pytest.raises(TraceError, match="No space left on device"):
            sink.close(StepFooter())
    assert not list(tmp_path.iterdir())
    save_one(tmp_path)
    with open_trace(tmp_path) as reader:
        assert reader.steps == (0,)


def test_a_step_that_is_given_up_leaves_neither_parts_nor_a_thread(tmp_path: Path) -> None:
    """Its parts stayed, so that the same step in the same folder was refused as traced already."""
    threads = set(threading.enumerate())
    other = save_rank_trace(tmp_path, step=0, global_rank=1, world_size=2, coordinates={}, entries=[])
    sink = open_full(tmp_path, part_bytes=4)
    for name in ("a", "b", "c"):
        sink.add(entry(whole(name, (1,)), torch.ones(1)))
    sink.abandon()
    assert part_names(tmp_path) == [other.name]
    assert set(threading.enumerate()) <= threads
    with pytest.raises(TraceError, match="the trace of this step is closed"):
        sink.close(StepFooter())
    open_full(tmp_path).abandon()


def test_giving_up_what_was_closed_removes_nothing(tmp_path: Path) -> None:
    sink = open_full(tmp_path)
    sink.close(StepFooter())
    sink.abandon()
    assert part_names(tmp_path) == ["rank_00000.part_000.safetensors"]


@pytest.mark.parametrize(("first", "second"), [("full", "sketch"), ("sketch", "full")])
def test_a_step_has_one_level(tmp_path: Path, first: str, second: str) -> None:
    """Both could be in one folder, and a comparison read the one that it preferred."""
    open_level(tmp_path, first).close(StepFooter())
    with pytest.raises(
        TraceError, match="exists: this step is traced already; choose another output_dir or trace_dir, or"
    ):
        open_level(tmp_path, second)


def open_level(trace_dir: Path, level: str) -> TraceSink:
    config = TraceConfig.model_validate({"level": level})
    return open_sink(config, trace_dir, step=0, place=place(0), world_size=1)


def test_a_sink_that_is_not_closed_leaves_no_whole_step(tmp_path: Path) -> None:
    sink = open_full(tmp_path, part_bytes=4)
    sink.add(entry(whole("a", (1,)), torch.ones(1)))
    sink._jobs.flush()
    assert "has no last part" in refused(tmp_path)


def test_a_step_that_is_traced_is_refused_before_anything_is_collected(tmp_path: Path) -> None:
    path = save_one(tmp_path)
    with pytest.raises(TraceError) as caught:
        open_full(tmp_path)
    assert str(caught.value) == (
        f"{path} exists: this step is traced already; choose another output_dir or trace_dir, or remove the trace"
    )


def test_a_tensor_given_twice_is_refused_also_in_another_part(tmp_path: Path) -> None:
    sink = open_full(tmp_path, part_bytes=4)
    sink.add(entry(whole("a", (1,)), torch.ones(1)))
    with pytest.raises(TraceError, match="step 0, global rank 0: 000000/gradient/a is given twice"):
        sink.add(entry(whole("a", (1,)), torch.ones(1)))


def test_a_closed_sink_takes_nothing(tmp_path: Path) -> None:
    sink = open_full(tmp_path)
    sink.close(StepFooter())
    with pytest.raises(TraceError, match="step 0, global rank 0: the trace of this step is closed"):
        sink.add(entry(whole("a", (1,)), torch.ones(1)))
    with pytest.raises(TraceError, match="the trace of this step is closed"):
        sink.close(StepFooter())


@pytest.mark.parametrize(("level", "kind"), [("full", FullSink), ("sketch", SketchSink)])
def test_the_level_says_what_entries_go_into(tmp_path: Path, level: str, kind: type[TraceSink]) -> None:
    config = TraceConfig.model_validate({"level": level})
    assert isinstance(open_sink(config, tmp_path, step=0, place=place(0), world_size=1), kind)


def test_level_off_has_no_sink(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="level is off"):
        open_sink(TraceConfig(), tmp_path, step=0, place=place(0), world_size=1)
