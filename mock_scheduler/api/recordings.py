"""Reads recordings from Python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.display.pages import render_summary
from mock_scheduler.recording.contract import Contract
from mock_scheduler.recording.inspection.verification import VerifyResult, verify_recording
from mock_scheduler.recording.paths import format_present, step_folder
from mock_scheduler.recording.reading.open_step import OpenStep
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID, Mode, RolloutRequest
from mock_scheduler.support.digests import JSON

_NUM_FIELDS = 12


class Recording:
    """A recording of rollouts, opened for reading.

    Iterating over it gives the batches of the default scheduler's training steps, in order, each read when its turn
    comes. A notebook shows its steps and contract.
    """

    def __init__(self, reader: RecordingReader) -> None:
        self._reader = reader

    @property
    def location(self) -> str:
        """The folder or URL of the recording."""
        return self._reader.dump_dir

    @property
    def run_id(self) -> str:
        """The id of the recording run."""
        return self._reader.manifest.run_id

    @property
    def contract(self) -> Contract:
        """The named fields promised by the recording run, with their rules."""
        return self._reader.manifest.contract

    @property
    def provenance(self) -> Mapping[str, JSON]:
        """Where it comes from: revision, package versions, settings as read back."""
        return self._reader.manifest.provenance

    @property
    def steps(self) -> Mapping[str, list[int]]:
        """The present steps, ascending, by folder: ``train``, ``val``, ``train.{scheduler_id}``."""
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
                *([field.name, field.rule.value.replace("_", " "), str(field.value)] for field in fields[:_NUM_FIELDS]),
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
