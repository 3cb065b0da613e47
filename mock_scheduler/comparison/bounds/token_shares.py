"""Bounds of shares of tokens (``clip_frac``), which move by whole tokens at any update.

A ratio moved over the bound of the clip by rounding turns one token. Perturbed runs show few of these, and at other
updates than a candidate does. So a share is held to the largest change any perturbed run has of it in any update, and
one token may always differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mock_scheduler.comparison.bounds.tensor_noise import TensorNoise
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
    """The largest change of each share, and the number of tokens it is a share of.

    Args:
        traced: By name, of traced scalars.
        logged: By name, of metrics.
        num_traced: By step and update, response tokens.
        num_logged: By step, response tokens of all its updates.
    """

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
        """Collects the noise of tensors and of metrics (b - a of each perturbed run), and the baseline's metrics."""
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
                # The logged number is a mean over updates; a share's mean is over the tokens of all of them.
                step: value * values.get((step, _NUM_UPDATES), 1.0)
                for (step, name), value in values.items()
                if name == _NUM_TOKENS
            },
        )

    def of_tensor(self, key: TraceKey, *, times: float) -> float:
        """Returns how much a traced share may differ: ``times`` its largest change, and one token at least."""
        # One token turned by rounding is honest, however few tokens an update has.
        return max(times * self.traced[key.name], _one_of(self.num_traced.get((key.step, key.update))))

    def of_metric(self, step: int, name: str, *, times: float) -> float:
        """Returns how much a logged share, the mean of a step's updates, may differ."""
        return max(times * self.logged[name], _one_of(self.num_logged.get(step)))


def _one_of(count: float | None) -> float:
    return 1.0 / count if count else 0.0
