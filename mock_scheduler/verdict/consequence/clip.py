"""Where the policy loss clips: by token, out of the facts of a run's loss and its traced log-probabilities.

Contract: decides as the loss does, in the dtype in which the loss was computed, and reads nothing but plain tensors.
With ℓ = new - old within ± ``LOG_RATIO_BOUND``, r = exp ℓ and A the advantage, a token of the ``ppo`` loss is
clipped where -clip(r, 1 - low, 1 + high)·A > -r·A (arXiv 1707.06347, eq. 7), and dual clipped where
A < 0 and the greater of both is above -dual·A (arXiv 1912.09729); of the ``gmpo`` loss (arXiv 2507.20673) it is
clipped where sgn(A)·clip(ℓ, -low, high) < sgn(A)·ℓ.
"""

from __future__ import annotations

from typing import get_args

import torch

from mock_scheduler.correction.config.rules import LOG_RATIO_BOUND
from mock_scheduler.program import ClipRule
from mock_scheduler.verdict.consequence.figures import ClipState

#: By their numbers in ``clip_states``.
CLIP_STATES: tuple[ClipState, ...] = get_args(ClipState)

_LOW, _HIGH, _DUAL = range(1, len(CLIP_STATES))


def clip_states(rule: ClipRule, log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Decides how the loss clips every token: int8, of the tensors' shape, a number of ``CLIP_STATES`` for each.

    ``log_ratio``: new - old, floating; ``advantages``: of the same dtype. Whoever counts leaves rejected tokens at 0.
    """
    states = torch.zeros(log_ratio.shape, dtype=torch.int8)
    if not rule.has_clip:
        return states
    log_ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if rule.is_geometric:
        sign = advantages.sign()
        is_clipped = sign * log_ratio.clamp(-rule.low, rule.high) < sign * log_ratio
        return _mark(states, is_clipped, advantages)
    ratio = log_ratio.exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - rule.low, 1.0 + rule.high) * advantages
    states = _mark(states, clipped > unclipped, advantages)
    if rule.dual is not None:
        limit = -rule.dual * advantages
        states[(advantages < 0) & (torch.maximum(unclipped, clipped) > limit)] = _DUAL
    return states


def _mark(states: torch.Tensor, is_clipped: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """A positive advantage is only clipped above, a negative one only below."""
    states[is_clipped & (advantages > 0)] = _HIGH
    states[is_clipped & (advantages < 0)] = _LOW
    return states
