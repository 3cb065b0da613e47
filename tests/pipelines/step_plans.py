"""A step's plan for tests: placed and filled at once."""

from __future__ import annotations

import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.correction.config.rules import Denominator
from pipelines.batching.placement import place_step
from pipelines.batching.plan import LossAggMode, StepPlan
from pipelines.batching.values import fill_step
from pipelines.config.training import TrainingConfig


def build_step_plan(
    batch: RolloutBatch,
    token_advantages: torch.Tensor,
    token_returns: torch.Tensor,
    training: TrainingConfig,
    *,
    count_multiple: int,
    dtype: torch.dtype,
    token_weights: torch.Tensor | None = None,
    token_kept: torch.Tensor | None = None,
    loss_agg_mode: LossAggMode = "token-mean",
    rs_denominator: Denominator = "original",
) -> StepPlan:
    """Place a step and fill it at once; arguments and errors are those of ``place_step`` and ``fill_step``."""
    return fill_step(
        place_step(batch, training, count_multiple=count_multiple, dtype=dtype),
        batch,
        token_advantages=token_advantages,
        token_returns=token_returns,
        token_weights=token_weights,
        token_kept=token_kept,
        loss_agg_mode=loss_agg_mode,
        rs_denominator=rs_denominator,
        global_batch_size=training.global_batch_size,
    )
