"""Writes the records of an operation log, some hundreds at once, with digests of tensors.

Contract: a record is open until it has its ``outputs``; it is written once it and all before it are complete. Memory is
bounded by a few hundred records. Threads may begin records at the same time.

A digest is 16 hexadecimal digits of a tensor's bits in row-major order, made without changing it or drawing a number.
Tensors of equal type and shape and equal bits have equal digests; others have different ones with a probability of
1 - 2^-64. Host and GPU digest in different ways, so their digests are never compared with each other.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import IO, TypedDict

import torch

from mock_scheduler.determinism.operations.log import FORMAT_VERSION, OperationLogHeader, Phase

_BLOCK_ELEMENTS = 1 << 22
_BIT_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd 64-bit constants of splitmix64 (Steele, Lea, Flood 2014), as torch's signed integers.
_POSITION = -7046029254386353131
_FACTORS = (-4658895280553007687, -7723592293110705685)
_SHIFTS = (30, 27, 31)


_RECORDS_AT_ONCE = 512


@dataclass(kw_only=True, slots=True)
class TensorEntry:
    """A ``TensorRecord`` in the making: its digest may still be a scalar on a GPU."""

    name: str
    dtype: str
    shape: list[int]
    storage: int
    digest: str | torch.Tensor | None
    note: str

    def as_json(self) -> list[object]:
        """Returns the entry as the file has it."""
        return [self.name, self.dtype, self.shape, self.storage, self.digest, self.note]


class OpenRecord(TypedDict, total=False):
    """Holds an ``OperationRecord`` in the making, with the fields known so far."""

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
        self._digest = hashlib.sha256()
        self._write([json.dumps({"format_version": FORMAT_VERSION, **asdict(header)})])

    def begin(self, record: OpenRecord) -> int:
        """Takes a record and numbers it."""
        with self._lock:
            if len(self._waiting) >= _RECORDS_AT_ONCE:
                self._flush()
            number = record["number"] = self._num_records
            self._num_records += 1
            self._waiting.append(record)
            return number

    def finish(self) -> None:
        """Writes the waiting records, and the footer: their number, and the SHA-256 of all lines before it."""
        self._flush()
        self._write([json.dumps({"num_records": self._num_records, "sha256": self._digest.hexdigest()})])

    def _flush(self) -> None:
        complete = list(takewhile(lambda record: "outputs" in record, self._waiting))
        self._waiting = self._waiting[len(complete) :]
        _read_back([entry for record in complete for entry in (*record.get("inputs", ()), *record["outputs"])])
        self._write(map(_to_line, complete))

    def _write(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._digest.update(f"{line}\n".encode("ascii"))
            self._lines.write(f"{line}\n")


def _to_line(record: OpenRecord) -> str:
    return json.dumps(record, separators=(",", ":"), default=TensorEntry.as_json)


def _read_back(entries: list[TensorEntry]) -> None:
    """Replaces digests on devices by their texts, with one transfer per device."""
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


def unrepeated(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with one element in place of each dimension that only repeats the same memory."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def host_digest(tensor: torch.Tensor) -> str:
    """Digests a strided CPU tensor: the first 8 bytes of SHA-256. Copies only a tensor that is not contiguous."""
    plain = tensor if tensor.is_contiguous() else unrepeated(tensor.detach()).contiguous()
    if plain.is_conj() or plain.is_neg():
        plain = plain.detach().resolve_conj().resolve_neg()
    # Read in place: a view as bytes and a NumPy array would cost more than the hash of a small tensor.
    size_bytes = plain.numel() * plain.element_size()
    data = (ctypes.c_char * size_bytes).from_address(plain.data_ptr()) if size_bytes else b""
    return hashlib.sha256(data).hexdigest()[:16]


def device_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Digests a strided tensor on any device to an int64 scalar there, and waits for nothing.

    Each element's bits and its position are mixed by the finaliser of splitmix64, and the results are added modulo
    2^64. Elements wider than 64 bits count as several.
    """
    # A sum of integers is exact in any order, so the order of a GPU's threads does not matter.
    flat = unrepeated(tensor.detach()).resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(_BIT_DTYPES[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _BLOCK_ELEMENTS):
        total += _mix(bits[start : start + _BLOCK_ELEMENTS], start).sum()
    return total


def _mix(bits: torch.Tensor, start: int) -> torch.Tensor:
    words = torch.arange(start + 1, start + 1 + bits.numel(), dtype=torch.int64, device=bits.device)
    words.mul_(_POSITION).bitwise_xor_(bits.to(torch.int64))
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        # torch shifts with the sign; the mask makes it a shift of unsigned words, which loses no information.
        words.bitwise_xor_((words >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(factor)
    return words


def as_hex(digest: int) -> str:
    """Spells a device digest, read back as a signed number, in 16 hexadecimal digits."""
    return f"{digest & 0xFFFFFFFFFFFFFFFF:016x}"
