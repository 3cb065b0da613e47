"""Small recordings on disk, of whole and of sharded steps, for the tests that read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.recording.manifest import Manifest, save_manifest
from mock_scheduler.recording.paths import file_name, step_name
from mock_scheduler.recording.shards import commit_shards
from mock_scheduler.recording.step.step_file import encode_step
from mock_scheduler.recording.storage import Storage, open_storage
from mock_scheduler.recording.writing.opening import WriterOptions, open_recording
from mock_scheduler.scheduler import RolloutRequest, RowShard
from tests.recording.builders import make_batch, make_contract, make_info

RUN_ID = "run-1"


def record(
    dump_dir: Path,
    steps: Iterable[int] = (0,),
    mode: str = "train",
    *,
    compression: Literal["none", "zstd"] = "none",
    **info: Any,
) -> None:
    """Record these steps, each of another batch of 4 trajectories; a second call adds to the recording."""
    writer = open_recording(
        str(dump_dir),
        contract=make_contract(),
        plan=(),
        provenance={},
        resume=False,
        options=WriterOptions(compression=compression, background=False),
        run_id=RUN_ID,
    )
    for step in steps:
        writer.write_step(make_batch(seed=step), make_info(step, **{"mode": mode, "run_id": RUN_ID, **info}))
    writer.close()


def write_shards(
    storage: Storage, parts: Sequence[RolloutBatch], *, step: int = 0, is_compressed: bool = False, **info: Any
) -> str:
    """Write one shard per part, without a commit; returns the step's name."""
    name = step_name(mode="train", scheduler_id="default", step=step)
    for index, part in enumerate(parts):
        shard = RowShard(index=index, count=len(parts))
        shard_info = make_info(step, **{"run_id": RUN_ID, **info, "shard": (index, len(parts))})
        pieces = encode_step(part, shard_info).pieces
        storage.publish(file_name(name, shard=shard, is_compressed=is_compressed), pieces)
    return name


def record_shards(dump_dir: Path, parts: Sequence[RolloutBatch], *, step: int = 0, **info: Any) -> str:
    """Record one sharded step with its manifest and commit; returns the step's name."""
    storage = open_storage(str(dump_dir))
    if not storage.exists("recording.json"):
        save_manifest(storage, Manifest(run_id=RUN_ID, contract=make_contract(), provenance={}))
    name = write_shards(storage, parts, step=step, **info)
    commit_shards(storage, name, count=len(parts))
    return name


def cut(batch: RolloutBatch, owners: Sequence[int], count: int) -> list[RolloutBatch]:
    """The batch's rows dealt to ``count`` parts: row i to part ``owners[i]``; groups need not be whole."""
    whole = replace(batch, group_size=None)
    return [whole.select([row for row, owner in enumerate(owners) if owner == index]) for index in range(count)]


def request(step: int = 0, **changes: Any) -> RolloutRequest:
    return RolloutRequest(**{"global_step": step, "batch_size": 4, **changes})
