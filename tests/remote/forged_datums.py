"""Datums as no client of ours makes them, with all digests right."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.columns import TensorColumn
from mock_scheduler.errors import RecordingError
from mock_scheduler.recording.step.header import _build_entries, _render_header, _render_metadata
from mock_scheduler.recording.step.stored_tensors import TensorEntry, digest_blocks
from mock_scheduler.remote.protocol import encode_datums
from mock_scheduler.support.digests import canonical_json
from mock_scheduler.support.raw_tensors import ITEM_SIZES


def with_dtype(batch: RolloutBatch, dtype: str, *, run_id: str = "r") -> bytes:
    """Datums with a matrix ``extras/own`` that is said to be of this dtype."""
    stored = torch.int32 if getattr(torch, dtype).itemsize == 4 else torch.uint8
    column = TensorColumn(values=torch.zeros(len(batch), 4, dtype=stored))
    body = encode_datums(replace(batch, extras={**batch.extras, "own": column}), step=0, run_id=run_id)
    content, table, tensors = unseal(body)
    entries = _build_entries(table, source="forged", start=0)
    table["extras/own"]["dtype"] = dtype
    # The reader of entries refuses what no file may hold; such a body has the entries of the stored dtype.
    with suppress(RecordingError):
        entries = _build_entries(table, source="forged", start=0)
    return _seal(content, table, entries, tensors)


def change_tensor(table: dict[str, Any], tensors: bytes, name: str, chance: random.Random) -> bytes:
    """Change one item of a tensor, or all of them, to an odd one; its digests in the table are made right again."""
    entry = _build_entries(table, source="forged", start=0)[name]
    width = ITEM_SIZES[entry.dtype]
    odd = [b"\xff" * width, bytes(width), b"\xff" * (width - 1) + b"\x7f", b"\x01" + bytes(width - 1), b"\x80" * width]
    data = bytearray(tensors[entry.start : entry.stop])
    if chance.random() < 0.4:
        data[:] = (chance.choice(odd) * len(data))[: len(data)]
    elif data:
        place = chance.randrange(0, len(data), width)
        data[place : place + width] = chance.choice(odd)[: len(data) - place]
    table[name]["blocks"] = digest_blocks(memoryview(bytes(data)))
    return tensors[: entry.start] + bytes(data) + tensors[entry.stop :]


def unseal(body: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The content, the table of tensors, and the tensors' bytes."""
    (size,) = struct.unpack_from("<Q", body)
    document = json.loads(json.loads(body[8 : 8 + size])["__metadata__"]["rollout"])
    return document["content"], document["tensors"], body[8 + size :]


def seal(content: dict[str, Any], table: dict[str, Any], tensors: bytes) -> bytes:
    """A body with right digests of its header; the tensors stay as they are."""
    return _seal(content, table, _build_entries(table, source="forged", start=0), tensors)


def _seal(content: dict[str, Any], table: dict[str, Any], entries: Mapping[str, TensorEntry], tensors: bytes) -> bytes:
    metadata, _ = _render_metadata(canonical_json(content), table)
    head = _render_header(metadata, entries)
    return struct.pack("<Q", len(head)) + head + tensors
