"""What a dump holds of one micro-batch's share: plain dicts of numbers and ``[b, s]`` tensors, padding included.

Contract: every file says whose tokens these are: ``sample_ids``, the rows' identities; ``sample_index`` int64, each
cell's place among them, -1 on padding; ``positions`` int64, the place in its row of the token that a value is of, which
is the target: values in column t are of the token that follows it. ``response_mask`` is True where they are defined.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from mock_scheduler.adapters.nexrl.files import Content
from mock_scheduler.batch import RolloutBatch
from pipelines.megatron.places import OwnBatch
from pipelines.micro_batches import MicroBatch


def token_table(micro_batch: MicroBatch, batch: RolloutBatch) -> Content:
    """Which tokens of which rows of the step's batch a micro-batch's cells are."""
    row_ids = micro_batch.row_ids.cpu()
    rows = sorted({row for row in row_ids.flatten().tolist() if row >= 0})
    place = torch.full((len(batch) + 1,), -1, dtype=torch.int64)  # the last entry is padding's, of row -1
    place[rows] = torch.arange(len(rows))
    return {
        "sample_ids": [str(batch.identities[row]) for row in rows],
        "sample_index": place[row_ids],
        "positions": micro_batch.positions.cpu() + 1,
        "input_ids": micro_batch.tokens,
        "targets": micro_batch.targets,
        "response_mask": micro_batch.response_mask,
    }


def batch_inputs(own: OwnBatch) -> Content:
    """What the model reads, and what the loss knows of the targets beforehand."""
    inputs = own.inputs
    return {
        "position_ids": inputs.positions,
        "attention_mask": inputs.attention_mask,
        "rollout_log_probs": own.batch.rollout_logprobs,
    }


def forward_content(outputs: Mapping[str, torch.Tensor], micro_batch: MicroBatch) -> Content:
    """outputs: ``logprobs`` and ``entropy`` of the policy under training, ``[b, s]``."""
    return {
        "log_probs": outputs["logprobs"],
        "entropy": outputs["entropy"],
        "log_probs_shape": list(outputs["logprobs"].shape),
        "entropy_shape": list(outputs["entropy"].shape),
        "rollout_log_probs": micro_batch.rollout_logprobs,
    }


def loss_content(
    terms: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
    micro_batch: MicroBatch,
    *,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    num_update_tokens: int,
) -> Content:
    """The losses of a micro-batch's share, and all that they are made of.

    terms: as ``PolicyLossOutput.terms``. ``loss``, ``pg_loss``, ``entropy_loss`` and ``kl_loss`` are means over the
    share's response tokens, 0 where it has none, exactly rounded sums in float64, so that their order does not matter.
    The update's loss is the sum of ``loss`` × ``num_tokens`` over all shares, divided by ``num_update_tokens``.
    ``effective_valid``: response tokens that rollout correction keeps.
    """
    mask = micro_batch.response_mask.cpu()
    by_token = {name: term.detach().cpu().clone() for name, term in terms.items()}
    scalars = {
        "loss": mean(by_token["total_loss"], mask),
        "pg_loss": mean(by_token["pg_loss"], mask),
        "entropy_loss": mean(outputs["entropy"], mask),
    }
    with_reference: Content = {}
    if "kl_loss" in by_token:
        with_reference = {"kl_loss": mean(by_token["kl_loss"], mask), "elementwise_kl_loss": by_token["kl_loss"]}
    return {
        **scalars,
        "num_tokens": int(mask.sum()),
        "num_update_tokens": num_update_tokens,
        "log_probs": outputs["logprobs"],
        "old_log_probs": old_logprobs,
        "advantages": advantages,
        "prob_ratio": by_token["ratio"],
        "elementwise_loss": by_token["total_loss"],
        "elementwise_pg_loss": by_token["pg_loss"],
        "elementwise_entropy_loss": outputs["entropy"],
        **with_reference,
        "importance_weights": micro_batch.weights,
        "effective_valid": micro_batch.kept_mask.cpu(),
    }


def mean(values: torch.Tensor, mask: torch.Tensor) -> float:
    """The mean where the mask is True, whatever the order; 0 where it never is."""
    chosen = values[mask].double().tolist()
    return math.fsum(chosen) / len(chosen) if chosen else 0.0
