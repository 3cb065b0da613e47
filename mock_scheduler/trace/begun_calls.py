"""The collectives that each rank has begun in a step, on the disk while the step goes on.

A run whose ranks do not issue the same collectives aborts or hangs, and then no trace of its step is written. These
files show afterwards which call each rank was in. ``{output_dir}/collectives/{rank}.jsonl``: the step in the first
line, then ``[operation, group, dtype, elements]`` for each call, written before the call begins. There only while a
step goes on, and after one that did not come to its end. Contract: no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from mock_scheduler.support.foreign_files import read_raw_lines
from mock_scheduler.support.run_files import COLLECTIVES_FOLDER
from mock_scheduler.trace.entries import LedgerCall

_MAX_RANKS = 4096


class BegunCalls:
    """Writes one rank's calls of one step. ``remove`` when the step has ended well, else ``close``."""

    def __init__(self, output_dir: Path, *, global_rank: int, step: int) -> None:
        self._path = output_dir / COLLECTIVES_FOLDER / f"{global_rank}.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file: int | None = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
        os.write(self._file, f"{step}\n".encode())

    def add(self, call: LedgerCall) -> None:
        """Writes a call that is about to begin; what the system has taken outlives this process."""
        if self._file is not None:
            os.write(self._file, (json.dumps(astuple(call)) + "\n").encode())

    def close(self) -> None:
        """Keeps the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def remove(self) -> None:
        """Removes the file, and the folder with the last one."""
        self.close()
        self._path.unlink(missing_ok=True)
        try:
            self._path.parent.rmdir()
        except OSError:  # of the other ranks some are still there
            return


@dataclass(frozen=True, kw_only=True, slots=True)
class BegunStep:
    """A step that did not come to its end. ``calls``: of each of its ranks, in order."""

    step: int
    calls: Mapping[int, tuple[LedgerCall, ...]]


_CALL: TypeAdapter[tuple[str, tuple[int, ...], str, int]] = TypeAdapter(tuple[str, tuple[int, ...], str, int])


def load_begun_step(output_dir: Path) -> BegunStep | None:
    """Reads the first step that some rank did not end; ``None`` where there is none, or a file is none of these."""
    found: dict[int, dict[int, tuple[LedgerCall, ...]]] = {}
    for path in sorted((output_dir / COLLECTIVES_FOLDER).glob("*.jsonl"))[:_MAX_RANKS]:
        try:
            step, calls = _load(path)
            found.setdefault(step, {})[int(path.stem)] = calls
        except (OSError, ValueError):
            return None
    if not found:
        return None
    first = min(found)
    return BegunStep(step=first, calls=found[first])


def _load(path: Path) -> tuple[int, tuple[LedgerCall, ...]]:
    lines = read_raw_lines(path)
    step = int(next(lines, b""))
    calls = []
    for line in lines:
        if not line.endswith(b"\n"):
            break  # the process was killed while it wrote
        try:
            operation, group, dtype, num_elements = _CALL.validate_json(line)
        except ValidationError as error:
            raise ValueError(f"{path}: no call: {error}") from error
        calls.append(LedgerCall(operation=operation, group=group, dtype=dtype, num_elements=num_elements))
    return step, tuple(calls)
