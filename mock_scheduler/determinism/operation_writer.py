"""Writes the records of a ledger, some hundreds at once, and reads the digests of a GPU back for them.

Contract: a record is open until it has its ``outputs``; it is written when it and all before it are complete. Memory is
bounded by a few hundred records. Threads may begin records at the same time.
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from itertools import takewhile
from typing import IO, Any

import torch

from mock_scheduler.determinism.bits import as_hex
from mock_scheduler.determinism.operation_records import FORMAT_VERSION, LedgerHeader

_RECORDS_AT_ONCE = 512

TensorEntry = list[Any]
"""A tensor's record as JSON has it: name, dtype, shape, storage, digest, note; the digest may still be on a GPU."""


class LedgerWriter:
    """Numbers records and writes them, some hundreds at once."""

    def __init__(self, lines: IO[str], header: LedgerHeader) -> None:
        self._lines = lines
        self._waiting: list[dict[str, Any]] = []
        self._num_records = 0
        self._lock = threading.Lock()
        lines.write(json.dumps({"format_version": FORMAT_VERSION, **asdict(header)}) + "\n")

    def begin(self, record: dict[str, Any]) -> int:
        """Take a record and number it. It stays open, and is not written, until it has its ``outputs``."""
        with self._lock:
            if len(self._waiting) >= _RECORDS_AT_ONCE:
                self._flush()
            record["number"] = self._num_records
            self._num_records += 1
            self._waiting.append(record)
            return int(record["number"])

    def finish(self) -> None:
        """Write what is waiting, and the footer."""
        self._flush()
        self._lines.write(json.dumps({"num_records": self._num_records}) + "\n")

    def _flush(self) -> None:
        complete = list(takewhile(lambda record: "outputs" in record, self._waiting))
        self._waiting = self._waiting[len(complete) :]
        _read_back([entry for record in complete for side in ("inputs", "outputs") for entry in record.get(side, ())])
        self._lines.writelines(json.dumps(record, separators=(",", ":")) + "\n" for record in complete)


def _read_back(entries: list[TensorEntry]) -> None:
    """Replace digests that are on a device by their text, with one transfer per device."""
    by_device: dict[torch.device, list[TensorEntry]] = {}
    for entry in entries:
        if isinstance(entry[4], torch.Tensor):
            by_device.setdefault(entry[4].device, []).append(entry)
    for device, waiting in by_device.items():
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # they were made on several streams
        digests = torch.stack([entry[4] for entry in waiting]).tolist()
        for entry, digest in zip(waiting, digests, strict=True):
            entry[4] = as_hex(digest)
