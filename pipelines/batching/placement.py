"""Which row goes where: the updates of a step, their micro-batches, and the line and column at which a row starts.

Contract: decided by the rows' lengths, their identities and the ``training`` section alone. No layout is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import BatchError
from mock_scheduler.support.text import bullet_list
from pipelines.batching.trajectories import trajectory_index
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
    updates = (trajectory_index(batch) // training.global_batch_size).numpy()
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
    """``size`` rows each in their order, the last micro-batch with what is left; all of one shape."""
    chunks = [tuple(rows[start : start + size]) for start in range(0, len(rows), size)]
    return [_one_row_per_line(chunk, (size, width)) for chunk in chunks]


def _place_dynamic(rows: Sequence[int], lengths: Sequence[int], padded: Sequence[int], budget: int) -> list[Placement]:
    """The longest rows first (equal ones in their order), as many as fit with their padding; shapes differ."""
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
    """First-fit decreasing (Johnson, 1973): the longest rows first (equal ones in their order), each into the first
    line that has room."""
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
