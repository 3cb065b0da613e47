"""Opens a recording to be written: everything that can be refused is refused here, before any rollout.

Contract: makes no more than the folder, the claim that keeps other runs out and, for planned steps, the locks.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from mock_scheduler.errors import RecordingError, StepExistsError
from mock_scheduler.recording.contract import Contract
from mock_scheduler.recording.manifest import Manifest, collect_provenance, load_manifest
from mock_scheduler.recording.paths import (
    MANIFEST_NAME,
    format_present,
    list_folders,
    locate_steps,
    step_folder,
)
from mock_scheduler.recording.storage import Storage, open_storage
from mock_scheduler.recording.writing.admission import (
    DiskForecast,
    FolderLocks,
    check_addition,
    exists_text,
    other_run_text,
)
from mock_scheduler.recording.writing.sharded import clear_uncommitted
from mock_scheduler.recording.writing.writer import RecordingWriter as RecordingWriter
from mock_scheduler.recording.writing.writer import WriterOptions as WriterOptions
from mock_scheduler.recording.writing.writer import WrittenStep as WrittenStep
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.digests import JSON

_NO_OPTIONS = WriterOptions()


def open_recording(
    dump_dir: str,
    *,
    contract: Contract,
    plan: Sequence[RolloutRequest],
    provenance: Mapping[str, JSON],
    resume: bool,
    options: WriterOptions = _NO_OPTIONS,
    run_id: str | None = None,
    max_row_tokens: int | None = None,
) -> RecordingWriter:
    """Check that the steps of ``plan`` can be recorded in ``dump_dir`` (a folder or an fsspec URL).

    An empty or missing place becomes a new recording, and no step of ``plan`` may be in it. One holding a recording
    is continued only with ``resume``, or joined by a caller that gives the same ``run_id`` (several schedulers or ranks
    of one run share a recording); both need an equal contract. ``run_id`` None: that of the recording, else a new one.
    With ``resume`` and shards, all writers must be open before any of them writes. ``provenance`` is the caller's
    part of it. ``max_row_tokens``: the longest row possible, for a first forecast of the disk.

    Raises ``StepExistsError`` naming the steps, ``ContractError`` or ``RecordingError``; so it does where another
    run records here, or another process writes the planned steps' folders.
    """
    storage = open_storage(dump_dir)
    located = {folder: locate_steps(storage, folder) for folder in list_folders(storage)}
    present = {folder: list(found) for folder, found in located.items() if found}
    planned = [(step_folder(request.mode, request.scheduler_id), request.global_step) for request in plan]
    existing = [located[folder][step] for folder, step in planned if step in located.get(folder, {})]
    # A step is never written over: a run that plays it again must say that it continues.
    if existing and not resume:
        raise StepExistsError(exists_text(storage, existing))
    manifest = _find_manifest(storage, present, resume=resume, run_id=run_id)
    if manifest is not None:
        check_addition(storage, manifest.contract, contract)
    # From here on something is made; everything above only looks.
    storage.check_writable()
    if max_row_tokens is not None:
        forecast = DiskForecast(storage, num_planned=len(plan), on_low_disk="warn")
        forecast.warn_of_largest(plan, max_row_tokens=max_row_tokens)
    if manifest is None:
        manifest = Manifest(
            run_id=str(uuid.uuid4()) if run_id is None else run_id,
            contract=contract,
            provenance=collect_provenance(provenance),
        )
    # A run id that is given may be that of several writers, of which each has folders of its own: it takes them later.
    takes_all = resume and (run_id is None or options.shard is not None)
    folders = sorted({folder for folder, _ in planned}) or (list(located) if takes_all else [])
    locks = FolderLocks(storage, options.shard, run_id=manifest.run_id)
    try:
        for folder in folders:
            locks.take(folder)
        locks.claim()
        if resume and options.is_committer:
            clear_uncommitted(storage, folders)
    except BaseException:
        locks.release()
        raise
    return RecordingWriter(storage, manifest, options=options, locks=locks, can_continue=resume)


def _find_manifest(
    storage: Storage, present: Mapping[str, Sequence[int]], *, resume: bool, run_id: str | None
) -> Manifest | None:
    """The manifest of the recording present, None where there is none, or an error where it is another run's."""
    if not storage.exists(MANIFEST_NAME):
        if present:
            raise RecordingError(
                f"[Rollout Mock] {storage.location} holds steps ({format_present(present)}) but no {MANIFEST_NAME}, so "
                "their run is not known. Set another rollout_mock.dump_dir, or remove the folder if the steps are not "
                "needed."
            )
        return None
    manifest = load_manifest(storage)
    if run_id is not None and run_id != manifest.run_id:
        raise RecordingError(other_run_text(storage, manifest.run_id, run_id))
    if run_id is None and not resume:
        raise RecordingError(
            f"[Rollout Mock] {storage.location} already holds a recording (run id {manifest.run_id}; steps: "
            f"{format_present(present)}). Set another rollout_mock.dump_dir, resume the run that "
            "recorded it, give all schedulers or ranks of one run one run_id (build_scheduler(run_id=...)), or remove "
            "the folder if it is not needed."
        )
    return manifest
