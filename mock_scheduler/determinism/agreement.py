"""Whether all ranks of a run hold the same values, at a cost per rank that does not grow with their number.

Contract: collective; every rank of the group must call, and every rank raises or none does. One reduction of eight
integers where all agree; the values themselves travel only where they do not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist

from mock_scheduler.errors import RankDisagreementError

ABSENT = "absent"


class RankGroup(Protocol):
    """The ranks that must agree."""

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""

    def all_equal(self, digest: bytes) -> bool:
        """Whether all ranks passed the same digest (a multiple of 8 bytes); collective, same answer on every rank."""

    def gather(self, payload: bytes) -> list[bytes]:
        """The bytes of every rank, by rank; collective, same answer on every rank. They may differ in length."""


class TorchRankGroup:
    """All ranks of torch's default process group; tensors live on ``device`` (the rank's GPU under NCCL)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.world_size = dist.get_world_size()

    def all_equal(self, digest: bytes) -> bool:
        """Whether all ranks passed the same digest: a minimum of its int64 words and of their complements.

        The complement turns the minimum into a maximum (``min(~w) == ~max(w)``) without overflow, so that one
        reduction gives both; they are equal exactly where all ranks hold one value.
        """
        words = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(self._device)
        lowest = torch.cat([words, ~words])
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        minimum, maximum = lowest[: len(words)], ~lowest[len(words) :]
        return torch.equal(minimum, maximum)

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, which travel padded to the longest: nothing is pickled."""
        sizes = [int(size) for size in self._gather(torch.tensor([len(payload)], device=self._device))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        if payload:  # torch.frombuffer refuses none
            padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        buffers = self._gather(padded.to(self._device))
        return [buffer[:size].cpu().numpy().tobytes() for buffer, size in zip(buffers, sizes, strict=True)]

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        pieces = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(pieces, tensor)
        return pieces


def check_agreement(values: Mapping[str, str], group: RankGroup) -> None:
    """Raise RankDisagreementError on *every* rank where any rank's values differ.

    It names each key, and which ranks hold which value: ``NCCL_ALGO: ranks 0-2 'Ring'; rank 3 'Tree'``. Collective.
    """
    text = json.dumps(dict(values), sort_keys=True)
    if group.all_equal(hashlib.sha256(text.encode()).digest()):
        return
    by_rank: list[dict[str, str]] = [json.loads(gathered) for gathered in group.gather(text.encode())]
    keys = sorted(set().union(*by_rank))
    differing = [key for key in keys if len({ranks_values.get(key) for ranks_values in by_rank}) > 1]
    listed = "".join(f"\n  - {_describe(key, by_rank)}" for key in differing)
    raise RankDisagreementError(
        f"the {group.world_size} ranks of this run differ:{listed}\n"
        "Start all ranks through launch/train.sh or launch/multi_node.sh with one configuration."
    )


def _describe(key: str, by_rank: Sequence[Mapping[str, str]]) -> str:
    ranks_by_text: dict[str, list[int]] = {}
    for rank, values in enumerate(by_rank):
        text = repr(values[key]) if key in values else ABSENT
        ranks_by_text.setdefault(text, []).append(rank)
    return f"{key}: " + "; ".join(f"{_name_ranks(ranks)} {text}" for text, ranks in ranks_by_text.items())


def _name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0-2,5``; ranks ascend."""
    starts = [ranks[0], *(right for left, right in pairwise(ranks) if right != left + 1)]
    stops = [*(left for left, right in pairwise(ranks) if right != left + 1), ranks[-1]]
    spans = [str(start) if start == stop else f"{start}-{stop}" for start, stop in zip(starts, stops, strict=True)]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {','.join(spans)}"
