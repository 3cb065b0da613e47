"""Where the policy loss clips: by token, out of a run's configuration and its traced log-probabilities.

Contract: decides as the loss does, in the dtype in which the loss was computed, and reads nothing but plain tensors.
With ℓ = new - old within ± ``LOG_RATIO_BOUND``, r = exp ℓ and A the advantage, a token of the ``ppo`` loss is
clipped where -clip(r, 1 - pg_clip, 1 + pg_clip_high)·A > -r·A (arXiv 1707.06347, eq. 7), and dual clipped where
A < 0 and the greater of both is above -dual_clip·A (arXiv 1912.09729); of the ``gmpo`` loss (arXiv 2507.20673) it is
clipped where sgn(A)·clip(ℓ, -pg_clip, pg_clip_high) < sgn(A)·ℓ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import yaml
from pydantic import ValidationError

from mock_scheduler.correction.config.algorithm import AlgorithmConfig
from mock_scheduler.correction.config.rules import LOG_RATIO_BOUND
from mock_scheduler.errors import AlignmentError
from mock_scheduler.verdict.consequence.figures import ClipState
from pipelines.config.schema import PipelineConfig

#: By their numbers in ``ClipRule.states``.
CLIP_STATES: tuple[ClipState, ...] = get_args(ClipState)

_LOW, _HIGH, _DUAL = range(1, len(CLIP_STATES))
_NUMBERS = ("pg_clip", "pg_clip_high", "dual_clip")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipRule:
    """How a run's loss clips. low, high: how far the ratio counts below and above 1. ``is_geometric``: GMPO.

    ``is_bypass``: old log-probabilities are the rollout policy's. ``has_clip``: whether the loss has a clip at all.
    """

    low: float
    high: float
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
        log_ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
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


def load_clip_rule(config_path: Path) -> ClipRule:
    """How the run clips whose ``config.yaml`` this is; keys that it lacks have their defaults.

    Raises ``AlignmentError`` where it cannot be read, naming each key that is not what it should be.
    """
    try:
        content = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise AlignmentError(f"{config_path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise AlignmentError(f"{config_path} is no configuration: it has no keys")
    numbers, problems = _numbers(content)
    algorithm = AlgorithmConfig()
    try:
        algorithm = AlgorithmConfig.model_validate(content.get("algorithm") or {})
    except ValidationError as error:
        problems.append(f"algorithm: {error.errors()[0]['msg']}")
    if problems:
        raise AlignmentError(f"{config_path} does not say how the loss clips: {'; '.join(problems)}")
    low, high, dual = numbers["pg_clip"], numbers["pg_clip_high"], numbers["dual_clip"]
    assert low is not None
    spec = None if algorithm.rollout_correction is None else algorithm.rollout_correction.spec
    is_geometric = content.get("policy_loss") == "gmpo"
    return ClipRule(
        low=low,
        high=low if high is None else high,
        dual=None if is_geometric else dual,
        is_geometric=is_geometric,
        is_bypass=spec is not None and spec.bypass,
        has_clip=spec is None or spec.loss_type == "ppo_clip",
    )


def _numbers(content: Mapping[str, Any]) -> tuple[dict[str, float | None], list[str]]:
    values: dict[str, float | None] = {}
    problems = []
    for name in _NUMBERS:
        value = content.get(name, PipelineConfig.model_fields[name].default)
        is_number = isinstance(value, float | int) and not isinstance(value, bool)
        if not is_number and not (value is None and name != "pg_clip"):
            problems.append(f"{name} is {value!r}, expected a number")
        values[name] = float(value) if is_number else None
    return values, problems


def _mark(states: torch.Tensor, is_clipped: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """A positive advantage is only clipped above, a negative one only below."""
    states[is_clipped & (advantages > 0)] = _HIGH
    states[is_clipped & (advantages < 0)] = _LOW
    return states
