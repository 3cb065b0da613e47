"""Writes and reads the header of a trace file: a rank's description of each stored piece, and of its whole step.

Contract: ``files`` describes the JSON. Two parts of it are stored more compactly than they are used. Many pieces lie at
the same places, as the pieces of all layers in one micro-batch do: places are listed once, under ``blocks``, and a
piece names its place by position. A ledger repeats few calls many times: each call is listed once, under ``calls``, and
``order`` gives its position for every time it was made.
Reading raises ``ValueError`` for any other content; the readers of files turn it into a ``TraceError`` with the path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from mock_scheduler.config.instruments import LedgerKind, TraceKind
from mock_scheduler.errors import TraceError
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.documents import AsRow, Count, Document
from mock_scheduler.support.tensor_bytes import dtype_name, find_dtype
from mock_scheduler.trace.entries import DimName, LedgerCall, RankPlace, RowTable, StepFooter, TraceKey, Unobserved
from mock_scheduler.trace.full.pieces import PieceRecord, RankStep, Shared, check_regions, check_size, check_spec
from mock_scheduler.trace.rows import check_rows, is_virtual
from mock_scheduler.trace.shards import Block, ShardSpec, Split

#: A canonical name. A longer one could hold a number that Python does not read.
TensorName = Annotated[str, Field(max_length=1000)]
#: The number of ranks of a run, bounded by what a reader can list.
WorldSize = Annotated[int, Field(ge=1, le=1 << 20)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredRankStep:
    """A ``RankStep`` as the file has it."""

    step: Count
    global_rank: Count
    world_size: WorldSize
    coordinates: dict[str, Count]


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredPiece:
    """A ``PieceRecord`` as the file has it; ``splits`` has ``[dimension, position in blocks]`` of each."""

    update: Count
    kind: TraceKind
    name: TensorName
    dtype: str
    global_shape: tuple[Count, ...]
    local_shape: tuple[Count, ...]
    splits: tuple[tuple[Count, Count], ...]
    flat_range: tuple[int, int] | None
    dims: tuple[DimName, ...]
    is_masked: bool
    sha256: str
    crc32: Count
    place: Count | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredPieces:
    """Holds the pieces of a file by stored name, and the places they name."""

    tensors: dict[str, _StoredPiece]
    blocks: tuple[tuple[Annotated[Block, AsRow()], ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredLedger:
    """Holds distinct calls, and the position of each call made."""

    calls: tuple[Annotated[LedgerCall, AsRow()], ...]
    order: tuple[Count, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredFooter:
    """A ``StepFooter`` as the file has it."""

    rows: RowTable
    update_rows: tuple[tuple[Count, ...], ...]
    ranks: tuple[Count, ...]
    kinds: tuple[str, ...]
    patterns: tuple[str, ...]
    exclude: tuple[str, ...]
    unobserved: tuple[Annotated[Unobserved, AsRow()], ...]
    ledgers: dict[LedgerKind, _StoredLedger]


_RANK_STEP = Document[_StoredRankStep](_StoredRankStep)
_PIECES = Document[_StoredPieces](_StoredPieces)
_FOOTER = Document[_StoredFooter](_StoredFooter)


def rank_step_as_json(rank_step: RankStep) -> dict[str, JSON]:
    """Gives ``step``, ``global_rank``, ``world_size`` and ``coordinates``."""
    place = rank_step.place
    stored: dict[str, JSON] = _RANK_STEP.dump(
        _StoredRankStep(
            step=rank_step.step,
            global_rank=place.global_rank,
            world_size=rank_step.world_size,
            coordinates=dict(place.coordinates),
        )
    )
    return stored


def parse_rank_step(content: Mapping[str, Any]) -> RankStep:
    """Gives the rank's step out of a header."""
    stored = _RANK_STEP.load(content)
    place = RankPlace(global_rank=stored.global_rank, coordinates=stored.coordinates)
    return RankStep(step=stored.step, place=place, world_size=stored.world_size)


def pieces_as_json(records: Sequence[PieceRecord]) -> dict[str, JSON]:
    """Gives ``tensors`` and ``blocks``, the same for records in any order."""
    positions: dict[tuple[Block, ...], int] = {}
    tensors: dict[str, _StoredPiece] = {}
    # Places are numbered in the order of the names, so that equal content gives equal bytes.
    for record in sorted(records, key=lambda item: item.stored_name):
        spec = record.spec
        tensors[record.stored_name] = _StoredPiece(
            update=record.key.update,
            kind=record.key.kind,
            name=record.key.name,
            dtype=dtype_name(record.dtype),
            global_shape=spec.global_shape,
            local_shape=spec.local_shape,
            splits=tuple((split.dim, positions.setdefault(split.blocks, len(positions))) for split in spec.splits),
            flat_range=spec.flat_range,
            dims=record.dims,
            is_masked=record.is_masked,
            sha256=record.sha256,
            crc32=record.crc32,
            place=record.key.place,
        )
    stored: dict[str, JSON] = _PIECES.dump(_StoredPieces(tensors=tensors, blocks=tuple(positions)))
    pieces: Any = stored["tensors"]
    for piece in pieces.values():
        if piece["place"] is None:
            # A piece that the order of names places is stored as it was before there were others.
            del piece["place"]
    return stored


def parse_pieces(content: Mapping[str, Any], *, step: int, shared: Shared) -> list[PieceRecord]:
    """Gives the written records; ``shared``: what they have in common with those of other files of the step."""
    stored = _PIECES.load(content)
    # A block without indices says nothing, and regions are counted by blocks.
    blocks = [shared.of(tuple(block for block in place if block.length)) for place in stored.blocks]
    return [shared.record(_read_piece(name, piece, blocks, step=step)) for name, piece in stored.tensors.items()]


def _read_piece(name: str, piece: _StoredPiece, blocks: Sequence[tuple[Block, ...]], *, step: int) -> PieceRecord:
    if any(place >= len(blocks) for _, place in piece.splits):
        raise ValueError(f"{piece.name}: splits {piece.splits} name places beyond the {len(blocks)} of blocks")
    try:
        dtype = find_dtype(piece.dtype)
    except ValueError as error:
        raise ValueError(f"{piece.name} {error}") from error
    spec = ShardSpec(
        name=piece.name,
        global_shape=piece.global_shape,
        local_shape=piece.local_shape,
        splits=tuple(Split(dim=dim, blocks=blocks[place]) for dim, place in piece.splits),
        flat_range=piece.flat_range,
    )
    check_spec(spec)
    check_regions(spec)
    if piece.dims and len(piece.dims) != len(spec.global_shape):
        raise ValueError(f"{spec.name}: {len(piece.dims)} names of {len(spec.global_shape)} dimensions")
    # A bound of its own, since a sealed header may still be a forged one.
    # Before anything is allocated from it. A size of 0 must not hide the others: torch computes strides from those.
    # Where rows are by content, the number of tokens is known when all tables are united, and looked at again.
    whole = spec.global_shape
    if is_virtual(piece.dims, whole):
        whole = (spec.local_shape[0], *whole[1:])
    check_size(spec.name, dtype, whole, spec.local_shape)
    return PieceRecord(
        key=TraceKey(step=step, update=piece.update, kind=piece.kind, name=piece.name, place=piece.place),
        stored_name=name,
        dtype=dtype,
        spec=spec,
        dims=piece.dims,
        is_masked=piece.is_masked,
        sha256=piece.sha256,
        crc32=piece.crc32,
    )


def footer_as_json(footer: StepFooter) -> dict[str, JSON]:
    """Gives all statements of a footer."""
    stored: dict[str, JSON] = _FOOTER.dump(
        _StoredFooter(
            **shared_statements(footer),
            unobserved=footer.unobserved,
            ledgers={kind: _pack_ledger(calls) for kind, calls in footer.ledgers.items()},
        )
    )
    if not footer.rows.starts:
        # Rows that lie one after another are stored as they were before there were others.
        rows = stored["rows"]
        assert isinstance(rows, dict)
        del rows["starts"]
    return stored


def check_footer(footer: StepFooter, rank_step: RankStep) -> None:
    """Raises ``TraceError`` where rows by content contradict each other, as where two of them have one place."""
    try:
        check_rows(footer.rows)
    except ValueError as error:
        raise TraceError(f"{rank_step.describe()}: {error}") from error


def parse_footer(content: object, shared: Shared) -> StepFooter:
    """Gives the written footer; ``shared``: as in ``parse_pieces``."""
    stored = _FOOTER.load(content, at="footer")
    rows = stored.rows
    check_rows(rows)
    if any(row >= len(rows.lengths) for update in stored.update_rows for row in update):
        raise ValueError(f"an update has a row beyond the {len(rows.lengths)} of the batch")
    ledgers = {kind: _unpack_ledger(ledger) for kind, ledger in stored.ledgers.items()}
    # The rows of the batch are the largest of what a rank says, and mostly the same on all.
    statements = {name: shared.of(value) for name, value in shared_statements(stored).items()}
    return StepFooter(**statements, unobserved=shared.of(stored.unobserved), ledgers=ledgers)


def shared_statements(footer: StepFooter | _StoredFooter) -> dict[str, Any]:
    """Gives the statements about a step made alike by all ranks, by field; the others are each rank's own."""
    return {
        "rows": footer.rows,
        "update_rows": footer.update_rows,
        "ranks": footer.ranks,
        "kinds": footer.kinds,
        "patterns": footer.patterns,
        "exclude": footer.exclude,
    }


def _pack_ledger(calls: Sequence[LedgerCall]) -> _StoredLedger:
    positions: dict[LedgerCall, int] = {}
    order = tuple(positions.setdefault(call, len(positions)) for call in calls)
    return _StoredLedger(calls=tuple(positions), order=order)


def _unpack_ledger(ledger: _StoredLedger) -> tuple[LedgerCall, ...]:
    if any(position >= len(ledger.calls) for position in ledger.order):
        raise ValueError(f"a ledger's order names a call beyond its {len(ledger.calls)}")
    return tuple(ledger.calls[position] for position in ledger.order)
