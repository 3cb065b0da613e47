"""Attaches the instruments to AReaL's Megatron engine.

    from areal import engine
    from mock_scheduler.adapters.areal import trace
    engine.MegatronPPOActor = trace.TracedMegatronPPOActor

AReaL's controller names the class to its workers by module and name, so it must be importable there: the class is made
when it is first asked for, since only then AReaL is imported.
"""

from __future__ import annotations

from typing import Any

from mock_scheduler.adapters.engines import EngineParts, find_traced

_MODULE = "areal.engine.megatron_engine"
PARTS = EngineParts(trains="train_batch", chunks="model", optimizer="optimizer")


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class of AReaL
    return find_traced(__name__, name, _MODULE, PARTS)
