"""Rows of a framework, one by one, as a rollout batch and back: the part that codecs and importers share.

Contract: a row's core fields are read from what the framework says; all its own fields lie beside them
(``plain_values``), so that it comes back bit for bit. A field of ``native`` that is ``FROM_CORE`` is not kept: its
codec makes it again out of the core fields.

- ``native/{field}``: JSON per row;  ``native.bytes``: uint8, the bytes of the row's fields;
- ``identity/row``: the row's number among the rows given; ``identity/native/{field}``: fields that say which row it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from mock_scheduler.adapters.plain_values import pack, unpack
from mock_scheduler.batch import IDENTITY_EXTRAS, RolloutBatch, SampleIdentity, SamplingParams, Termination, Trajectory
from mock_scheduler.batch.columns import JsonColumn, Ragged, RowValue, TensorColumn
from mock_scheduler.batch.engine_columns import (
    ROUTED_EXPERTS_COLUMN,
    SUPPORT_COLUMN,
    SUPPORT_OFFSETS_COLUMN,
    VERSIONS_COLUMN,
)
from mock_scheduler.batch.offsets import count_before
from mock_scheduler.errors import BatchError
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.tensor_bytes import share_array
from mock_scheduler.support.text import bullet_list

ROW_COLUMN = f"{IDENTITY_EXTRAS}row"
_PREFIX = "native/"
_IDENTITY_PREFIX = f"{IDENTITY_EXTRAS}native/"
_BYTES_COLUMN = "native.bytes"
_EXPERTS_KIND = ":experts"
_FIELD = re.compile(r"[A-Za-z0-9_.:-]{1,120}")
_ABSENT: JSON = {"$absent": True}
_CORE: JSON = {"$core": True}
_INT32_MAX = 2**31 - 1


class _FromCore:
    """Stands for a field that the core fields say exactly."""

    def __repr__(self) -> str:
        return "FROM_CORE"


FROM_CORE = _FromCore()

_Array = npt.NDArray[Any]
_Row = TypeVar("_Row")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForeignRow:
    """One training row. ``tokens`` int32 and ``response_mask`` bool ``[T]``, at least one; ``rollout_logprobs`` float32
    ``[R]``; ``versions``: the policy version, or one for each response token; ``member``: the trajectory's number in
    its group, of which ``turn`` numbers the rows.

    ``routed_experts`` integers ``[T or T - 1, layers, topk]``; ``support``: ids, and int64 ``[R + 1]`` where each
    response token's begin.
    """

    tokens: _Array
    response_mask: _Array
    rollout_logprobs: _Array
    group: int
    member: int
    turn: int = 0
    reward: float = 0.0
    versions: int | Sequence[int] = 0
    termination: Termination = Termination.TERMINATED
    prompt_length: int = 0
    tag: str = ""
    native: Mapping[str, object] = field(default_factory=dict)
    routed_experts: _Array | None = None
    support: tuple[_Array, _Array] | None = None


def read_rows(labels: Iterable[str], read: Callable[[int], _Row], refusal: str) -> list[_Row]:
    """Reads the row of each number, and gives what was read.

    Raises:
        BatchError: rows contradict themselves or have values that cannot be kept; lists every one by its label.
    """
    rows, problems = [], []
    for number, label in enumerate(labels):
        try:
            rows.append(read(number))
        except (BatchError, TypeError, ValueError, OverflowError) as error:
            problems.append(f"{label}: {error}")
    if problems:
        raise BatchError(f"{refusal}:{bullet_list(problems)}")
    return rows


def build_batch(
    rows: Sequence[ForeignRow],
    *,
    sampling: SamplingParams,
    scheduler_id: str,
    meta: Mapping[str, JSON],
    group_size: int | None = None,
    identity_fields: Collection[str] = (),
) -> RolloutBatch:
    """Makes the batch; ``group_size`` None: that of the groups, where all are equal.

    ``identity_fields``: fields that say which row it is, and not what is in it.

    Raises:
        BatchError: as ``RolloutBatch`` does, and where a field cannot be kept; names the row and the field.
    """
    columns = {
        name: f"{_IDENTITY_PREFIX if name in identity_fields else _PREFIX}{name}"
        for name in dict.fromkeys(name for row in rows for name in row.native)
    }
    has_routing = experts_fit([row.routed_experts for row in rows])
    has_support = any(row.support is not None for row in rows)
    has_versions = any(not isinstance(row.versions, int) and len(set(row.versions)) > 1 for row in rows)
    trajectories = []
    for number, row in enumerate(rows):
        extras: dict[str, RowValue] = {
            ROW_COLUMN: torch.tensor(number, dtype=torch.int32),
            **_pack_native(row, columns, number),
        }
        if has_routing:
            extras[ROUTED_EXPERTS_COLUMN] = Ragged(_routing_of(row, rows))
        if has_support:
            ids, bounds = row.support or (_no_ids(), np.zeros(int(row.response_mask.sum()) + 1, dtype=np.int64))
            extras[SUPPORT_COLUMN] = Ragged(share_array(ids.astype(np.int32)))
            extras[SUPPORT_OFFSETS_COLUMN] = Ragged(share_array(bounds.astype(np.int64)))
        by_token = _versions_by_token(row, number)
        if has_versions:
            extras[VERSIONS_COLUMN] = Ragged(share_array(by_token))
        trajectories.append(_build_row(row, by_token, extras, scheduler_id))
    sizes = {len(members) for members in _members(rows).values()}
    return RolloutBatch.from_trajectories(
        trajectories,
        sampling=sampling,
        group_size=sizes.pop() if group_size is None and len(sizes) == 1 else group_size,
        meta=meta,
    )


def _members(rows: Sequence[ForeignRow]) -> Mapping[int, set[int]]:
    members: dict[int, set[int]] = {}
    for row in rows:
        members.setdefault(row.group, set()).add(row.member)
    return members


def read_about(batch: RolloutBatch, key: str, version: int, origin: str) -> Mapping[str, Any]:
    """Read what a codec wrote of a batch into its meta; raises ``BatchError`` where this codec did not write it."""
    about: Any = batch.meta.get(key)
    if not isinstance(about, Mapping) or about.get("version") != version:
        raise BatchError(f"batch was not recorded from {origin}: meta {key!r} is {about}; expected version {version}")
    return about


def unpack_rows(batch: RolloutBatch) -> list[tuple[int, dict[str, Any]]]:
    """Gives each row's number in the batch and its own fields, in the order in which the rows were given.

    Fields that are ``FROM_CORE`` are that object. Raises ``BatchError`` where the batch has no such rows.
    """
    numbers = batch.extras.get(ROW_COLUMN)
    content = batch.extras.get(_BYTES_COLUMN)
    if not isinstance(numbers, TensorColumn) or not isinstance(content, TensorColumn):
        raise BatchError("batch was not made of a framework's rows: replay it with the codec that recorded it")
    columns = {
        name.removeprefix(IDENTITY_EXTRAS).removeprefix(_PREFIX): column
        for name, column in batch.extras.items()
        if name.startswith((_PREFIX, _IDENTITY_PREFIX)) and isinstance(column, JsonColumn)
    }
    order = torch.argsort(numbers.values, stable=True).tolist()
    rows = []
    for place in order:
        data = cast("Ragged", content.row(place)).values.numpy().tobytes()
        rows.append((place, {name: _unpack_field(column.row(place), data) for name, column in columns.items()}))
    return [(place, {name: value for name, value in own.items() if value is not _GONE}) for place, own in rows]


_GONE = object()


def _unpack_field(packed: JSON, content: bytes) -> object:
    if packed == _ABSENT:
        return _GONE
    return FROM_CORE if packed == _CORE else unpack(packed, content)


def _pack_native(row: ForeignRow, columns: Mapping[str, str], number: int) -> dict[str, RowValue]:
    content = bytearray()
    packed: dict[str, RowValue] = {}
    for name, column in columns.items():
        if not isinstance(name, str) or not _FIELD.fullmatch(name):
            raise BatchError(f"row {number}: a field is called {name!r}; expected letters, digits and '_.:-'")
        if name not in row.native:
            packed[column] = _ABSENT
        elif row.native[name] is FROM_CORE:
            packed[column] = _CORE
        else:
            packed[column], _ = pack(row.native[name], f"row {number}: {name}", content)
    data = np.frombuffer(content, dtype=np.uint8) if content else np.empty(0, dtype=np.uint8)
    return {**packed, _BYTES_COLUMN: Ragged(share_array(data))}


def _build_row(
    row: ForeignRow, by_token: npt.NDArray[np.int32], extras: Mapping[str, RowValue], scheduler_id: str
) -> Trajectory:
    mask = np.array(row.response_mask, dtype=np.bool_)
    starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    firsts = count_before(mask)[starts]
    rewards = np.zeros(len(starts), dtype=np.float32)
    if len(starts):
        rewards[-1] = row.reward
    # The oldest: a turn is as stale as its stalest token.
    versions = np.minimum.reduceat(by_token, firsts) if len(firsts) else by_token[:0]
    return Trajectory(
        identity=SampleIdentity(
            scheduler_id=scheduler_id, group_id=row.group, episode_id=0, env_id=row.member, turn=row.turn
        ),
        tokens=share_array(np.array(row.tokens, dtype=np.int32)),
        response_mask=share_array(mask),
        rollout_logprobs=share_array(np.array(row.rollout_logprobs, dtype=np.float32)),
        turn_rewards=share_array(rewards),
        policy_versions=share_array(versions.astype(np.int32)),
        termination=row.termination,
        prompt_length=row.prompt_length,
        tag=row.tag,
        reward=float(np.float32(row.reward)),
        extras=extras,
    )


def _versions_by_token(row: ForeignRow, number: int) -> npt.NDArray[np.int32]:
    num_response = int(np.count_nonzero(row.response_mask))
    stated = [row.versions] * num_response if isinstance(row.versions, int) else list(row.versions)
    if len(stated) != num_response:
        raise BatchError(f"row {number} has {len(stated)} policy versions of {num_response} response tokens")
    versions = np.array(stated, dtype=np.int64)
    if len(versions) and max(-versions.min(), versions.max()) > _INT32_MAX:
        raise BatchError(f"row {number} has policy versions outside of int32")
    return versions.astype(np.int32)


def _no_ids() -> _Array:
    return np.empty(0, dtype=np.int32)


def experts_fit(all_experts: Sequence[_Array | None]) -> bool:
    """Says whether any row has experts, and all that have them are of one dtype and form."""
    kinds = {(experts.dtype.str, experts.shape[1:]) for experts in all_experts if experts is not None}
    return len(kinds) == 1


def _routing_of(row: ForeignRow, rows: Sequence[ForeignRow]) -> torch.Tensor:
    if row.routed_experts is not None:
        # A copy: bytes out of a file cannot be written to, which torch warns of.
        return torch.from_numpy(row.routed_experts.copy())
    some = next(other.routed_experts for other in rows if other.routed_experts is not None)
    return torch.empty((0, *some.shape[1:]), dtype=torch.from_numpy(some[:0].copy()).dtype)


def experts_are_usable(experts: object, num_tokens: int) -> bool:
    """Whether experts can be the engine's column: of all tokens or all but the last, whole numbers, none twice."""
    if type(experts) is not np.ndarray or experts.ndim != 3 or experts.dtype.kind not in "iu":
        return False
    if len(experts) not in (num_tokens, num_tokens - 1) or experts.dtype.str not in ("<i4", "<i2", "|u1", "<i8", "|i1"):
        return False
    ordered = np.sort(experts, axis=2)
    is_twice = (ordered[..., 1:] == ordered[..., :-1]).any()
    return bool(experts.min(initial=0) >= 0 and not is_twice and experts.max(initial=0) < 2**31)


def without_doubles(rows: Sequence[ForeignRow], name: str) -> list[ForeignRow]:
    """Gives the rows without a second copy of experts that the engine's column keeps; their type is noted instead.

    ``name``: the field that has them.
    """
    if not experts_fit([row.routed_experts for row in rows]):
        return list(rows)
    found = []
    for row in rows:
        if row.routed_experts is not None:
            noted = {name: FROM_CORE, _EXPERTS_KIND: type(row.native[name]).__name__}
            row = replace(row, native={**row.native, **noted})
        found.append(row)
    return found


def restore_experts(own: dict[str, Any], batch: RolloutBatch, place: int, name: str) -> None:
    """Puts experts that ``without_doubles`` took out into their field again."""
    kind = own.pop(_EXPERTS_KIND, None)
    if kind is not None:
        experts = column_row(batch, ROUTED_EXPERTS_COLUMN, place)
        own[name] = experts.numpy().copy() if kind == "ndarray" else experts.clone()


def column_row(batch: RolloutBatch, name: str, place: int) -> torch.Tensor:
    """Gives one row's values of a column of tensors."""
    return cast("Ragged", cast("TensorColumn", batch.extras[name]).row(place)).values
