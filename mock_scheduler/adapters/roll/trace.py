"""Attaches the instruments to the training worker of ROLL, by its configuration:

    actor_train: {worker_cls: mock_scheduler.adapters.roll.trace.TracedActorWorker}

The strategy within the worker has chunks and optimizer, and its ``train_step`` runs once they are loaded to the device.
"""

from __future__ import annotations

from typing import Any

from mock_scheduler.adapters.engines import EngineParts, find_traced

_MODULE = "roll.pipeline.base_worker"
PARTS = EngineParts(
    trains="train_step", chunks="models_wrapped", optimizer="optimizer", engine="strategy", made_by="initialize"
)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class of ROLL
    return find_traced(__name__, name, _MODULE, PARTS)
