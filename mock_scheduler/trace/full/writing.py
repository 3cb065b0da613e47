"""Writes one rank's step of a trace beside the training: digests and files come from a background thread.

Contract: an entry is copied when it is given; from a GPU without waiting for it (``memory.begin_copy``). Its digests
are computed at once, in the background; when the part that is being filled has reached its size, that part is written
there too, and the next one is begun. ``add`` waits only where the part before is not written yet, so at most two parts
(and one entry) are in memory. An error of the background is raised by the next call, and by every later one; no part
follows one that failed. The last part, without which a rank's step does not count as complete, is missing then, and the
earlier ones are removed by ``close`` or ``abandon``: a step that cannot be written leaves neither files nor a full
disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.support.threads import JobQueue, QueueTexts
from mock_scheduler.trace.entries import RankPlace, StepFooter, TraceEntry
from mock_scheduler.trace.full.files import Ending, EntryIntake, check_unwritten, part_path, write_part
from mock_scheduler.trace.full.header import check_footer
from mock_scheduler.trace.full.pieces import PieceRecord, RankStep, record_entry

logger = logging.getLogger("mock_scheduler.trace")

DEFAULT_PART_BYTES = 1 << 30

#: A part with more pieces would have a header of many megabytes; safetensors reads none beyond 100 MB.
_MAX_PIECES = 1 << 13


@dataclass(slots=True)
class _Part:
    """A part being filled. records: of its tensors, while their digests are being computed."""

    index: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    records: list[Future[PieceRecord]] = field(default_factory=list)
    size_bytes: int = 0


class FullSink:
    """Takes one rank's entries of one step, and writes them whole; a ``TraceSink``.

    part_bytes: a part is ended when it holds so many bytes. Raises ``TraceError`` where this rank's step is traced
    already. One thread calls it. ``close`` or ``abandon`` ends it.
    """

    def __init__(
        self,
        trace_dir: Path,
        *,
        step: int,
        place: RankPlace,
        world_size: int,
        part_bytes: int = DEFAULT_PART_BYTES,
    ) -> None:
        self._trace_dir = trace_dir
        self._rank_step = RankStep(step=step, place=place, world_size=world_size)
        check_unwritten(trace_dir, self._rank_step)
        self._part_bytes = part_bytes
        self._intake = EntryIntake(self._rank_step)
        self._part = _Part(index=0)
        self._written: list[str] = []
        self._is_closed = False
        where = self._rank_step.describe()
        self._jobs = JobQueue(
            "trace-writer",
            texts=QueueTexts(
                closed=f"{where}: the trace of this step is closed",
                halted=f"{where}: nothing more is traced, since an earlier write failed",
                failed=f"{where}: a part of the trace could not be written",
                skipped=f"{where}: a part of the trace is not written",
            ),
            error=TraceError,
            logger=logger,
            max_held=1,
        )

    def add(self, entry: TraceEntry) -> None:
        """Copy one piece; raises ``TraceError`` as ``EntryIntake`` does, and for a write that failed."""
        self._jobs.check_open()
        name, owned, wait = self._intake.take(entry)
        part = self._part
        part.tensors[name] = owned.tensor
        part.records.append(self._jobs.compute(partial(self._record, wait, owned, name)))
        part.size_bytes += owned.tensor.nbytes
        # With one job held at most, this waits while the part before is written: two parts are in memory, never three.
        if part.size_bytes >= self._part_bytes or len(part.tensors) >= _MAX_PIECES:
            self._jobs.submit(lambda: partial(self._write, part, None))
            self._part = _Part(index=part.index + 1)

    def _record(self, wait: Callable[[], None], owned: TraceEntry, name: str) -> PieceRecord:
        """Waits for a copy and computes its digests, in the background."""
        wait()
        return record_entry(owned, step=self._rank_step.step, name=name)

    def close(self, footer: StepFooter) -> None:
        """Write the last part, and return when all are on the disk.

        Raises ``TraceError`` where one could not be, and where the rows contradict themselves.
        """
        if self._is_closed:
            self._jobs.check_open()
        self._is_closed = True
        part = self._part
        try:
            check_footer(footer, self._rank_step)
            self._jobs.submit(lambda: partial(self._write, part, footer))
            self._jobs.close()
        except BaseException:
            self._remove_parts()
            raise
        finally:
            self._part = _Part(index=part.index)

    def abandon(self) -> None:
        """Write nothing more, and remove the written parts; does nothing where the step was closed."""
        if not self._is_closed:
            self._is_closed = True
            self._remove_parts()
            self._part = _Part(index=self._part.index)

    def _remove_parts(self) -> None:
        """Remove all parts of this rank's step: none was there when it began. Waits for a write that has begun."""
        self._jobs.abandon()
        paths = [part_path(self._trace_dir, self._rank_step, part) for part in range(self._part.index + 1)]
        with suppress(OSError):  # what cannot be removed has no last part, and is no whole step
            # The first one last: it is what ``check_unwritten`` looks for.
            for path in reversed(paths):
                path.unlink(missing_ok=True)
            # Empty where no other rank has written: a folder without files would hide the steps before it.
            paths[0].parent.rmdir()

    def _write(self, part: _Part, footer: StepFooter | None) -> None:
        """Writes one part, in the background; its digests are there, since they were asked for earlier."""
        digest = write_part(
            self._trace_dir,
            self._rank_step,
            part=part.index,
            tensors=part.tensors,
            records=[record.result() for record in part.records],
            # The last part seals the others by their digests, and is the completeness of the step.
            ending=None if footer is None else Ending(footer=footer, earlier_parts=tuple(self._written)),
        )
        self._written.append(digest)
        part.tensors.clear()
