"""Writes a recording: the manifest with the first step, then the steps, beside the training loop or in it.

Contract: a step's presence is its completeness; an existing step is never replaced. Who writes into a folder holds its
lock, if the location has locks. Steps are written in the order in which they are given, and after a submitted one that
failed, none: from then on every call raises, so no checkpoint claims a step that is not on disk, and none is
removed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.rollout_mock import RetentionConfig
from mock_scheduler.errors import RecordingError, StepExistsError
from mock_scheduler.recording.inspection.diff import compare_batches
from mock_scheduler.recording.manifest import Manifest, load_manifest, save_manifest
from mock_scheduler.recording.paths import (
    file_name,
    find_file,
    find_step,
    list_steps,
    step_folder,
    step_name,
)
from mock_scheduler.recording.retention import is_train, load_retention, note_checkpoint, num_more_kept
from mock_scheduler.recording.step.step_file import StepFile, encode_step
from mock_scheduler.recording.step.step_info import StepInfo, info_differences
from mock_scheduler.recording.storage import Storage, locked
from mock_scheduler.recording.writing.admission import (
    DiskForecast,
    FolderLocks,
    check_addition,
    exists_text,
    other_run_text,
)
from mock_scheduler.recording.writing.sharded import Patience, commit_when_complete
from mock_scheduler.scheduler import Mode, RowShard
from mock_scheduler.support.threads import JobQueue, QueueTexts

logger = logging.getLogger("mock_scheduler.rollout_mock")

_NUM_ROWS_SHOWN = 10

#: Steps in memory beside the one being played: one is written, one waits.
_MAX_HELD = 2

_TEXTS = QueueTexts(
    closed="[Rollout Mock] The writer of this recording is closed: nothing more can be recorded",
    halted="[Rollout Mock] Nothing more is recorded, since an earlier write failed",
    failed="[Rollout Mock] Recording failed",
    skipped="[Rollout Mock] A step that was queued is not written",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterOptions:
    """How to record. ``shard``: this writer's part of every step, where several write their own rows of it.

    ``num_planned_steps``: how many steps this writer will record, for the forecast of the disk; 0: not known.
    ``patience``: how long the writer of shard 0 waits for the others before it gives a step up.
    """

    compression: Literal["none", "zstd"] = "none"
    background: bool = True
    on_low_disk: Literal["error", "warn"] = "error"
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    shard: RowShard | None = None
    num_planned_steps: int = 0
    patience: Patience = field(default_factory=Patience)

    @property
    def is_committer(self) -> bool:
        """Whether this writer completes steps and removes old ones: the only one, or that of shard 0."""
        return self.shard is None or self.shard.index == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenStep:
    """A step, or a shard of one, that is on disk: ``path``, with ``num_rows`` rows in ``size_bytes`` stored bytes.

    ``was_present``: an earlier part of the run had recorded this very batch.
    """

    step: int
    mode: Mode
    scheduler_id: str
    path: str
    num_rows: int
    size_bytes: int
    was_present: bool = False


class RecordingWriter:
    """An opened recording of one run; its run id goes into every step file. ``open_recording`` makes it.

    The manifest is written just before the first step, so a run that fails earlier leaves no recording.
    ``can_continue``: steps may be there already, of an earlier part of the run. ``on_written`` is called with every
    step that is on disk, in the writing thread; set it before the first step.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        *,
        options: WriterOptions,
        locks: FolderLocks,
        can_continue: bool,
    ) -> None:
        self.dump_dir = storage.location
        self.run_id = manifest.run_id
        self.on_written: Callable[[WrittenStep], None] = _ignore
        self._storage = storage
        self._manifest = manifest
        self._is_manifest_there = False
        self._has_written = False
        self._options = options
        self._locks = locks
        self._can_continue = can_continue
        self._jobs = JobQueue(
            "rollout-writer",
            texts=_TEXTS,
            error=RecordingError,
            logger=logger,
            max_held=_MAX_HELD,
            is_background=options.background,
        )
        self._forecast = DiskForecast(
            storage,
            num_planned=options.num_planned_steps,
            on_low_disk=options.on_low_disk,
            num_writers=1 if options.shard is None else options.shard.count,
        )

    def submit(self, batch: RolloutBatch, info: StepInfo) -> None:
        """Copy a step and queue it to be written; returns at once unless one is being written and one waits.

        Without ``options.background`` it is on disk when this returns. Raises the error of an earlier write or,
        where a call raised that already, ``RecordingError`` about it: nothing more is recorded then.
        """
        if self._options.background:
            self._jobs.submit(lambda: partial(self._write_and_tell, batch.copy(), info.copy()))
        else:
            self._jobs.submit(lambda: partial(self._write_and_tell, batch, info))

    def write_step(self, batch: RolloutBatch, info: StepInfo) -> WrittenStep:
        """Write one step, after those queued; returns when it is on disk.

        A run that continues may play its first steps again: a step present with the same batch stays as it is.
        Raises ``StepExistsError`` where the step is already recorded, and ``RecordingError`` where it cannot be
        written, another process writes here, or the disk will not hold the steps planned.
        """
        return self._jobs.run(lambda: self._write_and_tell(batch, info))

    def flush(self) -> None:
        """Return when all steps given are on disk; raises as ``submit`` where one of them is not, every time."""
        self._jobs.flush()

    def checkpoint_saved(self, next_step: int) -> Mapping[str, Sequence[int]]:
        """Say that a checkpoint is saved that continues with ``next_step``: the steps before it may now be removed,
        as ``options.retention`` says. Flushes first, and raises as it does.

        Returns the steps removed, per folder: none before this writer has written a step itself, since until then it
        is a mere reader of a recording that others may be reading too.
        """
        self._jobs.flush()
        retention = self._options.retention
        if not self._has_written or not self._options.is_committer:
            return {}
        return note_checkpoint(self._storage, next_step, retention)

    def last_train_step(self) -> int:
        """The latest training step that is on disk, of any scheduler; -1 where none is. Flushes first."""
        self._jobs.flush()
        found = list_steps(self._storage)
        return max((step for folder, steps in found.items() if is_train(folder) for step in steps), default=-1)

    def close(self) -> None:
        """Flush, and end the right to write here; a second call only raises again. Raises as ``flush``."""
        try:
            self._jobs.close()
        finally:
            self._locks.release()

    def _write_and_tell(self, batch: RolloutBatch, info: StepInfo) -> WrittenStep:
        written = self._write(batch, info)
        self.on_written(written)
        if self._options.num_planned_steps:
            self._forecast.add_step(written.size_bytes, count_kept=self._count_kept)
        return written

    def _write(self, batch: RolloutBatch, info: StepInfo) -> WrittenStep:
        shard = self._options.shard
        step = step_name(mode=info.mode, scheduler_id=info.scheduler_id, step=info.step)
        self._locks.take(step_folder(info.mode, info.scheduler_id))
        if shard is not None:
            info = replace(info, shard=(shard.index, shard.count))
        encoded = encode_step(batch, info)
        # Before the first step, after everything that could be refused: a run that fails earlier leaves no recording.
        self._provide_manifest()
        found = find_step(self._storage, step) or find_file(self._storage, step, shard=shard)
        name = file_name(step, shard=shard, is_compressed=self._options.compression == "zstd")
        if found is None:
            try:
                size_bytes = self._storage.publish(name, encoded.pieces)
                self._has_written = True
            except FileExistsError:  # another process was faster: its step is compared, never replaced
                found = name
        if found is not None:
            name = self._check_same(step, batch, info, found)
            size_bytes = self._storage.size_on_disk(name)
        if shard is not None and self._options.is_committer and find_step(self._storage, step) is None:
            commit_when_complete(self._storage, step, count=shard.count, patience=self._options.patience)
        return WrittenStep(
            step=info.step,
            mode=info.mode,
            scheduler_id=info.scheduler_id,
            path=self._storage.path(name),
            num_rows=len(batch),
            size_bytes=size_bytes,
            was_present=found is not None,
        )

    def _check_same(self, step: str, batch: RolloutBatch, info: StepInfo, found: str) -> str:
        """The file of a step present with this very batch; raises ``StepExistsError`` for any other."""
        name = find_file(self._storage, step, shard=self._options.shard)
        if not self._can_continue or name is None:
            raise StepExistsError(exists_text(self._storage, [found]))
        recorded = StepFile.open(self._storage.open_source(name), name=self._storage.path(name))
        if (recorded.info.run_id, recorded.info.step) != (info.run_id, info.step):
            raise StepExistsError(exists_text(self._storage, [name]))
        differences = info_differences(recorded.info, info)
        # Whole batches by digest first, which is cheap; rows one by one only to name a difference.
        recorded_batch = recorded.load()
        if not recorded_batch.is_identical(batch):
            differences.append(compare_batches(recorded_batch, batch, limit=_NUM_ROWS_SHOWN).describe())
        if differences:
            raise StepExistsError("\n".join([exists_text(self._storage, [name]), *differences]))
        return name

    def _provide_manifest(self) -> None:
        """Write the manifest, or check that the one present is this run's."""
        if self._is_manifest_there:
            return
        try:
            with locked(self._storage):
                # It is published once; the second writer of a run finds the first one's.
                save_manifest(self._storage, self._manifest)
        except RecordingError as error:
            if not isinstance(error.__cause__, FileExistsError):
                raise
            recorded = load_manifest(self._storage)
            if recorded.run_id != self.run_id:
                raise RecordingError(other_run_text(self._storage, recorded.run_id, self.run_id)) from error
            check_addition(self._storage, recorded.contract, self._manifest.contract)
        self._is_manifest_there = True

    def _count_kept(self, num_remaining: int) -> int:
        retention = self._options.retention
        if retention.keep_last is None:
            return num_remaining
        record = load_retention(self._storage)
        return num_more_kept(list_steps(self._storage), num_remaining, record=record, retention=retention)


def _ignore(_written: WrittenStep) -> None:
    pass
