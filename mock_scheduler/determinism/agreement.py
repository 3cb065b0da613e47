"""All ranks of a run must hold the same values; the cost of this check per rank does not grow with their number.

Contract: collective; every rank of the group must call, and every rank raises or none does. One reduction of eight
integers where all agree. Otherwise a fixed number of reductions, sized by the differing keys and values
(``agreement_rounds``); nothing is gathered from every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from mock_scheduler import errors
from mock_scheduler.determinism.agreement_rounds import (
    Op,
    Reduction,
    Words,
    agreement_rounds,
    describe_disagreement,
)
from mock_scheduler.errors import MockSchedulerError, RankDisagreementError
from mock_scheduler.support.text import list_some

T = TypeVar("T")

_REDUCE_OPS = {Op.MIN: dist.ReduceOp.MIN, Op.SUM: dist.ReduceOp.SUM}


class RankGroup(Protocol):
    """The ranks that must agree."""

    @property
    def global_rank(self) -> int:
        """Returns this rank in the group, from 0."""

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""

    def reduce(self, reduction: Reduction) -> Words:
        """Returns the minimum or sum of all ranks' words, word by word; collective, same answer on every rank."""

    def gather(self, payload: bytes) -> list[bytes]:
        """Returns every rank's bytes, of any lengths, by rank; collective, same answer on every rank."""


class TorchRankGroup:
    """Joins all ranks of torch's default process group; tensors live on ``device`` (the rank's GPU under NCCL)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.global_rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def reduce(self, reduction: Reduction) -> Words:
        """Reduces int64 words by one all-reduce."""
        words = torch.tensor(reduction.words, dtype=torch.int64, device=self._device)
        dist.all_reduce(words, op=_REDUCE_OPS[reduction.op])
        reduced: Words = words.tolist()
        return reduced

    def gather(self, payload: bytes) -> list[bytes]:
        """Gathers every rank's bytes, padded to the longest on their way; nothing is pickled."""
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
    """Raises ``RankDisagreementError`` on *every* rank where any rank's values differ. Collective.

    The error names each key, its values and their ranks, the rarest value first:
    ``NCCL_ALGO: rank 3 'Tree'; 4095 other ranks (first rank 0) 'Ring'``.
    """
    lines = _drive(agreement_rounds(values, global_rank=group.global_rank, world_size=group.world_size), group)
    if lines:
        raise RankDisagreementError(describe_disagreement(lines, world_size=group.world_size))


def _drive(rounds: Generator[Reduction, Words, T], group: RankGroup) -> T:
    """Carries a generator's reductions out in this group."""
    try:
        reduction = next(rounds)
        while True:
            reduction = rounds.send(group.reduce(reduction))
    except StopIteration as finished:
        result: T = finished.value
        return result


_MAX_LISTED_RANKS = 8


def share(
    ranks: RankGroup, content: Mapping[str, Any], error: MockSchedulerError | None = None
) -> list[dict[str, Any]]:
    """Gathers every rank's JSON content, by rank. Collective.

    Raises:
        MockSchedulerError: on every rank, where any rank brought an error; with every message and its ranks.
    """
    failure = None if error is None else {"type": type(error).__name__, "message": str(error)}
    payload = json.dumps({"error": failure, "content": content}).encode()
    gathered = [json.loads(item) for item in ranks.gather(payload)]
    by_message: dict[tuple[str, str], list[int]] = {}
    for global_rank, item in enumerate(gathered):
        if item["error"] is not None:
            by_message.setdefault((item["error"]["type"], item["error"]["message"]), []).append(global_rank)
    if by_message:
        raise _combined(by_message, world_size=ranks.world_size)
    return [item["content"] for item in gathered]


def do_together(ranks: RankGroup, work: Callable[[], T]) -> T:
    """Does work that does not communicate; no rank goes on where it failed on any. Collective.

    Raises:
        MockSchedulerError: on every rank, as of ``share``.
    """
    results: list[T] = []
    error = None
    try:
        results.append(work())
    except MockSchedulerError as raised:
        error = raised
    share(ranks, {}, error)
    return results[0]


def _combined(by_message: Mapping[tuple[str, str], list[int]], *, world_size: int) -> MockSchedulerError:
    (first_type, first_message), first_ranks = next(iter(by_message.items()))
    kind = vars(errors)[first_type]
    if len(by_message) == 1 and len(first_ranks) == world_size:
        text = first_message
    else:
        text = "\n".join(
            f"global rank {list_some([str(rank) for rank in ranks], _MAX_LISTED_RANKS, ', ')}: {message}"
            for (_, message), ranks in by_message.items()
        )
    combined: MockSchedulerError = kind(text)
    return combined
