"""Equality is concluded from bits: a forged or stale SHA-256 in a trace is found and named."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from mock_scheduler.commands.compare import CompareOptions, run_compare, run_replicas
from mock_scheduler.comparison.pairing.selection import EVERYTHING
from mock_scheduler.errors import ExitCode, RecordingError, TraceError
from mock_scheduler.trace.entries import StepFooter
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.shards import Block, ShardSpec, Split, cut_shard, even_split, whole
from mock_scheduler.trace.sketch.files import SketchSink
from tests.recording.builders import make_batch, make_info
from tests.recording.recordings import open_writer
from tests.trace.builders import entry, flip_last_byte, forge_sha256, forge_tensor, key, place, save

NAME = "decoder.layers.0.mlp.linear_fc2.weight"
STORED = f"000000/gradient/{NAME}"
SHAPE = (6, 4)
VALUES = torch.arange(1.0, 25.0).view(SHAPE)


def write(folder: Path, values: torch.Tensor = VALUES, *, num_ranks: int = 1, num_copies: int = 1) -> list[Path]:
    """A trace whose tensor is split over ``num_ranks``, ``num_copies`` times; returns the files by rank."""
    paths = []
    for rank in range(num_ranks * num_copies):
        local = (SHAPE[0] // num_ranks, SHAPE[1])
        splits = even_split(0, size=SHAPE[0], rank=rank % num_ranks, num_ranks=num_ranks)
        spec = ShardSpec(name=NAME, global_shape=SHAPE, local_shape=local, splits=splits)
        paths.append(save(folder, rank, num_ranks * num_copies, [entry(spec, cut_shard(values, spec))]))
    return paths


def compare(baseline: Path, candidate: Path) -> int:
    return run_compare(baseline, candidate, CompareOptions(), console=Console(file=io.StringIO(), width=200))


def refused(baseline: Path, candidate: Path) -> str:
    with pytest.raises(TraceError) as caught:
        compare(baseline, candidate)
    assert caught.value.exit_code == ExitCode.USAGE
    return str(caught.value)


def said(path: Path) -> str:
    return f"{path}: {STORED} does not match its digest (SHA-256); the file was changed or damaged after it was written"


def flip_last_bit(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(torch.int32).view(-1)[-1] ^= 1
    return tensor


@pytest.mark.parametrize("change", [lambda tensor: tensor * 2 + 1, flip_last_bit, lambda tensor: -tensor])
def test_changed_values_behind_an_old_digest_are_found_and_named(
    tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """The digest of the header stood for the bits: every value could be another, and the verdict was identical."""
    write(tmp_path / "a")
    (path,) = write(tmp_path / "b")
    forge_tensor(path, STORED, change)
    assert refused(tmp_path / "a", tmp_path / "b") == said(path)
    assert refused(tmp_path / "b", tmp_path / "a") == said(path)


def test_a_digest_of_other_bits_is_found_where_the_bits_are_equal(tmp_path: Path) -> None:
    write(tmp_path / "a")
    (path,) = write(tmp_path / "b")
    forge_sha256(path, STORED)
    assert refused(tmp_path / "a", tmp_path / "b") == said(path)


def test_one_forged_shard_of_several_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a", num_ranks=3)
    paths = write(tmp_path / "b", num_ranks=3)
    forge_tensor(paths[1], STORED, flip_last_bit)
    assert refused(tmp_path / "a", tmp_path / "b") == said(paths[1])


def test_a_forged_shard_is_found_whatever_the_layouts_are(tmp_path: Path) -> None:
    """Digests of differently cut tensors have nothing in common: those of the first differing tensor are checked."""
    write(tmp_path / "a", num_ranks=2)
    paths = write(tmp_path / "b", num_ranks=3)
    forge_tensor(paths[2], STORED, lambda tensor: tensor * 2 + 1)
    assert refused(tmp_path / "a", tmp_path / "b") == said(paths[2])


def test_equal_bits_in_other_layouts_are_identical_and_other_values_diverge(tmp_path: Path) -> None:
    write(tmp_path / "a", num_ranks=2)
    write(tmp_path / "b", num_ranks=3)
    write(tmp_path / "c", VALUES * 2 + 1, num_ranks=2)
    assert compare(tmp_path / "a", tmp_path / "b") == ExitCode.ALIGNED
    assert compare(tmp_path / "a", tmp_path / "c") == ExitCode.DIVERGED


def test_other_padding_is_no_forgery(tmp_path: Path) -> None:
    """Rows that belong to no element of the tensor have a say in its digest, and none in the comparison."""
    spec = ShardSpec(
        name=NAME,
        global_shape=(2, 2),
        local_shape=(3, 2),
        splits=(Split(dim=0, blocks=(Block(local_start=0, global_start=0, length=2),)),),
    )
    for name, padding in (("a", 0.0), ("b", 7.0)):
        save(tmp_path / name, 0, 1, [entry(spec, torch.tensor([[1.0, 2.0], [3.0, 4.0], [padding, padding]]))])
    assert compare(tmp_path / "a", tmp_path / "b") == ExitCode.ALIGNED


def test_a_forged_copy_is_no_equal_copy(tmp_path: Path) -> None:
    """Copies of one digest were taken for equal, so that replicas said so of any values."""
    paths = write(tmp_path, num_copies=2)
    forge_tensor(paths[1], STORED, lambda tensor: tensor * 2 + 1)
    with open_trace(tmp_path) as reader, pytest.raises(TraceError, match=re.escape(said(paths[1]))):
        reader.merge(key(NAME))
    with pytest.raises(TraceError, match=re.escape(said(paths[1]))):
        run_replicas(tmp_path, EVERYTHING, console=Console(file=io.StringIO()))


def test_the_digest_of_an_equal_copy_is_checked_too(tmp_path: Path) -> None:
    paths = write(tmp_path, num_copies=2)
    forge_sha256(paths[1], STORED)
    with open_trace(tmp_path) as reader, pytest.raises(TraceError, match=re.escape(said(paths[1]))):
        reader.merge(key(NAME))


def test_copies_that_differ_are_still_a_conflict(tmp_path: Path) -> None:
    for rank, values in enumerate((VALUES, VALUES + 1)):
        save(tmp_path, rank, 2, [entry(whole(NAME, SHAPE), values)])
    with open_trace(tmp_path) as reader:
        assert [conflict.num_elements for conflict in reader.merge(key(NAME)).conflicts] == [24]


# --- Recordings and sketches ------------------------------------------------------------------------------------------


def record(folder: Path) -> Path:
    writer = open_writer(folder)
    writer.write_step(make_batch(seed=0), make_info(0, run_id=writer.run_id))
    writer.close()
    return folder / "train/step_000000.safetensors"


@pytest.mark.parametrize("is_forged", [False, True])
def test_a_recording_is_compared_by_its_bits_whatever_its_digests_say(tmp_path: Path, is_forged: bool) -> None:
    """``is_forged``: not a bit of the data is changed, but one of its digests in the header."""
    record(tmp_path / "a")
    path = record(tmp_path / "b")
    content = bytearray(path.read_bytes())
    if is_forged:
        content = bytearray(re.sub(rb"(blocks[^0-9a-f]{1,9})[0-9a-f]", rb"\g<1>0", bytes(content), count=1))
    else:
        content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=r"step_000000\.safetensors") as caught:
        compare(tmp_path / "a", tmp_path / "b")
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_changed_fingerprint_of_a_sketch_is_found_by_the_digest_of_its_table(tmp_path: Path) -> None:
    for name in "ab":
        sink = SketchSink(tmp_path / name, step=0, place=place(0), world_size=1)
        sink.add(entry(whole(NAME, SHAPE), VALUES))
        sink.close(StepFooter())
    assert compare(tmp_path / "a", tmp_path / "b") == ExitCode.ALIGNED
    (path,) = (tmp_path / "b").rglob("*.safetensors")
    flip_last_byte(path)
    assert "does not match its digest" in refused(tmp_path / "a", tmp_path / "b")
