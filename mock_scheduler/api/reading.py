"""Reads from Python what runs left: recordings and traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.comparison.pairing.order import order_keys
from mock_scheduler.comparison.walk.traces import trace_level
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.display.pages import render_summary
from mock_scheduler.errors import TraceError
from mock_scheduler.recording.contract import Contract
from mock_scheduler.recording.inspection.verification import VerifyResult, verify_recording
from mock_scheduler.recording.paths import format_present, step_folder
from mock_scheduler.recording.reading.open_step import OpenStep
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.run_folder.inputs import find_trace
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID, Mode, RolloutRequest
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.fetched_folders import name_locations
from mock_scheduler.support.text import in_words
from mock_scheduler.trace.entries import RankPlace, TraceKey
from mock_scheduler.trace.full import reader as full
from mock_scheduler.trace.remote import open_location
from mock_scheduler.trace.sketch import reader as sketched
from mock_scheduler.trace.sketch.sketch import Sketch

_NUM_FIELDS = 12


class Recording:
    """Opens a recording of rollouts for reading.

    Iterating over it gives the batches of the default scheduler's training steps, in order, each read when its turn
    comes. A notebook shows its steps and contract.
    """

    def __init__(self, reader: RecordingReader) -> None:
        self._reader = reader

    @property
    def location(self) -> str:
        """Returns the folder or URL of the recording."""
        return self._reader.dump_dir

    @property
    def run_id(self) -> str:
        """Returns the id of the recording run."""
        return self._reader.manifest.run_id

    @property
    def contract(self) -> Contract:
        """Returns the named fields promised by the recording run, with their rules."""
        return self._reader.manifest.contract

    @property
    def provenance(self) -> Mapping[str, JSON]:
        """Where it comes from: revision, package versions, settings as read back."""
        return self._reader.manifest.provenance

    @property
    def steps(self) -> Mapping[str, list[int]]:
        """Returns the present steps, ascending, by folder: ``train``, ``val``, ``train.{scheduler_id}``."""
        return self._reader.steps()

    def batch(self, step: int, *, mode: Mode = "train", scheduler_id: str = DEFAULT_SCHEDULER_ID) -> RolloutBatch:
        """Read the rows of one step, and check the digest of every tensor.

        Raises:
            StepNotFoundError: The step is not recorded; the message lists the present steps, and likely causes.
            CorruptRecordingError: Its bytes have changed since they were written.
        """
        return self._open(step, mode, scheduler_id).load()

    def info(self, step: int, *, mode: Mode = "train", scheduler_id: str = DEFAULT_SCHEDULER_ID) -> StepInfo:
        """Read how one step was played: policy version, data cursor, metrics. Errors are as in ``batch``."""
        return self._open(step, mode, scheduler_id).info

    def verify(self) -> VerifyResult:
        """Read every byte of every step and check each digest; the result lists every change since the recording."""
        return verify_recording(self._reader.source)

    def _open(self, step: int, mode: Mode, scheduler_id: str) -> OpenStep:
        # Opening does not look at the batch size, which nobody asks for here.
        request = RolloutRequest(global_step=step, batch_size=1, mode=mode, scheduler_id=scheduler_id)
        return self._reader.open_step(request)

    def __len__(self) -> int:
        return sum(len(numbers) for numbers in self.steps.values())

    def __iter__(self) -> Iterator[RolloutBatch]:
        for number in self.steps.get(step_folder("train", DEFAULT_SCHEDULER_ID), []):
            yield self.batch(number)

    def __repr__(self) -> str:
        return f"Recording({self.location!r}: {format_present(self.steps)})"

    def _repr_html_(self) -> str:
        fields = self.contract.fields
        more = len(fields) - _NUM_FIELDS
        return render_summary(
            f"Recording {self.location}",
            [("run", self.run_id), ("steps", format_present(self.steps))],
            columns=("contract", "rule", "value"),
            table=[
                *([field.name, in_words(field.rule.value), str(field.value)] for field in fields[:_NUM_FIELDS]),
                *([[f"and {more:,} more", "", ""]] if more > 0 else []),
            ],
        )


def read_recording(location: str | Path) -> Recording:
    """Open a recording: a local folder (``rollout_mock.dump_dir`` of a run) or a URL like ``s3://bucket/path``.

    Only its manifest is read; steps are read, and their digests checked, when they are asked for.

    Raises:
        StepNotFoundError: There is no recording.
        CorruptRecordingError: Its manifest has changed since it was written.
    """
    return Recording(RecordingReader(str(location)))


class Trace:
    """Opens a trace of a run's inside for reading: whole tensors, or sketches of them, under canonical names.

    A tensor is merged from the pieces of all ranks, so its values do not depend on the layout of the run. Use it in a
    ``with`` block, or call ``close``. A notebook shows steps and counts.
    """

    def __init__(self, location: str, reader: full.TraceReader | sketched.SketchReader, *, closing: ExitStack) -> None:
        self.location = location
        self._reader = reader
        self._closing = closing

    @property
    def level(self) -> Literal["full", "sketch"]:
        """Whether tensors are there whole."""
        return "full" if isinstance(self._reader, full.TraceReader) else "sketch"

    @property
    def steps(self) -> tuple[int, ...]:
        """Returns the traced steps, ascending."""
        return self._reader.steps

    def ranks(self, step: int) -> tuple[RankPlace, ...]:
        """Returns the writing ranks of a step, with their places on each axis of the layout."""
        return self._reader.ranks(step)

    def keys(self, step: int, kind: TraceKind | None = None) -> list[TraceKey]:
        """Returns the tensors of a step in the order of computation; ``kind``: of one kind alone.

        Raises:
            TraceError: The step was not traced.
        """
        if step not in self.steps:
            raise TraceError(
                f"{self.location}: step {step} is not traced; traced steps: {', '.join(map(str, self.steps))}"
            )
        return [key for key in order_keys(self._reader.keys(step)) if kind in (None, key.kind)]

    def key(self, step: int, kind: TraceKind, name: str, *, update: int = 0) -> TraceKey:
        """Returns the key of one tensor.

        Raises:
            TraceError: The trace has no such tensor.
        """
        key = TraceKey(step=step, update=update, kind=kind, name=name)
        if not self._reader.has(key):
            raise TraceError(
                f"{self.location}: no rank wrote the {key.describe()}; Trace.keys(step) lists what is there"
            )
        return key

    def tensor(self, key: TraceKey) -> torch.Tensor:
        """The whole tensor, in its dtype in the run; elements held by no rank are 0.

        Token tensors have the tokens of the step's batch as their first dimension, in canonical order.

        Raises:
            TraceError: The trace holds sketches only, a file is damaged, or the pieces do not fit together.
        """
        if not isinstance(self._reader, full.TraceReader):
            raise TraceError(f"{self.location} holds sketches only; trace the run with trace.level=full")
        return self._reader.merge(key).tensor

    def sketch(self, key: TraceKey) -> Sketch:
        """Returns the sketch of a tensor: its fingerprint, and sums to estimate distances from.

        Raises:
            TraceError: The trace holds whole tensors, or the sketches do not fit together.
        """
        if not isinstance(self._reader, sketched.SketchReader):
            raise TraceError(f"{self.location} holds whole tensors, not sketches")
        return self._reader.sketch(key).sketch

    def counts(self, step: int) -> Mapping[TraceKind, int]:
        """How many tensors of each kind a step has, in the order of computation."""
        return Counter(key.kind for key in self.keys(step))

    def close(self) -> None:
        """Close the open files; tensors that were read stay valid."""
        if isinstance(self._reader, full.TraceReader):
            self._reader.close()
        self._closing.close()

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Trace({self.location!r}: level {self.level}, steps {list(self.steps)})"

    def _repr_html_(self) -> str:
        first = self.steps[0]
        return render_summary(
            f"Trace {self.location}",
            [
                ("level", self.level),
                ("steps", ", ".join(map(str, self.steps))),
                ("ranks", f"{len(self.ranks(first)):,}"),
            ],
            columns=("kind", f"tensors of step {first}"),
            table=[(in_words(kind), f"{count:,}") for kind, count in self.counts(first).items()],
        )


def open_trace(path: str | Path) -> Trace:
    """Open a trace: a run's ``output_dir``, or its ``trace`` folder; the headers of all files are read and checked.

    Both may be URLs, such as ``s3://bucket/runs/tp2``: tensors are then fetched when they are read.

    Raises:
        ConfigError: The path is neither.
        TraceError: Files are missing, damaged, or do not fit together; the message lists all of a step.
    """
    with ExitStack() as stack:
        folder = find_trace(stack.enter_context(open_location(path)))
        opened = full.open_trace(folder) if trace_level(folder) == "full" else sketched.open_sketches(folder)
        return Trace(name_locations(str(folder)), opened, closing=stack.pop_all())
