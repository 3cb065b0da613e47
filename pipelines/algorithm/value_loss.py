"""The critic's loss of one micro-batch: one dataclass in, one out; every term is a *sum* over response tokens.

Contract: as ``losses``. Tokens that rollout correction rejected teach the critic nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mock_scheduler.correction.config.rules import Denominator
from pipelines.algorithm.arrays import check_equal_shapes

SMALLEST_RELATIVE_VARIANCE = 1e-12
"""A variance below this part of the mean square is the rounding of its own computation from sums."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLossConfig:
    """``value_clip``: how far a value may move from the old one without being clipped; ``None`` does not clip.

    rs_denominator: whether ``num_tokens`` counts all response tokens, or the kept ones.
    """

    value_clip: float | None
    rs_denominator: Denominator = "original"


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLossInputs:
    """``[b, T]`` tensors of one micro-batch; values where ``response_mask`` is False are never used.

    new_values: with graph, from the critic under training. old_values: its own, before the step's first update.
    returns: the targets. Each entry belongs to the token sampled there. kept_mask: bool, False at rejected tokens, of
    which nothing is used; ``None`` keeps all. loss_weights: floating, each token's factor in the sum; ``None`` are 1.
    """

    new_values: torch.Tensor
    old_values: torch.Tensor
    returns: torch.Tensor
    response_mask: torch.Tensor
    kept_mask: torch.Tensor | None = None
    loss_weights: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLossOutput:
    """Sums over response tokens; ``total`` has a graph, ``metrics`` has none.

    num_tokens: int64 ``[]``, this micro-batch's share of the denominator. metrics: float64
    ``[len(VALUE_METRIC_SUMS)]``, in its order. terms: the summands, ``[b, T]`` by name, without graph: ``vf_loss``.
    """

    total: torch.Tensor
    num_tokens: torch.Tensor
    metrics: torch.Tensor
    terms: Mapping[str, torch.Tensor]


VALUE_METRIC_SUMS = (
    "vf_loss",
    "vf_clip_frac",
    "value",
    "value_squared_error",
    "return",
    "return_squared",
    "kept_tokens",
    "num_tokens",
)
"""``vf_loss`` is summed as the loss is, and divided by ``num_tokens`` what is minimised; the others are plain sums over
the tokens that are kept, and means where divided by ``kept_tokens``."""


def compute_value_loss(inputs: ValueLossInputs, config: ValueLossConfig) -> ValueLossOutput:
    """Computes half the squared error of the values, clipped as in PPO, times ``loss_weights``, summed over kept
    tokens.

    With v the new value, v_old the old one, R the return and ε ``value_clip``: 0.5 · max((v - R)², (v_c - R)²), where
    v_c = v_old + clip(v - v_old, -ε, ε) (OpenAI Baselines, ``ppo2/model.py``). ``vf_clip_frac`` counts tokens whose
    clipped branch is strictly larger, so that they have no gradient. ``value_squared_error`` is (v - R)², unclipped;
    with the sums of v, R and R² it gives ``explained_variance``. Dtypes are kept: float64 stays float64. Raises
    ``ValueError`` naming every tensor of another shape.
    """
    mask = inputs.response_mask
    tensors = {"new_values": inputs.new_values, "old_values": inputs.old_values, "returns": inputs.returns}
    optional = {"kept_mask": inputs.kept_mask, "loss_weights": inputs.loss_weights}
    given = {name: tensor for name, tensor in optional.items() if tensor is not None}
    check_equal_shapes("value loss", {"response_mask": mask, **tensors, **given})
    kept = mask if inputs.kept_mask is None else mask & inputs.kept_mask
    new_values = torch.where(kept, inputs.new_values, 0.0)
    old_values = torch.where(kept, inputs.old_values, 0.0)
    returns = torch.where(kept, inputs.returns, 0.0)

    squared_error = (new_values - returns).square()
    larger, is_clipped = squared_error, torch.zeros_like(kept)
    if config.value_clip is not None:
        change = new_values - old_values
        clipped = (old_values + change.clamp(-config.value_clip, config.value_clip) - returns).square()
        # Within the range old + (new - old) is new but for its last bit, which must not count as clipped.
        clipped = torch.where(change.abs() > config.value_clip, clipped, squared_error)
        larger, is_clipped = torch.maximum(squared_error, clipped), clipped > squared_error
    factor = kept.to(larger.dtype)
    if inputs.loss_weights is not None:
        factor = torch.where(kept, inputs.loss_weights, 0.0).to(larger.dtype)
    loss = 0.5 * larger * factor

    num_kept = kept.sum()
    num_tokens = num_kept if config.rs_denominator == "kept" else mask.sum()
    wide_returns = returns.double()
    terms = (loss, is_clipped, new_values, squared_error, wide_returns, wide_returns.square())
    # In float64, since ``explained_variance`` subtracts nearly equal sums.
    with torch.no_grad():
        sums = [(term.double() * kept).sum() for term in terms] + [num_kept.double(), num_tokens.double()]
    return ValueLossOutput(
        total=loss.sum(),
        num_tokens=num_tokens,
        metrics=torch.stack(sums).detach(),
        terms={"vf_loss": loss.detach()},
    )


def explained_variance(sums: Mapping[str, float]) -> float:
    """Computes 1 - Var(R - v) / Var(R) over kept tokens, from the sums of ``VALUE_METRIC_SUMS`` over any number of
    parts.

    1 for a perfect critic, 0 for one as good as the mean, negative for a worse one. 0 where the returns do not vary and
    it is not defined.
    """
    num_kept = max(sums["kept_tokens"], 1.0)
    mean_return, mean_square = sums["return"] / num_kept, sums["return_squared"] / num_kept
    mean_error = mean_return - sums["value"] / num_kept
    return_variance = mean_square - mean_return * mean_return
    error_variance = sums["value_squared_error"] / num_kept - mean_error * mean_error
    if return_variance <= SMALLEST_RELATIVE_VARIANCE * mean_square:
        return 0.0
    return 1.0 - error_variance / return_variance
