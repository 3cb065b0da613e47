"""Finds the rows of a forward call, and for each token its row and position; the tokens alone decide.

Contract: a row's name is a pure function of its tokens, so it is the same in every layout, micro-batch and packing.
Labels and loss mask are no part of it: with pipeline parallelism the first stage, which has the tokens, is often given
neither. They are traced as inputs, where a difference of them is found.

- Dense ``[b, s]``: each line is a row. Packed (``cu_seqlens``): each piece of the one line is.
- Padding: trailing ``pad_token_id`` where one is given, places behind a packed line's last piece, and places between a
  piece and its padded end.
- Context parallelism: each rank has slices of every row; ``position_ids`` say which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mock_scheduler.errors import TraceError

Ints = NDArray[np.int64]

_NAME_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FoundRows:
    """The rows of one call on one rank.

    numbers: int64 ``[b, s]``, each place's row in this call; -1 on padding. positions: int64 ``[b, s]``, its position
    in the row; 0 on padding. rows: the tokens of each whole row.
    """

    numbers: Ints
    positions: Ints
    rows: tuple[Ints, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slice:
    """The places of a call on one rank of context parallelism, before anybody else's are known.

    tokens, lines, positions: int64 ``[b, s]``. lines: the row of each place, in the order of the call; -1 on padding.
    """

    tokens: Ints
    lines: Ints
    positions: Ints


def name_row(tokens: Ints) -> str:
    """Names a row by its content: 16 hexadecimal digits of the BLAKE2b of its token ids, as int64 in little endian."""
    return hashlib.blake2b(tokens.astype("<i8").tobytes(), digest_size=_NAME_BYTES).hexdigest()


def slice_call(
    tokens: Ints, positions: Ints | None, bounds: PackedBounds | None, *, cp_rank: int, cp_size: int
) -> Slice:
    """Says the row and position of each place of a call.

    Args:
        tokens: int64 ``[b, s]``, this rank's.
        positions: ``position_ids`` of the call, of the same shape.
        bounds: the pieces of the packed line.
        cp_rank: this rank's place in context parallelism.
        cp_size: the number of its ranks.

    Raises:
        TraceError: the positions are those of no known way to slice rows.
    """
    if bounds is not None:
        lines, found = _packed_places(tokens.shape, positions, bounds, cp_rank=cp_rank, cp_size=cp_size)
    else:
        lines = np.repeat(np.arange(tokens.shape[0], dtype=np.int64)[:, None], tokens.shape[1], axis=1)
        found = _dense_positions(tokens.shape, positions, cp_rank=cp_rank, cp_size=cp_size)
    return Slice(tokens=tokens, lines=lines, positions=found)


def find_rows(own: Slice, slices: Sequence[Slice], *, pad_token_id: int | None) -> FoundRows:
    """Puts the rows of a call together.

    Args:
        own: this rank's slice.
        slices: those of all ranks of context parallelism, this one's included.
        pad_token_id: cut from the end of each row.

    Raises:
        TraceError: the slices do not make whole rows.
    """
    lines, positions, tokens = (
        np.concatenate([np.ravel(getattr(part, name)) for part in slices]) for name in ("lines", "positions", "tokens")
    )
    rows: list[Ints] = []
    number_of_line: dict[int, tuple[int, int]] = {}
    for line in range(int(lines.max(initial=-1)) + 1):
        is_here = lines == line
        order = np.argsort(positions[is_here], kind="stable")
        if not np.array_equal(positions[is_here][order], np.arange(order.size)):
            raise TraceError(
                f"row {line} of a forward pass has the positions {_describe(positions[is_here][order])}; expected each "
                f"of 0 to {order.size - 1} once. The ranks of context parallelism hold no whole row together"
            )
        row = _without_padding(tokens[is_here][order], pad_token_id)
        if row.size:
            number_of_line[line] = (len(rows), row.size)
            rows.append(row)
    numbers = np.full(own.lines.shape, -1, dtype=np.int64)
    for line, (number, length) in number_of_line.items():
        numbers[(own.lines == line) & (own.positions < length)] = number
    return FoundRows(numbers=numbers, positions=np.where(numbers >= 0, own.positions, 0), rows=tuple(rows))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedBounds:
    """Where the pieces of a packed line lie, over all ranks of context parallelism: int64 ``[R]`` each.

    starts: the first place of each piece. lengths: its tokens. rooms: its places, with its own padding.
    """

    starts: Ints
    lengths: Ints
    rooms: Ints


def read_bounds(packed: Any) -> PackedBounds | None:  # noqa: ANN401 - Megatron's PackedSeqParams has no annotations
    """Reads ``PackedSeqParams``; ``None`` where the call is not packed."""
    if packed is None or packed.cu_seqlens_q is None:
        return None
    bounds = _host(packed.cu_seqlens_q)
    padded = bounds if packed.cu_seqlens_q_padded is None else _host(packed.cu_seqlens_q_padded)
    return PackedBounds(starts=padded[:-1], lengths=np.diff(bounds), rooms=np.diff(padded))


def _packed_places(
    shape: tuple[int, ...], positions: Ints | None, bounds: PackedBounds, *, cp_rank: int, cp_size: int
) -> tuple[Ints, Ints]:
    if shape[0] != 1:
        raise TraceError(f"a packed forward pass has tokens of shape {list(shape)}; expected one line, [1, tokens]")
    lines, found = np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    ways = [_slice_places(int(room), cp_rank, cp_size) for room in bounds.rooms]
    # Each rank holds its slices of one piece after another (TransformerEngine, thd_get_partitioned_indices).
    ends = np.cumsum([way[0].size for way in ways])
    if ends.size and ends[-1] > shape[1]:
        raise TraceError(
            f"cu_seqlens of a forward pass has {int(ends[-1])} places for this rank, but its tokens are {shape[1]}"
        )
    for way in range(2):
        for number, (choices, end) in enumerate(zip(ways, ends, strict=True)):
            at = slice(int(end) - choices[0].size, int(end))
            found[0, at] = choices[way]
            lines[0, at] = np.where(choices[way] < bounds.lengths[number], number, -1)
        if cp_size == 1 or positions is None or _agrees(positions[0], found[0], lines[0], bounds):
            return lines, found
    raise TraceError(
        "position_ids of a packed forward pass under context parallelism are neither those of zigzag slices of each "
        "piece nor of contiguous ones, so its tokens' rows are unknown: pass position_ids as Megatron-core slices them"
    )


def _agrees(positions: Ints, found: Ints, lines: Ints, bounds: PackedBounds) -> bool:
    """Whether the given positions count from each piece's start, or from the line's."""
    is_token = lines >= 0
    from_line = found + bounds.starts[np.maximum(lines, 0)] if bounds.starts.size else found
    given = positions[is_token]
    return np.array_equal(given, found[is_token]) or np.array_equal(given, from_line[is_token])


def _dense_positions(shape: tuple[int, ...], positions: Ints | None, *, cp_rank: int, cp_size: int) -> Ints:
    if cp_size == 1:
        return np.broadcast_to(np.arange(shape[1], dtype=np.int64), shape).copy()
    ways = _slice_places(shape[1] * cp_size, cp_rank, cp_size)
    if positions is None:
        return np.broadcast_to(ways[0], shape).copy()
    for way in ways:
        if np.array_equal(positions, np.broadcast_to(way, shape)):
            return np.broadcast_to(way, shape).copy()
    raise TraceError(
        f"position_ids of a forward pass under context parallelism are {_describe(positions[0])} in the first line; "
        f"expected {_describe(ways[0])} (zigzag) or {_describe(ways[1])} (contiguous)"
    )


def _slice_places(length: int, cp_rank: int, cp_size: int) -> tuple[Ints, Ints]:
    """The places of a row that a rank holds: zigzag, as ``get_batch_on_this_cp_rank`` slices it, and contiguous.

    Zigzag: the row is 2 · cp equal parts, and rank r has parts r and 2 · cp - 1 - r.
    """
    if cp_size == 1:
        everything = np.arange(length, dtype=np.int64)
        return everything, everything
    if length % (2 * cp_size):
        raise TraceError(f"a row of {length} places cannot be cut into 2 · {cp_size} equal parts")
    part = length // (2 * cp_size)
    parts = np.arange(length, dtype=np.int64).reshape(2 * cp_size, part)
    zigzag = np.concatenate([parts[cp_rank], parts[2 * cp_size - 1 - cp_rank]])
    return zigzag, np.arange(2 * part, dtype=np.int64) + cp_rank * 2 * part


def _without_padding(row: Ints, pad_token_id: int | None) -> Ints:
    if pad_token_id is None:
        return row
    kept = np.flatnonzero(row != pad_token_id)
    return row[: int(kept[-1]) + 1] if kept.size else row[:0]


def _host(tensor: Any) -> Ints:  # noqa: ANN401 - a tensor
    return np.asarray(tensor.detach().cpu().numpy(), dtype=np.int64)


def _describe(values: Ints) -> str:
    shown = ", ".join(map(str, values[:8].tolist()))
    return f"{shown}, ..." if values.size > 8 else shown
