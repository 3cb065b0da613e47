"""Writes and reads the operation log of one training step on one rank.

Contract: imports no torch. ``{output_dir}/operations/step_000000/rank_0.jsonl`` has one JSON object per line: a header
(format version, step, rank, settings read back), then one record per operation in the order in which the rank began
them, then a footer with their number and the SHA-256 of all lines before it. A file's presence is its completeness, as
``files`` says; one whose footer is missing or wrong is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from mock_scheduler.errors import TraceError
from mock_scheduler.support.foreign_files import read_lines
from mock_scheduler.support.run_files import OPERATIONS_FOLDER

FORMAT_VERSION = 1

_STEP_FOLDER = re.compile(r"step_(\d{6,})")
_RANK_FILE = re.compile(r"rank_(\d+)\.jsonl")


class Phase(StrEnum):
    """The phase of training in which a rank began an operation."""

    FORWARD = "forward"
    RECOMPUTATION = "recomputation"
    BACKWARD = "backward"
    OUTSIDE = "outside any module"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """Holds a tensor that an operation read or wrote.

    ``name``: the operator's own name for it, such as ``mat2`` or ``tensors[0]``. ``storage``: the number of its memory,
    in order of appearance; equal numbers of one run share memory, and runs are not compared by them. ``digest``: of its
    bytes in row-major order; where it is ``None``, ``note`` says why.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    storage: int = -1
    digest: str | None = None
    note: str = ""

    def describe(self) -> str:
        """Returns ``mat2 float32[64, 128]``."""
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationRecord:
    """One operation. Unknown fields are empty.

    ``lane``: the thread that began it, ``main`` or ``backward-1``, ...; only within a lane is the order fixed.
    ``module``: the module whose forward was running; in backward, the one whose forward made the autograd node.
    ``node``: the autograd node. ``place``: file and line of the call, outside torch.
    ``arguments``: all arguments but tensors. ``inputs``: tensors before it ran, without overwritten ones; ``outputs``:
    tensors that it returned or wrote in place; ``values``: all else that it returned.
    ``group``: the global ranks of a communication's group. ``peer``: the other side of a send or receive.
    ``completes``: the number of an earlier, asynchronous operation. The record is then no operation, but the first use
    of the earlier one's results, which are its outputs.
    """

    number: int
    operator: str
    lane: str = "main"
    phase: Phase = Phase.OUTSIDE
    module: str = ""
    node: str = ""
    place: str = ""
    device: str = ""
    arguments: str = ""
    inputs: tuple[TensorRecord, ...] = ()
    outputs: tuple[TensorRecord, ...] = ()
    values: tuple[str, ...] = ()
    group: tuple[int, ...] | None = None
    peer: int | None = None
    completes: int | None = None

    @property
    def num_digests(self) -> int:
        """Counts tensors with a digest, read or written."""
        return sum(tensor.digest is not None for tensor in (*self.inputs, *self.outputs))

    @property
    def is_computation(self) -> bool:
        """Whether it read, made or sent anything; a view only names memory and did not."""
        return bool(self.num_digests or self.values or self.group is not None or self.completes is not None)

    def describe(self) -> str:
        """Returns ``operation 17, aten.mm.default, in policy.decoder (forward, at model.py:12)``."""
        results = f"the results of {self.operator} (operation {self.completes})" if self.completes is not None else ""
        where = f" in {self.module}" if self.module else ""
        details = [self.phase.value, *([self.node] if self.node else []), *([f"at {self.place}"] if self.place else [])]
        return f"operation {self.number}, {results or self.operator},{where} ({', '.join(details)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationLogHeader:
    """The step and the rank of a log. ``settings``: determinism settings as this rank read them back at its start."""

    step: int
    global_rank: int
    world_size: int
    settings: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationLog:
    """Holds a whole operation log on disk: its header, and its records, read anew at each request."""

    path: Path
    header: OperationLogHeader

    @classmethod
    def open(cls, path: Path) -> OperationLog:
        """Read the header; raises ``TraceError`` where the file cannot be read or is no operation log."""
        content = _parse(path, next(_read_lines(path), ""))
        version = content.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise TraceError(f"{path}: format version {version!r}, expected {FORMAT_VERSION}")
        try:
            return cls(path=path, header=OperationLogHeader(**content))
        except TypeError as error:
            raise TraceError(f"{path}: the header is no operation log's: {error}") from error

    def records(self) -> Iterator[OperationRecord]:
        """Every record in order; raises ``TraceError`` where the file is cut off, changed or no operation log's."""
        num_records, num_stated = 0, None
        digest = hashlib.sha256()
        for number, line in enumerate(_read_lines(self.path)):
            content = _parse(self.path, line)
            if "num_records" in content and number:
                num_stated = content["num_records"]
                # Logs of earlier releases have none.
                if content.get("sha256", digest.hexdigest()) != digest.hexdigest():
                    raise TraceError(f"{self.path}: its lines do not match their digest (SHA-256); it was changed")
                continue
            digest.update(line.removesuffix("\n").encode() + b"\n")
            if not number:
                continue
            try:
                record = _parse_record(content)
            except (KeyError, TypeError, ValueError) as error:
                raise TraceError(f"{self.path}: record {num_records} is no operation log's: {error!r}") from error
            num_records += 1
            yield record
        if num_stated != num_records:
            raise TraceError(
                f"{self.path} has {num_records} records and says {num_stated or 'nothing'}: it was cut off"
            )


def operation_log_path(output_dir: Path, *, step: int, global_rank: int) -> Path:
    """Returns the path of the operation log of one step and rank."""
    return output_dir / OPERATIONS_FOLDER / f"step_{step:06d}" / f"rank_{global_rank}.jsonl"


def find_operation_logs(output_dir: Path) -> dict[int, dict[int, OperationLog]]:
    """Finds a run's operation logs by step and global rank, in order; empty without any. Raises ``TraceError``."""
    found: dict[int, dict[int, OperationLog]] = {}
    for path in (output_dir / OPERATIONS_FOLDER).glob("*/*"):
        step, global_rank = _STEP_FOLDER.fullmatch(path.parent.name), _RANK_FILE.fullmatch(path.name)
        if step is not None and global_rank is not None:
            found.setdefault(int(step[1]), {})[int(global_rank[1])] = OperationLog.open(path)
    return {step: dict(sorted(found[step].items())) for step in sorted(found)}


def _parse_record(content: Mapping[str, Any]) -> OperationRecord:
    """Makes a record of its JSON object."""
    fields = dict(content)
    for side in ("inputs", "outputs"):
        fields[side] = tuple(
            TensorRecord(name=name, dtype=dtype, shape=tuple(shape), storage=storage, digest=digest, note=note)
            for name, dtype, shape, storage, digest, note in fields.get(side, ())
        )
    fields["phase"] = Phase(fields["phase"])
    fields["values"] = tuple(fields.get("values", ()))
    if fields.get("group") is not None:
        fields["group"] = tuple(fields["group"])
    return OperationRecord(**fields)


def _read_lines(path: Path) -> Iterator[str]:
    try:
        yield from read_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error


def _parse(path: Path, line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: a line is no JSON: {error}; it was cut off, or is no operation log") from error
    if not isinstance(content, dict):
        raise TraceError(f"{path}: a line is of type {type(content).__name__}, expected an object")
    return content
