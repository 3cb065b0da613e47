"""Rows become columns of a batch: checked one by one, and joined.

Contract: values are copied bit for bit and in the order given. A row is checked here only for problems that joining the
rows would hide or could not survive; all other checks look at the joined rows (``checks``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import numpy as np
import torch

from mock_scheduler.batch.building import build_column
from mock_scheduler.batch.checks import LAST_TERMINATION, dtype_problems
from mock_scheduler.batch.columns import Column
from mock_scheduler.batch.trajectory import Termination, Trajectory
from mock_scheduler.errors import BatchError

_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def join_rows(rows: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """Returns the core tensors of a batch of the given rows, one after another."""
    return {
        "tokens": _join([row.tokens for row in rows], torch.int32),
        "row_offsets": compute_offsets([len(row.tokens) for row in rows]),
        "response_mask": _join([row.response_mask for row in rows], torch.bool),
        "rollout_logprobs": _join([row.rollout_logprobs for row in rows], torch.float32),
        "turn_offsets": compute_offsets([len(row.turn_rewards) for row in rows]),
        "turn_rewards": _join([row.turn_rewards for row in rows], torch.float32),
        "policy_versions": _join([row.policy_versions for row in rows], torch.int32),
        "rewards": torch.tensor([_total_reward(row) for row in rows], dtype=torch.float32),
        "terminations": torch.tensor([row.termination for row in rows], dtype=torch.uint8),
        "prompt_lengths": torch.tensor([row.prompt_length for row in rows], dtype=torch.int32),
    }


def join_extras(rows: Sequence[Trajectory]) -> tuple[dict[str, Column], list[str]]:
    """Build the columns of the rows' extras, and list the problems of the others; all rows have the same."""
    columns, problems = {}, []
    for name in rows[0].extras if rows else ():
        try:
            columns[name] = build_column(name, [row.extras[name] for row in rows])
        except BatchError as error:
            problems.append(str(error))
    return columns, problems


def compute_offsets(sizes: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """Returns the bounds of parts of the given sizes, one after another: int64 ``[len(sizes) + 1]``, the first 0."""
    offsets = torch.zeros(len(sizes) + 1, dtype=torch.int64)
    torch.cumsum(torch.as_tensor(sizes, dtype=torch.int64), 0, out=offsets[1:])
    return offsets


def _join(pieces: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype)


def _total_reward(row: Trajectory) -> float:
    if row.reward is not None:
        return float(row.reward)
    # fsum is correctly rounded, so the total does not depend on the order of the turns. It refuses inf - inf; what is
    # not finite is found among the turns' rewards.
    rewards = row.turn_rewards.tolist()
    return math.fsum(rewards) if all(map(math.isfinite, rewards)) else math.nan


# --- Checks of one row, before joining would hide the problem ---


def row_problems(row: Trajectory) -> list[str]:
    """List problems of one row that joining would hide or could not survive: wrong types, numbers too large for their
    tensor, and contradicting sizes."""
    tensors = {
        "tokens": row.tokens,
        "response_mask": row.response_mask,
        "rollout_logprobs": row.rollout_logprobs,
        "turn_rewards": row.turn_rewards,
        "policy_versions": row.policy_versions,
    }
    problems = (dtype_problems(tensors) or _row_size_problems(row)) + _row_value_problems(row)
    return [f"{row.identity}: {problem}" for problem in problems]


def _row_value_problems(row: Trajectory) -> list[str]:
    problems = []
    if type(row.tag) is not str:
        problems.append(f"tag is {row.tag!r}; expected a text")
    if type(row.prompt_length) is not int:
        problems.append(f"prompt_length is {row.prompt_length!r}; expected an int")
    elif abs(row.prompt_length) > _INT32_MAX:
        problems.append(f"prompt_length is {row.prompt_length}, the row has {len(row.tokens)} tokens")
    ending = row.termination
    if type(ending) not in (int, Termination) or not 0 <= ending <= LAST_TERMINATION:
        problems.append(f"termination is {ending!r}; expected 0 to {LAST_TERMINATION}")
    if row.reward is not None and (isinstance(row.reward, bool) or not isinstance(row.reward, Real)):
        problems.append(f"reward is {row.reward!r}; expected a number or None")
    elif isinstance(row.reward, int) and abs(row.reward) > _FLOAT32_MAX:
        problems.append("reward is not finite: it is an integer that float32 cannot hold")
    return problems


def _row_size_problems(row: Trajectory) -> list[str]:
    length, num_response = len(row.tokens), int(np.count_nonzero(row.response_mask.numpy()))
    problems = []
    if len(row.response_mask) != length:
        problems.append(f"response_mask has {len(row.response_mask)} entries, the row has {length} tokens")
    if len(row.rollout_logprobs) != num_response:
        problems.append(
            f"rollout_logprobs has {len(row.rollout_logprobs)} entries, response_mask marks {num_response} tokens"
        )
    if len(row.turn_rewards) != len(row.policy_versions):
        problems.append(
            f"turn_rewards has {len(row.turn_rewards)} turns, policy_versions has {len(row.policy_versions)}"
        )
    return problems


def extra_name_problems(rows: Sequence[Trajectory]) -> list[str]:
    """Returns rows with other extras than the first row's."""
    if not rows:
        return []
    expected = rows[0].extras.keys()
    return [
        f"{row.identity}: extras are {sorted(row.extras)}; the first row, {rows[0].identity}, has {sorted(expected)}"
        for row in rows
        if row.extras.keys() != expected
    ]
