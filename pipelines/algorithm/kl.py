"""Estimates the KL from sampled tokens, makes the penalty of it, and adapts the penalty's coefficient.

KL(q‖p) is estimated from samples of q with d = log p - log q (joschu.net/blog/kl-approx):

==  ==============  ================================================  ===============
    estimate        of KL(q‖p)                                        gradient
==  ==============  ================================================  ===============
k1  -d              unbiased; may be negative; the largest variance   1
k2  d² / 2          biased; never negative                            -d
k3  exp(d) - 1 - d  unbiased; never negative                          1 - exp(d)
==  ==============  ================================================  ===============

The gradient is with respect to log q; a loss adds it times ∇ log q. With samples of q itself its mean is 0 for k1 (it
pulls nowhere and only adds noise), ∇KL(q‖p) for k2, and ∇KL(p‖q) for k3. In a reward, where nothing is differentiated,
k1 and k3 have the mean KL(q‖p).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from pipelines.algorithm.arrays import check_equal_shapes
from pipelines.config.algorithm import KlEstimator

MAX_RELATIVE_ERROR = 0.2
"""Where Ziegler et al. (arXiv 1909.08593, section 2.2) clip the controller's relative error."""


def estimate_kl(log_ratio: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Estimate of KL(q‖p) per token, in the shape and dtype of ``log_ratio`` = log p - log q, samples from q."""
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        return torch.expm1(log_ratio) - log_ratio
    raise ValueError(f"KL estimator is {estimator!r}; expected 'k1', 'k2' or 'k3'")


def compute_kl_penalty(
    old_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, *, estimator: KlEstimator, coef: float
) -> torch.Tensor:
    """Computes the penalty on every token's reward (``kl_in_reward``): coef · estimate of KL(policy ‖ reference),
    float64.

    old_logprobs, ref_logprobs: floating, of the response tokens, by the policy before the step's first update and by
    the reference. Raises ``ValueError`` where their shapes differ.
    """
    check_equal_shapes("KL penalty", {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs})
    return coef * estimate_kl(ref_logprobs.double() - old_logprobs.double(), estimator)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveKl:
    """The coefficient of the KL penalty; it follows the measured KL where ``target`` and ``horizon`` are set.

    e = clip((KL - target) / target, -0.2, 0.2), and coef becomes coef · (1 + e · num_samples / horizon) (Ziegler et
    al., arXiv 1909.08593, section 2.2, with K_β = 0.1 for num_samples / horizon). That rate is at most 1 here, so that
    one step changes the coefficient by at most a fifth and never its sign. Without target and horizon it stays.
    ``target``: nats per response token. ``horizon``: trajectories.
    """

    coef: float
    target: float | None = None
    horizon: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if not _is_number(self.coef) or self.coef < 0:
            problems.append(f"coef is {self.coef!r}; expected a finite number of 0 or more")
        if (self.target is None) != (self.horizon is None):
            problems.append(f"target is {self.target} and horizon is {self.horizon}: set both, or neither")
        if self.target is not None and (not _is_number(self.target) or self.target <= 0):
            problems.append(f"target is {self.target!r}; expected a finite number above 0")
        if self.horizon is not None and (type(self.horizon) is not int or self.horizon <= 0):
            problems.append(f"horizon is {self.horizon!r}; expected an int above 0")
        if problems:
            raise ValueError(f"KL controller: {'; '.join(problems)}")

    def update(self, *, measured_kl: float, num_samples: int) -> AdaptiveKl:
        """Returns the controller after a step.

        measured_kl: mean KL(policy ‖ reference) over the step's response tokens, in nats; num_samples: its
        trajectories. Raises ``ValueError`` for a KL that is not finite, since no coefficient would come back from it.
        """
        if self.target is None or self.horizon is None:
            return self
        if not math.isfinite(measured_kl):
            raise ValueError(
                f"KL controller: measured_kl is {measured_kl}; a log-probability of the policy or of the reference is "
                "not finite"
            )
        error = min(max(measured_kl / self.target - 1.0, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        return replace(self, coef=self.coef * (1.0 + error * min(num_samples / self.horizon, 1.0)))

    def state_dict(self) -> dict[str, float | int | None]:
        """JSON for a checkpoint; ``from_state_dict`` is the inverse."""
        return {"coef": self.coef, "target": self.target, "horizon": self.horizon}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, float | int | None]) -> AdaptiveKl:
        """The controller of a checkpoint; raises ``ValueError`` for other keys, or as the constructor."""
        if set(state) != {"coef", "target", "horizon"}:
            raise ValueError(f"KL controller: state has {sorted(state)}; expected coef, horizon and target")
        coef, horizon = state["coef"], state["horizon"]
        if coef is None or isinstance(horizon, float):
            raise ValueError(f"KL controller: coef is {coef} and horizon is {horizon}; expected a number, and an int")
        return cls(coef=coef, target=state["target"], horizon=horizon)


def _is_number(value: float) -> bool:
    return type(value) in (float, int) and math.isfinite(value)
