"""Writes the records of an operation log, some hundreds at once, and reads the digests of a GPU back for them.

Contract: a record is open until it has its ``outputs``; it is written when it and all before it are complete. Memory is
bounded by a few hundred records. Threads may begin records at the same time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import IO, TypedDict

import torch

from mock_scheduler.determinism.operations.bits import as_hex
from mock_scheduler.determinism.operations.log import FORMAT_VERSION, OperationLogHeader, Phase

_RECORDS_AT_ONCE = 512


@dataclass(kw_only=True, slots=True)
class TensorEntry:
    """A ``TensorRecord`` that is being made: its digest may still be a scalar on a GPU."""

    name: str
    dtype: str
    shape: list[int]
    storage: int
    digest: str | torch.Tensor | None
    note: str

    def as_json(self) -> list[object]:
        """The entry as the file has it."""
        return [self.name, self.dtype, self.shape, self.storage, self.digest, self.note]


class OpenRecord(TypedDict, total=False):
    """An ``OperationRecord`` that is being made, with the fields that are known already."""

    number: int
    operator: str
    lane: str
    phase: Phase
    module: str
    node: str
    place: str
    device: str
    arguments: str
    inputs: list[TensorEntry]
    outputs: list[TensorEntry]
    values: list[str]
    group: Sequence[int]
    peer: int | None
    completes: int


class OperationLogWriter:
    """Numbers records and writes them, some hundreds at once."""

    def __init__(self, lines: IO[str], header: OperationLogHeader) -> None:
        self._lines = lines
        self._waiting: list[OpenRecord] = []
        self._num_records = 0
        self._lock = threading.Lock()
        lines.write(json.dumps({"format_version": FORMAT_VERSION, **asdict(header)}) + "\n")

    def begin(self, record: OpenRecord) -> int:
        """Take a record and number it. It stays open, and is not written, until it has its ``outputs``."""
        with self._lock:
            if len(self._waiting) >= _RECORDS_AT_ONCE:
                self._flush()
            number = record["number"] = self._num_records
            self._num_records += 1
            self._waiting.append(record)
            return number

    def finish(self) -> None:
        """Write the waiting records, and the footer."""
        self._flush()
        self._lines.write(json.dumps({"num_records": self._num_records}) + "\n")

    def _flush(self) -> None:
        complete = list(takewhile(lambda record: "outputs" in record, self._waiting))
        self._waiting = self._waiting[len(complete) :]
        _read_back([entry for record in complete for entry in (*record.get("inputs", ()), *record["outputs"])])
        self._lines.writelines(f"{_to_line(record)}\n" for record in complete)


def _to_line(record: OpenRecord) -> str:
    return json.dumps(record, separators=(",", ":"), default=TensorEntry.as_json)


def _read_back(entries: list[TensorEntry]) -> None:
    """Replace digests that are on a device by their text, with one transfer per device."""
    by_device: dict[torch.device, list[TensorEntry]] = {}
    for entry in entries:
        if isinstance(entry.digest, torch.Tensor):
            by_device.setdefault(entry.digest.device, []).append(entry)
    for device, waiting in by_device.items():
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # they were made on several streams
        digests = torch.stack([entry.digest for entry in waiting if isinstance(entry.digest, torch.Tensor)]).tolist()
        for entry, digest in zip(waiting, digests, strict=True):
            entry.digest = as_hex(digest)
