"""Recognises the same values in another order along one dimension: by blocks, and by the ranks' shards.

An order gives, for each index of the candidate, the baseline's index found there. Its blocks follow from the order
alone: the largest equal ones moved as a whole. The candidate's trace says what its ranks hold, so that two shards in
each other's place, and parts cut in one piece, are told from any other order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mock_scheduler.comparison.residuals import BlockOrder, MisplacedShards, WrongCut
from mock_scheduler.comparison.thresholds import FEWEST_ROW_VALUES
from mock_scheduler.trace.entries import RankPlace, TraceKey
from mock_scheduler.trace.full.reader import TraceReader
from mock_scheduler.trace.shards import Block

#: Layers of which one parameter is several matrices, one after another.
_PART_NAMES: Mapping[tuple[str, int], tuple[str, ...]] = {("linear_fc1", 2): ("gate", "up")}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Holders:
    """Ranks and what each holds along one dimension that is split over them.

    Args:
        axis: The axis on which they stand apart; ``ranks`` where no single axis tells them apart.
        names: As ``tp0``, ascending.
        indices: int64 of each rank, in the order in which it stores them.
        part_names: Of the parts of which each rank holds a piece, as ``gate`` and ``up``; empty where not known.
        num_parts: How many parts there are.
    """

    axis: str
    names: tuple[str, ...]
    indices: tuple[torch.Tensor, ...]
    part_names: tuple[str, ...]
    num_parts: int

    @property
    def in_turn(self) -> torch.Tensor:
        """Returns int64 ``[n]``: all indices, one holder's after another's."""
        return torch.cat(self.indices)


def find_holders(key: TraceKey, reader: TraceReader) -> dict[int, Holders]:
    """Finds, by dimension, the shards of a run's ranks; only split dimensions, and never tokens."""
    places: dict[int, dict[tuple[Block, ...], list[RankPlace]]] = {}
    is_by_token = reader.dims(key)[:1] == ("token",)
    for piece in reader.pieces(key):
        for split in piece.spec.splits:
            # Tokens go to ranks by the batch and not by a cut of the model, so their dimension has no holders.
            if split.dim or not is_by_token:
                blocks = tuple(sorted(split.blocks, key=lambda block: block.local_start))
                places.setdefault(split.dim, {}).setdefault(blocks, []).append(piece.place)
    return {dim: _name_holders(key, held) for dim, held in places.items() if len(held) > 1}


def find_holders_fault(order: torch.Tensor, holders: Holders | None) -> MisplacedShards | WrongCut | None:
    """Finds the mistake of ranks' shards behind an order; ``None`` for none, or where they do not hold all indices.

    ``order``: int64 ``[n]``, a permutation moving something.
    """
    # Ranks that hold only some indices, as of a padded vocabulary, do not show whose part is whose.
    if holders is None or not torch.equal(holders.in_turn.sort().values, torch.arange(order.numel())):
        return None
    # Whole shards in each other's places first: a wrong cut moves parts of every shard.
    return _find_misplaced(order, holders) or _find_cut(order, holders)


def find_row_order(
    baseline: torch.Tensor, candidate: torch.Tensor, lengths: Sequence[int], *, present: torch.Tensor | None
) -> torch.Tensor | None:
    """Finds which row's value each row of the batch has, where every row has one value, as an advantage of its reward.

    Rows of equal values are told apart by their order, and the fewest are moved. ``None`` where a row has several
    values, the candidate has others, or too few are different to tell an order from chance.

    Args:
        baseline: ``[tokens]``, floating point, row after row.
        candidate: As the baseline.
        lengths: Tokens of each row.
        present: bool ``[tokens]``: tokens that count; rows without any are left out.

    Returns:
        int64 ``[rows]``: the baseline's row of each row that is left.
    """
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    counts = torch.ones_like(rows, dtype=torch.bool) if present is None else present
    _, rows = torch.unique(rows[counts], return_inverse=True)
    sides = []
    for side in (baseline, candidate):
        values = side[counts].double()
        first = torch.zeros(int(rows.max()) + 1, dtype=torch.float64).scatter_(0, rows, values)
        if not torch.equal(first[rows], values):
            return None
        sides.append(first)
    mine, other = sides
    if len(mine.unique()) < FEWEST_ROW_VALUES or not torch.equal(mine.sort().values, other.sort().values):
        return None
    order = torch.arange(len(mine))
    moved = (mine != other).nonzero().squeeze(1)
    order[moved[other[moved].argsort(stable=True)]] = moved[mine[moved].argsort(stable=True)]
    return order


def block_size(order: torch.Tensor) -> int:
    """Returns the largest size of equal blocks the order moves as a whole."""
    num = order.numel()
    breaks = (order.diff() != 1).nonzero().squeeze(1) + 1
    # A block begins at every break, on both sides, so that its size divides all of these places.
    return math.gcd(num, *breaks.tolist(), *order[breaks].tolist(), int(order[0]))


def _name_holders(key: TraceKey, held: Mapping[tuple[Block, ...], Sequence[RankPlace]]) -> Holders:
    axes = [axis for axis in next(iter(held.values()))[0].coordinates if _tells_apart(axis, list(held.values()))]
    axis = axes[0] if axes else "ranks"
    rows = []
    for blocks, ranks in held.items():
        number = ranks[0].coordinates[axis] if axes else min(place.global_rank for place in ranks)
        name = f"{axis}{number}" if axes else f"global rank {number}"
        indices = [torch.arange(block.global_start, block.global_start + block.length) for block in blocks]
        rows.append((number, name, torch.cat(indices) if indices else torch.arange(0), len(blocks)))
    rows.sort(key=lambda row: row[0])
    count = max(num_blocks for *_, num_blocks in rows)
    known = (names for (name, parts), names in _PART_NAMES.items() if parts == count and name in key.name)
    return Holders(
        axis=axis,
        names=tuple(name for _, name, _, _ in rows),
        indices=tuple(indices for _, _, indices, _ in rows),
        part_names=next(known, ()),
        num_parts=count,
    )


def _tells_apart(axis: str, groups: Sequence[Sequence[RankPlace]]) -> bool:
    """Whether the ranks of each group stand at one place of the axis, and no two groups at the same."""
    found = [{place.coordinates.get(axis) for place in ranks} for ranks in groups]
    return all(len(places) == 1 for places in found) and len(set.union(*found)) == len(found)


def find_blocks(order: torch.Tensor) -> BlockOrder:
    """Finds the simplest form of an order moving something; int64 ``[n]``."""
    num_rows = order.numel()
    straight = torch.arange(num_rows)
    moved = (order != straight).nonzero().squeeze(1)
    found = BlockOrder(form="other", num_indices=num_rows, num_moved=moved.numel())
    if torch.equal(order, straight.flip(0)):
        return replace(found, form="reversed")
    # Tried from the most special form to the most general one, so that the first that fits says most.
    first, second = moved.tensor_split(2)
    if torch.equal(order[moved], torch.cat([second, first])) and _is_run(first) and _is_run(second):
        return replace(found, form="exchanged", runs=(_ends(first), _ends(second)))
    if torch.equal(order, straight.roll(-int(order[0]))):
        return replace(found, form="rotated", first=int(order[0]))
    # Blocks that move as a whole are one thing: the order of blocks says it in fewer numbers than that of rows.
    size = block_size(order)
    blocks_order = order[::size] // size
    for parts in _divisors(blocks_order.numel()):
        if torch.equal(blocks_order, torch.arange(blocks_order.numel()).view(parts, -1).T.reshape(-1)):
            return replace(found, form="interleaved", block_size=size, num_parts=parts)
    return replace(found, block_size=size)


def _divisors(number: int) -> list[int]:
    """Returns divisors between 1 and the number, both excluded."""
    small = [item for item in range(2, math.isqrt(number) + 1) if number % item == 0]
    return sorted({*small, *(number // item for item in small)})


def _find_misplaced(order: torch.Tensor, holders: Holders) -> MisplacedShards | None:
    """Finds ranks holding each other's parts."""
    sources = []
    for indices in holders.indices:
        found = order[indices]
        same = (place for place, other in enumerate(holders.indices) if torch.equal(found, other))
        sources.append(next(same, None))
    known = [source for source in sources if source is not None]
    moved = [(place, source) for place, source in enumerate(known) if source != place]
    # One shard that is nobody's is no exchange of shards.
    if len(known) < len(sources) or not moved:
        return None
    return MisplacedShards(places=tuple((holders.names[place], holders.names[source]) for place, source in moved))


def _find_cut(order: torch.Tensor, holders: Holders) -> WrongCut | None:
    """Finds parts cut over the ranks in one piece, or one piece cut as if it were parts."""
    num, count = order.numel(), len(holders.indices)
    in_turn, straight = order[holders.in_turn], torch.arange(order.numel())
    # The ranks' shards one after another are the whole tensor: it was cut as if it were a single part.
    if torch.equal(in_turn, straight):
        return WrongCut(axis=holders.axis, is_whole=True, num_parts=holders.num_parts, part_names=holders.part_names)
    # A tensor of several parts is to be cut by parts, so that this cut is the right one.
    if holders.num_parts > 1 or num % count:
        return None
    for parts in _divisors(num // count):
        if torch.equal(in_turn, straight.view(parts, count, -1).transpose(0, 1).reshape(-1)):
            return WrongCut(axis=holders.axis, is_whole=False, num_parts=parts)
    return None


def _is_run(places: torch.Tensor) -> bool:
    return int(places[-1] - places[0]) == places.numel() - 1


def _ends(places: torch.Tensor) -> tuple[int, int]:
    return int(places[0]), int(places[-1])
