"""The kinds of traced tensors: their meaning, whether they belong to a step or an update, and their phase."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from mock_scheduler.config.instruments import DEFAULT_KINDS, LEDGER_KINDS, TRACE_KINDS, LedgerKind, TraceKind

__all__ = [
    "DEFAULT_KINDS",
    "DESCRIPTIONS",
    "LEDGER_KINDS",
    "PHASES",
    "STEP_KINDS",
    "TRACE_KINDS",
    "LedgerKind",
    "Phase",
    "TraceKind",
]

#: Kinds that are there once in a step; all others are there once in each of its updates.
STEP_KINDS: frozenset[TraceKind] = frozenset({"initial", "input", "score", "advantage"})

#: What is under each kind.
DESCRIPTIONS: Mapping[TraceKind, str] = {
    "initial": "parameters and buffers before the first update, in the precision in which parameters are updated",
    "input": "tokens, response mask and recorded log-probabilities",
    "score": "what the models say before the first update: old and reference log-probabilities, values",
    "advantage": "advantages and returns",
    "activation": "outputs of the embedding, of each layer and of its parts",
    "router": "logits, probabilities and choice of experts",
    "logits": "the output layer's logits",
    "output": "new log-probabilities, entropy and values",
    "loss": "ratios, element-wise loss terms and their sums",
    "activation_gradient": "gradients of the loss with respect to activations",
    "gradient": "main gradients after the reduction, before clipping",
    "gradient_norm": "the norm of all main gradients, before clipping",
    "optimizer": "the optimizer's moments after the update",
    "parameter": "parameters and buffers after the update, in the precision in which parameters are updated",
    "weight": "what a model in less than float32 computes with",
}


class Phase(IntEnum):
    """A stage of a training step; kinds of one phase are computed interleaved, layer by layer."""

    START = 0
    DATA = 1
    FORWARD = 2
    SCORES = 3
    LOSS = 4
    BACKWARD = 5
    GRADIENT = 6
    NORM = 7
    UPDATE = 8


#: Where a kind is computed. Scores, and advantages made of them, come from a pass through the modules of the first
#: update's forward pass, with equal weights: they stand behind these, of which more is traced. In ``BACKWARD`` names
#: are walked from the output to the embedding, else the other way.
PHASES: Mapping[TraceKind, Phase] = {
    "initial": Phase.START,
    "input": Phase.DATA,
    "score": Phase.SCORES,
    "advantage": Phase.SCORES,
    "activation": Phase.FORWARD,
    "router": Phase.FORWARD,
    "logits": Phase.FORWARD,
    "output": Phase.FORWARD,
    "loss": Phase.LOSS,
    "activation_gradient": Phase.BACKWARD,
    "gradient": Phase.GRADIENT,
    "gradient_norm": Phase.NORM,
    "optimizer": Phase.UPDATE,
    "parameter": Phase.UPDATE,
    "weight": Phase.UPDATE,
}
