"""Ranks of one process group as threads, for what ranks only send each other as bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from mock_scheduler.determinism.agreement_rounds import Reduction, Words

T = TypeVar("T")


class ThreadRank:
    """One rank; a ``RankGroup`` whose ``gather`` waits for all others."""

    def __init__(self, global_rank: int, payloads: list[bytes], barrier: threading.Barrier) -> None:
        self.global_rank = global_rank
        self.world_size = len(payloads)
        self._payloads = payloads
        self._barrier = barrier

    def reduce(self, reduction: Reduction) -> Words:
        """No test needs it."""
        raise NotImplementedError(reduction)

    def gather(self, payload: bytes) -> list[bytes]:
        """Returns every rank's bytes."""
        self._payloads[self.global_rank] = payload
        self._barrier.wait()
        gathered = list(self._payloads)
        self._barrier.wait()
        return gathered


def one_rank() -> ThreadRank:
    """The only rank of its group."""
    return ThreadRank(0, [b""], threading.Barrier(1))


def run_ranks(functions: Sequence[Callable[[ThreadRank], T]]) -> list[T]:
    """Calls each function as a rank of one group, all at once; returns the results by rank."""
    payloads, barrier = [b""] * len(functions), threading.Barrier(len(functions), timeout=60.0)
    with ThreadPoolExecutor(len(functions)) as threads:
        started = [
            threads.submit(function, ThreadRank(rank, payloads, barrier)) for rank, function in enumerate(functions)
        ]
        return [one.result() for one in started]
