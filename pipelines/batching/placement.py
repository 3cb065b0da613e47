"""Places rows: into the updates of a step, their micro-batches, and the line and column where a row starts.

Contract: deterministic, on the host. Rows, lines, columns, indices and padding follow from the rows' lengths, their
identities and the ``training`` section alone. The layout gives one number, ``count_multiple``, and decides nothing but
how many empty micro-batches end each update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.versions import trajectory_index
from mock_scheduler.errors import BatchError
from mock_scheduler.support.text import bullet_list
from pipelines.batching.checks import check_plan
from pipelines.batching.plan import MicroBatch, StepPlan, Update
from pipelines.config.training import TrainingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The rows of one micro-batch of ``shape`` ``(b, T)``: row ``rows[i]`` is in line ``lines[i]`` from column
    ``starts[i]``."""

    shape: tuple[int, int]
    rows: tuple[int, ...]
    lines: tuple[int, ...]
    starts: tuple[int, ...]


def place_rows(batch: RolloutBatch, training: TrainingConfig) -> list[list[Placement]]:
    """The micro-batches of each update, without empty ones; update u has trajectories [u·G, (u + 1)·G) of the batch.

    G: ``training.global_batch_size``. Raises ``BatchError`` for rows longer than ``max_tokens_per_micro_batch``.
    """
    lengths: list[int] = batch.lengths.tolist()
    updates = trajectory_index(batch) // training.global_batch_size
    starts = np.flatnonzero(np.diff(updates, prepend=-1))
    rows_by_update = [part.tolist() for part in np.split(np.arange(len(batch)), starts[1:])]
    budget = training.max_tokens_per_micro_batch
    if budget is None:
        width = _round_up(max(lengths), training.sequence_multiple_of)
        return [_place_fixed(rows, training.micro_batch_size, width) for rows in rows_by_update]
    multiple_of = 1 if training.sequence_packing else training.sequence_multiple_of
    _check_fits(batch, budget, multiple_of)
    if training.sequence_packing:
        return [_place_packed(rows, lengths, budget) for rows in rows_by_update]
    padded = [_round_up(length, multiple_of) for length in lengths]
    return [_place_dynamic(rows, lengths, padded, budget) for rows in rows_by_update]


def _round_up(length: int, multiple_of: int) -> int:
    return -(-length // multiple_of) * multiple_of


def _check_fits(batch: RolloutBatch, budget: int, multiple_of: int) -> None:
    too_long = [
        f"{identity}: {length} tokens"
        for identity, length in zip(batch.identities, batch.lengths.tolist(), strict=True)
        if _round_up(length, multiple_of) > budget
    ]
    if too_long:
        rounding = f", rounded up to a multiple of {multiple_of}," if multiple_of > 1 else ""
        raise BatchError(
            f"rows that{rounding} are longer than training.max_tokens_per_micro_batch {budget} fit into no "
            f"micro-batch; raise it to the longest row's length:{bullet_list(too_long)}"
        )


def _place_fixed(rows: Sequence[int], size: int, width: int) -> list[Placement]:
    """Places ``size`` rows each in their order, the last micro-batch with the rest; all have one shape."""
    chunks = [tuple(rows[start : start + size]) for start in range(0, len(rows), size)]
    return [_one_row_per_line(chunk, (size, width)) for chunk in chunks]


def _place_dynamic(rows: Sequence[int], lengths: Sequence[int], padded: Sequence[int], budget: int) -> list[Placement]:
    """Returns the longest rows first (equal ones in their order), as many as fit with their padding; shapes differ."""
    # sorted is stable, so rows of one length keep the batch's order.
    chunks: list[list[int]] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        # The first row of a micro-batch is its longest, so the others are padded to it.
        if chunks and (len(chunks[-1]) + 1) * padded[chunks[-1][0]] <= budget:
            chunks[-1].append(row)
        else:
            chunks.append([row])
    return [_one_row_per_line(tuple(chunk), (len(chunk), padded[chunk[0]])) for chunk in chunks]


def _one_row_per_line(rows: tuple[int, ...], shape: tuple[int, int]) -> Placement:
    return Placement(shape=shape, rows=rows, lines=tuple(range(len(rows))), starts=(0,) * len(rows))


def _place_packed(rows: Sequence[int], lengths: Sequence[int], line_length: int) -> list[Placement]:
    """First-fit decreasing (Johnson, 1973): the longest rows first, equal ones in their order, each into the first line
    with room for it.
    """
    room = np.full(len(rows), line_length)
    placed: dict[int, list[tuple[int, int]]] = {}
    for row in sorted(rows, key=lambda row: -lengths[row]):
        line = int(np.argmax(room >= lengths[row]))
        placed.setdefault(line, []).append((row, line_length - int(room[line])))
        room[line] -= lengths[row]
    return [
        Placement(
            shape=(1, line_length),
            rows=tuple(row for row, _ in entries),
            lines=(0,) * len(entries),
            starts=tuple(start for _, start in entries),
        )
        for entries in placed.values()
    ]


def place_step(batch: RolloutBatch, training: TrainingConfig, *, count_multiple: int, dtype: torch.dtype) -> StepPlan:
    """Cuts a step's batch into updates of micro-batches, whose values are still to be filled in.

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
    # Empty ones are numbered behind all others: the layout adds them and must renumber none.
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
    raise_unfit(problems)


def _constant(batch: RolloutBatch, value: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns one value for every response token."""
    return torch.full((len(batch.rollout_logprobs),), value, dtype=dtype)


def raise_unfit(problems: Sequence[str]) -> None:
    """Raises ``BatchError`` that lists why a batch cannot be trained on; nothing where there are no problems."""
    if problems:
        raise BatchError(f"micro-batches cannot be made of this step's batch:{bullet_list(problems)}")


def _fill(batch: RolloutBatch, placements: Sequence[Placement], values: Mapping[str, torch.Tensor]) -> list[MicroBatch]:
    """Makes the micro-batches of these placements, as views of one flat tensor per field."""
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
    """Gives each token the facts of its successor in its row, 0 for a row's last token: one entry per token.

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
