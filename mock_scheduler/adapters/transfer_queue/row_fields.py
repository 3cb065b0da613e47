"""What one row of a TransferQueue says of a rollout's core fields, by names of fields that the framework gives.

Contract: a field whose every type and bit the core fields give back is ``FROM_CORE``, and kept once: ``restored`` makes
it again, and is what decides this. A row without a token has one placeholder, and all its own fields beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.adapters.rows import FROM_CORE, ForeignRow, experts_are_usable
from mock_scheduler.adapters.token_lists import INT32_MAX, LARGEST_FLOAT32
from mock_scheduler.errors import BatchError
from mock_scheduler.support.tensor_bytes import as_bytes

#: From a key: its group's name, the trajectory's number in the group, and the row's number in the trajectory.
SplitKey: TypeAlias = Callable[[str], tuple[str, int, int]]


def split_key(key: str) -> tuple[str, int, int]:
    """Takes ``{group}_{trajectory}_{row}`` apart; a group's name may have ``_`` in it."""
    group, _, rest = key.rpartition("_")
    group, _, member = group.rpartition("_")
    if not group or not _is_number(member) or not _is_number(rest):
        raise BatchError(f"key {key!r} is none of a group, a trajectory and a row, joined by '_'")
    return group, int(member), int(rest)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldNames:
    """Where a framework keeps what a rollout says; ``None`` or nothing: it has no such field.

    Attributes:
        tokens: int ``[T]``, the prompt and the response.
        responses: int ``[R]``, the last R of them.
        prompts: int ``[T - R]``, the others.
        masks: int or bool ``[R]``, or of all tokens: 0 where the policy sampled nothing. The first one counts.
        positions: int ``[T]``, counted from 0.
        logprobs: float ``[R]``, as sampled.
        scores: float ``[R]``, whose sum is the reward.
        experts: int ``[T or T - 1, layers, topk]``.
        source: a text, where the prompt is from.
        prompt: the prompt as the trainer drew it.
        identities: fields that say which row it is, and not what is in it.
        version_tag: the tag with the oldest policy that sampled the row.
    """

    tokens: str
    responses: str
    prompts: str | None = None
    masks: tuple[str, ...] = ()
    positions: str | None = None
    logprobs: str | None = None
    scores: str | None = None
    experts: str | None = None
    source: str | None = None
    prompt: str | None = None
    identities: tuple[str, ...] = ()
    version_tag: str | None = None


def read_version(names: FieldNames, tag: Mapping[str, Any]) -> int | None:
    """Reads the oldest policy that sampled a row; ``None`` where its tags do not say."""
    version = tag.get(names.version_tag) if names.version_tag else None
    return version if type(version) is int and version >= 0 else None


def read_row(
    values: Mapping[str, object], names: FieldNames, *, place: tuple[int, int, int], version: int
) -> ForeignRow:
    """Reads a row's core fields; ``place``: group, trajectory and row. ``native`` has all its fields.

    Raises:
        BatchError: its fields contradict themselves, or one that it needs is not there.
    """
    tokens = _whole_numbers(values, names.tokens)
    num_response = len(_whole_numbers(values, names.responses))
    prompt_length = len(tokens) - num_response
    flags = _read_mask(values, names, num_response, prompt_length)
    logprobs = _read_logprobs(values, names, flags)
    experts = values.get(names.experts) if names.experts else None
    usable = experts.numpy() if isinstance(experts, torch.Tensor) and experts.layout is torch.strided else None
    source = values.get(names.source) if names.source else None
    is_filled = len(tokens) > 0
    return ForeignRow(
        tokens=tokens.astype(np.int32) if is_filled else np.zeros(1, dtype=np.int32),
        response_mask=np.concatenate([np.zeros(prompt_length if is_filled else 1, dtype=np.bool_), flags]),
        rollout_logprobs=logprobs,
        group=place[0],
        member=place[1],
        turn=place[2],
        reward=_read_reward(values, names),
        versions=version,
        prompt_length=prompt_length if is_filled else 1,
        tag=source if isinstance(source, str) else "",
        native=values,
        routed_experts=usable if is_filled and experts_are_usable(usable, len(tokens)) else None,
    )


def _whole_numbers(values: Mapping[str, object], name: str) -> npt.NDArray[Any]:
    ids = values.get(name)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 1 or ids.is_floating_point() or ids.is_complex():
        found = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise BatchError(f"{name} is {found}; expected token ids, whole numbers [T]")
    numbers = ids.numpy()
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() <= INT32_MAX:
        raise BatchError(f"{name} lies from {numbers.min()} to {numbers.max()}; expected 0 to {INT32_MAX}")
    return numbers


def _read_mask(
    values: Mapping[str, object], names: FieldNames, num_response: int, prompt_length: int
) -> npt.NDArray[np.bool_]:
    mask = values.get(names.masks[0]) if names.masks else None
    if mask is None and not names.masks and prompt_length >= 0:
        return np.ones(num_response, dtype=np.bool_)
    size = len(mask) if isinstance(mask, torch.Tensor) and mask.dim() == 1 else None
    if prompt_length < 0 or size not in (num_response, num_response + prompt_length):
        raise BatchError(
            f"has {num_response + prompt_length} tokens, {num_response} of the response, and a mask of {size}"
        )
    assert isinstance(mask, torch.Tensor)  # it has a size
    flags = (mask != 0).numpy()
    return flags[len(flags) - num_response :]


def _read_logprobs(values: Mapping[str, object], names: FieldNames, flags: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """Reads those of sampled tokens; 0 where there are none, and where one is no number."""
    stated = values.get(names.logprobs) if names.logprobs else None
    if stated is None:
        return np.zeros(int(flags.sum()), dtype=np.float32)
    if not isinstance(stated, torch.Tensor) or stated.dim() != 1 or len(stated) < len(flags):
        found = list(stated.shape) if isinstance(stated, torch.Tensor) else type(stated).__name__
        raise BatchError(f"{names.logprobs} is {found}; expected a number for each of {len(flags)} response tokens")
    numbers = stated.detach().float().numpy()
    own = numbers[len(numbers) - len(flags) :][flags]
    return np.where(np.isfinite(own), own, np.float32(0))


def _read_reward(values: Mapping[str, object], names: FieldNames) -> float:
    scores = values.get(names.scores) if names.scores else None
    total = float(scores.detach().double().sum()) if isinstance(scores, torch.Tensor) else 0.0
    return total if abs(total) <= LARGEST_FLOAT32 else 0.0


def without_doubles(row: ForeignRow, names: FieldNames, *, keeps_experts: bool) -> ForeignRow:
    """The row with ``FROM_CORE`` for fields that ``restored`` gives back; ``keeps_experts``: the batch has them."""
    if not isinstance(tokens := row.native.get(names.tokens), torch.Tensor) or not len(tokens):
        return row
    experts = torch.from_numpy(row.routed_experts) if keeps_experts and row.routed_experts is not None else None
    again = restored(
        names,
        torch.from_numpy(row.tokens),
        torch.from_numpy(row.response_mask)[row.prompt_length :],
        torch.from_numpy(row.rollout_logprobs),
        reward=row.reward,
        experts=experts,
    )
    native = {
        name: FROM_CORE if name in again and _is_same(value, again[name]) else value
        for name, value in row.native.items()
    }
    return replace(row, native=native)


def restored(
    names: FieldNames,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    logprobs: torch.Tensor,
    *,
    reward: float,
    experts: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Makes the fields that the core fields of a row give back.

    Args:
        names: of the fields.
        tokens: int32 ``[T]``.
        mask: bool ``[R]``, of the response's tokens, sampled or not.
        logprobs: float32 of sampled tokens.
        reward: of the row.
        experts: as the batch has them; ``None``: it has none.
    """
    ids, num_response = tokens.long(), len(mask)
    spread = torch.zeros(num_response, dtype=torch.float32)
    spread[mask] = logprobs
    scores = torch.zeros(num_response, dtype=torch.float32)
    if num_response:
        scores[-1] = reward
    found: dict[str | None, torch.Tensor | None] = {
        names.tokens: ids,
        names.responses: ids[len(ids) - num_response :],
        names.prompts: ids[: len(ids) - num_response],
        names.positions: torch.arange(len(ids)),
        names.logprobs: spread,
        names.scores: scores,
        names.experts: experts,
        **dict.fromkeys(names.masks, mask.long()),
    }
    return {name: value.clone() for name, value in found.items() if name is not None and value is not None}


def _is_same(one: object, other: torch.Tensor) -> bool:
    """Whether both are one tensor, in type and every bit."""
    return (
        isinstance(one, torch.Tensor)
        and one.layout is torch.strided
        and (one.dtype, one.shape) == (other.dtype, other.shape)
        and torch.equal(as_bytes(one.detach()), as_bytes(other))
    )
