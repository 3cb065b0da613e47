"""Whether a merged tensor holds all that its trace must hold, and nothing else.

Tokens that no rank holds, in a trace that is complete and undamaged, are tokens that the run did not train on: whether
that is an error is for the reader of the trace to say. Anything else that is missing, or too much, is one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.trace.entries import RowTable, TraceKey
from mock_scheduler.trace.full.pieces import Piece


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Expectation:
    """What a trace must hold of a tensor.

    is_complete: all ranks of the run wrote, so nothing may be missing. rows: of the batch. tokens: bool ``[T]``, the
    tokens that a token tensor has; ``None`` where the trace does not say.
    """

    is_complete: bool
    rows: RowTable
    tokens: torch.Tensor | None


def check_present(
    key: TraceKey, pieces: Sequence[Piece], held: torch.Tensor | None, expectation: Expectation
) -> tuple[torch.Tensor | None, str]:
    """What ``MergedTensor.present`` and ``missing`` are, from which elements are held: bool of the whole shape.

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
    if expectation.tokens is not None:
        _check_no_others(key, pieces, some, expectation)
        if expectation.is_complete and not record.is_masked:
            missing = _describe_missing(pieces, some, expectation)
    if held is None:
        return None, missing
    is_partial = some & ~every
    shape = [-1, *([1] * (held.dim() - 1))]
    if not bool(is_partial.any()):
        return every.view(shape), missing
    if expectation.is_complete:
        raise _gap(key, pieces, ~held & is_partial.view(shape))
    return held, missing


def _by_token(held: torch.Tensor | None, *, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bool ``[T]`` each: tokens of which some element is held, and tokens that are held entirely."""
    if held is None:
        everything = torch.ones(num_tokens, dtype=torch.bool)
        return everything, everything
    flat = held.view(num_tokens, -1)
    return flat.any(dim=1), flat.all(dim=1)


def held_twice(key: TraceKey, piece: Piece, index: Sequence[int], rows: RowTable) -> TraceError:
    """The error for a rank that holds an element in two of its pieces, as where a micro-batch was traced twice."""
    is_token = piece.record.dims[:1] == ("token",) and index and index[0] < rows.num_tokens
    token = f", {describe_token(index[0], rows)}" if is_token else ""
    return TraceError(
        f"{key.describe()}: {piece.place.describe()} wrote the element at index {list(index)} twice{token}"
    )


def describe_token(token: int, rows: RowTable) -> str:
    """``position 3 of row train/g0``."""
    row, position = rows.find(token)
    return f"position {position} of row {rows.identities[row]}"


def _check_no_others(key: TraceKey, pieces: Sequence[Piece], some: torch.Tensor, expectation: Expectation) -> None:
    """No token is held that is of a row which the step or update does not have."""
    expected, rows = expectation.tokens, expectation.rows
    assert expected is not None
    extra = some & ~expected
    if bool(extra.any()):
        token = int(extra.nonzero()[0])
        holders = [piece for piece in pieces if _holds_token(piece, token)]
        raise TraceError(
            f"{key.describe()}: {int(extra.sum())} tokens are of rows that are not in the update, the first is "
            f"{describe_token(token, rows)}, held by global rank {_ranks(holders)}"
        )


def _describe_missing(pieces: Sequence[Piece], some: torch.Tensor, expectation: Expectation) -> str:
    """How many of the expected tokens nobody holds any part of, the first, and who holds the others; else empty."""
    expected = expectation.tokens
    assert expected is not None
    missing = expected & ~some
    if not bool(missing.any()):
        return ""
    first = describe_token(int(missing.nonzero()[0]), expectation.rows)
    count, total = int(missing.sum()), int(expected.sum())
    who = _describe_same_rows(pieces) or f"pieces come from global rank {_ranks(pieces)}"
    return f"{count} of {total} tokens are held by no rank, the first is {first}; {who}"


def _describe_same_rows(pieces: Sequence[Piece]) -> str:
    """Which ranks of other ``dp`` places, which share out the rows, hold the same ones, in words; else empty."""
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


def _holds_token(piece: Piece, token: int) -> bool:
    """Whether a piece has elements of a token; its flat range is not looked at."""
    spec = piece.spec
    splits = [split for split in spec.splits if split.dim == 0]
    if not splits:
        return True
    return any(block.global_start <= token < block.global_start + block.length for block in splits[0].blocks)


def _gap(key: TraceKey, pieces: Sequence[Piece], missing: torch.Tensor) -> TraceError:
    return TraceError(
        f"{key.describe()}: {int(missing.sum())} of {math.prod(missing.shape)} elements are held by no rank, the first "
        f"at index {missing.nonzero()[0].tolist()}; pieces come from global rank {_ranks(pieces)}"
    )


def _ranks(pieces: Sequence[Piece]) -> str:
    return ", ".join(str(rank) for rank in sorted({piece.place.global_rank for piece in pieces}))
