"""The global batch cut into updates and micro-batches, before any layout is known.

Contract: deterministic, on the host. Which rows are in which micro-batch, at which line and column, its index, its
padding and the loss denominator follow from the batch and the ``training`` section. The layout gives one number,
``count_multiple``, and all that it decides is how many empty micro-batches end each update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.correction.config.rules import Denominator
from mock_scheduler.errors import BatchError
from mock_scheduler.support.tensor_bytes import shape_text
from mock_scheduler.support.text import bullet_list
from pipelines.batching.checks import check_plan
from pipelines.batching.placement import Placement, place_rows
from pipelines.batching.plan import LossAggMode, MicroBatch, StepPlan, Update
from pipelines.batching.trajectories import trajectory_index
from pipelines.config.training import TrainingConfig

__all__ = [
    "LossAggMode",
    "MicroBatch",
    "StepPlan",
    "Update",
    "build_step_plan",
    "check_plan",
    "compute_loss_weights",
    "fill_step",
    "place_step",
    "response_values",
    "with_values",
]


def place_step(batch: RolloutBatch, training: TrainingConfig, *, count_multiple: int, dtype: torch.dtype) -> StepPlan:
    """Cut a step's batch into updates of micro-batches, whose values are still to be filled in.

    Update u has trajectories [u·G, (u + 1)·G), with G ``training.global_batch_size``, in micro-batches

    - ``batching: fixed``: of ``micro_batch_size`` rows in the batch's order, all of the step padded to its longest row,
      rounded up to ``sequence_multiple_of``; the last one of an update may have empty lines;
    - ``batching: dynamic``: of the longest rows first, as many as ``max_tokens_per_micro_batch`` has room for with
      their padding, each padded to its own longest row, rounded up;
    - ``sequence_packing``: of one line of ``max_tokens_per_micro_batch`` tokens, packed first-fit decreasing.

    Empty micro-batches of the last one's shape follow until their number is a multiple of ``count_multiple``; their
    indices come after all others in the step. Advantages and returns are 0, weights 1, and every response token is
    kept, until ``fill_step`` says more.

    Args:
        dtype: of advantages, returns and weights in the micro-batches: float32 or float64.

    Raises:
        BatchError: the batch has no rows, or a row that starts with a response token or is longer than a micro-batch.
    """
    _check_rows(batch, dtype)
    if count_multiple < 1:
        raise BatchError(f"count_multiple is {count_multiple}; expected 1 or more")
    placements = place_rows(batch, training)
    ones, zeros = _constant(batch, 1, dtype), _constant(batch, 0, dtype)
    by_token = {
        "advantages": zeros,
        "returns": zeros,
        "rollout_logprobs": batch.rollout_logprobs,
        "weights": ones,
        "kept_mask": ones.bool(),
        "loss_weights": ones,
    }
    filled = _fill(batch, [placement for update in placements for placement in update], by_token)
    index = count(len(filled))
    updates = []
    position = 0
    for update in placements:
        real = filled[position : position + len(update)]
        position += len(update)
        empty = [_empty_like(real[-1], next(index)) for _ in range(-len(real) % count_multiple)]
        updates.append(Update(micro_batches=(*real, *empty)))
    plan = StepPlan(updates=tuple(updates), row_weights=batch.response_lengths.double())
    check_plan(plan, batch)
    return plan


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
    """Give a placed step the values that it is trained with; which row is where stays as it is.

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


def compute_loss_weights(
    batch: RolloutBatch,
    token_kept: torch.Tensor | None,
    *,
    loss_agg_mode: LossAggMode,
    rs_denominator: Denominator,
    global_batch_size: int,
) -> torch.Tensor:
    """What each response token's loss is multiplied by, float64 ``[M]``, so that one sum over N is the mean asked for.

    N: the tokens of the update that count, which are its response tokens, or with ``rs_denominator: kept`` those that
    are kept. B: its sequences that have one, where a sequence is a trajectory, of one row or several. T: the tokens of
    the sequence that count. ``token-mean`` gives 1; ``seq-mean-token-sum`` N / B, the mean over sequences of the sum of
    their tokens; ``seq-mean-token-mean`` N / (B·T), the mean over sequences of the mean of their tokens. In the
    modes of sequences one without a token that counts has 0; so has all of an update without one.
    """
    sequences = trajectory_index(batch).numpy()
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
    """These micro-batches of a plan with other values of their response tokens, each in its field's dtype.

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
    """The values at response tokens, float64 1-D on the host, in the batch's order: by row, then by position.

    values_by_index: ``[b, T]`` by micro-batch index, on any device; those of micro-batches without response tokens
    are not needed. The micro-batches of all updates give one value per response token of the batch, others those of
    their rows. Raises ``BatchError`` for values that are absent or of another shape.
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


def _constant(batch: RolloutBatch, value: int, dtype: torch.dtype) -> torch.Tensor:
    """One value for every response token."""
    return torch.full((len(batch.rollout_logprobs),), value, dtype=dtype)


def _check_rows(batch: RolloutBatch, dtype: torch.dtype) -> None:
    if len(batch) == 0:
        raise BatchError("the batch of this step has no rows: there is nothing to train on")
    problems = []
    if dtype not in (torch.float32, torch.float64):
        problems.append(f"dtype is {dtype}; expected torch.float32 or torch.float64")
    for row in torch.nonzero(batch.response_mask[batch.row_offsets[:-1]]).flatten().tolist():
        problems.append(
            f"row {row} ({batch.identities[row]}) starts with a response token, which no token predicts; give the row "
            "a prompt of at least one token"
        )
    _raise_listed(problems)


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
    _raise_listed(problems)


def _raise_listed(problems: Sequence[str]) -> None:
    if problems:
        raise BatchError(f"micro-batches cannot be made of this step's batch:{bullet_list(problems)}")


def _fill(batch: RolloutBatch, placements: Sequence[Placement], values: Mapping[str, torch.Tensor]) -> list[MicroBatch]:
    """The micro-batches of these placements, as views of one flat tensor per field."""
    lengths, row_starts = batch.lengths.numpy(), batch.row_offsets[:-1].numpy()
    sizes = [rows * width for rows, width in (placement.shape for placement in placements)]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    cell_of_row = np.empty(len(batch), dtype=np.int64)
    for offset, placement in zip(offsets[:-1], placements, strict=True):
        lines, starts = np.array(placement.lines), np.array(placement.starts)
        cell_of_row[list(placement.rows)] = offset + lines * placement.shape[1] + starts
    row_of_token = np.repeat(np.arange(len(batch)), lengths)
    position_of_token = np.arange(len(batch.tokens)) - row_starts[row_of_token]
    cells = torch.from_numpy(cell_of_row[row_of_token] + position_of_token)
    by_token = {
        "tokens": batch.tokens.long(),
        "positions": torch.from_numpy(position_of_token),
        "row_ids": torch.from_numpy(row_of_token),
        **_next_of_each_token(batch, values),
    }
    flat = {name: _scatter(tokens, cells, int(offsets[-1]), name) for name, tokens in by_token.items()}
    parts = {name: torch.split(tensor, sizes) for name, tensor in flat.items()}
    return [
        MicroBatch(index=index, **{name: part[index].view(placement.shape) for name, part in parts.items()})
        for index, placement in enumerate(placements)
    ]


def _scatter(by_token: torch.Tensor, cells: torch.Tensor, size: int, name: str) -> torch.Tensor:
    flat = by_token.new_full((size,), -1 if name == "row_ids" else 0)
    flat[cells] = by_token
    return flat


def _next_of_each_token(batch: RolloutBatch, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is known of each token's successor in its row, 0 for a row's last token: one entry per token.

    values: by field, one entry per response token of the batch, in its order.
    """
    mask = batch.response_mask

    def on_response(per_response: torch.Tensor) -> torch.Tensor:
        spread = per_response.new_zeros(len(mask))
        spread[mask] = per_response
        return spread

    def shifted(per_token: torch.Tensor) -> torch.Tensor:
        moved = torch.cat((per_token[1:], per_token.new_zeros(1)))
        moved[batch.row_offsets[1:] - 1] = 0
        return moved

    moved = {name: shifted(on_response(tensor)) for name, tensor in values.items()}
    return moved | {"targets": shifted(batch.tokens.long()), "response_mask": shifted(mask)}


def _empty_like(micro_batch: MicroBatch, index: int) -> MicroBatch:
    """A micro-batch of the same shape that is padding throughout."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in micro_batch.tensors().items()}
    return MicroBatch(index=index, **{**tensors, "row_ids": torch.full_like(micro_batch.row_ids, -1)})
