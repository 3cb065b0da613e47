"""Masked sums and means, and ratios, as verl computes them: in the dtype of the inputs, with no upcast.

Contract: pure functions. ``mask`` has the shape of ``values`` and any dtype; result dtypes are what torch's promotion
of the two gives. A source of bugs that is kept: ``1e-8`` in the divisor, and no care for infinities inside the mask.
Source: verl, utils/torch_functional.py, masked_sum and masked_mean, alike in 0.6.0 to 0.9.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mock_scheduler.correction.config.rules import LOG_RATIO_BOUND


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ratios:
    """Ratios of a level.

    per_token: [B, T], exp of the clamped log ratio of the token or of its row. of_rows: [B, 1], the log ratio of each
    row before the clamp; ``None`` at level ``token``.
    """

    per_token: torch.Tensor
    of_rows: torch.Tensor | None


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Σ values·mask; what ``values`` hold where the mask is 0, NaN too, counts as 0."""
    return (torch.where(mask.bool(), values, 0.0) * mask).sum(dim=dim)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """``masked_sum`` / (Σ mask + 1e-8), so 0 and not NaN where nothing is selected."""
    return masked_sum(values, mask, dim) / (mask.sum(dim=dim) + 1e-8)


def mean_of(condition: torch.Tensor, mask: torch.Tensor) -> float:
    """The fraction of selected tokens where a bool tensor holds."""
    return float(masked_mean(condition.float(), mask).item())


def clamp_log(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp to ±20, which NaN passes."""
    return torch.clamp(log_ratio, min=-LOG_RATIO_BOUND, max=LOG_RATIO_BOUND)


def compute_ratios(level: str, log_ratio: torch.Tensor, mask: torch.Tensor) -> Ratios:
    """Ratios π_train/π_rollout of ``log_ratio`` [B, T] at level token, sequence (product) or geometric (mean).

    Rows are clamped after they are added, tokens each on its own.
    """
    if level == "token":
        return Ratios(per_token=torch.exp(clamp_log(log_ratio)), of_rows=None)
    add = masked_sum if level == "sequence" else masked_mean
    of_rows = add(log_ratio, mask, -1).unsqueeze(-1)
    return Ratios(per_token=torch.exp(clamp_log(of_rows)).expand_as(log_ratio), of_rows=of_rows)
