"""The rules every rollout batch keeps, each stated once; whoever breaks some gets all of them in one error.

Contract: problems of a row alone are found in ``rows``; everything else is checked here on the joined tensors,
without a loop over rows or tokens unless something is wrong, since each load pays for it. Each check relies on the
ones before it: dtypes, then sizes, then content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter, itemgetter, lt
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mock_scheduler.batch.columns import Column, JsonColumn, column_name_problem
from mock_scheduler.batch.offsets import count_before
from mock_scheduler.batch.trajectory import (
    GroupKey,
    RowKey,
    SampleIdentity,
    Termination,
    TrajectoryKey,
    count_groups,
    partial_group_problems,
)
from mock_scheduler.errors import BatchError
from mock_scheduler.support.digests import JSON, check_json
from mock_scheduler.support.text import count_of

#: Name -> dtype of every tensor of a batch; all have one dimension.
TENSOR_FIELDS: Mapping[str, str] = {
    "tokens": "int32",
    "row_offsets": "int64",
    "response_mask": "bool",
    "rollout_logprobs": "float32",
    "turn_offsets": "int64",
    "turn_rewards": "float32",
    "policy_versions": "int32",
    "rewards": "float32",
    "terminations": "uint8",
    "prompt_lengths": "int32",
}

MAX_LISTED_PROBLEMS = 20
_MAX_LISTED_VALUES = 4
LAST_TERMINATION = int(max(Termination))

_Array: TypeAlias = "npt.NDArray[Any]"
_Arrays: TypeAlias = "Mapping[str, _Array]"
_RowProblem: TypeAlias = "tuple[int, str]"

# Getters of operator, since they make the keys of a batch several times faster than a function of ours.
_identity_key: Callable[[SampleIdentity], RowKey] = attrgetter(
    "scheduler_id", "group_id", "episode_id", "env_id", "turn"
)
_trajectory_of: Callable[[RowKey], TrajectoryKey] = itemgetter(0, 1, 2, 3)
_group_of: Callable[[TrajectoryKey], GroupKey] = itemgetter(0, 1, 2)


def raise_problems(problems: Sequence[str]) -> None:
    """Raise one ``BatchError`` listing the problems, the first 20 of them where there are more."""
    if not problems:
        return
    lines = [f"\n  - {problem}" for problem in problems[:MAX_LISTED_PROBLEMS]]
    if len(problems) > MAX_LISTED_PROBLEMS:
        lines.append(f"\n  and {len(problems) - MAX_LISTED_PROBLEMS} more")
    raise BatchError(f"rollout batch has {count_of(len(problems), 'problem')}:{''.join(lines)}")


def dtype_problems(tensors: Mapping[str, object]) -> list[str]:
    """List tensors unlike ``TENSOR_FIELDS`` in dtype or dimensions, not dense, not on the CPU, or with a gradient's
    history."""
    import torch

    from mock_scheduler.support.tensor_bytes import DTYPES, has_plain_bytes, shape_text

    problems = []
    for name, tensor in tensors.items():
        dtype = DTYPES[TENSOR_FIELDS[name]]
        if not isinstance(tensor, torch.Tensor):
            problems.append(f"{name} is of type {type(tensor).__name__}; expected a tensor of {dtype}")
        elif not has_plain_bytes(tensor) or tensor.dtype is not dtype or tensor.dim() != 1 or not tensor.is_cpu:
            problems.append(f"{name} is {shape_text(tensor)}; expected {dtype} with 1 dimension on cpu")
        elif tensor.requires_grad:
            problems.append(f"{name} requires grad, which a recording cannot keep: detach it")
        elif tensor.is_neg():
            problems.append(f"{name} is the negated view of another tensor: give resolve_neg() of it")
    return problems


def scalar_problems(tags: Sequence[str], group_size: int | None) -> list[str]:
    """List tags other than texts, and a group size other than a positive int (a NumPy one would not be written)."""
    problems = []
    if not set(map(type, tags)) <= {str}:
        problems += [
            f"tag of row {row} is {tag!r}; expected a text" for row, tag in enumerate(tags) if type(tag) is not str
        ]
    if group_size is not None and (type(group_size) is not int or group_size < 1):
        problems.append(f"group_size is {group_size!r}; expected an int of 1 or more, or None")
    return problems


def size_problems(arrays: _Arrays, other_sizes: Mapping[str, int], *, num_rows: int) -> list[str]:
    """List contradicting sizes and offsets; ``other_sizes``: of the fields beside the tensors."""
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


def extras_problems(extras: Mapping[str, Column], num_rows: int, *, checks_json: bool = True) -> list[str]:
    """List impossible names of extras, and columns unfit for the batch.

    ``checks_json`` False: JSON columns were read from JSON, and only their size is looked at.
    """
    problems = []
    for name, column in extras.items():
        problems += column_name_problem(name)
        if checks_json or not isinstance(column, JsonColumn):
            problems += column.problems(name, num_rows)
        elif len(column) != num_rows:
            problems.append(f"extra {name!r} has {len(column)} rows; expected {num_rows}")
    return problems


def meta_problems(meta: Mapping[str, JSON]) -> list[str]:
    """List entries of a batch's meta that JSON would not give back as they are."""
    problems = [
        f"meta: key {key!r} is {type(key).__name__}; JSON has text keys only" for key in meta if type(key) is not str
    ]
    for name, value in meta.items():
        try:
            check_json(value, f"meta {name!r}")
        except ValueError as error:
            problems.append(str(error))
    return problems


def prompt_problems(digests: Sequence[str], expected: Sequence[str], identities: Sequence[SampleIdentity]) -> list[str]:
    """List rows with another digest than their prompt's."""
    return [
        f"{identity}: prompt_digest is {found!r}; that of its prompt is {right!r}"
        for identity, found, right in zip(identities, digests, expected, strict=True)
        if found != right
    ]


def content_problems(arrays: _Arrays, identities: Sequence[SampleIdentity]) -> list[str]:
    """List impossible values, each with its row's identity, in row order."""
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


def _mask_rule(arrays: _Arrays) -> Iterator[_RowProblem]:
    mask = arrays["response_mask"].view(np.uint8)
    if mask.max(initial=0) > 1:  # which is True all the same, but recorded as a bit
        for row, values in _flagged(mask, mask > 1, arrays["row_offsets"]):
            yield row, f"response_mask holds a byte of {values[0]}; expected 0 and 1, as bits are recorded"


def _finite_rule(arrays: _Arrays) -> Iterator[_RowProblem]:
    rollout_logprobs, turn_rewards, rewards = (arrays[n] for n in ("rollout_logprobs", "turn_rewards", "rewards"))
    if not np.isfinite(rollout_logprobs).all():
        counts = count_before(arrays["response_mask"])
        for row, values in _flagged(rollout_logprobs, ~np.isfinite(rollout_logprobs), counts[arrays["row_offsets"]]):
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
    for row in _rows_where(arrays["terminations"] > LAST_TERMINATION):
        yield row, f"termination is {arrays['terminations'][row]}; expected 0 to {LAST_TERMINATION}"


_CONTENT_RULES: tuple[Callable[[_Arrays], Iterator[_RowProblem]], ...] = (
    _length_rule,
    _prompt_rule,
    _token_rule,
    _mask_rule,
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
    """List identities out of order or duplicated, and partial groups."""
    keys = list(map(_identity_key, identities))
    problems: list[str] = []
    if all(map(lt, keys, keys[1:])):
        if group_size is None or _has_whole_groups(keys, group_size):
            return problems
    else:
        problems = [f"{later}: duplicated identity" for earlier, later in pairwise(identities) if earlier == later]
        if any(later < earlier for earlier, later in pairwise(keys)):
            problems.append("identities are not in increasing order")
    if group_size is not None:
        problems += partial_group_problems(count_groups(map(_trajectory_of, keys)), group_size)
    return problems


def _has_whole_groups(keys: Sequence[RowKey], group_size: int) -> bool:
    """Whether every group has ``group_size`` trajectories, of keys in increasing order.

    As they are in order, it is enough to look at the first and the last of every ``group_size`` trajectories: these
    must be of one group, and the next of another.
    """
    groups = list(map(_group_of, dict.fromkeys(map(_trajectory_of, keys))))
    firsts, lasts = groups[::group_size], groups[group_size - 1 :: group_size]
    return len(groups) == group_size * len(firsts) and firsts == lasts and all(map(lt, firsts, firsts[1:]))
