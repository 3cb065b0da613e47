"""Reads a recording through memory maps; any number of processes may read at once, without communication.

Contract: nothing is invented. A step that is absent, damaged, misplaced or of another run is an error that names it.
The first load of a step verifies every digest; later loads by the same reader verify the header only. What a check of
the plan verified is verified again by the first load, since a training may lie between.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import CorruptRecordingError, RecordingError, StepNotFoundError
from mock_scheduler.recording.container import (
    StepHeader,
    StepInfo,
    decode_step,
    read_header_size,
    read_step_header,
)
from mock_scheduler.recording.manifest import load_manifest
from mock_scheduler.recording.paths import (
    check_inside,
    format_present,
    list_steps,
    request_path,
    step_folder,
)
from mock_scheduler.scheduler import RolloutRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """A step as read."""

    path: str
    batch: RolloutBatch
    info: StepInfo


class RecordingReader:
    """An opened recording; opening raises ``StepNotFoundError`` where ``dump_dir`` holds none."""

    def __init__(self, dump_dir: str) -> None:
        self.dump_dir = dump_dir
        self.manifest = load_manifest(dump_dir)
        self._verified: set[str] = set()

    def steps(self) -> dict[str, list[int]]:
        """Folder name (``train``, ``val``, ``train.{scheduler_id}``) -> steps present."""
        return list_steps(self.dump_dir)

    def check_plan(self, plan: Sequence[RolloutRequest], *, verify: bool = False) -> int:
        """Check that every step that will be asked for is there, whole by size and header, and the one asked for.

        ``verify``: read all of each file and check every digest and the number of trajectories too, as loading it
        will. Returns the number of bytes that were read for that. Raises ``StepNotFoundError`` listing all that are
        absent, ``CorruptRecordingError`` or ``RecordingError``.
        """
        missing = [request for request in plan if not os.path.isfile(request_path(self.dump_dir, request))]
        if missing:
            raise StepNotFoundError(_missing_text(self.dump_dir, missing))
        for request in plan:
            path = request_path(self.dump_dir, request)
            check_inside(self.dump_dir, path)
            if verify:
                self._read_step(path, request, verify=True)
            else:
                self._check_info(read_step_info(path), request, path)
        return sum(os.path.getsize(request_path(self.dump_dir, request)) for request in plan) if verify else 0

    def load_step(self, request: RolloutRequest) -> RecordedStep:
        """The recorded answer to ``request``; its tensors are views of a private memory map.

        Raises ``StepNotFoundError`` with the steps present and the likely causes, ``CorruptRecordingError`` naming
        file and tensor, ``RecordingError`` where the file holds another step or another number of trajectories.
        """
        path = request_path(self.dump_dir, request)
        if not os.path.isfile(path):
            raise StepNotFoundError(_missing_text(self.dump_dir, [request]))
        check_inside(self.dump_dir, path)
        step = self._read_step(path, request, verify=path not in self._verified)
        self._verified.add(path)
        return step

    def _read_step(self, path: str, request: RolloutRequest, *, verify: bool) -> RecordedStep:
        batch, info = decode_step(_map_file(path), source=path, verify=verify)
        self._check_info(info, request, path)
        if batch.num_trajectories != request.batch_size:
            raise RecordingError(
                f"[Rollout Mock] {path} holds {batch.num_trajectories} trajectories; the run asks for "
                f"{request.batch_size}. Use the batch size of the recording, or record again."
            )
        return RecordedStep(path=path, batch=batch, info=info)

    def _check_info(self, info: StepInfo, request: RolloutRequest, path: str) -> None:
        values = (
            ("step", info.step, request.global_step),
            ("mode", info.mode, request.mode),
            ("scheduler_id", info.scheduler_id, request.scheduler_id),
            ("run_id", info.run_id, self.manifest.run_id),
        )
        wrong = [f"{name} {found!r} instead of {expected!r}" for name, found, expected in values if found != expected]
        if wrong:
            raise RecordingError(
                f"[Rollout Mock] {path} holds another step than its name says: {', '.join(wrong)}. "
                "It was renamed, moved or copied from another recording: restore it or record again."
            )


def read_step_info(path: str) -> StepInfo:
    """What a step file says about itself, from its header alone; raises as ``decode_step``."""
    content = _read_header(path).document["content"]
    try:
        return StepInfo(**content["info"])
    except (KeyError, TypeError) as error:
        raise CorruptRecordingError(f"{path}: content is no rollout batch: {error!r}") from error


def _read_header(path: str) -> StepHeader:
    with open(path, "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        head = file.read(read_header_size(prefix, size_bytes, source=path))
    return read_step_header(prefix, head, size_bytes, source=path)


def _map_file(path: str) -> bytearray | mmap.mmap:
    """The file as a private map: what a caller writes into a tensor never reaches the disk."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return bytearray()
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _missing_text(dump_dir: str, missing: Sequence[RolloutRequest]) -> str:
    by_folder: dict[str, list[int]] = {}
    for request in missing:
        by_folder.setdefault(step_folder(request.mode, request.scheduler_id), []).append(request.global_step)
    modes = ", ".join(dict.fromkeys(request.mode for request in missing))
    first = request_path(dump_dir, missing[0])
    if len(missing) == 1:
        head, reason = first, f"Step {missing[0].global_step} was not run in dump mode"
    else:
        head = f"{first} (and {len(missing) - 1} more)"
        reason = f"Steps {format_present(by_folder)} were not run in dump mode"
    return (
        f"[Rollout Mock] Mock file not found: {head}\n"
        "Possible reasons:\n"
        f"  1. {reason}\n"
        f"  2. dump_dir configuration is incorrect: {dump_dir}\n"
        f"  3. mode mismatch (current: {modes})\n"
        f"Steps present: {format_present(list_steps(dump_dir))}\n"
        "Please run in dump mode first to ensure all step data is generated."
    )
