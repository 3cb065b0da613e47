"""The step file: one safetensors file that holds one batch, with a digest over every bit of it.

Format, version 1. Eight bytes (header size, little endian), the safetensors header, the tensors without gaps.
The header's ``__metadata__`` has one key, ``rollout``, whose value is canonical JSON: ``format``, ``version``,
``content`` (everything that is no tensor), ``tensor_digests`` (SHA-256 over type and shape, as in ``int32[2, 3]``,
then the bytes) and ``digest`` (SHA-256 over the rest of this JSON). One key, since safetensors does not order several.
A header is accepted only if writing what it says gives the same bytes, so that no bit of it can change unnoticed;
sizes are bounded before anything is allocated; nothing is unpickled. Equal content gives equal bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from mmap import mmap
from typing import Any, TypeAlias

import numpy as np
import safetensors.torch
import torch

from mock_scheduler.batch import (
    TENSOR_FIELDS,
    RolloutBatch,
    SampleIdentity,
    SamplingParams,
    sampling_as_json,
)
from mock_scheduler.digests import JSON, canonical_json, compute_tensor_digest, open_sealed, seal
from mock_scheduler.errors import BatchError, CorruptRecordingError, RecordingError
from mock_scheduler.scheduler import Mode

StepBuffer: TypeAlias = "bytes | bytearray | mmap"

STEP_FORMAT = "rollout-step"
STEP_VERSION = 1
MAX_HEADER_BYTES = 8 * 2**20

_METADATA_KEY = "rollout"
_DTYPES: Mapping[str, torch.dtype] = {
    "I64": torch.int64,
    "I32": torch.int32,
    "F32": torch.float32,
    "U8": torch.uint8,
}
_STORED_FIELDS: Mapping[str, tuple[torch.dtype, int]] = {
    **{name: spec for name, spec in TENSOR_FIELDS.items() if name != "response_mask"},
    "response_mask_bits": (torch.uint8, 1),
    "identities": (torch.int64, 2),
    "scheduler_index": (torch.int32, 1),
    "tag_index": (torch.int32, 1),
    "prompt_digests": (torch.uint8, 2),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInfo:
    """What a step file says about itself.

    ``metrics``: what the real scheduler measured for this batch, for example seconds and tokens.
    ``scheduler_state``: its ``state_dict`` after the batch, so that a replay can make a truthful checkpoint.
    """

    step: int
    mode: Mode
    scheduler_id: str
    run_id: str
    policy_version: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    scheduler_state: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class _TensorEntry:
    """Where a tensor lies, in bytes from the start of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepHeader:
    """A header that was read and found plausible; ``document`` is the JSON of its metadata."""

    document: Mapping[str, Any]
    entries: tuple[_TensorEntry, ...]
    size_bytes: int


def encode_step(batch: RolloutBatch, info: StepInfo) -> bytes:
    """The bytes of a step file; equal for equal content, whatever the rows' arrival order.

    Raises ``RecordingError`` where ``info`` holds what is no JSON (NaN, an infinity, an object), naming it.
    """
    tensors, tables = _pack_batch(batch)
    document: dict[str, JSON] = {
        "format": STEP_FORMAT,
        "version": STEP_VERSION,
        "content": {**tables, "info": _info_as_json(info)},
        "tensor_digests": {name: compute_tensor_digest(tensor) for name, tensor in tensors.items()},
    }
    metadata = canonical_json(seal(document))
    data = bytes(safetensors.torch.save(tensors, {_METADATA_KEY: metadata}))
    (header_size,) = struct.unpack("<Q", data[:8])
    if header_size > MAX_HEADER_BYTES:
        raise RecordingError(
            f"step {info.step}: header of {header_size} bytes is over the limit of {MAX_HEADER_BYTES}: "
            "scheduler state, metrics or tags are too large to record"
        )
    return data


def decode_step(
    data: StepBuffer, *, source: str = "step in memory", verify: bool = True
) -> tuple[RolloutBatch, StepInfo]:
    """The batch and what the step says about itself; the inverse of ``encode_step``, bit for bit.

    Tensors are views of ``data`` where it is writable (a private memory map, a bytearray), else of one copy.
    ``verify=False`` skips the tensors' digests, for bytes that were verified before. Raises
    ``CorruptRecordingError`` naming ``source`` and the tensor where any bit changed, ``RecordingError`` where a newer
    version wrote it.
    """
    buffer = data if not isinstance(data, bytes) else bytearray(data)
    prefix = bytes(buffer[:8])
    head = bytes(buffer[8 : 8 + read_header_size(prefix, len(buffer), source=source)])
    header = read_step_header(prefix, head, len(buffer), source=source)
    tensors = {entry.name: _view_tensor(buffer, entry) for entry in header.entries}
    if verify:
        _check_tensor_digests(tensors, header.document["tensor_digests"], source)
    try:
        return _unpack_step(tensors, header.document["content"])
    except (BatchError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CorruptRecordingError(f"{source}: content is no rollout batch: {error!r}") from error


def read_step_header(prefix: bytes, head: bytes, size_bytes: int, *, source: str) -> StepHeader:
    """Read and check the header of a step file, without its tensors.

    ``prefix``: its first 8 bytes; ``head``: the header, as many bytes as ``read_header_size`` says;
    ``size_bytes``: the size of the file. Raises as ``decode_step``.
    """
    header_size = read_header_size(prefix, size_bytes, source=source)
    if len(head) != header_size:
        raise CorruptRecordingError(f"{source}: header ends after {len(head)} of {header_size} bytes: truncated")
    header = _parse_canonical(head, source)
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or set(metadata) != {_METADATA_KEY}:
        raise CorruptRecordingError(f"{source}: header has no metadata {_METADATA_KEY!r}: not a recorded step")
    document = _parse_document(metadata[_METADATA_KEY], source)
    entries = _read_entries(header, 8 + header_size, size_bytes, source)
    if set(header) != set(document["tensor_digests"]):
        raise CorruptRecordingError(f"{source}: tensors {sorted(header)} are not those that the digests list")
    return StepHeader(document=document, entries=entries, size_bytes=size_bytes)


def read_header_size(prefix: bytes, size_bytes: int, *, source: str) -> int:
    """The size of the header that follows the first 8 bytes; raises ``CorruptRecordingError`` if it cannot be."""
    if len(prefix) < 8:
        raise CorruptRecordingError(f"{source}: {size_bytes} bytes are too few for a step file: truncated")
    (header_size,) = struct.unpack("<Q", prefix)
    if header_size > min(MAX_HEADER_BYTES, size_bytes - 8):
        raise CorruptRecordingError(
            f"{source}: header size {header_size} is over the limit of {MAX_HEADER_BYTES} or the file's "
            f"{size_bytes} bytes: truncated or changed"
        )
    return int(header_size)


def _parse_canonical(text: bytes, source: str) -> dict[str, Any]:
    """The header as a dict, in the file's order; refused where it is not what a writer would have written."""
    try:
        header = json.loads(text)
        written = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    except (ValueError, RecursionError) as error:
        raise CorruptRecordingError(f"{source}: header is no JSON: {error}") from error
    if not isinstance(header, dict) or written.ljust(-(-len(written) // 8) * 8) != text:
        raise CorruptRecordingError(f"{source}: header is not in canonical form: its bytes were changed")
    return header


def _parse_document(text: object, source: str) -> dict[str, Any]:
    """The metadata JSON, with its digest checked before anything in it is believed."""
    if not isinstance(text, str):
        raise CorruptRecordingError(f"{source}: header metadata is of type {type(text).__name__}, expected text")
    try:
        document = open_sealed(text)
    except ValueError as error:
        raise CorruptRecordingError(f"{source}: header metadata {error}") from error
    if canonical_json(seal(document)) != text:
        raise CorruptRecordingError(f"{source}: header metadata is not in canonical form: its bytes were changed")
    if not isinstance(document.get("tensor_digests"), dict):
        raise CorruptRecordingError(f"{source}: header metadata is not that of a recorded step")
    if document.get("format") != STEP_FORMAT or not isinstance(document.get("version"), int):
        raise CorruptRecordingError(f"{source}: format {document.get('format')!r} is not {STEP_FORMAT!r}")
    if document["version"] > STEP_VERSION:
        raise RecordingError(
            f"{source}: step format version {document['version']} is newer than {STEP_VERSION}, the newest that this "
            "release reads. Update mock-scheduler, or record again with this release."
        )
    return document


def _read_entries(header: Mapping[str, Any], start: int, size_bytes: int, source: str) -> tuple[_TensorEntry, ...]:
    """The tensors in file order, which must fill the file exactly, without gap or overlap."""
    entries, position = [], start
    for name, spec in header.items():
        try:
            dtype, shape, (begin, end) = _DTYPES[spec["dtype"]], tuple(spec["shape"]), spec["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptRecordingError(f"{source}: tensor {name!r}: header entry cannot be read: {error!r}") from error
        if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise CorruptRecordingError(f"{source}: tensor {name!r}: shape or offsets are no sizes")
        if begin != position - start or end - begin != math.prod(shape) * dtype.itemsize:
            raise CorruptRecordingError(
                f"{source}: tensor {name!r}: offsets {begin} to {end} do not fit {spec['dtype']} {list(shape)} "
                f"after byte {position - start}"
            )
        entries.append(_TensorEntry(name=name, dtype=dtype, shape=shape, start=position, stop=start + end))
        position = start + end
    if position != size_bytes:
        raise CorruptRecordingError(
            f"{source}: file has {size_bytes} bytes; its header describes {position}: truncated"
        )
    return tuple(entries)


def _view_tensor(buffer: bytearray | mmap, entry: _TensorEntry) -> torch.Tensor:
    count = math.prod(entry.shape)
    if count == 0:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return torch.frombuffer(buffer, dtype=entry.dtype, count=count, offset=entry.start).reshape(entry.shape)


def _check_tensor_digests(tensors: Mapping[str, torch.Tensor], digests: Mapping[str, str], source: str) -> None:
    changed = [name for name, tensor in sorted(tensors.items()) if compute_tensor_digest(tensor) != digests[name]]
    if changed:
        names = ", ".join(repr(name) for name in changed)
        raise CorruptRecordingError(
            f"{source}: tensor {names} does not match its digest: the file was changed after it was written. "
            "Restore it from a copy or record the step again."
        )


def _info_as_json(info: StepInfo) -> dict[str, JSON]:
    """``StepInfo`` as JSON; each part is tried alone so that the error names it."""
    parts = {**asdict(info), "metrics": dict(info.metrics), "scheduler_state": dict(info.scheduler_state)}
    for group in ("metrics", "scheduler_state"):
        for name, value in parts[group].items():
            try:
                canonical_json({name: value})
            except (TypeError, ValueError) as error:
                raise RecordingError(
                    f"step {info.step}: {group} {name!r} is {value!r}, which cannot be recorded: {error}"
                ) from error
    return parts


def _pack_batch(batch: RolloutBatch) -> tuple[dict[str, torch.Tensor], dict[str, JSON]]:
    """The batch as tensors and, for its strings, tables."""
    num_rows = len(batch)
    scheduler_ids = sorted({identity.scheduler_id for identity in batch.identities})
    tag_names = sorted(set(batch.tags))
    bits = np.packbits(batch.response_mask.numpy(), bitorder="little")
    digests = np.frombuffer(bytes.fromhex("".join(batch.prompt_digests)), dtype=np.uint8).reshape(num_rows, 32)
    # Clones, since a caller's tensors may share memory, which safetensors refuses.
    tensors = {name: tensor.clone() for name, tensor in batch.tensors().items() if name != "response_mask"}
    tensors |= {
        "response_mask_bits": torch.from_numpy(bits),
        "identities": torch.tensor([i.numbers for i in batch.identities], dtype=torch.int64).reshape(num_rows, 4),
        "scheduler_index": torch.tensor(
            [scheduler_ids.index(identity.scheduler_id) for identity in batch.identities], dtype=torch.int32
        ),
        "tag_index": torch.tensor([tag_names.index(tag) for tag in batch.tags], dtype=torch.int32),
        "prompt_digests": torch.from_numpy(digests.copy()),
    }
    tables: dict[str, JSON] = {
        "scheduler_ids": scheduler_ids,
        "tags": tag_names,
        "sampling": sampling_as_json(batch.sampling),
        "group_size": batch.group_size,
    }
    return tensors, tables


def _unpack_step(tensors: Mapping[str, torch.Tensor], content: Mapping[str, Any]) -> tuple[RolloutBatch, StepInfo]:
    found = {name: (tensor.dtype, tensor.dim()) for name, tensor in tensors.items()}
    if found != _STORED_FIELDS:
        raise ValueError(f"tensors {found}; expected {dict(_STORED_FIELDS)}")
    num_tokens = len(tensors["tokens"])
    bits = np.unpackbits(tensors["response_mask_bits"].numpy(), count=num_tokens, bitorder="little")
    digests, tags = tensors["prompt_digests"].numpy(), content["tags"]
    batch = RolloutBatch(
        identities=_unpack_identities(tensors, content["scheduler_ids"]),
        response_mask=torch.from_numpy(bits.view(np.bool_)),
        prompt_digests=tuple(digest.tobytes().hex() for digest in digests),
        tags=tuple(tags[index] for index in tensors["tag_index"].tolist()),
        sampling=SamplingParams(**content["sampling"]),
        group_size=content["group_size"],
        **{name: tensor for name, tensor in tensors.items() if name in TENSOR_FIELDS},
    )
    return batch, StepInfo(**content["info"])


def _unpack_identities(tensors: Mapping[str, torch.Tensor], scheduler_ids: list[str]) -> tuple[SampleIdentity, ...]:
    rows, indices = tensors["identities"].tolist(), tensors["scheduler_index"].tolist()
    return tuple(
        SampleIdentity(
            scheduler_id=scheduler_ids[index], group_id=group_id, episode_id=episode_id, env_id=env_id, turn=turn
        )
        for index, (group_id, episode_id, env_id, turn) in zip(indices, rows, strict=True)
    )
