"""Recordings that tests write, and what they look at in them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.writing.opening import RecordingWriter, WrittenStep, open_recording
from mock_scheduler.scheduler import RolloutRequest
from tests.recording.builders import make_batch, make_contract, make_info


def open_writer(dump_dir: Path | str, **changes: Any) -> RecordingWriter:
    values: dict[str, Any] = {"contract": make_contract(), "plan": (), "provenance": {}, "resume": False}
    return open_recording(str(dump_dir), **{**values, **changes})


def write(writer: RecordingWriter, steps: Iterable[int] = (0,), **info: Any) -> list[WrittenStep]:
    return [writer.write_step(make_batch(seed=step), make_info(step, run_id=writer.run_id, **info)) for step in steps]


def record(dump_dir: Path | str, steps: Iterable[int] = (0,), **changes: Any) -> RecordingWriter:
    writer = open_writer(dump_dir, **changes)
    write(writer, steps)
    writer.close()
    return writer


def request(step: int, **changes: Any) -> RolloutRequest:
    return RolloutRequest(**{"global_step": step, "batch_size": 4, **changes})


def plan(*steps: int) -> list[RolloutRequest]:
    return [request(step) for step in steps]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def loaded(dump_dir: Path | str, step: int, **changes: Any) -> RolloutBatch:
    return RecordingReader(str(dump_dir)).load_step(request(step, **changes)).batch
