"""Attaches the instruments to the training worker of ROLL's agentic pipeline, by its configuration:

    actor_train: {worker_cls: mock_scheduler.adapters.roll.trace.TracedActorWorker}

Another worker, as ``agentic_actor_pg_worker.ActorWorker``, has another loss: ``traced_worker`` makes a class of it.

The strategy within the worker has chunks and optimizer, and its ``train_step`` runs once they are loaded to the device.
"""

from __future__ import annotations

from typing import Any

from mock_scheduler.adapters.engines import Engine, EngineParts, find_traced, with_trace

#: The worker that the pipeline has by default; that of ``base_worker`` has the loss of RLVR.
_MODULE = "roll.pipeline.agentic.agentic_actor_worker"
PARTS = EngineParts(
    trains="train_step", chunks="models_wrapped", optimizer="optimizer", engine="strategy", made_by="initialize"
)


def traced_worker(worker: Engine) -> Engine:
    """Return a class of this worker, whose strategy is attached to before it first trains."""
    return with_trace(worker, PARTS)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class of ROLL
    return find_traced(__name__, name, _MODULE, PARTS)
