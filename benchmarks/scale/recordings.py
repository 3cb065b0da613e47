"""Recordings as many ranks read them: requests and bytes of each; and recordings and rollout files of several sizes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from fsspec.implementations.memory import MemoryFileSystem

from benchmarks.recording import CODEC, SAMPLING, info, make_padded, open_writer
from mock_scheduler.adapters.imports.steps import ImportOptions
from mock_scheduler.adapters.slime.files import read_rollouts, write_rollouts
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.proxy.build import build_scheduler
from mock_scheduler.recording.contract import Contract
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.storage.byte_sources import FileSource
from mock_scheduler.recording.storage.local import LocalStorage
from mock_scheduler.scheduler import RolloutRequest, RowShard
from mock_scheduler.support.node_cache import FOLDER_VARIABLE, LIMIT_VARIABLE

NUM_STEPS = 8
_NUM_ROWS, _WIDTH, _MEAN_LENGTH = 64, 2048, 700

#: The requests of each kind of place: methods that ask a disk or a server for something.
_FOLDER_REQUESTS = ((LocalStorage, ("exists", "list_names", "open_source", "read_bytes")), (FileSource, ("read",)))
_STORE_REQUESTS = ((MemoryFileSystem, ("exists", "info", "ls", "cat_file")),)


Place = Literal["folder", "store", "node"]
"""A folder; an object store, each rank by itself; and one whose ranks are of one node, which keeps what they fetch."""


@dataclass(kw_only=True, slots=True)
class Requests:
    """What one rank asked for: to open the recording and check its plan, and to load all steps."""

    place: Place
    rank: int
    num_opening: int = 0
    num_loading: int = 0
    opening_bytes: int = 0
    loading_bytes: int = 0


def make_batch(num_rows: int, seed: int) -> RolloutBatch:
    """Makes the batch of an agentic step, without the tensors that a codec keeps beside it."""
    padded = make_padded(num_rows, _WIDTH, mean_length=_MEAN_LENGTH, seed=seed)
    return replace(CODEC.encode(padded, RolloutRequest(global_step=0, batch_size=num_rows)), extras={})


def write_recording(location: Path | str, num_rows: int, *, num_steps: int = 1) -> None:
    """Records steps of ``num_rows`` trajectories each."""
    writer = open_writer(location, background=False)
    for step in range(num_steps):
        writer.write_step(make_batch(num_rows, step), info(writer, step))
    writer.close()


def write_batches(folder: Path, num_rows: int) -> None:
    """Writes a rollout file of another framework, to be imported."""
    write_rollouts([("train", 0, make_batch(num_rows, 0))], folder / "rollouts")


def replay(folder: Path) -> str:
    """Replays the first step of a recording."""
    reader = RecordingReader(str(folder))
    (step,) = reader.steps()["train"]
    with reader_of(folder, [RolloutRequest(global_step=step, batch_size=1, has_open_size=True)]) as load:
        return f"{load(0)} rows"


def import_batches(folder: Path) -> str:
    """Reads a rollout file and records what it holds."""
    writer = open_writer(folder / "imported", background=False)
    num_rows = 0
    for step in read_rollouts(folder / "rollouts", ImportOptions(sampling=SAMPLING)):
        writer.write_step(step.batch, info(writer, step.step))
        num_rows += len(step.batch)
    writer.close()
    return f"{num_rows} rows"


@contextmanager
def reader_of(
    location: Path | str, plan: list[RolloutRequest], *, is_writer: bool = True, shard: RowShard | None = None
) -> Iterator[Callable[[int], int]]:
    """Opens a recording as a rank of a run that replays it; gives a function that loads a planned step."""

    def make_real() -> object:
        raise AssertionError("a replay builds no real scheduler")

    scheduler = build_scheduler(
        {"enable": True, "mode": "mock", "dump_dir": str(location)},
        make_real,
        Contract([]),
        plan=plan,
        is_writer=is_writer,
        shard=shard,
    )
    with scheduler:
        yield lambda index: len(scheduler.get_batch(plan[index]))


def count_requests(folder: Path, ranks: Sequence[int], num_ranks: int, *, is_sharded: bool) -> list[Requests]:
    """Counts what some of ``num_ranks`` ranks ask for that replay one recording, in each kind of place.

    is_sharded: each rank reads its own rows; else each reads all of them, and rank 0 alone checks every bit.
    """
    plan = [RolloutRequest(global_step=step, batch_size=_NUM_ROWS, policy_version=step) for step in range(NUM_STEPS)]
    found = []
    places: tuple[Place, ...] = ("folder", "store", "node")
    for place in places:
        location = str(folder / "recording") if place == "folder" else f"memory://{place}"
        write_recording(location, _NUM_ROWS, num_steps=NUM_STEPS)
        kinds: Any = _FOLDER_REQUESTS if place == "folder" else _STORE_REQUESTS
        kept = {FOLDER_VARIABLE: str(folder / "kept"), LIMIT_VARIABLE: "16" if place == "node" else "0"}
        for rank in ranks:
            counted = Requests(place=place, rank=rank)
            shard = RowShard(index=rank, count=num_ranks) if is_sharded else None
            with (
                patch.dict(os.environ, kept),
                _counting(kinds) as tally,
                reader_of(location, plan, is_writer=is_sharded or rank == 0, shard=shard) as load,
            ):
                counted.num_opening, counted.opening_bytes = tally
                for index in range(NUM_STEPS):
                    load(index)
                counted.num_loading = tally[0] - counted.num_opening
                counted.loading_bytes = tally[1] - counted.opening_bytes
            found.append(counted)
        if place != "folder":
            MemoryFileSystem.store.clear()
            MemoryFileSystem.pseudo_dirs[:] = [""]
    return found


@contextmanager
def _counting(kinds: tuple[tuple[type, tuple[str, ...]], ...]) -> Iterator[list[int]]:
    """Counts calls of methods, and the bytes that they give: a list of both."""
    tally, depth = [0, 0], [0]

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - of any method
            # One request may be made of others, which are no further ones.
            tally[0] += not depth[0]
            depth[0] += 1
            try:
                result = method(*arguments, **options)
            finally:
                depth[0] -= 1
            tally[1] += len(result) if isinstance(result, bytes | memoryview) and not depth[0] else 0
            return result

        return call

    with ExitStack() as stack:
        for kind, names in kinds:
            for name in names:
                stack.enter_context(patch.object(kind, name, counted(getattr(kind, name))))
        yield tally
