"""Tells which elements of a merged tensor no rank holds, and which of them a trace should have.

Tokens held by no rank, in a complete and undamaged trace, are tokens the run did not train on: the reader of the trace
decides whether it is an error. Any other missing or superfluous element is one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.trace.entries import RowTable, TraceKey
from mock_scheduler.trace.full.pieces import Piece
from mock_scheduler.trace.geometry import blocks_hold


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Expectation:
    """The elements a trace must hold of a tensor.

    is_complete: all ranks of the run wrote, so nothing may be missing. rows: of the batch. find_tokens: gives bool
    ``[T]``, the tokens of a token tensor, and is asked only for a tensor of so many; ``None`` where the trace does not
    say. stored_bytes: all that the files of the step store.
    """

    is_complete: bool
    rows: RowTable
    find_tokens: Callable[[], torch.Tensor] | None
    stored_bytes: int


def check_present(
    key: TraceKey, pieces: Sequence[Piece], held: torch.Tensor | None, expectation: Expectation
) -> tuple[torch.Tensor | None, str]:
    """Gives ``MergedTensor.present`` and ``missing``. held: bool of the whole shape, True where an element is held.

    ``held``: ``None`` for all. Raises ``TraceError`` where elements are missing, or tokens there, against the
    expectation.
    """
    record = pieces[0].record
    if record.dims[:1] != ("token",):
        if held is not None and expectation.is_complete:
            raise _gap(key, pieces, ~held)
        return held, ""
    some, every = _by_token(held, num_tokens=record.spec.global_shape[0])
    missing = ""
    if expectation.find_tokens is not None:
        expected = expectation.find_tokens()
        _check_no_others(key, pieces, some & ~expected, expectation.rows)
        if expectation.is_complete and not record.is_masked:
            missing = _describe_missing(pieces, expected & ~some, expected, expectation.rows)
    if held is None:
        return None, missing
    # In a complete run a token is held as a whole or not at all.
    is_partial = some & ~every
    shape = [-1, *([1] * (held.dim() - 1))]
    if not bool(is_partial.any()):
        return every.view(shape), missing
    if expectation.is_complete:
        raise _gap(key, pieces, ~held & is_partial.view(shape))
    return held, missing


def _by_token(held: torch.Tensor | None, *, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Marks the tokens of which some element is held, and the tokens held entirely: bool ``[T]`` each."""
    if held is None:
        everything = torch.ones(num_tokens, dtype=torch.bool)
        return everything, everything
    if not held.numel():  # which torch cannot flatten
        return torch.zeros(num_tokens, dtype=torch.bool), torch.ones(num_tokens, dtype=torch.bool)
    flat = held.reshape(num_tokens, -1)
    return flat.any(dim=1), flat.all(dim=1)


def held_twice(key: TraceKey, piece: Piece, index: Sequence[int], rows: RowTable) -> TraceError:
    """The error for a rank holding an element in two of its pieces, as where a micro-batch was traced twice."""
    is_token = piece.record.dims[:1] == ("token",) and index and index[0] < rows.num_tokens
    token = f", {_describe_token(index[0], rows)}" if is_token else ""
    return TraceError(
        f"{key.describe()}: {piece.place.describe()} wrote the element at index {list(index)} twice{token}"
    )


def _describe_token(token: int, rows: RowTable) -> str:
    """Returns ``position 3 of row train/g0``."""
    row, position = rows.find(token)
    return f"position {position} of row {rows.identities[row]}"


def _check_no_others(key: TraceKey, pieces: Sequence[Piece], extra: torch.Tensor, rows: RowTable) -> None:
    """Raises where a token is held of a row the step or update does not have. extra: bool ``[T]``, such tokens."""
    if bool(extra.any()):
        token = int(extra.nonzero()[0])
        # By blocks alone: a flat range leaves it open which rank holds a token's first element.
        holders = [piece for piece in pieces if blocks_hold(piece.spec, 0, token)]
        raise TraceError(
            f"{key.describe()}: {int(extra.sum())} tokens are of rows that are not in the update, the first is "
            f"{_describe_token(token, rows)}, held by global rank {_ranks(holders)}"
        )


def _describe_missing(pieces: Sequence[Piece], missing: torch.Tensor, expected: torch.Tensor, rows: RowTable) -> str:
    """How many of the expected tokens nobody holds any part of, the first, and who holds the others; else empty.

    missing, expected: bool ``[T]``.
    """
    if not bool(missing.any()):
        return ""
    first = _describe_token(int(missing.nonzero()[0]), rows)
    count, total = int(missing.sum()), int(expected.sum())
    who = _describe_same_rows(pieces) or f"pieces come from global rank {_ranks(pieces)}"
    return f"{count} of {total} tokens are held by no rank, the first is {first}; {who}"


def _describe_same_rows(pieces: Sequence[Piece]) -> str:
    """Names ranks of other ``dp`` places holding the same rows, though ``dp`` shares rows out; else empty."""
    tokens: dict[int, set[tuple[int, int]]] = defaultdict(set)
    dp_places: dict[int, int] = {}
    for piece in pieces:
        blocks = [block for split in piece.spec.splits if split.dim == 0 for block in split.blocks]
        rank = piece.place.global_rank
        tokens[rank] |= {(block.global_start, block.length) for block in blocks}
        dp_places[rank] = piece.place.coordinates.get("dp", 0)
    alike: dict[frozenset[tuple[int, int]], list[int]] = {}
    for rank, held in sorted(tokens.items()):
        alike.setdefault(frozenset(held), []).append(rank)
    groups = [ranks for held, ranks in alike.items() if held and len({dp_places[rank] for rank in ranks}) > 1]
    listed = [f"global ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}" for ranks in groups]
    return f"{', and '.join(listed)} hold the same rows" if listed else ""


def _gap(key: TraceKey, pieces: Sequence[Piece], missing: torch.Tensor) -> TraceError:
    return TraceError(
        f"{key.describe()}: {int(missing.sum())} of {math.prod(missing.shape)} elements are held by no rank, the first "
        f"at index {missing.nonzero()[0].tolist()}; pieces come from global rank {_ranks(pieces)}"
    )


def _ranks(pieces: Sequence[Piece]) -> str:
    return ", ".join(str(rank) for rank in sorted({piece.place.global_rank for piece in pieces}))
