"""Where the policy loss clips, by token, out of its clip rule and the traced log-probabilities.

Contract: decides as the loss does, in the dtype of the loss, and reads nothing but plain tensors.
With ℓ = new - old within ± ``log_ratio_bound``, r = exp ℓ and A the advantage, a token of the ``ppo`` loss is
clipped where -clip(r, 1 - pg_clip, 1 + pg_clip_high)·A > -r·A (arXiv 1707.06347, eq. 7), and dual clipped where
A < 0 and the greater of both is above -dual_clip·A (arXiv 1912.09729); of the ``gmpo`` loss (arXiv 2507.20673) it is
clipped where sgn(A)·clip(ℓ, -pg_clip, pg_clip_high) < sgn(A)·ℓ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from mock_scheduler.verdict.consequence.figures import ClipState

#: By their numbers in ``ClipRule.states``.
CLIP_STATES: tuple[ClipState, ...] = get_args(ClipState)

_LOW, _HIGH, _DUAL = range(1, len(CLIP_STATES))


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipRule:
    """How a run's loss clips.

    Args:
        low: How far below 1 the ratio counts.
        high: How far above 1.
        log_ratio_bound: The loss first clamps the logarithm of the ratio to ± this.
        dual: The largest counted ratio where the advantage is negative; ``None`` where there is no dual clip.
        is_geometric: The loss is GMPO's.
        is_bypass: Old log-probabilities are the rollout policy's.
        has_clip: Whether the loss has a clip at all.
    """

    low: float
    high: float
    log_ratio_bound: float
    dual: float | None = None
    is_geometric: bool = False
    is_bypass: bool = False
    has_clip: bool = True

    def states(self, log_ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """int8, of the tensors' shape: a number of ``CLIP_STATES`` for each token.

        log_ratio: new - old, floating; advantages: of the same dtype. Whoever counts leaves rejected tokens at 0.
        """
        states = torch.zeros(log_ratio.shape, dtype=torch.int8)
        if not self.has_clip:
            return states
        log_ratio = log_ratio.clamp(-self.log_ratio_bound, self.log_ratio_bound)
        if self.is_geometric:
            sign = advantages.sign()
            is_clipped = sign * log_ratio.clamp(-self.low, self.high) < sign * log_ratio
            return _mark(states, is_clipped, advantages)
        ratio = log_ratio.exp()
        unclipped = -ratio * advantages
        clipped = -ratio.clamp(1.0 - self.low, 1.0 + self.high) * advantages
        states = _mark(states, clipped > unclipped, advantages)
        if self.dual is not None:
            limit = -self.dual * advantages
            states[(advantages < 0) & (torch.maximum(unclipped, clipped) > limit)] = _DUAL
        return states


def _mark(states: torch.Tensor, is_clipped: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """A positive advantage is only clipped above, a negative one only below."""
    states[is_clipped & (advantages > 0)] = _HIGH
    states[is_clipped & (advantages < 0)] = _LOW
    return states
