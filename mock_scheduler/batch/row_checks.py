"""What is checked of a row before it is joined with others.

Contract: only what joining the rows would hide or could not do; all else is checked on the joined rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import numpy as np

from mock_scheduler.batch.checks import LAST_TERMINATION, dtype_problems
from mock_scheduler.batch.trajectory import Termination, Trajectory

_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def row_problems(row: Trajectory) -> list[str]:
    """What of one row would be hidden once rows are joined, or would not let them be: wrong types and dtypes, numbers
    that their tensor cannot hold, and sizes that contradict each other."""
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
    """Rows whose extras are not those of the first row."""
    if not rows:
        return []
    expected = rows[0].extras.keys()
    return [
        f"{row.identity}: extras are {sorted(row.extras)}; the first row, {rows[0].identity}, has {sorted(expected)}"
        for row in rows
        if row.extras.keys() != expected
    ]
