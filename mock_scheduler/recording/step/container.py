"""The step file: one safetensors file holding one batch, with digests over every bit of it.

Contract: ``header`` has the format, ``layout`` the tensors holding a batch, ``step_file`` reads. Nothing is
unpickled. Equal content gives equal bytes, whatever the rows' arrival order.
"""

from __future__ import annotations

from dataclasses import dataclass
from mmap import mmap
from typing import TypeAlias

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.recording.step.header import encode_tensors
from mock_scheduler.recording.step.layout import pack_batch
from mock_scheduler.recording.step.step_file import StepFile
from mock_scheduler.recording.step.step_info import StepInfo as StepInfo
from mock_scheduler.recording.storage.byte_sources import MemorySource

StepBuffer: TypeAlias = "bytes | bytearray | memoryview | mmap"


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedStep:
    """A step file in memory. ``pieces``: its bytes in order, views of the batch's tensors where that is possible, so
    the batch must not change before they are written; ``digest``: that of ``StepFile.digest``."""

    pieces: tuple[bytes | memoryview, ...]
    digest: str

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return sum(len(piece) for piece in self.pieces)

    def to_bytes(self) -> bytes:
        """The whole file."""
        return b"".join(self.pieces)


def encode_step(batch: RolloutBatch, info: StepInfo) -> EncodedStep:
    """The step file of a batch.

    Raises ``RecordingError`` where ``info`` holds a value other than JSON (NaN, an infinity, an object), naming it, or
    where the step is too large for the format.
    """
    tensors, content = pack_batch(batch)
    content["info"] = info.as_json()
    pieces, digest = encode_tensors(content, tensors, name=f"step {info.step}")
    return EncodedStep(pieces=pieces, digest=digest)


def decode_step(
    data: StepBuffer, *, source: str = "step in memory", verify: bool = True
) -> tuple[RolloutBatch, StepInfo]:
    """The batch and the step's description of itself; the inverse of ``encode_step``, bit for bit.

    Tensors are views of ``data`` where it is writable (a bytearray), else of one copy. Raises as
    ``StepFile.open`` and ``StepFile.load``, naming ``source``.
    """
    view = memoryview(data)
    buffer = MemorySource(bytearray(view) if view.readonly else view, path=source)
    step = StepFile.open(buffer, name=source)
    return step.load(verify=verify), step.info
