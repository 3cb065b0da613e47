"""One field of two batches, row against row: whether it differs, where first, and both values as text.

Contract: bits decide, never values: -0.0 is not 0.0. JSON values are compared by their canonical text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mock_scheduler.batch import RolloutBatch, Termination
from mock_scheduler.batch.columns import Column, JsonColumn, TensorColumn, column_kind
from mock_scheduler.batch.engine_columns import ENGINE_COLUMNS
from mock_scheduler.support.digests import JSON, canonical_json
from mock_scheduler.support.tensor_bytes import as_bytes
from mock_scheduler.support.text import shorten

ABSENT = "absent"

_NUM_TEXT = 100
_NUMPY_TEXT = (torch.float32, torch.float16)  # their shortest exact text is numpy's, not that of a Python float
_HEX_ONLY = tuple(getattr(torch, name) for name in ("float4_e2m1fn_x2", "complex32") if hasattr(torch, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldDifference:
    """One differing field, with the first place where it differs.

    ``where``: the position inside the row's field (``[3]``, ``[1, 4]``; for JSON a path like ``.messages[0]``),
    empty for a field of one value. ``rollout_logprobs`` counts response tokens, ``turn_rewards`` and
    ``policy_versions`` turns. ``a`` and ``b``: both values as text, with their bits where the text is the same.
    ``extent``: how much differs in all, or empty.
    """

    field: str
    where: str
    a: str
    b: str
    extent: str = ""

    def describe(self, names: tuple[str, str]) -> str:
        """``tokens[3]: recorded 17, played 18 (2 of 40 positions differ)``; long values are cut."""
        extent = f" ({self.extent})" if self.extent else ""
        a, b = (shorten(text, _NUM_TEXT) for text in (self.a, self.b))
        return f"{self.field}{self.where}: {names[0]} {a}, {names[1]} {b}{extent}"


class FieldPair(Protocol):
    """One field in batch ``a`` and in batch ``b``; rows are given by their numbers in the two."""

    @property
    def name(self) -> str:
        """Returns the field's name in messages."""

    def is_equal(self) -> bool:
        """Whether all rows are equal, for batches whose rows have the same identities."""

    def differs(self, row_a: int, row_b: int) -> bool:
        """Whether a bit differs between two rows."""

    def difference(self, row_a: int, row_b: int) -> FieldDifference:
        """Returns the first difference of two differing rows."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _TensorRows:
    """Holds ``values`` ``[B, *shape]``, or with ``offsets`` ``[sum n, *shape]``."""

    values: torch.Tensor
    offsets: Sequence[int] | None = None

    def row(self, index: int) -> torch.Tensor:
        if self.offsets is None:
            return self.values[index]
        return self.values[self.offsets[index] : self.offsets[index + 1]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _TensorPair:
    """A tensor field of one dtype and trailing shape in both batches; ``show`` writes one value, given as a scalar."""

    name: str
    a: _TensorRows
    b: _TensorRows
    show: Callable[[torch.Tensor], str]

    def is_equal(self) -> bool:
        return self.a.offsets == self.b.offsets and _has_same_bits(self.a.values, self.b.values)

    def differs(self, row_a: int, row_b: int) -> bool:
        return not _has_same_bits(self.a.row(row_a), self.b.row(row_b))

    def difference(self, row_a: int, row_b: int) -> FieldDifference:
        a, b = self.a.row(row_a), self.b.row(row_b)
        differing = _differing_elements(a, b)
        if len(differing):
            first = int(differing[0])
            index = tuple(int(part) for part in torch.unravel_index(torch.tensor(first), a.shape)) if a.dim() else ()
            # Equal positions of a common prefix have equal flat numbers, since only the first dimension varies.
            texts = _both_texts(a.reshape(-1)[first], b.reshape(-1)[first], self.show)
        else:
            length = min(len(a), len(b))
            index, texts = (length,), (_show_entry(a, length, self.show), _show_entry(b, length, self.show))
        where = f"[{', '.join(map(str, index))}]" if index else ""
        extent = _extent(a, b, len(differing))
        return FieldDifference(field=self.name, where=where, a=texts[0], b=texts[1], extent=extent)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _JsonPair:
    """Holds one JSON value per row in both batches."""

    name: str
    a: Sequence[JSON]
    b: Sequence[JSON]

    def is_equal(self) -> bool:
        return canonical_json(self.a) == canonical_json(self.b)

    def differs(self, row_a: int, row_b: int) -> bool:
        return canonical_json(self.a[row_a]) != canonical_json(self.b[row_b])

    def difference(self, row_a: int, row_b: int) -> FieldDifference:
        return json_difference(self.name, self.a[row_a], self.b[row_b])


def pair_fields(a: RolloutBatch, b: RolloutBatch) -> tuple[list[FieldPair], list[FieldDifference]]:
    """Returns the fields comparable row by row, core fields first, and the extras of different kinds."""
    core_a, core_b = _core_rows(a), _core_rows(b)
    pairs: list[FieldPair] = [
        _TensorPair(name=name, a=core_a[name], b=core_b[name], show=_SHOWN_AS.get(name, show_value)) for name in core_a
    ]
    pairs.append(_JsonPair(name="tag", a=a.tags, b=b.tags))
    pairs.append(_JsonPair(name="prompt_digest", a=a.prompt_digests, b=b.prompt_digests))
    kinds = []
    names = {*a.extras, *b.extras}
    for key in [*(name for name in ENGINE_COLUMNS if name in names), *sorted(names.difference(ENGINE_COLUMNS))]:
        name = key if key in ENGINE_COLUMNS else f"extra {key!r}"
        left, right = a.extras.get(key), b.extras.get(key)
        if isinstance(left, TensorColumn) and isinstance(right, TensorColumn) and _kind(left) == _kind(right):
            pairs.append(_TensorPair(name=name, a=_column_rows(left), b=_column_rows(right), show=show_value))
        elif isinstance(left, JsonColumn) and isinstance(right, JsonColumn):
            pairs.append(_JsonPair(name=name, a=left.items, b=right.items))
        else:
            kinds.append(FieldDifference(field=name, where="", a=_kind(left), b=_kind(right)))
    return pairs, kinds


def json_difference(name: str, a: JSON, b: JSON) -> FieldDifference:
    """Returns the first difference of two JSON values, with its path; keys in sorted order."""
    where = ""
    while True:
        parts_a, parts_b = _json_parts(a), _json_parts(b)
        if parts_a is None or parts_b is None or isinstance(a, Mapping) != isinstance(b, Mapping):
            return FieldDifference(field=name, where=where, a=canonical_json(a), b=canonical_json(b))
        keys = sorted({*parts_a, *parts_b}) if isinstance(a, Mapping) else [*max(parts_a, parts_b, key=len)]
        texts = {key: (_part_text(parts_a, key), _part_text(parts_b, key)) for key in keys}
        key = next(key for key in keys if texts[key][0] != texts[key][1])
        where += key
        if key not in parts_a or key not in parts_b:
            return FieldDifference(field=name, where=where, a=texts[key][0], b=texts[key][1])
        a, b = parts_a[key], parts_b[key]


def _json_parts(value: JSON) -> dict[str, JSON] | None:
    """Returns the parts of an object or a list, each under its step of a path; ``None`` for a value without parts."""
    if isinstance(value, Mapping):
        return {f".{key}": part for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return {f"[{index}]": part for index, part in enumerate(value)}
    return None


def _part_text(parts: Mapping[str, JSON], key: str) -> str:
    return canonical_json(parts[key]) if key in parts else ABSENT


def show_value(value: torch.Tensor) -> str:
    """Returns one value of any dtype (a tensor without dimensions) as the shortest exact text."""
    if value.dtype in _HEX_ONLY:
        return _hex(value)
    return str(value.numpy()[()]) if value.dtype in _NUMPY_TEXT else str(value.item())


def _show_termination(value: torch.Tensor) -> str:
    return Termination(int(value)).name.lower()


_SHOWN_AS: Mapping[str, Callable[[torch.Tensor], str]] = {"termination": _show_termination}


def _core_rows(batch: RolloutBatch) -> dict[str, _TensorRows]:
    """Every tensor of the batch by the name of the row's field, in the order in which a person asks for them."""
    tokens, turns = batch.row_offsets.tolist(), batch.turn_offsets.tolist()
    return {
        "tokens": _TensorRows(values=batch.tokens, offsets=tokens),
        "response_mask": _TensorRows(values=batch.response_mask, offsets=tokens),
        "rollout_logprobs": _TensorRows(values=batch.rollout_logprobs, offsets=batch.response_offsets.tolist()),
        "turn_rewards": _TensorRows(values=batch.turn_rewards, offsets=turns),
        "policy_versions": _TensorRows(values=batch.policy_versions, offsets=turns),
        "reward": _TensorRows(values=batch.rewards),
        "termination": _TensorRows(values=batch.terminations),
        "prompt_length": _TensorRows(values=batch.prompt_lengths),
    }


def _column_rows(column: TensorColumn) -> _TensorRows:
    offsets = None if column.offsets is None else column.offsets.tolist()
    return _TensorRows(values=column.values, offsets=offsets)


def _kind(column: Column | None) -> str:
    """Returns ``float32 [3]`` (an entry of a dense column), ``ragged float32 [n, 3]``, ``JSON`` or ``absent``."""
    if column is None:
        return ABSENT
    return column_kind(column)


def _has_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares two tensors of one dtype."""
    return a.shape == b.shape and torch.equal(as_bytes(a), as_bytes(b))


def _differing_elements(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns flat numbers of the elements whose bits differ, up to the end of the shorter one."""
    count = min(a.numel(), b.numel())
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    bits_a, bits_b = (as_bytes(side)[: count * side.dtype.itemsize].reshape(count, -1) for side in (a, b))
    return (bits_a != bits_b).any(dim=1).nonzero().flatten()


def _both_texts(a: torch.Tensor, b: torch.Tensor, show: Callable[[torch.Tensor], str]) -> tuple[str, str]:
    """Both values; with their bits where they read the same, as NaNs do."""
    texts = show(a), show(b)
    return texts if texts[0] != texts[1] else (f"{texts[0]} ({_hex(a)})", f"{texts[1]} ({_hex(b)})")


def _hex(value: torch.Tensor) -> str:
    """Returns the bits of one value, the most significant byte first."""
    return "0x" + bytes(reversed(as_bytes(value).tolist())).hex()


def _show_entry(values: torch.Tensor, index: int, show: Callable[[torch.Tensor], str]) -> str:
    """Entry ``index`` of a ragged row: its first values, or that it is absent."""
    if index >= len(values):
        return ABSENT
    if values.dim() == 1:
        return show(values[index])
    shown = [show(value) for value in values[index].reshape(-1)[:8]]
    more = ", …" if math.prod(values.shape[1:]) > len(shown) else ""
    return f"[{', '.join(shown)}{more}]"


def _extent(a: torch.Tensor, b: torch.Tensor, num_differing: int) -> str:
    if a.dim() == 0:
        return ""
    if a.shape == b.shape:
        return f"{num_differing} of {a.numel()} positions differ"
    common = min(a.numel(), b.numel())
    return f"lengths {len(a)} and {len(b)}, {num_differing} of the first {common} positions differ"
