"""Where a tensor of SGLang's dumper lies in the whole one, by the ``dims`` that its code states.

``b s[cp:zigzag,sp] (heads*size)[tp] # dp:=attn_dp`` names each dimension; in brackets the axes over which it is split,
the outer one first. Ranks of an axis that is not named hold copies. Contract: nothing is added up or moved. Where the
ranks hold different tensors of one name (parts of a sum, other samples, packed rows over cp), each is a tensor of its
own (``traces.name_apart``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mock_scheduler.adapters.imports.traces import name_apart
from mock_scheduler.errors import ForeignFileError
from mock_scheduler.trace.shards import Block, ShardSpec, Split

_DIM = re.compile(r"(?P<name>1|[A-Za-z_]\w*|\([^()\[\]]+\))(?:\[(?P<axes>[^\]]+)\])?")
_AXES = ("tp", "cp", "ep", "sp", "dp", "etp", "edp", "attn_tp", "attn_dp", "moe_ep", "moe_tp", "moe_dp")
_INFOS = ("sglang_parallel_info", "megatron_parallel_info")
_SEQUENCE, _TOKENS = "s", "t"


@dataclass(frozen=True, slots=True)
class AxisPlace:
    """A rank's place on an axis, and how many there are."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class _Share:
    """One cut of a dimension."""

    place: AxisPlace
    is_zigzag: bool


def read_places(meta: Mapping[str, Any], where: str) -> dict[str, AxisPlace]:
    """Gives a rank's place on each axis that has more than one; axes of both frameworks' names."""
    found: dict[str, AxisPlace] = {}
    for key in _INFOS:
        info = meta.get(key)
        if not isinstance(info, Mapping):
            continue
        for name, rank in info.items():
            axis, size = str(name).removesuffix("_rank"), info.get(f"{str(name).removesuffix('_rank')}_size")
            if axis == name or rank is None or size is None:
                continue
            if type(rank) is not int or type(size) is not int or not 0 <= rank < size:
                raise ForeignFileError(f"{where}: {key} says place {rank!r} of {size!r} on axis {axis}")
            if size > 1:
                found[axis] = AxisPlace(rank, size)
    return found


def place_tensor(name: str, shape: Sequence[int], dims: str, places: Mapping[str, AxisPlace], where: str) -> ShardSpec:
    """Gives the place of a tensor that states its dims; raises ``ForeignFileError`` where these do not fit it."""
    text, _, remark = dims.partition("#")
    words = text.split()
    if len(words) != len(shape):
        raise ForeignFileError(f"{where}: dims {dims!r} name {len(words)} dimensions of {list(shape)}")
    if not re.search(r"dp\b", text):
        name = _name_replica(name, remark, places)
    whole, splits = [], []
    for dim, (word, size) in enumerate(zip(words, shape, strict=True)):
        shares, apart = _read_dim(word, places, f"{where}: dims {dims!r}")
        for axis in apart:
            name = name_apart(name, axis, places[axis].rank, places[axis].size)
        blocks: tuple[Block, ...] = (Block(local_start=0, global_start=0, length=size * _count(shares)),)
        for share in shares:
            blocks = _cut(blocks, share, f"{where}: dims {dims!r}, {word}")
        if shares:
            splits.append(Split(dim=dim, blocks=blocks))
        whole.append(size * _count(shares))
    return ShardSpec(name=name, global_shape=tuple(whole), local_shape=tuple(shape), splits=tuple(splits))


def _name_replica(name: str, remark: str, places: Mapping[str, AxisPlace]) -> str:
    """Names the place among replicas of the model, which hold other samples; the first has the name itself."""
    alias = re.search(r"\bdp:=(\w+)", remark)
    axes = (alias[1],) if alias else ("attn_dp", "dp")
    place = next((places[axis] for axis in axes if axis in places), None)
    return name if place is None or place.rank == 0 else name_apart(name, "dp", place.rank, place.size)


def _read_dim(word: str, places: Mapping[str, AxisPlace], where: str) -> tuple[list[_Share], list[str]]:
    """Gives the cuts of a dimension, the outer one first, and the axes whose ranks hold other tensors."""
    match = _DIM.fullmatch(word)
    if match is None:
        raise ForeignFileError(f"{where}: {word!r} names no dimension; expected for example h[tp] or s[cp:zigzag,sp]")
    shares: list[_Share] = []
    apart: list[str] = []
    for item in filter(None, (match["axes"] or "").split(",")):
        axis, _, marks = item.strip().partition(":")
        words = set(filter(None, marks.split("+")))
        if axis not in _AXES or not words <= {"zigzag", "natural", "partial", "sharded"}:
            raise ForeignFileError(f"{where}: {item!r} is no axis; expected one of {', '.join(_AXES)}")
        place = places.get(axis)
        if place is None:
            continue
        # The rows of packed tokens are cut one by one, and no file says where they begin.
        if "partial" in words or (match["name"] == _TOKENS and axis == "cp"):
            apart.append(axis)
        elif "zigzag" in words and match["name"] != _SEQUENCE:
            raise ForeignFileError(f"{where}: {word!r} is zigzag; expected that of dimension {_SEQUENCE} alone")
        else:
            shares.append(_Share(place, "zigzag" in words))
    return shares, apart


def _count(shares: Sequence[_Share]) -> int:
    count = 1
    for share in shares:
        count *= share.place.size
    return count


def _cut(blocks: Sequence[Block], share: _Share, where: str) -> tuple[Block, ...]:
    """Gives a rank's part of blocks that the ranks of one axis hold together."""
    rank, size = share.place.rank, share.place.size
    length = sum(block.length for block in blocks)
    chunks = [rank, 2 * size - 1 - rank] if share.is_zigzag else [rank]
    num_chunks = 2 * size if share.is_zigzag else size
    if length % num_chunks:
        raise ForeignFileError(f"{where}: {length} places are not {num_chunks} equal pieces")
    found: list[Block] = []
    for chunk in chunks:
        start = chunk * (length // num_chunks)
        for block in _slice(blocks, start, start + length // num_chunks):
            end = found[-1].local_start + found[-1].length if found else 0
            found.append(Block(local_start=end, global_start=block.global_start, length=block.length))
    return tuple(found)


def _slice(blocks: Sequence[Block], start: int, stop: int) -> list[Block]:
    """Gives the parts of blocks at the local places from ``start`` to ``stop``."""
    found = []
    for block in blocks:
        first = max(start, block.local_start)
        end = min(stop, block.local_start + block.length)
        if first < end:
            moved = block.global_start + first - block.local_start
            found.append(Block(local_start=first, global_start=moved, length=end - first))
    return found
