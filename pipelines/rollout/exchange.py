"""Ranks give each other the rows they played, so that every rank holds the same whole batch.

Rows travel as step files, the format of the recording: typed, checked by digest, and no pickle.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.recording.container import StepInfo, decode_step, encode_step


def gather_rows(batch: RolloutBatch | None, info: StepInfo, *, device: torch.device) -> RolloutBatch:
    """The union of all ranks' rows, in canonical order, on every rank. ``None``: this rank played none. Collective."""
    parts = [decode_step(part)[0] for part in _gather_bytes(encode_step(batch, info) if batch else b"", device)]
    return RolloutBatch.concat(parts)


def _gather_bytes(payload: bytes, device: torch.device) -> list[bytes]:
    """Every rank's bytes in rank order, without the empty ones."""
    world_size = dist.get_world_size()
    size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(world_size)]
    dist.all_gather(sizes, size)
    longest = max(int(other) for other in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    if payload:
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    buffers = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(world_size)]
    dist.all_gather(buffers, padded.to(device))
    return [
        buffer[: int(other)].cpu().numpy().tobytes() for buffer, other in zip(buffers, sizes, strict=True) if int(other)
    ]
