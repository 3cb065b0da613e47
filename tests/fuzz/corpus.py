"""Small sound files of each format, and their parts to be mutated and put together again."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mock_scheduler.config.steps import StepRanges
from mock_scheduler.recording.retention import RetentionRecord, save_retention
from mock_scheduler.recording.step import header
from mock_scheduler.recording.step.stored_tensors import digest_blocks
from mock_scheduler.recording.storage import open_storage
from mock_scheduler.recording.writing.opening import WriterOptions, open_recording
from mock_scheduler.support.digests import canonical_json
from mock_scheduler.support.tensor_bytes import DTYPES
from mock_scheduler.trace.entries import LedgerCall, RankPlace, StepFooter, TraceEntry, Unobserved
from mock_scheduler.trace.shards import cut_shard, whole
from mock_scheduler.trace.sketch.files import SketchSink
from tests.recording.builders import make_batch, make_contract, make_info
from tests.recording.step_bytes import make_rich_batch
from tests.recording.step_recordings import record_shards
from tests.trace.builders import HIDDEN, NORM, ROWS, entry, gated_spec, place, save, token_piece

Tensors = dict[str, list[Any]]
"""Name -> dtype, shape and bytes."""


def make_recording(folder: Path) -> Path:
    """Steps 0 to 4 of a run, one of them with extras of every kind, one compressed and one in shards."""
    contract = make_contract(envs=["a", "b"], nested={"x": [1, 2]})
    provenance: dict[str, Any] = {"facts": ["a fact"], "settings": {"A": "1"}, "node": "n"}
    for step, compression in ((0, "none"), (3, "none"), (4, "zstd")):
        writer = open_recording(
            str(folder),
            contract=contract,
            plan=(),
            provenance=provenance,
            resume=False,
            options=WriterOptions(compression=compression, background=False),  # type: ignore[arg-type]
            run_id="run-1",
        )
        batch = make_rich_batch() if step == 3 else make_batch(seed=step)
        writer.write_step(batch, make_info(step, run_id="run-1", scheduler_state={"next": step, "a": [1, None]}))
        writer.close()
    batch = make_batch(seed=9)
    half = len(batch) // 2
    parts = [batch.select(range(half)), batch.select(range(half, len(batch)))]
    record_shards(folder, parts, step=5, scheduler_state={"next": 9})
    record = RetentionRecord(start_points=(0,), removed={"train": StepRanges.parse("7-8")})
    save_retention(open_storage(str(folder)), record)
    return folder


def unpack_step(data: bytes) -> tuple[dict[str, Any], Tensors]:
    """Gives the content and the tensors of a step file."""
    (size,) = struct.unpack("<Q", data[:8])
    document = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["rollout"])
    entries = header._build_entries(document["tensors"], source="x", start=8 + size)
    tensors = {
        name: [item["dtype"], item["shape"], data[entries[name].start : entries[name].stop]]
        for name, item in document["tensors"].items()
    }
    return document["content"], tensors


def pack_step(content: Any, tensors: Tensors) -> bytes:
    """Puts a step file together again, every digest of which fits, whether it makes sense or not."""

    def width(name: str) -> int:
        dtype = tensors[name][0]
        return DTYPES[dtype].itemsize if isinstance(dtype, str) and dtype in DTYPES else 0

    order = sorted(tensors, key=lambda name: (-width(name), name))
    table = {
        name: {
            "dtype": tensors[name][0],
            "shape": tensors[name][1],
            "blocks": digest_blocks(memoryview(tensors[name][2])),
        }
        for name in order
    }
    try:
        metadata, _ = header._render_metadata(canonical_json(content), table)
        head = header._render_header(metadata, header._build_entries(table, source="x", start=0))
    except (ValueError, TypeError, OSError, KeyError, RecursionError):
        metadata = json.dumps(
            {"content": content, "format": "rollout-step", "tensors": table, "version": 2}, default=str
        )
        head = json.dumps({"__metadata__": {"rollout": metadata}}).encode()
        head = head.ljust(-(-len(head) // 8) * 8)
    return struct.pack("<Q", len(head)) + head + b"".join(tensors[name][2] for name in order)


FOOTER = StepFooter(
    rows=ROWS,
    update_rows=((0, 1), (2,)),
    kinds=("gradient", "output", "parameter", "activation"),
    patterns=("*",),
    unobserved=(Unobserved(kind="activation", name="decoder.layers.0.x", reason="fused"),),
    ledgers={"collective": (LedgerCall(operation="all_reduce", group=(0, 1), dtype="float32", num_elements=4),)},
)


def trace_entries(rank: int, *, scale: float = 1.0) -> list[TraceEntry]:
    """What rank ``rank`` of 2 traces of a step: a gated weight, a norm, log-probabilities and hidden states."""
    probs, hidden = torch.arange(9.0) * scale, torch.arange(36.0).reshape(9, 4) * scale
    weight, spec = torch.arange(24.0).reshape(8, 3) * scale, gated_spec(rank)
    tokens = ([0, 1, 2, 3, 4], [5, 6, 7, 8])[rank]
    return [
        entry(spec, cut_shard(weight, spec)),
        entry(whole(NORM, (4,)), torch.ones(4) * scale, kind="parameter"),
        entry(whole(NORM, (4,)), torch.ones(4) * scale, kind="initial"),
        token_piece(probs, tokens, update=rank),
        token_piece(hidden, tokens, name=HIDDEN, kind="activation", update=rank),
    ]


def whole_entries(*, scale: float = 1.0) -> list[TraceEntry]:
    """The same of a run of one rank, so that no other rank has to agree with a forged header."""
    hidden = torch.arange(36.0).reshape(9, 4) * scale
    return [
        entry(whole(NORM, (4,)), torch.ones(4) * scale),
        entry(gated_spec(0, flat_range=(0, 12)), torch.arange(12.0) * scale, kind="parameter"),
        token_piece(torch.arange(9.0) * scale, [0, 1, 2, 3, 4], update=0, is_masked=True),
        token_piece(hidden, [5, 6, 7, 8], name=HIDDEN, kind="activation", update=1),
    ]


def make_trace(folder: Path, *, scale: float = 1.0, num_ranks: int = 2) -> Path:
    """A trace of two steps."""
    for step in (0, 1):
        for rank in range(num_ranks):
            entries = trace_entries(rank, scale=scale) if num_ranks == 2 else whole_entries(scale=scale)
            save(folder, rank, num_ranks, entries, step=step, footer=FOOTER)
    return folder


def make_sketches(folder: Path, *, scale: float = 1.0) -> Path:
    """A trace of sketches, of one step and two ranks."""
    for rank in range(2):
        sink = SketchSink(
            folder, step=0, place=RankPlace(global_rank=rank, coordinates=place(rank).coordinates), world_size=2
        )
        for item in trace_entries(rank, scale=scale):
            sink.add(item)
        sink.close(FOOTER)
    return folder


def read_safetensors(path: Path, key: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Gives the document in a file's metadata, and its tensors."""
    with safe_open(path, framework="pt") as handle:
        document = json.loads(handle.metadata()[key])
    return document, load_file(path)


def write_safetensors(path: Path, key: str, text: str, tensors: dict[str, torch.Tensor]) -> None:
    """Writes such a file with any text as its metadata."""
    save_file(tensors, path, metadata={key: text.encode("utf-8", "replace").decode()})


def copy_tree(source: Path, target: Path) -> Path:
    """Makes a fresh copy, in place of an older one."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))
