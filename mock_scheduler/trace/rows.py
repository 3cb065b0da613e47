"""Rows by content: unites the tables of ranks that each know their own rows alone, and closes the gaps between rows.

Nobody tells a foreign training its rows beforehand, so a row's place follows from its identity (``virtual_start``), and
each rank's footer lists the rows it has met. In the united table rows are sorted by identity. Whole tensors are read
*dense*: rows lie one after another in that order. Sketches keep the places, which no other rank's rows can move.

Contract: nothing in a table is believed. A start that does not follow from its identity, a row that is too long, and
two rows at one place are errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mock_scheduler.support.text import list_some, printable
from mock_scheduler.trace.entries import ROW_PLACES, VIRTUAL_TOKENS, DimName, RowTable, StepFooter, virtual_start
from mock_scheduler.trace.shards import Block, ShardSpec, Split, blocks_along

#: The rows of one rank's step. Among so many, two have one place with a chance of 3 %; of 8,192 with 3e-5.
MAX_ROWS = 1 << 18
#: Tokens of a step's batch; a token tensor of more has more than 1 TB in int64.
MAX_TOKENS = 1 << 37

_MAX_LISTED = 10
_ADVICE = "give the rows ids: run.step(number, rows=...)"


def check_rows(rows: RowTable) -> None:
    """Checks a table by itself.

    Raises:
        ValueError: it contradicts itself, or is larger than any batch.
    """
    if len(rows.identities) != len(rows.lengths):
        raise ValueError(f"{len(rows.identities)} rows have {len(rows.lengths)} lengths")
    if min(rows.lengths, default=0) < 0 or rows.num_tokens > MAX_TOKENS:
        raise ValueError(f"rows of {rows.num_tokens} tokens; expected at most {MAX_TOKENS}, none negative")
    if not rows.starts:
        return
    # Before anything is computed for every row.
    if len(rows.starts) > MAX_ROWS or len(rows.starts) != len(rows.lengths):
        raise ValueError(f"{len(rows.lengths)} rows have {len(rows.starts)} starts; expected at most {MAX_ROWS}")
    taken: dict[int, str] = {}
    for identity, length, start in zip(rows.identities, rows.lengths, rows.starts, strict=True):
        if length > ROW_PLACES:
            raise ValueError(f"row {_name(identity)} has {length} tokens; expected at most {ROW_PLACES}")
        if start != virtual_start(identity):
            raise ValueError(f"row {_name(identity)} starts at {start}; its identity says {virtual_start(identity)}")
        if start in taken:
            raise ValueError(_describe_one_place(taken[start], identity))
        taken[start] = identity


def is_virtual(dims: Sequence[DimName], shape: Sequence[int]) -> bool:
    """Tells whether the first dimension of a tensor is tokens at places that follow from their rows' identities."""
    return tuple(dims[:1]) == ("token",) and tuple(shape[:1]) == (VIRTUAL_TOKENS,)


def check_tokens(name: str, shape: Sequence[int], spans: Sequence[tuple[int, int]], rows: RowTable) -> None:
    """Checks the places of a rank's tokens against its own table.

    Args:
        name: of the tensor.
        shape: of the whole tensor.
        spans: first place and number of places of each run of tokens.
        rows: of the rank.

    Raises:
        ValueError: a run is of no row, or of several, or the dimension has another size.
    """
    if shape[0] != VIRTUAL_TOKENS:
        raise ValueError(f"{name}: {shape[0]} tokens, where rows are by content")
    lengths = dict(zip(rows.starts, rows.lengths, strict=False))
    for start, size in spans:
        _check_in_row(name, start, size, lengths.get(start - start % ROW_PLACES, 0))


def _check_in_row(name: str, start: int, size: int, length: int) -> None:
    """Raises ``ValueError`` where a run of tokens is not in the row of ``length`` tokens at its place."""
    if start % ROW_PLACES + size > length:
        raise ValueError(f"{name}: places {start} to {start + size} are of no row of the step")


# --- The tables of all ranks -----------------------------------------------------------------------------------------


def unite_footers(footers: Mapping[int, StepFooter]) -> tuple[dict[int, StepFooter], list[str]]:
    """Puts the rows of all ranks, sorted by identity, into each rank's footer, and what any of them does not show.

    Footers without rows by content keep their rows.

    Args:
        footers: by global rank; each table is checked by itself.

    Returns:
        The footers, and what ranks say otherwise of rows.
    """
    # Each rank knows the layers of its own stage.
    unobserved = tuple(dict.fromkeys(item for _, footer in sorted(footers.items()) for item in footer.unobserved))
    footers = {rank: replace(footer, unobserved=unobserved) for rank, footer in footers.items()}
    if not any(footer.rows.starts for footer in footers.values()):
        return footers, []
    problems: list[str] = []
    lengths: dict[str, tuple[int, int]] = {}
    places: dict[int, str] = {}
    for rank, footer in sorted(footers.items()):
        rows = footer.rows
        if rows.identities and not rows.starts:
            problems.append(f"global rank {rank} says no starts of its rows, where other ranks do")
            footers = {**footers, rank: replace(footer, update_rows=((),) * len(footer.update_rows))}
        for identity, length, start in zip(rows.identities, rows.lengths, rows.starts, strict=False):
            first, known = lengths.setdefault(identity, (rank, length))
            if known != length:
                problems.append(
                    f"row {_name(identity)} has {known} tokens on global rank {first}, {length} on global rank {rank}"
                )
            if places.setdefault(start, identity) != identity:
                problems.append(_describe_one_place(places[start], identity))
    names = sorted(lengths)
    united = RowTable.by_content(names, [lengths[name][1] for name in names])
    if united.num_tokens > MAX_TOKENS:
        problems.append(f"rows of {united.num_tokens} tokens; expected at most {MAX_TOKENS}")
    updates = _unite_updates(footers, {name: index for index, name in enumerate(names)}, problems)
    # Of a million rows each may be wrong in its own way.
    listed = [list_some(problems, _MAX_LISTED)] if problems else []
    return {rank: replace(one, rows=united, update_rows=updates) for rank, one in footers.items()}, listed


def _unite_updates(
    footers: Mapping[int, StepFooter], index: Mapping[str, int], problems: list[str]
) -> tuple[tuple[int, ...], ...]:
    """Gives the rows of each update on any rank, as positions in the united table."""
    counts = {rank: len(footer.update_rows) for rank, footer in sorted(footers.items())}
    first = min(counts)
    problems += [
        f"global rank {rank} says {count} updates, global rank {first} says {counts[first]}"
        for rank, count in counts.items()
        if count != counts[first]
    ]
    return tuple(
        tuple(
            sorted(
                {
                    index[footer.rows.identities[row]]
                    for footer in footers.values()
                    for row in (footer.update_rows[update] if update < len(footer.update_rows) else ())
                }
            )
        )
        for update in range(counts[first])
    )


def _describe_one_place(first: str, second: str) -> str:
    if first == second:
        return f"row {_name(first)} is listed twice"
    return f"rows {_name(first)} and {_name(second)} have one place, by chance; {_ADVICE}"


def _name(identity: str) -> str:
    return printable(identity, limit=80)


# --- Dense places ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class DensePlaces:
    """Where the tokens of a united table lie when its rows lie one after another.

    rows: the table without starts, as readers of whole tensors give it.
    """

    rows: RowTable
    _rows_at: dict[int, tuple[int, int]]
    # By the blocks' own identity: the pieces of all layers share them, and hashing them costs as much as moving them.
    _moved: dict[int, tuple[tuple[Block, ...], tuple[Block, ...]]] = field(default_factory=dict)

    @classmethod
    def of(cls, united: RowTable) -> DensePlaces:
        """Lays out the rows of a table with starts."""
        rows = replace(united, starts=())
        ends = zip(united.starts, rows.first_places, united.lengths, strict=True)
        return cls(rows=rows, _rows_at={start: (first, length) for start, first, length in ends})

    def move(self, spec: ShardSpec) -> ShardSpec:
        """Gives the spec of a token tensor's piece in the dense tensor.

        Raises:
            ValueError: a block holds places of no row, or of several.
        """
        blocks = blocks_along(spec, 0)
        known = self._moved.get(id(blocks))
        if known is None or known[0] is not blocks:
            known = self._moved[id(blocks)] = (blocks, tuple(self._move(spec.name, block) for block in blocks))
        rest = tuple(split for split in spec.splits if split.dim != 0)
        return replace(
            spec,
            global_shape=(self.rows.num_tokens, *spec.global_shape[1:]),
            splits=(Split(dim=0, blocks=known[1]), *rest),
        )

    def _move(self, name: str, block: Block) -> Block:
        position = block.global_start % ROW_PLACES
        first, length = self._rows_at.get(block.global_start - position, (0, 0))
        _check_in_row(name, block.global_start, block.length, length)
        return replace(block, global_start=first + position)


def open_gaps(dense: RowTable) -> RowTable:
    """Gives the table with starts that a dense one was made of."""
    return RowTable.by_content(dense.identities, dense.lengths)


def spread_tokens(name: str, shape: tuple[int, ...], dense: RowTable) -> ShardSpec:
    """Tells the places of a whole dense token tensor's elements, as sketches of its parts have them."""
    places = zip(dense.first_places, open_gaps(dense).starts, dense.lengths, strict=True)
    blocks = tuple(Block(local_start=first, global_start=start, length=length) for first, start, length in places)
    return ShardSpec(
        name=name,
        global_shape=(VIRTUAL_TOKENS, *shape[1:]),
        local_shape=shape,
        splits=(Split(dim=0, blocks=blocks),),
    )
