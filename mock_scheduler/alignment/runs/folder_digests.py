"""Digests of the folders that a run reads and of those that it leaves."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from mock_scheduler.support.digests import JSON, compute_json_digest
from mock_scheduler.support.foreign_files import open_foreign
from mock_scheduler.support.run_files import (
    CODE_FOLDER,
    CONFIG_FILE,
    LEDGER_FILE,
    METRICS_FILE,
    RUN_FILE,
    START_FOLDER,
    TRACE_FOLDER,
)

_RECORDING_PREFIX = "recording/"
_HEADER_LENGTH_BYTES = 8  # of a safetensors file, little-endian
_MAX_HEADER_BYTES = 100_000_000  # that safetensors reads
_WHOLE_BYTES = 1 << 24
_END_BYTES = 1 << 16


def describe_run_files(run_dir: Path, recording_dir: Path | None) -> dict[str, JSON]:
    """Reads size and digest of each file of a finished run with a use in comparisons, by its path in the folder."""
    named = (CONFIG_FILE, RUN_FILE, LEDGER_FILE, METRICS_FILE)
    files: dict[str, JSON] = {name: _describe_file(run_dir / name) for name in named if (run_dir / name).is_file()}
    for name in (TRACE_FOLDER, START_FOLDER, CODE_FOLDER):
        files |= _describe_folder(run_dir / name, f"{name}/")
    if recording_dir is not None:
        files |= _describe_folder(recording_dir, _RECORDING_PREFIX)
    return files


def digest_folder(folder: Path) -> str:
    """Computes a SHA-256 (hex) over sizes and headers of a recording or trace; reads no rows and no tensors."""
    return compute_json_digest(_describe_folder(folder, ""))


def digest_checkpoint(folder: Path) -> str:
    """Computes a SHA-256 (hex) over a checkpoint's files: the size, the two ends and the time of writing of each."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    # Checkpoints are too large to read whole; a changed one has another time of writing, or other ends.
    files: dict[str, JSON] = {
        path.relative_to(folder).as_posix(): [*_describe_file(path, by_ends=True), path.stat().st_mtime_ns]
        for path in paths
    }
    return compute_json_digest(files)


def _describe_folder(folder: Path, prefix: str) -> dict[str, JSON]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path, folder))
    return {prefix + path.relative_to(folder).as_posix(): _describe_file(path) for path in paths}


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _describe_file(path: Path, *, by_ends: bool = False) -> list[int | str]:
    """Reads the size and the SHA-256 of a safetensors file's header, else of the whole file.

    ``by_ends``: of a large other file, of its two ends.
    """
    with open_foreign(path) as file:
        size = os.fstat(file.fileno()).st_size
        if path.suffix == ".safetensors":
            length = file.read(_HEADER_LENGTH_BYTES)
            content = length + file.read(min(int.from_bytes(length, "little"), size, _MAX_HEADER_BYTES))
        elif not by_ends or size <= _WHOLE_BYTES:
            # A verdict rests on metrics and settings as they are read here, so no part of them may change unseen.
            return [size, hashlib.file_digest(file, "sha256").hexdigest()]
        else:
            content = file.read(_END_BYTES)
            file.seek(size - _END_BYTES)
            content += file.read()
    return [size, hashlib.sha256(content).hexdigest()]
