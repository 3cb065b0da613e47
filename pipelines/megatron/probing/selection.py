"""Whether a run can trace what its configuration selects.

Ranks that do not exist are refused before anything is built. A glob that selects nothing is known when all names of a
step are: each rank has only those of its own stage, so this check, unlike the probe, communicates.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.errors import ConfigError, TraceError
from mock_scheduler.trace.selection import TraceSelection, describe_unmatched
from pipelines.config.schema import PipelineConfig


def check_trace_ranks(config: PipelineConfig) -> None:
    """Refuse ``trace.ranks`` that the layout does not have.

    Raises:
        ConfigError: with these ranks and the number of processes.
    """
    world_size = config.parallel.world_size
    beyond = [global_rank for global_rank in config.trace.ranks or () if global_rank >= world_size]
    if beyond:
        raise ConfigError(
            f"trace.ranks has {', '.join(map(str, beyond))}, but layout {config.parallel.describe()} has "
            f"{world_size} {'process' if world_size == 1 else 'processes'}: its global ranks are 0 to "
            f"{world_size - 1}. Remove them from trace.ranks, or set it to null for all ranks"
        )


def check_patterns(selection: TraceSelection, ranks: RankGroup) -> None:
    """Refuse globs that selected nothing on any rank in a whole step. Collective, over all ranks.

    Raises:
        TraceError: on every rank, with each such glob and the names nearest to it.
    """
    matched = _gather(selection.matched, ranks)
    if all(pattern in matched for pattern in selection.patterns):
        return
    raise TraceError(describe_unmatched(selection.patterns, _gather(selection.names, ranks), matched=matched))


def _gather(texts: Collection[str], ranks: RankGroup) -> frozenset[str]:
    """The texts of all ranks."""
    payloads = ranks.gather(json.dumps(sorted(texts)).encode())
    return frozenset(text for payload in payloads for text in json.loads(payload))
