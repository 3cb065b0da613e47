"""Checks a trace's selection against a run: unknown ranks before anything is built, unmatched globs after a step."""

from __future__ import annotations

import json
from collections.abc import Collection

from mock_scheduler.config.instruments import TraceConfig
from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.errors import ConfigError, TraceError
from mock_scheduler.trace.selection import TraceSelection, describe_unmatched


def check_trace_ranks(trace: TraceConfig, parallel: ParallelConfig) -> None:
    """Refuses ``trace.ranks`` outside the layout.

    Raises:
        ConfigError: with these ranks and the number of processes.
    """
    world_size = parallel.world_size
    beyond = [global_rank for global_rank in trace.ranks or () if global_rank >= world_size]
    if beyond:
        raise ConfigError(
            f"trace.ranks has {', '.join(map(str, beyond))}, but layout {parallel.describe()} has "
            f"{world_size} {'process' if world_size == 1 else 'processes'}: its global ranks are 0 to "
            f"{world_size - 1}. Remove them from trace.ranks, or set it to null for all ranks"
        )


def check_patterns(selection: TraceSelection, ranks: RankGroup) -> None:
    """Refuses globs without any match on any rank in a whole step. Collective: each rank knows the names of its own
    stage.

    Raises:
        TraceError: on every rank, with each unmatched glob and the names nearest to it.
    """
    matched = _gather(selection.matched, ranks)
    if all(pattern in matched for pattern in selection.patterns):
        return
    raise TraceError(describe_unmatched(selection.patterns, _gather(selection.names, ranks), matched=matched))


def _gather(texts: Collection[str], ranks: RankGroup) -> frozenset[str]:
    """The texts of all ranks."""
    payloads = ranks.gather(json.dumps(sorted(texts)).encode())
    return frozenset(text for payload in payloads for text in json.loads(payload))
