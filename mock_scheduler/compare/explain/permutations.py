"""The same values in another order along one dimension, in words: by blocks, and by which rank holds whose part.

An order gives for each index of the candidate the baseline's index that is found there. Its blocks are found from the
order alone: the largest equal ones that were moved as a whole. What ranks hold is read from the candidate's trace, so
that two shards in each other's place, and parts that were cut in one piece, are told from any other order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mock_scheduler.support.text import list_some
from mock_scheduler.trace.entries import RankPlace, TraceKey
from mock_scheduler.trace.full.reader import TraceReader
from mock_scheduler.trace.shards import Block

_NUM_NAMED = 4
#: Layers of which one parameter is several matrices, one after another.
_PARTS: Mapping[tuple[str, int], str] = {("linear_fc1", 2): "gate and up are"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Holders:
    """Who holds what along one dimension that is split over ranks.

    axis: on which they stand apart, ``ranks`` where that is no single one. names: as ``tp0``, ascending. indices: of
    each, int64, in the order in which it stores them. parts: what each holds a piece of, with its verb; num_parts: how
    many.
    """

    axis: str
    names: tuple[str, ...]
    indices: tuple[torch.Tensor, ...]
    parts: str
    num_parts: int

    @property
    def in_turn(self) -> torch.Tensor:
        """int64 ``[n]``: all indices, one holder's after another's."""
        return torch.cat(self.indices)


def find_holders(key: TraceKey, reader: TraceReader) -> dict[int, Holders]:
    """By dimension, what the ranks of a run hold of a tensor; without dimensions that are not split, and tokens."""
    places: dict[int, dict[tuple[Block, ...], list[RankPlace]]] = {}
    is_by_token = reader.dims(key)[:1] == ("token",)
    for piece in reader.pieces(key):
        for split in piece.spec.splits:
            if split.dim or not is_by_token:
                blocks = tuple(sorted(split.blocks, key=lambda block: block.local_start))
                places.setdefault(split.dim, {}).setdefault(blocks, []).append(piece.place)
    return {dim: _name_holders(key, held) for dim, held in places.items() if len(held) > 1}


def describe_order(order: torch.Tensor, noun: str, holders: Holders | None) -> str:
    """What the candidate is. order: int64 ``[n]``, a permutation that moves something. noun: as ``rows``."""
    text = f"candidate has {_describe_blocks(order, noun)}"
    if holders is None or not torch.equal(holders.in_turn.sort().values, torch.arange(order.numel())):
        return text
    whose = _describe_swap(order, holders) or _describe_cut(order, holders)
    return f"{text}: {whose}" if whose else text


def block_size(order: torch.Tensor) -> int:
    """The largest size of equal blocks that the order moves as a whole."""
    num = order.numel()
    breaks = (order.diff() != 1).nonzero().squeeze(1) + 1
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
    known = next((text for (name, parts), text in _PARTS.items() if parts == count and name in key.name), None)
    return Holders(
        axis=axis,
        names=tuple(name for _, name, _, _ in rows),
        indices=tuple(indices for _, _, indices, _ in rows),
        parts=known or f"its {count} parts are",
        num_parts=count,
    )


def _tells_apart(axis: str, groups: Sequence[Sequence[RankPlace]]) -> bool:
    """Whether the ranks of each group stand at one place of the axis, and those of no two at the same."""
    found = [{place.coordinates.get(axis) for place in ranks} for ranks in groups]
    return all(len(places) == 1 for places in found) and len(set.union(*found)) == len(found)


def _describe_blocks(order: torch.Tensor, noun: str) -> str:
    num_rows = order.numel()
    straight = torch.arange(num_rows)
    if torch.equal(order, straight.flip(0)):
        return f"the {noun} of the baseline reversed"
    moved = (order != straight).nonzero().squeeze(1)
    first, second = moved.tensor_split(2)
    if torch.equal(order[moved], torch.cat([second, first])) and _is_run(first) and _is_run(second):
        blocks = " and ".join(_describe_run(block) for block in (first, second))
        return f"{noun} {blocks} of the baseline exchanged"
    if torch.equal(order, straight.roll(-int(order[0]))):
        return f"the {noun} of the baseline rotated: it begins with {int(order[0]):,} of {num_rows:,}"
    size = block_size(order)
    blocks_order = order[::size] // size
    for parts in _divisors(blocks_order.numel()):
        if torch.equal(blocks_order, torch.arange(blocks_order.numel()).view(parts, -1).T.reshape(-1)):
            what = noun if size == 1 else f"blocks of {size:,} {noun}"
            return f"{what} of the baseline interleaved, one of each of its {parts:,} parts in turn"
    by = f", in blocks of {size:,}" if size > 1 else ""
    return f"{moved.numel():,} of {num_rows:,} {noun} of the baseline in another order{by}"


def _divisors(number: int) -> list[int]:
    """Those between 1 and the number."""
    small = [item for item in range(2, math.isqrt(number) + 1) if number % item == 0]
    return sorted({*small, *(number // item for item in small)})


def _describe_swap(order: torch.Tensor, holders: Holders) -> str:
    """That ranks hold each other's parts; empty where they do not."""
    sources = []
    for indices in holders.indices:
        found = order[indices]
        same = (place for place, other in enumerate(holders.indices) if torch.equal(found, other))
        sources.append(next(same, -1))
    moved = [place for place, source in enumerate(sources) if source != place]
    if -1 in sources or not moved:
        return ""
    if len(moved) == 2:
        first, second = (holders.names[place] for place in moved)
        return f"the shards of {first} and {second} are swapped, each holds the other's part"
    named = [f"{holders.names[place]} that of {holders.names[sources[place]]}" for place in moved]
    return f"shards are at the wrong rank, {list_some(named, _NUM_NAMED, ', ')}"


def _describe_cut(order: torch.Tensor, holders: Holders) -> str:
    """That parts were cut over the ranks in one piece, or one piece as if it were parts; empty where it is neither."""
    num, count = order.numel(), len(holders.indices)
    in_turn, straight = order[holders.in_turn], torch.arange(order.numel())
    if torch.equal(in_turn, straight):
        return f"it was cut over {holders.axis} in one piece, where {holders.parts} each cut over {holders.axis}"
    if holders.num_parts > 1 or num % count:
        return ""
    for parts in _divisors(num // count):
        if torch.equal(in_turn, straight.view(parts, count, -1).transpose(0, 1).reshape(-1)):
            return f"{parts} parts of it were each cut over {holders.axis}, where it is cut in one piece"
    return ""


def _is_run(places: torch.Tensor) -> bool:
    return int(places[-1] - places[0]) == places.numel() - 1


def _describe_run(places: torch.Tensor) -> str:
    first, last = int(places[0]), int(places[-1])
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"
