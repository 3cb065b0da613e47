"""Shares of tokens (``clip_frac``): they move by whole tokens, at any update, so that they have bounds of their own.

A ratio that rounding moves over the bound of the clip turns one token. Perturbed runs show few of these, and at other
updates than a candidate does: so a share is held to the largest change that any perturbed run has of it in any update,
and one token may always differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mock_scheduler.compare.bounds.tensor_noise import TensorNoise
from mock_scheduler.trace.entries import TraceKey

_SUFFIX = "_frac"
#: Response tokens of an update, as a traced scalar and as a metric; and updates of a step.
_TRACED_TOKENS, _NUM_TOKENS, _NUM_UPDATES = "mean.num_response_tokens", "num_response_tokens", "num_updates"

Metric = tuple[int, str]
"""Step and name of a logged value."""


def is_share(name: str) -> bool:
    """Whether a scalar of the loss or a metric is a share of tokens."""
    return name.endswith(_SUFFIX)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShares:
    """By name, the largest change of each share, traced and logged; and the number of tokens that one is of."""

    traced: Mapping[str, float]
    logged: Mapping[str, float]
    num_traced: Mapping[tuple[int, int], float]
    num_logged: Mapping[int, float]

    @classmethod
    def collect(
        cls,
        tensors: Mapping[TraceKey, TensorNoise],
        metrics: Mapping[Metric, tuple[float, ...]],
        values: Mapping[Metric, float],
    ) -> TokenShares:
        """Of the noise of tensors, of metrics (b - a of each perturbed run) and the baseline's metrics."""
        traced: dict[str, float] = {}
        logged: dict[str, float] = {}
        for key, noise in tensors.items():
            if is_share(key.name):
                traced[key.name] = max(noise.distance, traced.get(key.name, 0.0))
        for (_, name), changes in metrics.items():
            if is_share(name):
                logged[name] = max(*map(abs, changes), logged.get(name, 0.0))
        return cls(
            traced=traced,
            logged=logged,
            num_traced={
                (key.step, key.update): noise.size for key, noise in tensors.items() if key.name == _TRACED_TOKENS
            },
            num_logged={
                step: value * values.get((step, _NUM_UPDATES), 1.0)
                for (step, name), value in values.items()
                if name == _NUM_TOKENS
            },
        )

    def of_tensor(self, key: TraceKey, *, times: float) -> float:
        """How much a traced share may differ: so many times its largest change, and at least by one token."""
        return max(times * self.traced[key.name], _one_of(self.num_traced.get((key.step, key.update))))

    def of_metric(self, step: int, name: str, *, times: float) -> float:
        """The same of a logged one, which is the mean of a step's updates."""
        return max(times * self.logged[name], _one_of(self.num_logged.get(step)))


def _one_of(count: float | None) -> float:
    return 1.0 / count if count else 0.0
