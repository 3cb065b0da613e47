"""Rollout correction: importance weights and rejection for rollouts that another policy sampled.

``compute_correction`` takes ``CorrectionInputs`` and a ``CorrectionSpec``, which ``algorithm.rollout_correction``
compiles to, and gives weights, a mask and ``CorrectionStates``; these are merged over micro-batches and ranks before
``correction_metrics`` makes numbers of them.
"""

from mock_scheduler.correction.config.rules import CorrectionSpec, Rule
from mock_scheduler.correction.engine.compute import compute_correction
from mock_scheduler.correction.engine.inputs import CorrectionInputs, CorrectionResult
from mock_scheduler.correction.engine.metrics import correction_metrics
from mock_scheduler.correction.engine.states import CorrectionStates

__all__ = [
    "CorrectionInputs",
    "CorrectionResult",
    "CorrectionSpec",
    "CorrectionStates",
    "Rule",
    "compute_correction",
    "correction_metrics",
]
