"""Fills a placed step with the values of its response tokens, and reads values back in the batch's order.

Contract: on the host; rows stay where ``placement`` put them, and the loss denominator follows from the batch alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.versions import trajectory_index
from mock_scheduler.correction.config.rules import Denominator
from mock_scheduler.errors import BatchError
from mock_scheduler.support.tensor_bytes import shape_text
from mock_scheduler.support.text import bullet_list
from pipelines.batching.checks import check_plan
from pipelines.batching.placement import raise_unfit
from pipelines.batching.plan import LossAggMode, MicroBatch, StepPlan, Update


def fill_step(
    plan: StepPlan,
    batch: RolloutBatch,
    *,
    token_advantages: torch.Tensor,
    token_returns: torch.Tensor,
    token_weights: torch.Tensor | None = None,
    token_kept: torch.Tensor | None = None,
    loss_agg_mode: LossAggMode = "token-mean",
    rs_denominator: Denominator = "original",
    global_batch_size: int,
) -> StepPlan:
    """Gives a placed step its values for training; every row stays at its place.

    Args:
        batch: the step's; its rollout log-probabilities are filled in too.
        token_advantages, token_returns, token_weights: floating 1-D, one per response token of the batch, in row order.
        token_kept: bool, likewise; False where rollout correction rejects.
        loss_agg_mode, rs_denominator: as in ``compute_loss_weights``.

    Raises:
        BatchError: there is not one value per response token.
    """
    values = {"token_advantages": token_advantages, "token_returns": token_returns}
    if token_weights is not None:
        values["token_weights"] = token_weights
    _check_values(batch, values, token_kept)
    by_token = {
        "advantages": token_advantages.detach(),
        "returns": token_returns.detach(),
        "rollout_logprobs": batch.rollout_logprobs,
        "loss_weights": compute_loss_weights(
            batch,
            token_kept,
            loss_agg_mode=loss_agg_mode,
            rs_denominator=rs_denominator,
            global_batch_size=global_batch_size,
        ),
    }
    by_token |= {} if token_weights is None else {"weights": token_weights.detach()}
    by_token |= {} if token_kept is None else {"kept_mask": token_kept}
    updates = tuple(
        Update(micro_batches=tuple(with_values(one.micro_batches, batch, by_token))) for one in plan.updates
    )
    filled = replace(plan, updates=updates)
    check_plan(filled, batch)
    return filled


def compute_loss_weights(
    batch: RolloutBatch,
    token_kept: torch.Tensor | None,
    *,
    loss_agg_mode: LossAggMode,
    rs_denominator: Denominator,
    global_batch_size: int,
) -> torch.Tensor:
    """Computes each response token's factor in the loss, float64 ``[M]``, by which one sum over N is the configured
    mean.

    N: the counted tokens of the update, its response tokens, or with ``rs_denominator: kept`` the kept ones. B: its
    sequences with a counted token, where a sequence is a trajectory of one row or several. T: the counted tokens of the
    sequence. ``token-mean`` gives 1; ``seq-mean-token-sum`` N / B, the mean over sequences of the sum of their tokens;
    ``seq-mean-token-mean`` N / (B·T), the mean over sequences of the mean of their tokens. Sequences and updates
    without a counted token have 0 (of sequences: in the two modes of sequences).
    """
    sequences = trajectory_index(batch)
    sequence_of_token = np.repeat(sequences, batch.response_lengths.numpy())
    counted = sequence_of_token
    if rs_denominator == "kept" and token_kept is not None:
        counted = sequence_of_token[token_kept.cpu().numpy()]
    lengths = np.bincount(counted, minlength=batch.num_trajectories).astype(np.float64)
    updates = np.arange(batch.num_trajectories) // global_batch_size
    num_tokens = np.bincount(updates, weights=lengths)[updates]
    if loss_agg_mode == "token-mean":
        factors = (num_tokens > 0).astype(np.float64)
    else:
        num_sequences = np.bincount(updates, weights=lengths > 0)[updates]
        divisors = num_sequences * lengths if loss_agg_mode == "seq-mean-token-mean" else num_sequences
        factors = np.divide(num_tokens, divisors, out=np.zeros_like(lengths), where=lengths > 0)
    return torch.from_numpy(factors[sequence_of_token])


def with_values(
    micro_batches: Sequence[MicroBatch], batch: RolloutBatch, values: Mapping[str, torch.Tensor], *, first: int = 0
) -> list[MicroBatch]:
    """Returns micro-batches of a plan with other values of their response tokens, each in its field's dtype.

    values: by field, one per response token of the batch from number ``first`` on, as far as these micro-batches go.
    """
    numbers = batch.response_mask.cumsum(0) - 1 - first
    replaced = []
    for micro_batch in micro_batches:
        mask = micro_batch.response_mask
        # Column t is of the token that follows the one there.
        targets = batch.row_offsets[micro_batch.row_ids[mask]] + micro_batch.positions[mask] + 1
        tensors: dict[str, Any] = {name: torch.zeros_like(getattr(micro_batch, name)) for name in values}
        for name, tensor in tensors.items():
            tensor[mask] = values[name].cpu()[numbers[targets]].to(tensor.dtype)
        replaced.append(replace(micro_batch, **tensors))
    return replaced


def response_values(
    plan_micro_batches: Iterable[MicroBatch], values_by_index: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """Returns the values at response tokens, float64 1-D on the host, in the batch's order: by row, then by position.

    values_by_index: ``[b, T]`` by micro-batch index, on any device; micro-batches without response tokens need none.
    The micro-batches of all updates give one value per response token of the batch, others one per token of their rows.
    Raises ``BatchError`` for absent values or values of another shape.
    """
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    problems = []
    for micro_batch in plan_micro_batches:
        mask = micro_batch.response_mask.cpu()
        if not bool(mask.any()):
            continue
        values = values_by_index.get(micro_batch.index)
        if values is None or values.shape != mask.shape:
            found = "absent" if values is None else shape_text(values)
            problems.append(f"those of micro-batch {micro_batch.index} are {found}; expected {list(mask.shape)}")
            continue
        kept = values.detach().cpu()[mask].double()
        parts.append((micro_batch.row_ids.cpu()[mask], micro_batch.positions.cpu()[mask], kept))
    if problems:
        raise BatchError(f"values of response tokens cannot be gathered:{bullet_list(problems)}")
    if not parts:
        return torch.zeros(0, dtype=torch.float64)
    rows, positions, gathered = (torch.cat(part).numpy() for part in zip(*parts, strict=True))
    return torch.from_numpy(gathered[np.lexsort((positions, rows))])


def _check_values(batch: RolloutBatch, values: Mapping[str, torch.Tensor], token_kept: torch.Tensor | None) -> None:
    problems = []
    num_response = len(batch.rollout_logprobs)
    for name, tensor in values.items():
        if tensor.shape != (num_response,) or not tensor.is_floating_point():
            problems.append(
                f"{name} is {shape_text(tensor)}; expected floating [{num_response}], one per response token"
            )
    if token_kept is not None and (token_kept.shape != (num_response,) or token_kept.dtype != torch.bool):
        found = shape_text(token_kept)
        problems.append(f"token_kept is {found}; expected torch.bool [{num_response}], one per response token")
    raise_unfit(problems)
