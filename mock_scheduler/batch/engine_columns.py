"""Named core fields that an engine may add to a rollout: columns of a fixed name, form and meaning, each optional.

=============================  =============================================  =======================================
name                           one row                                        meaning
=============================  =============================================  =======================================
``routed_experts``             ragged integers ``[n, layers, topk]``          experts of the first n tokens in every
                                                                              layer that has experts, by global number
``sampling_support``           ragged integers                                token ids that top-p and top-k left, of
                                                                              one response token after another
``sampling_support_offsets``   ragged integers ``[R + 1]``                    where each response token's ids begin
``raw_logprobs``               ragged floats ``[R]``                          log-probabilities of the logits
``processed_logprobs``         ragged floats ``[R]``                          those of the sampled distribution
``policy_versions_by_token``   ragged integers ``[R]``                        the policy that sampled each token
``finish_reasons``             JSON: a text, or one for each turn             why the engine stopped
=============================  =============================================  =======================================

R: response tokens of the row, T: its tokens. n is T - 1 (an engine does not read the last token), T, or 0 where the
engine said nothing; the order within ``topk`` is free. An empty support stands for the whole vocabulary. The batch's
meta entry ``num_experts`` bounds expert numbers.

Contract: fields are checked where a batch is made, and not where one is read, so older recordings with columns of
these names open as they were written. They are recorded bit for bit, in the dtype given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mock_scheduler.batch.columns import Column, JsonColumn, TensorColumn, column_kind
from mock_scheduler.batch.trajectory import SampleIdentity
from mock_scheduler.support.digests import JSON

if TYPE_CHECKING:
    import torch

ROUTED_EXPERTS_COLUMN = "routed_experts"
SUPPORT_COLUMN = "sampling_support"
SUPPORT_OFFSETS_COLUMN = "sampling_support_offsets"
LOGPROB_COLUMNS = ("raw_logprobs", "processed_logprobs")
#: The policy version that sampled each response token, where it changed within a turn.
VERSIONS_COLUMN = "policy_versions_by_token"
FINISH_REASONS_COLUMN = "finish_reasons"
#: The entry of a batch's meta that says how many experts a layer has.
NUM_EXPERTS_META = "num_experts"

#: All names, in the order in which a person asks for them.
ENGINE_COLUMNS = (
    FINISH_REASONS_COLUMN,
    VERSIONS_COLUMN,
    *LOGPROB_COLUMNS,
    SUPPORT_COLUMN,
    SUPPORT_OFFSETS_COLUMN,
    ROUTED_EXPERTS_COLUMN,
)

_Array: TypeAlias = "npt.NDArray[Any]"
_Integers: TypeAlias = "npt.NDArray[np.int64]"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSizes:
    """The rows that engine columns must fit: tokens, response tokens and turns of each, int64 ``[B]``, and the ids of
    all response tokens."""

    identities: Sequence[SampleIdentity]
    lengths: _Integers
    response_lengths: _Integers
    num_turns: _Integers
    response_tokens: _Array


def expert_dtype(num_experts: int) -> torch.dtype:
    """Returns the smallest dtype that holds the numbers of so many experts."""
    import torch

    if num_experts <= 2**8:
        return torch.uint8
    return torch.int16 if num_experts <= 2**15 else torch.int32


class _UnfitError(Exception):
    """A column does not fit; its text says the column and why."""


def engine_column_problems(extras: Mapping[str, Column], rows: RowSizes, meta: Mapping[str, JSON]) -> list[str]:
    """Lists named columns of another form than the module's table says, each with its first problem."""
    checks: list[Callable[[], None]] = []
    if ROUTED_EXPERTS_COLUMN in extras:
        checks.append(lambda: _check_routing(extras[ROUTED_EXPERTS_COLUMN], rows, meta.get(NUM_EXPERTS_META)))
    if SUPPORT_COLUMN in extras or SUPPORT_OFFSETS_COLUMN in extras:
        checks.append(lambda: _check_support(extras, rows))
    if FINISH_REASONS_COLUMN in extras:
        checks.append(lambda: _check_reasons(extras[FINISH_REASONS_COLUMN], rows))
    for name in (VERSIONS_COLUMN, *LOGPROB_COLUMNS):
        if name in extras:
            checks.append(partial(_check_tokens, name, extras[name], rows))
    problems = []
    for check in checks:
        try:
            check()
        except _UnfitError as error:
            problems.append(str(error))
    return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entries:
    """Holds a ragged column as arrays; row i from ``offsets[i]``."""

    values: _Array
    offsets: _Integers

    def row(self, index: int) -> _Array:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def row_of(self, entry: int) -> int:
        return int(np.searchsorted(self.offsets, entry, side="right")) - 1


def _read_ragged(name: str, column: Column, *, num_dims: int = 1, is_float: bool = False) -> _Entries:
    expected = f"ragged {'floats' if is_float else 'integers'} {'[n, layers, topk]' if num_dims == 3 else '[n]'}"
    if isinstance(column, TensorColumn) and column.bounds is not None and len(column.raw.shape) == num_dims:
        dtype = column.raw.dtype
        is_number = dtype != "bool" and not dtype.startswith("complex")
        if is_number and dtype.startswith(("float", "bfloat")) == is_float:
            # Torch has dtypes of floats that NumPy does not.
            array = column.values.double().numpy() if is_float else column.raw.array()
            assert array is not None
            return _Entries(values=array, offsets=column.bounds)
    raise _UnfitError(f"{name} is {column_kind(column)}; expected {expected}")


def _check_sizes(name: str, found: _Integers, expected: _Integers, what: str, rows: RowSizes) -> None:
    for row in np.flatnonzero(found != expected)[:1].tolist():
        raise _UnfitError(f"{name}: {rows.identities[row]} has {found[row]} entries; expected {expected[row]}, {what}")


def _check_routing(column: Column, rows: RowSizes, num_experts: JSON) -> None:
    name, entries = ROUTED_EXPERTS_COLUMN, _read_ragged(ROUTED_EXPERTS_COLUMN, column, num_dims=3)
    experts, sizes, lengths = entries.values, np.diff(entries.offsets), rows.lengths
    for row in np.flatnonzero((sizes != lengths) & (sizes != lengths - 1) & (sizes != 0))[:1].tolist():
        raise _UnfitError(
            f"{name}: {rows.identities[row]} has the experts of {sizes[row]} tokens; expected {lengths[row]}, or "
            f"{lengths[row] - 1} (an engine does not read the last token), or 0"
        )
    limit = num_experts if type(num_experts) is int else 2**31
    is_outside = (experts < 0) | (experts >= limit)
    ordered = np.sort(experts, axis=2)
    is_twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=2)
    for entry, layer in np.argwhere(is_outside.any(axis=2) | is_twice)[:1].tolist():
        row = entries.row_of(entry)
        where = f"{name}: {rows.identities[row]}, token {entry - entries.offsets[row]}, layer {layer} of its layers,"
        chosen = experts[entry, layer].tolist()
        if is_outside[entry, layer].any():
            raise _UnfitError(
                f"{where} has experts {chosen}; expected numbers of 0 to {limit - 1} (meta {NUM_EXPERTS_META})"
            )
        raise _UnfitError(
            f"{where} has experts {chosen}; expected different ones. A capture that failed is often all zeros: leave "
            "such a row without entries"
        )


def _check_support(extras: Mapping[str, Column], rows: RowSizes) -> None:
    for one, other in ((SUPPORT_COLUMN, SUPPORT_OFFSETS_COLUMN), (SUPPORT_OFFSETS_COLUMN, SUPPORT_COLUMN)):
        if one not in extras:
            raise _UnfitError(f"{one} is absent; {other}, which is there, has no meaning without it")
    ids = _read_ragged(SUPPORT_COLUMN, extras[SUPPORT_COLUMN])
    bounds = _read_ragged(SUPPORT_OFFSETS_COLUMN, extras[SUPPORT_OFFSETS_COLUMN])
    what = "one for each response token and one for the end"
    _check_sizes(SUPPORT_OFFSETS_COLUMN, np.diff(bounds.offsets), rows.response_lengths + 1, what, rows)
    if ids.values.min(initial=0) < 0:
        raise _UnfitError(f"{SUPPORT_COLUMN}: token id {ids.values.min()} is negative")
    ends = np.cumsum(rows.response_lengths)
    for row, end in enumerate(ends.tolist()):
        own = rows.response_tokens[end - rows.response_lengths[row] : end]
        own_ids, starts = ids.row(row), bounds.row(row).astype(np.int64)
        sizes = starts[1:] - starts[:-1]
        if starts[0] != 0 or starts[-1] != len(own_ids) or sizes.min(initial=0) < 0:
            raise _UnfitError(
                f"{SUPPORT_OFFSETS_COLUMN}: {rows.identities[row]} has {starts.tolist()[:8]} and {starts[-1]} at the "
                f"end; expected numbers that rise from 0 to {len(own_ids)}, the row's ids in {SUPPORT_COLUMN}"
            )
        of_token = np.repeat(np.arange(len(own)), sizes)
        num_hits = np.bincount(of_token[own_ids == own[of_token]], minlength=len(own))
        for token in np.flatnonzero((sizes > 0) & (num_hits == 0))[:1].tolist():
            raise _UnfitError(
                f"{SUPPORT_COLUMN}: {rows.identities[row]}, response token {token}: the sampled id {own[token]} is not "
                f"among its {sizes[token]} ids; ids or offsets are those of another token"
            )


def _check_tokens(name: str, column: Column, rows: RowSizes) -> None:
    entries = _read_ragged(name, column, is_float=name in LOGPROB_COLUMNS)
    _check_sizes(name, np.diff(entries.offsets), rows.response_lengths, "one for each response token", rows)
    for entry in np.flatnonzero(~np.isfinite(entries.values))[:1].tolist():
        raise _UnfitError(f"{name}: {rows.identities[entries.row_of(entry)]}: {entries.values[entry]} is not finite")


def _check_reasons(column: Column, rows: RowSizes) -> None:
    name = FINISH_REASONS_COLUMN
    if not isinstance(column, JsonColumn):
        raise _UnfitError(f"{name} is {column_kind(column)}; expected JSON: a text, or one for each turn")
    for row, reason in enumerate(column.items):
        is_list = isinstance(reason, list | tuple)
        texts = reason if isinstance(reason, list | tuple) else [reason]
        if not all(isinstance(text, str) and text for text in texts) or (is_list and len(texts) != rows.num_turns[row]):
            raise _UnfitError(
                f"{name}: {rows.identities[row]} has {reason!r}; expected a text such as 'stop', or a list of "
                f"{rows.num_turns[row]} texts, one for each turn"
            )


def list_finish_reasons(extras: Mapping[str, Column]) -> list[str]:
    """Lists the finish reasons of all rows and turns; none where there is no such column."""
    column = extras.get(FINISH_REASONS_COLUMN)
    if not isinstance(column, JsonColumn):
        return []
    reasons = [item if isinstance(item, list | tuple) else [item] for item in column.items]
    return [text for texts in reasons for text in texts if isinstance(text, str)]
