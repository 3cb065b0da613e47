"""Whether a plan holds its batch: every row once, whole and in order, with the batch's own values, and nothing else.

Contract: reads the plan and the batch only, and nothing of how the plan was made. Everything is compared in flat
arrays of all cells of the plan, without a loop over rows or tokens unless something is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.versions import trajectory_index
from mock_scheduler.errors import BatchError
from mock_scheduler.support.text import bullet_list
from pipelines.batching.plan import StepPlan

_Array = npt.NDArray[Any]
_Text = Callable[[int], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cells:
    """Holds all cells of a plan, one after another: ``values`` by field of ``MicroBatch``, ``[N]`` each.

    line_starts: the first cell of each line, rising. follows: bool ``[N]``, whether a cell is the next token of the row
    in the cell before, in the same line. offsets: the first cell of each micro-batch, and N.
    """

    plan: StepPlan
    batch: RolloutBatch
    values: Mapping[str, _Array]
    line_starts: _Array
    follows: _Array
    offsets: _Array

    def name(self, cell: int) -> str:
        """Returns ``micro-batch 3, line 0, column 17, row 5 (default/group 0/episode 0/env 5/turn 0)``."""
        number = int(np.searchsorted(self.offsets, cell, side="right")) - 1
        micro_batch = self.plan.micro_batches[number]
        line, column = divmod(cell - int(self.offsets[number]), micro_batch.tokens.shape[1])
        row = int(self.values["row_ids"][cell])
        known = f"row {row} ({self.batch.identities[row]})" if 0 <= row < len(self.batch) else f"row {row}"
        return f"micro-batch {micro_batch.index}, line {line}, column {column}, {known if row != -1 else 'padding'}"

    def problems(self, is_wrong: _Array, describe: _Text) -> list[str]:
        """Returns the first wrong cell of each row, described."""
        wrong = np.flatnonzero(is_wrong)
        if len(wrong) == 0:
            return []
        _, firsts = np.unique(self.values["row_ids"][wrong], return_index=True)
        return [f"{self.name(cell)}: {describe(cell)}" for cell in sorted(wrong[firsts].tolist())]


def check_plan(plan: StepPlan, batch: RolloutBatch) -> None:
    """Raises ``BatchError`` unless the plan holds every row of the batch once, whole, in order and with its values.

    Checked: row numbers; positions 0 to length - 1 in neighbouring columns of one line; tokens; targets (the row's next
    tokens, never another row's); response mask and rollout_logprobs; zeros where there is nothing; unique indices;
    row_weights; rows of one trajectory in one update, and updates in the batch's order. The message names the first
    wrong place of each row (micro-batch by its index, line, column), as far as positions are sound.
    """
    problems = _shape_problems(plan)
    if not problems:
        cells = _flatten(plan, batch)
        problems = _plan_problems(plan, batch)
        problems += _position_problems(cells) or _row_problems(cells) or _content_problems(cells)
    if problems:
        raise BatchError(f"micro-batches do not hold the batch they were made of:{bullet_list(problems)}")


def _flatten(plan: StepPlan, batch: RolloutBatch) -> _Cells:
    parts = [micro_batch.tensors() for micro_batch in plan.micro_batches]
    values = {name: np.concatenate([part[name].numpy().ravel() for part in parts]) for name in parts[0]}
    offsets = np.cumsum([0, *(part["tokens"].numel() for part in parts)])
    spans = zip(offsets[:-1], offsets[1:], parts, strict=True)
    line_starts = np.concatenate([np.arange(start, stop, part["tokens"].shape[1]) for start, stop, part in spans])
    follows = _find_followers(values["row_ids"], values["positions"], line_starts)
    return _Cells(plan=plan, batch=batch, values=values, line_starts=line_starts, follows=follows, offsets=offsets)


def _shape_problems(plan: StepPlan) -> list[str]:
    """Why the cells of a plan cannot be looked at."""
    problems = [] if plan.micro_batches else ["there are none"]
    for micro_batch in plan.micro_batches:
        shapes = {name: list(tensor.shape) for name, tensor in micro_batch.tensors().items()}
        if len(shapes["tokens"]) != 2 or any(shape != shapes["tokens"] for shape in shapes.values()):
            problems.append(f"micro-batch {micro_batch.index} has tensors of shapes {shapes}; expected one [b, T]")
    return problems


def _plan_problems(plan: StepPlan, batch: RolloutBatch) -> list[str]:
    """Lists problems of the plan as a whole."""
    counts = Counter(micro_batch.index for micro_batch in plan.micro_batches)
    problems = [f"{number} micro-batches have index {index}" for index, number in counts.items() if number > 1]
    if plan.row_weights.tolist() != batch.response_lengths.tolist():
        problems.append("row_weights are not the rows' numbers of response tokens")
    return problems


def _position_problems(cells: _Cells) -> list[str]:
    """Cells of no known row, or whose position is not one more than that of the cell before."""
    rows, positions = cells.values["row_ids"], cells.values["positions"]
    is_unknown = (rows < -1) | (rows >= len(cells.batch))
    problems = cells.problems(is_unknown, lambda cell: f"the batch has rows 0 to {len(cells.batch) - 1}")
    if problems:
        return problems
    is_misplaced = (positions != 0) & ~cells.follows
    problems = cells.problems(is_misplaced, lambda cell: _describe_misplaced(cells, cell))
    lengths = np.append(cells.batch.lengths.numpy(), 1)  # padding, row -1, has position 0 only
    return problems or cells.problems(
        positions >= lengths[rows],
        lambda cell: f"position is {positions[cell]}; the row has {lengths[rows[cell]]} tokens",
    )


def _find_followers(rows: _Array, positions: _Array, line_starts: _Array) -> _Array:
    follows = np.zeros(len(rows), dtype=bool)
    np.equal(rows[1:], rows[:-1], out=follows[1:])
    follows[1:] &= positions[1:] - positions[:-1] == 1
    follows &= rows >= 0
    follows[line_starts] = False
    return follows


def _describe_misplaced(cells: _Cells, cell: int) -> str:
    rows, positions = cells.values["row_ids"], cells.values["positions"]
    if rows[cell] < 0:
        return f"position is {positions[cell]}; expected 0"
    is_inside = cell not in cells.line_starts and rows[cell] == rows[cell - 1]
    expected = f"{positions[cell - 1] + 1}" if is_inside else "0, where a row starts"
    return f"position is {positions[cell]}; expected {expected}"


def _row_problems(cells: _Cells) -> list[str]:
    """Lists rows that are cut, absent, present twice, or in another update than their place in the batch demands."""
    rows, positions = cells.values["row_ids"], cells.values["positions"]
    batch, lengths = cells.batch, cells.batch.lengths.numpy()
    is_last = positions == np.append(lengths, 1)[rows] - 1  # padding is no row's middle
    problems = cells.problems(
        ~is_last & ~np.append(cells.follows[1:], False),
        lambda cell: f"the row ends after {positions[cell] + 1} of its {lengths[rows[cell]]} tokens",
    )
    heads = np.flatnonzero((rows >= 0) & (positions == 0))
    _, firsts = np.unique(rows[heads], return_index=True)
    is_again = np.zeros(len(rows), dtype=bool)
    is_again[np.delete(heads, firsts)] = True
    problems += cells.problems(is_again, lambda cell: "the row is here again; expected once in all micro-batches")
    absent = np.flatnonzero(np.bincount(rows[heads], minlength=len(batch)) == 0)
    problems += [f"row {row} ({batch.identities[row]}) is in no micro-batch" for row in absent.tolist()]
    return problems or _update_problems(cells, heads)


def _update_problems(cells: _Cells, heads: _Array) -> list[str]:
    """Lists rows in another update than their trajectory's first row, or in an earlier one than the row before.

    heads: the cell at the start of each row, every row once.
    """
    updates = np.repeat(
        [number for number, update in enumerate(cells.plan.updates) for _ in update.micro_batches],
        np.diff(cells.offsets),
    )
    by_row = heads[np.argsort(cells.values["row_ids"][heads])]
    update_of_row = updates[by_row]
    steps, is_new = np.diff(update_of_row), np.diff(trajectory_index(cells.batch)) > 0
    is_wrong = np.zeros(len(updates), dtype=bool)
    is_wrong[by_row[1:][(steps < 0) | ((steps > 0) & ~is_new)]] = True
    return cells.problems(is_wrong, lambda cell: f"in update {updates[cell]}, away from the rows before it")


def _content_problems(cells: _Cells) -> list[str]:
    """Cells whose values are not the batch's; the positions are known to be sound."""
    values, expected = cells.values, _expected_values(cells)
    problems = []
    for name, right in expected.items():
        problems += cells.problems(values[name] != right, _describe_value(name, values[name], right))
    for name in ("advantages", "returns", "weights", "kept_mask", "loss_weights"):
        is_wrong = ~expected["response_mask"] & (values[name] != 0)
        problems += cells.problems(is_wrong, _describe_value(name, values[name], np.zeros_like(values[name])))
    return problems


def _describe_value(name: str, found: _Array, expected: _Array) -> _Text:
    return lambda cell: f"{name} is {found[cell]}; expected {expected[cell]}"


def _expected_values(cells: _Cells) -> dict[str, _Array]:
    """Looks up the right content of each cell, by field, from the batch's row and position."""
    batch = cells.batch
    offsets, mask = batch.row_offsets.numpy(), batch.response_mask.numpy()
    # Entry len(batch.tokens) of each table is 0 and for padding: its row -1 is the last offset, its position 0.
    source = offsets[cells.values["row_ids"]] + cells.values["positions"]
    tokens = np.append(batch.tokens.numpy(), 0)
    rollout_logprobs = np.zeros(len(tokens), dtype=np.float32)
    rollout_logprobs[:-1][mask] = batch.rollout_logprobs.numpy()
    tables = {"targets": tokens, "response_mask": np.append(mask, False), "rollout_logprobs": rollout_logprobs}
    expected = {"tokens": tokens[source]}
    for name, table in tables.items():
        following = np.append(table[1:], table[-1])
        following[offsets[1:] - 1] = 0  # a row's last token has no successor
        expected[name] = following[source]
    return expected
