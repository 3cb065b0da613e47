"""Writes a recording: the manifest with the first step, then one file per step.

Contract: one process writes. A step's presence is its completeness; an existing step is never replaced.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.digests import JSON
from mock_scheduler.errors import MockSchedulerError, RecordingError, StepExistsError
from mock_scheduler.recording.container import StepInfo, encode_step
from mock_scheduler.recording.contract import Contract, check_contract
from mock_scheduler.recording.manifest import Manifest, collect_provenance, load_manifest, save_manifest
from mock_scheduler.recording.paths import (
    MANIFEST_NAME,
    check_inside,
    check_writable,
    format_present,
    list_steps,
    publish_file,
    request_path,
    step_path,
)
from mock_scheduler.recording.reader import RecordingReader, read_step_info
from mock_scheduler.scheduler import RolloutRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenStep:
    """A step that is on disk. ``was_present``: an earlier part of the run had recorded this very batch."""

    path: str
    size_bytes: int
    was_present: bool = False


class RecordingWriter:
    """An opened recording of one run; its run id goes into every step file.

    The manifest is written just before the first step, so that a run that fails earlier leaves no recording.
    ``is_new``: there is no manifest yet; otherwise an earlier part of the run is continued.
    """

    def __init__(self, dump_dir: str, manifest: Manifest, *, is_new: bool) -> None:
        self._is_continued = not is_new
        self.dump_dir = dump_dir
        self.run_id = manifest.run_id
        self._manifest = manifest
        self._is_manifest_missing = is_new

    def write_step(self, batch: RolloutBatch, info: StepInfo) -> WrittenStep:
        """Write one step; returns when it is on disk.

        A run that continues may play its first steps again: a step that is there with the same batch stays as it is.
        Raises ``StepExistsError`` where the step is already recorded, and ``RecordingError`` where it cannot be written
        or another run has begun to record here.
        """
        path = step_path(self.dump_dir, mode=info.mode, scheduler_id=info.scheduler_id, step=info.step)
        check_inside(self.dump_dir, path)
        data = encode_step(batch, info)
        if self._is_manifest_missing:
            save_manifest(self.dump_dir, self._manifest)
            self._is_manifest_missing = False
        try:
            publish_file(path, data)
        except FileExistsError as error:
            if self._is_continued and self._is_recorded(batch, info):
                return WrittenStep(path=path, size_bytes=os.path.getsize(path), was_present=True)
            raise StepExistsError(_exists_text([path])) from error
        return WrittenStep(path=path, size_bytes=len(data))

    def _is_recorded(self, batch: RolloutBatch, info: StepInfo) -> bool:
        request = RolloutRequest(
            global_step=info.step,
            batch_size=batch.num_trajectories,
            mode=info.mode,
            scheduler_id=info.scheduler_id,
            policy_version=info.policy_version,
        )
        return RecordingReader(self.dump_dir).load_step(request).batch.is_identical(batch)


def open_recording(
    dump_dir: str,
    *,
    contract: Contract,
    plan: Sequence[RolloutRequest],
    provenance: Mapping[str, JSON],
    resume: bool,
) -> RecordingWriter:
    """Check that the steps of ``plan`` can be recorded in ``dump_dir``; makes no more than the folder.

    An empty or missing folder becomes a new recording, and no step of ``plan`` may be in it. One that holds a recording
    is continued only with ``resume`` and an equal contract. Raises ``StepExistsError`` naming the steps,
    ``ContractError`` or ``RecordingError``. ``provenance`` is what the caller adds to it.
    """
    existing = [path for path in (request_path(dump_dir, request) for request in plan) if os.path.lexists(path)]
    if existing and not resume:
        raise StepExistsError(_exists_text(existing))
    if os.path.lexists(os.path.join(dump_dir, MANIFEST_NAME)):
        manifest = _continue_recording(dump_dir, contract, resume=resume)
        return RecordingWriter(dump_dir, manifest, is_new=False)
    present = list_steps(dump_dir)
    if present:
        raise RecordingError(
            f"[Rollout Mock] {dump_dir} holds steps ({format_present(present)}) but no {MANIFEST_NAME}, so their run "
            "is not known. Set another rollout_mock.dump_dir, or remove the folder if the steps are not needed."
        )
    check_writable(dump_dir)
    manifest = Manifest(run_id=str(uuid.uuid4()), contract=contract, provenance=collect_provenance(provenance))
    return RecordingWriter(dump_dir, manifest, is_new=True)


def _continue_recording(dump_dir: str, contract: Contract, *, resume: bool) -> Manifest:
    """The manifest of the recording that is there, or an error where it must not be continued."""
    manifest = load_manifest(dump_dir)
    if not resume:
        raise RecordingError(
            f"[Rollout Mock] {dump_dir} already holds a recording (run id {manifest.run_id}; steps: "
            f"{format_present(list_steps(dump_dir))}). Set another rollout_mock.dump_dir, resume the run that "
            "recorded it, or remove the folder if it is not needed."
        )
    check_contract(manifest.contract, contract, "error", source=dump_dir)
    return manifest


def _exists_text(paths: Sequence[str]) -> str:
    try:
        owner = f"run id {read_step_info(paths[0]).run_id}"
    except MockSchedulerError as error:
        owner = f"run id cannot be read: {error}"
    more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
    return (
        f"[Rollout Mock] Step file exists and is not overwritten: {paths[0]}{more} ({owner}). "
        "Set another rollout_mock.dump_dir, or remove the recording if it is not needed."
    )
