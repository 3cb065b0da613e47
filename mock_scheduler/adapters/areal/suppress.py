"""What else must not start where every rollout of AReaL is replayed: engines, weights sent to them, evaluation.

Contract: versions are still set, on the actor and on what stands for its engines. A teacher that scores by an engine
stays live: it scores rows that training has.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from mock_scheduler.errors import SchedulerError
from mock_scheduler.ledger import Ledger

_IDLE = (
    *("pause", "resume", "pause_generation", "continue_generation", "offload", "onload", "destroy"),
    *("config_perf_tracer", "save_perf_tracer", "start_proxy", "start_proxy_gateway", "submit", "initialize"),
)
_GENERATING = ("agenerate", "rollout_batch", "prepare_batch", "compute_logp")


class SuppressedRollout:
    """Stands for AReaL's ``InferenceEngine``, or its controller: there is no engine behind it."""

    server_infos = ("replayed",)
    staleness_manager = None
    workflow_executor = SimpleNamespace(staleness_manager=None)

    def __init__(self, ledger: Ledger, *, is_evaluating: bool) -> None:
        self._ledger = ledger
        self._version = 0
        ledger.count("suppressed", "evaluation_engines" if is_evaluating else "engines")

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name in _GENERATING:
            raise SchedulerError(
                f"AReaL asked its inference engine ({name}) in a run that only replays: the rollout was not taken from "
                "the recording"
            )
        if name not in _IDLE:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return lambda *_arguments, **_options: self._ledger.count("suppressed", name)

    def set_version(self, version: int) -> None:
        """Note the version of the weights."""
        self._version = version

    def get_version(self) -> int:
        """Return the version of the weights."""
        return self._version

    def export_stats(self) -> dict[str, float]:
        """Nothing was measured."""
        return {}

    def wait(self, *_arguments: object, **_options: object) -> list[object]:
        """No evaluation was played."""
        self._ledger.count("suppressed", "wait")
        return []


def suppress_weight_updates(actor: Any, ledger: Ledger) -> None:  # noqa: ANN401 - AReaL's
    """Keep an actor from meeting its engines, and from sending them weights."""
    for name in ("connect_engine", "update_weights"):
        setattr(actor, name, _counting(ledger, name))


def _counting(ledger: Ledger, name: str) -> Callable[..., None]:
    return lambda *_arguments, **_options: ledger.count("suppressed", name)
