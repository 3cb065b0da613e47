"""Rank 0 hears the requests of a service, and tells the other ranks what to do.

Contract: every rank is either in ``listen`` or carries out the same command. Rank 0 sends an empty command at least
every ``HEARTBEAT_S`` seconds, so that no collective of the waiting ranks runs into its timeout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

HEARTBEAT_S = 20.0
_IDLE, _SCORE, _TRAIN, _STOP = range(4)
_CODES = {"score": _SCORE, "train": _TRAIN, "stop": _STOP, "idle": _IDLE}
_NAMES = {code: name for name, code in _CODES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """``operation``: score, train, stop or idle; ``step`` and ``body`` as the request has them."""

    operation: str
    step: int = 0
    body: bytes = b""


def send(command: Command, *, device: torch.device) -> None:
    """Tell every other rank; rank 0 calls it."""
    if dist.get_world_size() == 1:
        return
    numbers = [_CODES[command.operation], command.step, len(command.body)]
    dist.broadcast(torch.tensor(numbers, dtype=torch.int64, device=device), src=0)
    if command.body:
        dist.broadcast(torch.frombuffer(bytearray(command.body), dtype=torch.uint8).to(device), src=0)


def listen(*, device: torch.device) -> Iterator[Command]:
    """The commands of rank 0 until it stops; every other rank iterates over it."""
    while True:
        numbers = torch.zeros(3, dtype=torch.int64, device=device)
        dist.broadcast(numbers, src=0)
        code, step, size = numbers.tolist()
        body = torch.empty(size, dtype=torch.uint8, device=device)
        if size:
            dist.broadcast(body, src=0)
        if code == _STOP:
            return
        if code != _IDLE:
            yield Command(operation=_NAMES[code], step=step, body=body.cpu().numpy().tobytes())
