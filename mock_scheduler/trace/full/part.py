"""Opens one file of a trace, and reads its header: nothing in it is believed before its digest is checked.

The format is in ``files``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from mock_scheduler.errors import ForeignFileError, TraceError
from mock_scheduler.support.digests import compute_json_digest, open_sealed
from mock_scheduler.support.documents import Count, Document
from mock_scheduler.support.foreign_files import name_descriptor, open_regular
from mock_scheduler.trace.full.files import FORMAT_VERSION, METADATA_KEY, Ending
from mock_scheduler.trace.full.header import parse_footer, parse_pieces, parse_rank_step
from mock_scheduler.trace.full.pieces import DAMAGED, PieceRecord, RankStep, Shared


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredPart:
    """Holds the statement of a part's header beside the rank's step, the pieces and the footer."""

    part: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredEnding:
    """Holds the statements of the last part's header beside the footer."""

    num_parts: Count
    earlier_parts: tuple[str, ...]


_PART = Document[_StoredPart](_StoredPart)
_ENDING = Document[_StoredEnding](_StoredEnding)


class Handle(Protocol):
    """The methods used of an open safetensors file (its own class is untyped in safetensors 0.8)."""

    def metadata(self) -> dict[str, str] | None:
        """Returns the texts in the header."""

    def keys(self) -> list[str]:
        """Returns the names of the stored tensors."""

    def get_tensor(self, name: str) -> torch.Tensor:
        """Returns a stored tensor, as a view of the mapped file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One file with its checked header. digest: the header's own; ``num_parts``, ``ending``: in the last part only."""

    path: Path
    rank_step: RankStep
    index: int
    records: tuple[PieceRecord, ...]
    digest: str
    num_parts: int
    ending: Ending | None

    @property
    def rank(self) -> int:
        """Returns the global rank that wrote it."""
        return self.rank_step.place.global_rank


@contextmanager
def open_file(path: Path, *, inside: Path | None = None) -> Iterator[Handle]:
    """A mapped safetensors file; raises ``TraceError`` where it is none, or a link that leads out of ``inside``."""
    try:
        descriptor = open_regular(path, inside=inside)
    except ForeignFileError as error:
        raise TraceError(str(error)) from error
    except OSError as error:
        raise TraceError(f"{path}: not a readable safetensors file: {error}") from error
    try:
        # By its descriptor: safetensors opens by name, and would wait for a pipe for ever.
        opened = safe_open(name_descriptor(descriptor, path), framework="pt")
    except (OSError, SafetensorError, RuntimeError, MemoryError) as error:
        raise TraceError(f"{path}: not a readable safetensors file: {error}") from error
    finally:
        os.close(descriptor)
    with opened as handle:
        yield handle


def read_part(path: Path, trace_dir: Path, *, shared: Shared | None = None) -> Part:
    """Reads the header of one part.

    Args:
        path: of the file.
        trace_dir: the folder that it must lie in.
        shared: what earlier parts of the step said, which this one refers to where it says the same.

    Raises:
        TraceError: the file is no part of a trace, or not as it was written.
    """
    with open_file(path, inside=trace_dir) as handle:
        content = read_metadata(path, handle, METADATA_KEY, version=FORMAT_VERSION, kind="trace file")
        stored_names = set(handle.keys())
    try:
        part = _parse_part(path, content, Shared() if shared is None else shared)
    except ValueError as error:
        raise TraceError(f"{path}: the metadata is not that of a trace: {error}") from error
    if stored_names != {record.stored_name for record in part.records}:
        raise TraceError(f"{path}: the stored tensors are not those that the metadata lists; {DAMAGED}")
    # From here on what a piece takes is believed; its very shape is looked at when it is read.
    num_bytes, size_bytes = sum(record.size_bytes for record in part.records), path.stat().st_size
    if num_bytes > size_bytes:
        raise TraceError(
            f"{path}: the metadata lists {num_bytes} bytes of tensors in a file of {size_bytes}; {DAMAGED}"
        )
    return part


def read_metadata(path: Path, handle: Handle, key: str, *, version: int, kind: str) -> dict[str, Any]:
    """Reads the JSON in a file's header: its digest is checked before anything in it is believed, then its version.

    Raises:
        TraceError: there is no such key, the digest does not match, or another release wrote the file.
    """
    text = (handle.metadata() or {}).get(key)
    if text is None:
        raise TraceError(f"{path}: no metadata key {key!r}; this is no {kind}")
    try:
        content = open_sealed(text)
    except ValueError as error:
        raise TraceError(f"{path}: the metadata {error}; {DAMAGED}") from error
    # Only now: a version in a damaged header would blame another release for it.
    found = content.get("format_version")
    if found != version:
        raise TraceError(f"{path}: {another_release(f'format version {found!r}', version)}")
    return content


def another_release(found: str, expected: int) -> str:
    """Returns ``format version 4, expected 3; another release wrote it: run it again with this one``."""
    return f"{found}, expected {expected}; another release wrote it: run it again with this one"


def _parse_part(path: Path, content: Mapping[str, Any], shared: Shared) -> Part:
    rank_step, ending = parse_rank_step(content), content.get("ending")
    stored = None if ending is None else _ENDING.load(ending, at="ending")
    return Part(
        path=path,
        rank_step=rank_step,
        index=_PART.load(content).part,
        records=tuple(parse_pieces(content, step=rank_step.step, shared=shared)),
        # The last part lists the digests of the others: only theirs are asked for.
        digest=compute_json_digest(content) if stored is None else "",
        num_parts=0 if stored is None else stored.num_parts,
        ending=None if ending is None or stored is None else _read_ending(stored, ending, shared),
    )


def _read_ending(stored: _StoredEnding, content: Mapping[str, Any], shared: Shared) -> Ending:
    if len(stored.earlier_parts) != stored.num_parts - 1:
        raise ValueError(f"{len(stored.earlier_parts)} digests of {stored.num_parts} parts")
    return Ending(footer=parse_footer(content.get("footer"), shared), earlier_parts=stored.earlier_parts)
