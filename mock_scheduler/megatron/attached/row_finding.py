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
    """Holds the rows of one call on one rank.

    numbers: int64 ``[b, s]``, each place's row in this call; -1 on padding. positions: int64 ``[b, s]``, its position
    in the row; 0 on padding. rows: the tokens of each whole row.
    """

    numbers: Ints
    positions: Ints
    rows: tuple[Ints, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slice:
    """The places of a call on one rank of context parallelism, before anybody else's are known.

    tokens: int64 ``[b, s]``. lines: the row of each place, in the order of the call; -1 on padding. positions: in the
    row, of each place. lines, positions: int64 ``[W, b, s]``, for each way to slice rows (``WAYS``). fits: bool
    ``[W]``, whether the call's ``position_ids`` are those of this way, or 0, as on padding.
    """

    tokens: Ints
    lines: Ints
    positions: Ints
    fits: Ints


#: How a row's 2 · cp equal parts are dealt to the ranks of context parallelism, Megatron's own way first.
WAYS = ("zigzag", "contiguous")


def name_row(tokens: Ints) -> str:
    """Names a row by its content: 16 hexadecimal digits of the BLAKE2b of its token ids, as int64 in little endian."""
    return hashlib.blake2b(tokens.astype("<i8").tobytes(), digest_size=_NAME_BYTES).hexdigest()


def slice_call(
    tokens: Ints, positions: Ints | None, bounds: PackedBounds | None, *, cp_rank: int, cp_size: int
) -> Slice:
    """Says the row and position of each place of a call, for each way to slice rows.

    Args:
        tokens: int64 ``[b, s]``, this rank's.
        positions: ``position_ids`` of the call, of the same shape.
        bounds: the pieces of the packed line.
        cp_rank: this rank's place in context parallelism.
        cp_size: the number of its ranks.

    Raises:
        TraceError: the call is of another shape than its pieces, or cannot be sliced.
    """
    if bounds is not None and tokens.shape[0] != 1:
        raise TraceError(f"a packed forward pass has tokens of shape {list(tokens.shape)}; expected one line")
    by_way = []
    for way in range(len(WAYS)):
        if bounds is not None:
            lines, found = _packed_places(tokens.shape, bounds, way, cp_rank=cp_rank, cp_size=cp_size)
        else:
            lines = np.repeat(np.arange(tokens.shape[0], dtype=np.int64)[:, None], tokens.shape[1], axis=1)
            row = _slice_places(tokens.shape[1] * cp_size, cp_rank, cp_size)[way]
            found = np.broadcast_to(row, tokens.shape).copy()
        by_way.append((lines, found, cp_size == 1 or positions is None or _fits(positions, lines, found, bounds)))
    all_lines, all_positions, fits = zip(*by_way, strict=True)
    return Slice(
        tokens=tokens,
        lines=np.stack(all_lines),
        positions=np.stack(all_positions),
        fits=np.array(fits, dtype=np.int64),
    )


def find_rows(own: Slice, slices: Sequence[Slice], *, pad_token_id: int | None) -> FoundRows:
    """Puts the rows of a call together.

    Args:
        own: this rank's slice.
        slices: those of all ranks of context parallelism, this one's included.
        pad_token_id: cut from the end of each row.

    Raises:
        TraceError: ``position_ids`` are those of no known way to slice rows.
    """
    ways = [way for way in range(len(WAYS)) if all(part.fits[way] for part in slices)]
    if not ways:
        raise TraceError(
            "position_ids of a forward pass under context parallelism do not say the rows of its tokens: found "
            f"{', '.join(_describe_fit(rank, part) for rank, part in enumerate(slices))}; expected one way on all "
            "ranks; slice position_ids as Megatron-core's get_batch_on_this_cp_rank does (zigzag), and start them at "
            "0 in each row"
        )
    way = ways[0]
    lines, positions, tokens = (
        np.concatenate([part.lines[way].ravel() for part in slices]),
        np.concatenate([part.positions[way].ravel() for part in slices]),
        np.concatenate([part.tokens.ravel() for part in slices]),
    )
    rows: list[Ints] = []
    numbers = np.full(own.tokens.shape, -1, dtype=np.int64)
    for line in range(int(lines.max(initial=-1)) + 1):
        is_here = lines == line
        row = _without_padding(tokens[is_here][np.argsort(positions[is_here], kind="stable")], pad_token_id)
        if row.size:
            numbers[(own.lines[way] == line) & (own.positions[way] < row.size)] = len(rows)
            rows.append(row)
    return FoundRows(numbers=numbers, positions=np.where(numbers >= 0, own.positions[way], 0), rows=tuple(rows))


def _describe_fit(rank: int, part: Slice) -> str:
    ways = [name for name, fits in zip(WAYS, part.fits, strict=True) if fits]
    return f"{' or '.join(ways) or 'neither zigzag nor contiguous'} slices on cp rank {rank}"


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
    shape: tuple[int, ...], bounds: PackedBounds, way: int, *, cp_rank: int, cp_size: int
) -> tuple[Ints, Ints]:
    lines, found = np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    end = 0
    # Each rank holds its slices of one piece after another (TransformerEngine, thd_get_partitioned_indices).
    for number, (room, length) in enumerate(zip(bounds.rooms.tolist(), bounds.lengths.tolist(), strict=True)):
        places = _slice_places(room, cp_rank, cp_size)[way]
        start, end = end, end + places.size
        if end > shape[1]:
            raise TraceError(
                f"cu_seqlens of a forward pass has {int(bounds.rooms.sum()) // cp_size} places for this rank, but its "
                f"tokens are {shape[1]}"
            )
        found[0, start:end] = places
        lines[0, start:end] = np.where(places < length, number, -1)
    return lines, found


def _fits(positions: Ints, lines: Ints, found: Ints, bounds: PackedBounds | None) -> bool:
    """Whether given positions count from each row's start, or from the packed line's, or are 0, as on padding."""
    is_token = (lines >= 0) & (positions != 0)
    from_row = found
    if np.array_equal(positions[is_token], from_row[is_token]):
        return True
    if bounds is None or not bounds.starts.size:
        return False
    from_line = found + bounds.starts[np.maximum(lines, 0)]
    return np.array_equal(positions[is_token], from_line[is_token])


def _slice_places(length: int, cp_rank: int, cp_size: int) -> tuple[Ints, Ints]:
    """The places of a row that a rank holds, by way.

    Zigzag, as ``get_batch_on_this_cp_rank`` slices: the row is 2 · cp equal parts, and rank r has parts r and
    2 · cp - 1 - r. Contiguous: rank r has the r-th of cp equal parts.
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
