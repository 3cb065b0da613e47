"""The first rank works for all: each gets its answer, or its error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.errors import EngineError, MockSchedulerError


def on_first_rank(ranks: RankGroup, compute: Callable[[], object]) -> Any:  # noqa: ANN401 - whatever it gave, as JSON
    """Computes on rank 0; returns on every rank the answer as JSON has it. Collective.

    Raises:
        EngineError: on every rank, where rank 0 raised an error of this library.
    """
    payload, cause = b"", None
    if ranks.global_rank == 0:
        try:
            payload = json.dumps({"value": compute()}).encode()
        except MockSchedulerError as error:
            payload, cause = json.dumps({"error": str(error)}).encode(), error
    found = json.loads(ranks.gather(payload)[0])
    if "error" in found:
        raise EngineError(found["error"]) from cause
    return found["value"]
