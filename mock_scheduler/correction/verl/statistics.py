"""verl's ratios, masked means and metrics of ratios and of the two policies, without the prefix.

Contract: pure functions, in the dtype of the inputs, with no upcast; ``mask`` has the shape of ``values`` and any
dtype. Kept as the releases define them: ``1e-8`` in the divisor of means, and no care for infinities inside the mask;
an effective sample size that can exceed 1, or whose division raises ZeroDivisionError where all weights are 0; rows
with no response token as rows of 0; and unclamped exponentials in ``k3_kl``.
Source: verl, utils/torch_functional.py, masked_sum and masked_mean, equal in 0.6.0 to 0.9.1, and the helpers that
``releases.py`` names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: verl's own constant; log ratios are clamped to ± this.
SAFETY_BOUND = 20.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ratios:
    """Holds the ratios π_train/π_rollout at one level.

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
    """Clamps to ±20, which NaN passes."""
    return torch.clamp(log_ratio, min=-SAFETY_BOUND, max=SAFETY_BOUND)


def compute_ratios(level: str, log_ratio: torch.Tensor, mask: torch.Tensor) -> Ratios:
    """Returns ratios π_train/π_rollout of ``log_ratio`` [B, T] at level token, sequence (product) or geometric (mean).

    Rows are clamped after they are added, tokens each on its own.
    """
    if level == "token":
        return Ratios(per_token=torch.exp(clamp_log(log_ratio)), of_rows=None)
    add = masked_sum if level == "sequence" else masked_mean
    of_rows = add(log_ratio, mask, -1).unsqueeze(-1)
    return Ratios(per_token=torch.exp(clamp_log(of_rows)).expand_as(log_ratio), of_rows=of_rows)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredRatios:
    """Holds the ratios that ``ratio_metrics`` measures, and the bounds.

    applied, raw: [B, T], as used and before truncation; the same tensor where a release makes no difference.
    of_rows: [B, 1], log ratios of rows; ``None`` at level token. lower, upper: the bounds that fractions are beyond.
    clamp_lower: the lower bound of the clamp before squares.
    """

    applied: torch.Tensor
    raw: torch.Tensor
    of_rows: torch.Tensor | None
    mask: torch.Tensor
    lower: float
    upper: float
    clamp_lower: float

    @classmethod
    def of_raw(cls, ratios: Ratios, mask: torch.Tensor, *, lower: float, upper: float) -> MeasuredRatios:
        """Makes it of untouched ratios, clamped before squares at both bounds."""
        return cls(
            applied=ratios.per_token,
            raw=ratios.per_token,
            of_rows=ratios.of_rows,
            mask=mask,
            lower=lower,
            upper=upper,
            clamp_lower=lower,
        )


def ratio_metrics(
    name: str, ratios: MeasuredRatios, *, fractions_by_token: bool = False, divides_tensors: bool = False
) -> dict[str, float]:
    """Returns metrics ``rollout_is_*`` or ``rollout_rs_*`` (``name``) of ratios.

    fractions_by_token: fractions of rows beyond a bound weigh each row by its tokens. divides_tensors: the effective
    sample size is divided as a tensor, which gives inf for 1/0.
    """
    mask = ratios.mask
    metrics = _range_metrics(ratios, fractions_by_token=fractions_by_token)
    metrics["mean"] = masked_mean(ratios.applied, mask).item()
    metrics["std"] = clamped_std(ratios.applied, mask, lower=ratios.clamp_lower, upper=ratios.upper)
    clamped = ratios.applied.clamp(min=ratios.clamp_lower, max=ratios.upper)
    squares = masked_mean((clamped / (masked_mean(clamped, mask) + 1e-8)).square(), mask)
    metrics["eff_sample_size"] = (1.0 / squares).item() if divides_tensors else 1.0 / squares.item()
    rows, raw_rows = masked_mean(ratios.applied, mask, -1), masked_mean(ratios.raw, mask, -1)
    metrics |= {f"seq_{key}": value for key, value in spread_metrics(rows).items()}
    metrics["seq_max_deviation"] = (rows - 1.0).abs().max().item()
    metrics["seq_fraction_high"] = (raw_rows > ratios.upper).float().mean().item()
    metrics["seq_fraction_low"] = (raw_rows < ratios.lower).float().mean().item()
    return {f"{name}_{key}": value for key, value in metrics.items()}


def _range_metrics(ratios: MeasuredRatios, *, fractions_by_token: bool) -> dict[str, float]:
    if ratios.of_rows is None:
        high, low = ratios.raw > ratios.upper, ratios.raw < ratios.lower
        largest, smallest = masked_range(ratios.applied, ratios.mask)
        by_token = True
    else:
        # Logarithms of bounds are float32 tensors of no dimension, so that rows are compared in their own dtype.
        log_upper, log_lower = (
            torch.log(torch.tensor(bound, device=ratios.of_rows.device)) for bound in (ratios.upper, ratios.lower)
        )
        high, low = ratios.of_rows > log_upper, ratios.of_rows < log_lower
        largest = torch.exp(torch.clamp(ratios.of_rows.max(), max=SAFETY_BOUND)).item()
        smallest = torch.exp(ratios.of_rows.min()).item()
        by_token = fractions_by_token
    metrics = {"max": largest, "min": smallest}
    for key, beyond in (("ratio_fraction_high", high), ("ratio_fraction_low", low)):
        metrics[key] = mean_of(beyond.expand_as(ratios.mask), ratios.mask) if by_token else beyond.float().mean().item()
    return metrics


def masked_range(values: torch.Tensor, mask: torch.Tensor) -> tuple[float, float]:
    """Returns the largest and the smallest selected value."""
    others = ~mask.bool()
    largest = values.masked_fill(others, float("-inf")).max().item()
    return largest, values.masked_fill(others, float("inf")).min().item()


def clamped_std(values: torch.Tensor, mask: torch.Tensor, *, lower: float, upper: float) -> float:
    """√(E[x²] − E[x]²) of selected values after a clamp; 0, and no clamp that could fail, for a single one."""
    if not mask.sum() > 1:
        return 0.0
    clamped = values.clamp(min=lower, max=upper)
    variance = masked_mean(clamped.square(), mask) - masked_mean(clamped, mask).square()
    return float(torch.sqrt(torch.clamp(variance, min=0.0)).item())


def spread_metrics(rows: torch.Tensor) -> dict[str, float]:
    """Mean, unbiased standard deviation (0 for one row), maximum and minimum of values of rows [B]."""
    std = rows.std().item() if rows.numel() > 1 else 0.0
    return {"mean": rows.mean().item(), "std": std, "max": rows.max().item(), "min": rows.min().item()}


def policy_metrics(
    old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor, mask: torch.Tensor, *, has_chi2: bool
) -> dict[str, float]:
    """The 11 metrics of the distance between two policies, of log-probabilities [B, T]; ``has_chi2`` adds two of χ²."""
    log_ratio = old_log_prob - rollout_log_prob
    train, rollout = masked_mean(old_log_prob, mask, -1), masked_mean(rollout_log_prob, mask, -1)
    difference = rollout - train
    metrics = {
        "training_ppl": torch.exp(-train).mean(),
        "training_log_ppl": (-train).mean(),
        "kl": masked_mean(rollout_log_prob - old_log_prob, mask),
        "k3_kl": masked_mean(torch.exp(log_ratio) - log_ratio - 1, mask),
        "rollout_ppl": torch.exp(-rollout).mean(),
        "rollout_log_ppl": (-rollout).mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": torch.exp(difference).mean(),
    }
    if has_chi2:
        metrics["chi2_token"] = masked_mean(torch.exp(clamp_log(log_ratio)).square(), mask) - 1.0
        metrics["chi2_seq"] = torch.exp(2.0 * clamp_log(masked_sum(log_ratio, mask, -1))).mean() - 1.0
    return {name: value.item() for name, value in metrics.items()}
