"""Lets an error of one rank end all ranks, at places where all of them come by."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mock_scheduler import errors
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.errors import MockSchedulerError
from mock_scheduler.support.text import list_some

T = TypeVar("T")

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
