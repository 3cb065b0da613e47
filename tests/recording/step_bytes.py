"""Step files as bytes, for the tests that damage them, and batches with extras of every kind."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from typing import Any

import torch

from mock_scheduler.batch import RolloutBatch, Trajectory
from mock_scheduler.batch.columns import Ragged
from mock_scheduler.recording.step.step_file import StepFile, encode_step
from mock_scheduler.recording.storage.byte_sources import MemorySource
from mock_scheduler.support.digests import JSON
from tests.recording.builders import SAMPLING, make_info, make_row, make_rows


class CountingSource:
    """A source that notes which ranges were read."""

    def __init__(self, data: bytes) -> None:
        self._inner = MemorySource(bytearray(data), path="counted")
        self.ranges: list[tuple[int, int]] = []

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def read(self, start: int, stop: int) -> memoryview:
        self.ranges.append((start, stop))
        return self._inner.read(start, stop)


def open_bytes(data: bytes, *, name: str = "here") -> StepFile:
    return StepFile.open(MemorySource(bytearray(data), path=name), name=name)


def tiny_step() -> bytes:
    """The smallest step: one row, no extras."""
    rows = [
        make_row(tokens=(1, 2), response=(False, True), rollout_logprobs=(-0.5,), turn_rewards=(1.0,), prompt_length=1)
    ]
    batch = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=1)
    return encode_step(batch, make_info()).to_bytes()


def with_extras(row: Trajectory, index: int) -> Trajectory:
    """The row with a dense, a ragged, a bool and a JSON extra that depend on its index."""
    extras = {
        "score": torch.tensor(index + 0.5, dtype=torch.float64),
        "experts": Ragged(torch.arange(3 * (index % 3), dtype=torch.int16).reshape(-1, 3) + index),
        "flags": torch.tensor([index % 2 == 0, True, index % 3 == 0]),
        "seen": Ragged(torch.arange(index % 5) % 2 == 0),
        "messages": [{"role": "user", "content": f"row {index} é"}, None, -0.0],
    }
    return Trajectory(**{name: getattr(row, name) for name in row.__dataclass_fields__} | {"extras": extras})


def make_rich_batch(num_groups: int = 3, group_size: int = 2) -> RolloutBatch:
    """A batch with extras of every kind and a meta."""
    rows = [with_extras(row, index) for index, row in enumerate(make_rows(num_groups, group_size))]
    meta: dict[str, JSON] = {"global_step": 3, "names": ["a", None]}
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=group_size, meta=meta)


def fixed_step() -> bytes:
    """A step with extras whose every value is written in this repository: no random generator is behind it."""
    rows = [with_extras(make_row(index // 2, index % 2, turn_rewards=[index, 0.5]), index) for index in range(6)]
    batch = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=2, meta={"global_step": 3})
    return encode_step(batch, make_info(data_cursor=[1, "a"])).to_bytes()


def make_large_batch(num_rows: int = 48, num_tokens: int = 2048) -> RolloutBatch:
    """A batch whose tokens, logprobs and one extra take several blocks."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(num_rows):
        row = make_row(
            index // 4,
            index % 4,
            tokens=torch.randint(0, 2**31 - 1, (num_tokens,), generator=generator).tolist(),
            response=[False] * 8 + [True] * (num_tokens - 8),
            rollout_logprobs=torch.randn(num_tokens - 8, generator=generator).tolist(),
            prompt_length=8,
        )
        rows.append(with_extras(row, index))
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=4)


def split_header(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The safetensors header and the tensors."""
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join_header(header: object, tensors: bytes) -> bytes:
    """The inverse of ``split_header``."""
    return join_text(json.dumps(header, separators=(",", ":")).encode(), tensors)


def join_text(text: bytes, tensors: bytes = b"") -> bytes:
    """A file with this text as its header."""
    padded = text.ljust(-(-len(text) // 8) * 8)
    return struct.pack("<Q", len(padded)) + padded + tensors


def rewrite(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The step file with its metadata document changed and its digest made right again."""
    header, tensors = split_header(data)
    document = json.loads(header["__metadata__"]["rollout"])
    del document["digest"]
    change(document)
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["digest"] = hashlib.sha256(text.encode()).hexdigest()
    header["__metadata__"]["rollout"] = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return join_header(header, tensors)
