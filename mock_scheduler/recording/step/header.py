"""The header of a step file: a safetensors header whose one metadata entry describes the whole file.

Format, version 2. Eight bytes (header size, little endian), the safetensors header, the tensors without gaps.
The header's ``__metadata__`` has one key, ``rollout``, whose value is canonical JSON: ``format``, ``version``,
``content`` (everything but tensors), ``tensors`` and ``digest`` (SHA-256 over the rest of this JSON). ``tensors``
holds each tensor's true dtype, its shape and the digests of its blocks; from it follow how the tensor is stored
(``stored_tensors``) and where: widest dtype first, then by name.

Contract: a header is accepted only where writing its metadata again gives the same bytes, so no bit of it can
change unnoticed; sizes are bounded before anything is allocated. Equal content gives equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mock_scheduler.errors import CorruptRecordingError, RecordingError
from mock_scheduler.recording.sealed import check_version
from mock_scheduler.recording.step.stored_tensors import (
    DIGEST_CHARS,
    TensorEntry,
    count_blocks,
    count_stored_bytes,
    digest_blocks,
    stored_bytes,
    stored_form,
)
from mock_scheduler.recording.storage import ByteSource
from mock_scheduler.support.digests import JSON, MAX_JSON_CONTAINERS, canonical_json, count_containers, open_sealed
from mock_scheduler.support.raw_tensors import ITEM_SIZES, RawTensor, unknown_dtype_text

STEP_FORMAT = "rollout-step"
STEP_VERSION = 2
MAX_HEADER_BYTES = 8 * 2**20

_METADATA_KEY = "rollout"
_HEAD_START = f'{{"__metadata__":{{"{_METADATA_KEY}":'
_DECODER = json.JSONDecoder()
_FIRST_READ_BYTES = 16 * 2**10
_MAX_DIMS = 64
_MAX_TENSOR_BYTES = 2**48


@dataclass(frozen=True, kw_only=True, slots=True)
class StepHeader:
    """A header read and found sound. ``content``: canonical JSON of everything but tensors, as text, so
    that each who reads it has its own; ``digest`` stands for all that the file holds; ``size_bytes`` is the header's
    own size."""

    content: str
    entries: Mapping[str, TensorEntry]
    digest: str
    size_bytes: int


def encode_tensors(
    content: Mapping[str, JSON], tensors: Mapping[str, RawTensor], *, name: str
) -> tuple[tuple[bytes | memoryview, ...], str]:
    """The file in pieces, and its header's digest; the pieces are views of the tensors except for bool ones.

    Raises ``RecordingError`` beginning with ``name`` where a tensor or the content is too large for the format.
    """
    # The order in the file depends on dtype and name alone, so that equal content gives equal bytes.
    order = sorted(tensors, key=lambda tensor: _sort_key(tensor, tensors[tensor].dtype))
    pieces = {tensor: stored_bytes(tensors[tensor]) for tensor in order}
    table: dict[str, JSON] = {
        tensor: {
            "dtype": tensors[tensor].dtype,
            "shape": list(tensors[tensor].shape),
            "blocks": digest_blocks(pieces[tensor]),
        }
        for tensor in order
    }
    # The digest covers the blocks' digests, and so every byte of every tensor.
    metadata, digest = _render_metadata(canonical_json(content), table)
    _check_containers(metadata, name, RecordingError)
    head = _render_header(metadata, _build_entries(table, source=name, start=0))
    # Refused when it is written: a reader refuses it too, and the rollout would be lost by then.
    if len(head) > MAX_HEADER_BYTES:
        raise RecordingError(
            f"{name}: header of {len(head)} bytes is over the limit of {MAX_HEADER_BYTES}: "
            "scheduler state, metrics, tags or meta are too large to record, or the tensors are over about 8 GiB"
        )
    return (struct.pack("<Q", len(head)) + head, *pieces.values()), digest


def read_head(source: ByteSource, *, name: str) -> bytes:
    """Reads the bytes of a step file's safetensors header; only the size is checked; ``name`` is the file's, for
    messages. Raises ``CorruptRecordingError`` where the file has no header of a size within the bounds."""
    size_bytes = source.size_bytes
    first = source.read(0, min(size_bytes, _FIRST_READ_BYTES))
    header_size = _read_header_size(first, size_bytes, name)
    rest = source.read(len(first), 8 + header_size) if 8 + header_size > len(first) else b""
    return bytes(first[8 : 8 + header_size]) + bytes(rest)


def parse_head(head: bytes, *, size_bytes: int, name: str) -> StepHeader:
    """Parses and checks the bytes from ``read_head``, of a file of ``size_bytes``.

    Raises ``CorruptRecordingError`` where any bit of them changed or the file is not as long as they say, and
    ``RecordingError`` where another version of the format, or of torch, wrote it.
    """
    start = 8 + len(head)
    metadata = _find_metadata(head, name)
    content, table = _parse_metadata(metadata, name)
    content_text, digest = _check_digest(metadata, content, table, source=name)
    entries = _build_entries(table, source=name, start=start)
    # The safetensors part repeats what the metadata says; a bit that changed only there is found here.
    if _render_header(metadata, entries) != head:
        raise CorruptRecordingError(f"{name}: header is not in canonical form: its bytes were changed")
    stop = max((entry.stop for entry in entries.values()), default=start)
    # Nothing may follow the last tensor, either: no digest covers it.
    if stop != size_bytes:
        raise CorruptRecordingError(f"{name}: file has {size_bytes} bytes; its header describes {stop}: truncated")
    return StepHeader(content=content_text, entries=entries, digest=digest, size_bytes=start)


def _read_header_size(first: memoryview, size_bytes: int, source: str) -> int:
    if len(first) < 8:
        raise CorruptRecordingError(f"{source}: {size_bytes} bytes are too few for a step file: truncated")
    (header_size,) = struct.unpack_from("<Q", first)
    # Before anything is allocated: a forged size must not take the memory of the process.
    if header_size > min(MAX_HEADER_BYTES, size_bytes - 8):
        raise CorruptRecordingError(
            f"{source}: header size {header_size} is over the limit of {MAX_HEADER_BYTES} or the file's "
            f"{size_bytes} bytes: truncated or changed"
        )
    return int(header_size)


def _find_metadata(head: bytes, source: str) -> str:
    try:
        text = head.decode("ascii")
        if text.startswith(_HEAD_START):
            # What follows need not be parsed: it is compared with what the metadata says.
            metadata, _ = _DECODER.raw_decode(text, len(_HEAD_START))
            if isinstance(metadata, str):
                return metadata
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptRecordingError(f"{source}: header is no JSON: {error}") from error
    entry = header.get("__metadata__") if isinstance(header, dict) else None
    metadata = entry.get(_METADATA_KEY) if isinstance(entry, dict) else None
    if not isinstance(metadata, str):
        raise CorruptRecordingError(f"{source}: header has no metadata {_METADATA_KEY!r}: not a recorded step")
    return metadata


def _parse_metadata(text: str, source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content and the tensor table, neither of them believed yet; another version is refused."""
    _check_containers(text, source, CorruptRecordingError)
    try:
        document = json.loads(text)
        if not isinstance(document, dict) or (document.get("format"), document.get("version")) != (
            STEP_FORMAT,
            STEP_VERSION,
        ):
            document = open_sealed(text)  # what says that it is of another version must be intact
    except (ValueError, RecursionError) as error:
        raise CorruptRecordingError(f"{source}: header metadata {error}") from error
    if document.get("format") != STEP_FORMAT or type(document.get("version")) is not int:
        raise CorruptRecordingError(f"{source}: format {document.get('format')!r} is not {STEP_FORMAT!r}")
    check_version(document["version"], STEP_VERSION, source=source, kind="step")
    content, table = document.get("content"), document.get("tensors")
    if not isinstance(content, dict) or not isinstance(table, dict):
        raise CorruptRecordingError(f"{source}: header metadata is not that of a recorded step")
    return content, table


def _check_containers(metadata: str, source: str, error: type[RecordingError]) -> None:
    # Before it is parsed: a header of 8 MiB of empty lists takes 30 times its size.
    if len(metadata) > MAX_JSON_CONTAINERS and count_containers(metadata) > MAX_JSON_CONTAINERS:
        raise error(
            f"{source}: header metadata holds more than {MAX_JSON_CONTAINERS} lists and objects: scheduler state, "
            "metrics, tags or meta are too large to record"
        )


def _check_digest(metadata: str, content: dict[str, Any], table: dict[str, Any], *, source: str) -> tuple[str, str]:
    """The content as text and the digest, if writing the two parts again gives the very same text."""
    try:
        content_text = canonical_json(content)
        written, digest = _render_metadata(content_text, table)
    except (ValueError, RecursionError) as error:  # NaN, which Python's JSON reads but no step holds
        raise CorruptRecordingError(f"{source}: header metadata is not JSON: {error}") from error
    if written != metadata:
        raise CorruptRecordingError(f"{source}: header metadata does not match its digest: its bytes were changed")
    return content_text, digest


def _render_metadata(content_text: str, table: Mapping[str, JSON]) -> tuple[str, str]:
    """The sealed document as canonical JSON, and its digest; each part becomes text once, since every open pays."""
    head = f'{{"content":{content_text},'
    tail = f'"format":"{STEP_FORMAT}","tensors":{canonical_json(table)},"version":{STEP_VERSION}}}'
    digest = hashlib.sha256((head + tail).encode("ascii")).hexdigest()
    return f'{head}"digest":"{digest}",{tail}', digest


def _build_entries(table: Mapping[str, Any], *, source: str, start: int) -> dict[str, TensorEntry]:
    """The tensors in file order, from byte ``start`` on; raises ``CorruptRecordingError`` where one cannot be."""
    kinds = {tensor: _read_kind(tensor, item, source) for tensor, item in table.items()}
    entries: dict[str, TensorEntry] = {}
    # Places follow from the table, so no offset of the header has to be believed.
    for tensor in sorted(kinds, key=lambda tensor: _sort_key(tensor, kinds[tensor][0])):
        dtype, shape = kinds[tensor]
        stop = start + count_stored_bytes(dtype, shape)
        blocks = table[tensor]["blocks"]
        if not isinstance(blocks, str) or len(blocks) != count_blocks(stop - start) * DIGEST_CHARS:
            raise CorruptRecordingError(
                f"{source}: tensor {tensor!r}: its digests are not those of {stop - start} bytes"
            )
        entries[tensor] = TensorEntry(name=tensor, dtype=dtype, shape=shape, blocks=blocks, start=start, stop=stop)
        start = stop
    return entries


def _read_kind(tensor: str, item: object, source: str) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape of one entry of the tensor table, bounded so that no later product is large."""
    if not isinstance(item, dict) or item.keys() != {"dtype", "shape", "blocks"} or not isinstance(item["shape"], list):
        raise CorruptRecordingError(f"{source}: tensor {tensor!r}: header entry cannot be read")
    dtype, shape = item["dtype"], item["shape"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise RecordingError(f"{source}: tensor {tensor!r} {unknown_dtype_text(dtype)}")
    if len(shape) > _MAX_DIMS or not set(map(type, shape)) <= {int} or min(shape, default=0) < 0:
        raise CorruptRecordingError(f"{source}: tensor {tensor!r}: shape is no list of up to {_MAX_DIMS} sizes")
    # Sizes of 0 do not hide the others: torch computes strides from those.
    if math.prod([size or 1 for size in shape]) * ITEM_SIZES[dtype] > _MAX_TENSOR_BYTES:
        raise CorruptRecordingError(f"{source}: tensor {tensor!r}: shape {shape} is over {_MAX_TENSOR_BYTES} bytes")
    return dtype, tuple(shape)


def _render_header(metadata: str, entries: Mapping[str, TensorEntry]) -> bytes:
    """Returns the safetensors header, padded to a multiple of 8 bytes."""
    header: dict[str, JSON] = {"__metadata__": {_METADATA_KEY: metadata}}
    base = min((entry.start for entry in entries.values()), default=0)
    for entry in entries.values():
        name, dtype, shape = stored_form(entry)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [entry.start - base, entry.stop - base]}
    # ASCII, so that one character is one byte; padded, so that the first tensor is aligned.
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    return text.ljust(-(-len(text) // 8) * 8)


def _sort_key(tensor: str, dtype: str) -> tuple[int, str]:
    # Widest first keeps every tensor aligned without gaps.
    return -ITEM_SIZES[dtype], tensor
