"""Corrects rollouts that another policy sampled, by importance weights and rejection.

``correct`` corrects one batch of tensors by a preset's name. Training uses the parts: ``compute_correction`` takes
``CorrectionInputs`` and a ``CorrectionSpec``, to which ``algorithm.rollout_correction`` compiles, and gives weights, a
mask and ``CorrectionStates``; these are merged over micro-batches and ranks before ``correction_metrics`` makes numbers
of them. ``engine/__init__.py`` shows the way of one batch.

Contract: importing this package imports no torch, so that ``correction.config`` stays light; each name below is
imported when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mock_scheduler.correction.config.rules import CorrectionSpec, Rule
    from mock_scheduler.correction.door import Correction, correct
    from mock_scheduler.correction.engine.compute import compute_correction
    from mock_scheduler.correction.engine.inputs import CorrectionInputs, CorrectionResult
    from mock_scheduler.correction.engine.metrics import correction_metrics
    from mock_scheduler.correction.engine.states import CorrectionStates

__all__ = [
    "Correction",
    "CorrectionInputs",
    "CorrectionResult",
    "CorrectionSpec",
    "CorrectionStates",
    "Rule",
    "compute_correction",
    "correct",
    "correction_metrics",
]

#: Name -> the module that has it.
_HOMES = {
    "Correction": "door",
    "CorrectionInputs": "engine.inputs",
    "CorrectionResult": "engine.inputs",
    "CorrectionSpec": "config.rules",
    "CorrectionStates": "engine.states",
    "Rule": "config.rules",
    "compute_correction": "engine.compute",
    "correct": "door",
    "correction_metrics": "engine.metrics",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
