"""The rules that every rollout batch keeps, each stated once; whoever breaks some gets all of them in one error.

Contract: a row is checked alone only for what joining the rows would hide (dtypes and sizes); everything else is
checked on the joined tensors, without a loop over rows or tokens unless something is wrong, since each load pays for
it. Every check here assumes that those before it found nothing: dtypes, sizes, content.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter, itemgetter, lt
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.columns import Column, column_name_problem
from mock_scheduler.digests import JSON, canonical_json
from mock_scheduler.errors import BatchError
from mock_scheduler.trajectory import SampleIdentity, Termination, Trajectory

#: Name -> (dtype, number of dimensions) of every tensor of a batch.
TENSOR_FIELDS: Mapping[str, tuple[torch.dtype, int]] = {
    "tokens": (torch.int32, 1),
    "row_offsets": (torch.int64, 1),
    "response_mask": (torch.bool, 1),
    "rollout_logprobs": (torch.float32, 1),
    "turn_offsets": (torch.int64, 1),
    "turn_rewards": (torch.float32, 1),
    "policy_versions": (torch.int32, 1),
    "rewards": (torch.float32, 1),
    "terminations": (torch.uint8, 1),
    "prompt_lengths": (torch.int32, 1),
}

MAX_LISTED_PROBLEMS = 20
_MAX_LISTED_VALUES = 4
_LAST_TERMINATION = int(max(Termination))

_Array: TypeAlias = "npt.NDArray[Any]"
_Arrays: TypeAlias = "Mapping[str, _Array]"
_RowProblem: TypeAlias = "tuple[int, str]"

# Getters of operator, since they make the keys of a batch several times faster than a function of ours.
_identity_key: Callable[[SampleIdentity], tuple[str, int, int, int, int]] = attrgetter(
    "scheduler_id", "group_id", "episode_id", "env_id", "turn"
)
_trajectory_key: Callable[[SampleIdentity], tuple[str, int, int, int]] = attrgetter(
    "scheduler_id", "group_id", "episode_id", "env_id"
)
_trajectory_of: Callable[[tuple[str, int, int, int, int]], tuple[str, int, int, int]] = itemgetter(0, 1, 2, 3)
_group_of: Callable[[tuple[str, int, int, int]], tuple[str, int, int]] = itemgetter(0, 1, 2)


def raise_problems(problems: Sequence[str]) -> None:
    """Raise one ``BatchError`` that lists the problems, the first 20 of them where there are more."""
    if not problems:
        return
    lines = [f"\n  - {problem}" for problem in problems[:MAX_LISTED_PROBLEMS]]
    if len(problems) > MAX_LISTED_PROBLEMS:
        lines.append(f"\n  and {len(problems) - MAX_LISTED_PROBLEMS} more")
    raise BatchError(f"rollout batch has {len(problems)} problem{'s'[: len(problems) > 1]}:{''.join(lines)}")


def row_problems(row: Trajectory) -> list[str]:
    """What of one row would be hidden once rows are joined: wrong dtypes, and sizes that contradict each other."""
    tensors = {
        "tokens": row.tokens,
        "response_mask": row.response_mask,
        "rollout_logprobs": row.rollout_logprobs,
        "turn_rewards": row.turn_rewards,
        "policy_versions": row.policy_versions,
    }
    problems = dtype_problems(tensors) or _row_size_problems(row)
    return [f"{row.identity}: {problem}" for problem in problems]


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


def dtype_problems(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Tensors that are not of the dtype and number of dimensions that ``TENSOR_FIELDS`` says, or not on the CPU."""
    problems = []
    for name, tensor in tensors.items():
        dtype, num_dims = TENSOR_FIELDS[name]
        if tensor.dtype is not dtype or tensor.dim() != num_dims or not tensor.is_cpu:
            problems.append(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; "
                f"expected {dtype} with {num_dims} dimension on cpu"
            )
    return problems


def size_problems(arrays: _Arrays, other_sizes: Mapping[str, int], *, num_rows: int) -> list[str]:
    """Sizes and offsets that contradict each other; ``other_sizes``: those of the fields that are no tensors."""
    num_response = int(np.count_nonzero(arrays["response_mask"]))
    expected = {
        "row_offsets": num_rows + 1,
        "turn_offsets": num_rows + 1,
        "response_mask": len(arrays["tokens"]),
        "rollout_logprobs": num_response,
        "policy_versions": len(arrays["turn_rewards"]),
        **dict.fromkeys(("rewards", "terminations", "prompt_lengths", *other_sizes), num_rows),
    }
    found = {**{name: len(values) for name, values in arrays.items()}, **other_sizes}
    problems = [
        f"{name} has {found[name]} entries; expected {size}" for name, size in expected.items() if found[name] != size
    ]
    for name, values in (("row_offsets", "tokens"), ("turn_offsets", "turn_rewards")):
        offsets, total = arrays[name], len(arrays[values])
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != total or (offsets[1:] < offsets[:-1]).any():
            problems.append(f"{name} must rise from 0 to {total}")
    return problems


def extras_problems(extras: Mapping[str, Column], num_rows: int) -> list[str]:
    """Names that no extra can have, and columns that do not fit the batch."""
    return [
        problem
        for name, column in extras.items()
        for problem in (*column_name_problem(name), *column.problems(name, num_rows))
    ]


def meta_problems(meta: Mapping[str, JSON]) -> list[str]:
    """Entries of a batch's meta that are not JSON."""
    problems: list[str] = []
    try:
        canonical_json(meta)
    except (TypeError, ValueError, RecursionError):  # of which it is not known yet whose it is
        pass
    else:
        return problems
    for name, value in meta.items():
        try:
            canonical_json({name: value})
        except (TypeError, ValueError, RecursionError) as error:
            problems.append(f"meta {name!r} is not JSON: {error}")
    return problems


def content_problems(arrays: _Arrays, identities: Sequence[SampleIdentity]) -> list[str]:
    """Values that no row may have, each with its row's identity, in row order."""
    found = [problem for rule in _CONTENT_RULES for problem in rule(arrays)]
    return [f"{identities[row]}: {problem}" for row, problem in sorted(found, key=itemgetter(0))]


def _length_rule(arrays: _Arrays) -> Iterator[_RowProblem]:
    offsets = arrays["row_offsets"]
    for row in _rows_where(offsets[1:] == offsets[:-1]):
        yield row, "it has no tokens"


def _prompt_rule(arrays: _Arrays) -> Iterator[_RowProblem]:
    offsets, prompts = arrays["row_offsets"], arrays["prompt_lengths"]
    starts, lengths = offsets[:-1], offsets[1:] - offsets[:-1]
    is_inside = (prompts >= 0) & (prompts <= lengths)
    for row in _rows_where(~is_inside):
        yield row, f"prompt_length is {prompts[row]}, the row has {lengths[row]} tokens"
    rows = (is_inside & (prompts > 0)).nonzero()[0]
    if len(rows) == 0:
        return
    # The even segments run over the prompts, the odd ones from a prompt's end to the next prompt; an end of the last
    # row's prompt that is the end of all tokens is no index, and need not be one.
    bounds = np.empty(2 * len(rows), dtype=np.int64)
    bounds[::2], bounds[1::2] = starts[rows], starts[rows] + prompts[rows]
    mask = arrays["response_mask"].view(np.uint8)  # as bytes, of which NumPy finds the largest much faster
    is_masked = np.maximum.reduceat(mask, bounds[:-1] if bounds[-1] == len(mask) else bounds)[::2] != 0
    for row in rows[is_masked].tolist():
        yield row, f"response_mask is True inside the prompt of {prompts[row]} tokens"


def _token_rule(arrays: _Arrays) -> Iterator[_RowProblem]:
    tokens = arrays["tokens"]
    if tokens.min(initial=0) < 0:
        for row, values in _flagged(tokens, tokens < 0, arrays["row_offsets"]):
            yield row, f"token id {values[0]} is negative"


def _finite_rule(arrays: _Arrays) -> Iterator[_RowProblem]:
    logprobs, turn_rewards, rewards = arrays["rollout_logprobs"], arrays["turn_rewards"], arrays["rewards"]
    if not np.isfinite(logprobs).all():
        counts = np.concatenate([[0], arrays["response_mask"].cumsum()])
        for row, values in _flagged(logprobs, ~np.isfinite(logprobs), counts[arrays["row_offsets"]]):
            yield row, f"rollout_logprobs is not finite: {_list_some(values)}"
    if np.isfinite(rewards).all() and np.isfinite(turn_rewards).all():
        return
    without_total = set()
    for row, values in _flagged(turn_rewards, ~np.isfinite(turn_rewards), arrays["turn_offsets"]):
        without_total.add(row)
        yield row, f"turn_rewards is not finite: {_list_some(values)}"
    for row in _rows_where(~np.isfinite(rewards)):
        if row not in without_total:  # where a turn's is not finite, the row's cannot be: that is one problem
            yield row, f"reward is not finite: {rewards[row]}"


def _termination_rule(arrays: _Arrays) -> Iterator[_RowProblem]:
    for row in _rows_where(arrays["terminations"] > _LAST_TERMINATION):
        yield row, f"termination is {arrays['terminations'][row]}; expected 0 to {_LAST_TERMINATION}"


_CONTENT_RULES: tuple[Callable[[_Arrays], Iterator[_RowProblem]], ...] = (
    _length_rule,
    _prompt_rule,
    _token_rule,
    _finite_rule,
    _termination_rule,
)


def _rows_where(flags: _Array) -> list[int]:
    rows: list[int] = flags.nonzero()[0].tolist()
    return rows


def _flagged(values: _Array, flags: _Array, offsets: _Array) -> Iterator[tuple[int, _Array]]:
    """Each row with a flag, and its flagged values; row i has ``values[offsets[i]:offsets[i + 1]]``."""
    positions = np.flatnonzero(flags)
    rows = np.searchsorted(offsets, positions, side="right") - 1
    for row in np.unique(rows):
        yield int(row), values[positions[rows == row]]


def _list_some(values: _Array) -> str:
    listed = ", ".join(map(str, values[:_MAX_LISTED_VALUES].tolist()))
    return f"[{listed}]" if len(values) <= _MAX_LISTED_VALUES else f"[{listed}, …] ({len(values)} values)"


def identity_problems(identities: Sequence[SampleIdentity], group_size: int | None) -> list[str]:
    """Identities out of order or duplicated, and groups that are not whole."""
    keys = list(map(_identity_key, identities))
    problems: list[str] = []
    if all(map(lt, keys, keys[1:])):
        if group_size is None or (group_size > 0 and _has_whole_groups(keys, group_size)):
            return problems
    else:
        problems = [f"{later}: duplicated identity" for earlier, later in pairwise(identities) if earlier == later]
        if any(later < earlier for earlier, later in pairwise(keys)):
            problems.append("identities are not in increasing order")
    if group_size is not None:
        problems += [
            f"{name_group(group)}: group has {size} trajectories; expected group_size {group_size}"
            for group, size in group_sizes(identities).items()
            if size != group_size
        ]
    return problems


def _has_whole_groups(keys: Sequence[tuple[str, int, int, int, int]], group_size: int) -> bool:
    """Whether every group has ``group_size`` trajectories, of keys in increasing order.

    As they are in order, it is enough to look at the first and the last of every ``group_size`` trajectories: these
    must be of one group, and the next of another.
    """
    groups = list(map(_group_of, dict.fromkeys(map(_trajectory_of, keys))))
    firsts, lasts = groups[::group_size], groups[group_size - 1 :: group_size]
    return len(groups) == group_size * len(firsts) and firsts == lasts and all(map(lt, firsts, firsts[1:]))


def group_sizes(identities: Sequence[SampleIdentity]) -> Counter[tuple[str, int, int]]:
    """Number of trajectories of each group, by ``group_key``, in the order of the identities."""
    trajectories = dict.fromkeys(map(_trajectory_key, identities))
    return Counter(map(_group_of, trajectories))


def name_group(group_key: tuple[str, int, int]) -> str:
    """A group as messages name it."""
    scheduler_id, group_id, episode_id = group_key
    return f"{scheduler_id}/group {group_id}/episode {episode_id}"
