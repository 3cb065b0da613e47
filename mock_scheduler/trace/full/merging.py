"""Puts a tensor together from all ranks' pieces, and says which replicas disagree and what is missing.

Pieces at the same places are replicas: their bits are compared, and the lowest rank's are taken. The others are copied
block by block to where they belong. Only where pieces overlap in part, or flat ranges leave a part of a local tensor
out, is every element looked at on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.trace.coverage import count_cells, element_places, fill_local_tensor
from mock_scheduler.trace.entries import RowTable, TraceKey
from mock_scheduler.trace.full.files import view_as_bits
from mock_scheduler.trace.full.memory import MemoryPool
from mock_scheduler.trace.full.merged import ConflictTally, MergedTensor
from mock_scheduler.trace.full.pieces import Piece
from mock_scheduler.trace.full.presence import Expectation, check_present, held_twice
from mock_scheduler.trace.shards import place_shard

Load = Callable[[Piece], torch.Tensor]

#: Replicas: pieces of several ranks at the same places, by ascending rank.
_Group = list[Piece]

#: The groups of one local tensor: one, or several that hold flat ranges of it.
_Family = list[_Group]


def merge_pieces(
    key: TraceKey, pieces: Sequence[Piece], load: Load, expectation: Expectation, memory: MemoryPool
) -> MergedTensor:
    """The whole tensor. pieces: at least one, by ascending rank. load: gives a piece's stored elements, checked.
    memory: where the tensor lies, unless one piece holds all of it.

    Raises ``TraceError`` where ranks disagree on the tensor's form, a rank holds an element twice, or an element is
    missing, or a token there, against the expectation. Whole tokens that are missing are told of in the result.
    """
    _check_agreement(key, pieces, expectation)
    dims = pieces[0].record.dims
    groups = _group_replicas(key, pieces, expectation.rows)
    families = _group_families(groups)
    conflicts = ConflictTally(key)
    if all(fill_local_tensor([group[0].spec for group in family]) for family in families):
        coverage = count_cells(pieces[0].spec.global_shape, [family[0][0].spec for family in families])
        if coverage.is_disjoint:
            held = None if coverage.is_full else coverage.present()
            present, missing = check_present(key, pieces, held, expectation)
            values = _copy_families(families, load, conflicts, memory, is_full=coverage.is_full)
            content = tuple(map(_content, groups))
            return MergedTensor(
                tensor=values, conflicts=conflicts.all(), present=present, missing=missing, dims=dims, content=content
            )
    values, held = _copy_elements(key, groups, load, conflicts, memory, rows=expectation.rows)
    present, missing = check_present(key, pieces, None if bool(held.all()) else held, expectation)
    return MergedTensor(tensor=values, conflicts=conflicts.all(), present=present, missing=missing, dims=dims)


def _content(group: _Group) -> tuple[object, ...]:
    """Where a group's elements lie, and the digest of those that are taken."""
    spec = group[0].spec
    return spec.splits, spec.local_shape, spec.flat_range, group[0].record.sha256


def _check_agreement(key: TraceKey, pieces: Sequence[Piece], expectation: Expectation) -> None:
    """All pieces say the same dtype, whole shape, dimensions and mask, and the batch's number of tokens."""
    forms: dict[str, int] = {}
    for piece in pieces:
        record = piece.record
        dims = f" ({', '.join(record.dims)})" if record.dims else ""
        masked = ", masked" if record.is_masked else ""
        form = f"{str(record.dtype).removeprefix('torch.')} {list(record.spec.global_shape)}{dims}{masked}"
        forms.setdefault(form, piece.place.global_rank)
    if len(forms) > 1:
        found = ", ".join(f"global rank {rank}: {form}" for form, rank in forms.items())
        raise TraceError(f"{key.describe()}: ranks disagree on dtype or whole shape ({found})")
    record = pieces[0].record
    expected = expectation.tokens
    if record.dims[:1] == ("token",) and expected is not None and len(expected) != record.spec.global_shape[0]:
        raise TraceError(
            f"{key.describe()}: has {record.spec.global_shape[0]} tokens, the step's batch has {len(expected)}"
        )


def _group_replicas(key: TraceKey, pieces: Sequence[Piece], rows: RowTable) -> list[_Group]:
    """Pieces at the same places, each of another rank. Pieces without elements are left out where there are others."""
    groups: dict[tuple[object, ...], _Group] = {}
    for piece in pieces:
        spec = piece.spec
        group = groups.setdefault((spec.splits, spec.local_shape, spec.flat_range), [])
        if group and group[-1].place.global_rank == piece.place.global_rank:
            _, targets = element_places(spec)
            if len(targets):
                raise held_twice(key, piece, _unflatten(int(targets[0]), spec.global_shape), rows)
        group.append(piece)
    filled = [group for group in groups.values() if math.prod(group[0].record.stored_shape)]
    return filled or list(groups.values())[:1]


def _group_families(groups: Sequence[_Group]) -> list[_Family]:
    families: dict[tuple[object, ...], _Family] = {}
    for group in groups:
        spec = group[0].spec
        families.setdefault((spec.splits, spec.local_shape), []).append(group)
    return list(families.values())


def _load_group(group: _Group, load: Load, conflicts: ConflictTally) -> torch.Tensor:
    """The first rank's elements; those of the others are read, checked and compared with them."""
    first, stored = group[0], load(group[0])
    for other in group[1:]:
        replica = load(other)
        # Both are as they were written, so equal digests are equal bits.
        if other.record.sha256 != first.record.sha256:
            conflicts.compare(first, other, (stored, replica))
    return stored


def _copy_families(
    families: list[_Family], load: Load, conflicts: ConflictTally, memory: MemoryPool, *, is_full: bool
) -> torch.Tensor:
    """Whole local tensors that do not overlap; what none of them holds is 0."""
    spec, dtype = families[0][0][0].spec, families[0][0][0].record.dtype
    if len(families) == 1 and len(families[0]) == 1 and spec.is_whole:
        return _load_group(families[0][0], load, conflicts)
    values = memory.allocate(spec.global_shape, dtype, is_filled=is_full)
    for family in families:
        spec = family[0][0].spec
        if len(family) == 1:
            local = _load_group(family[0], load, conflicts).reshape(spec.local_shape)
            place_shard(values, local, spec)
            continue
        local = memory.allocate(spec.local_shape, dtype, is_filled=True) if spec.splits else values
        flat = local.view(-1)
        for group in family:
            start, stop = group[0].spec.flat_range or (0, len(flat))
            flat[start:stop] = _load_group(group, load, conflicts)
        if spec.splits:
            place_shard(values, local, spec)
    return values


def _copy_elements(
    key: TraceKey, groups: list[_Group], load: Load, conflicts: ConflictTally, memory: MemoryPool, *, rows: RowTable
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pieces that may overlap: the whole tensor, 0 where nothing is held; bool, of its shape, where something is."""
    shape, dtype = groups[0][0].spec.global_shape, groups[0][0].record.dtype
    values = memory.allocate([math.prod(shape)], dtype, is_filled=False)
    bits = view_as_bits(values)
    owner = torch.full(values.shape, -1, dtype=torch.int32)
    for index, group in enumerate(groups):
        places, targets = element_places(group[0].spec)
        mine = view_as_bits(_load_group(group, load, conflicts).reshape(-1))[places]
        owners = owner[targets]
        for other in torch.unique(owners[owners >= 0]).tolist():
            claimed = owners == other
            if {piece.place.global_rank for piece in groups[other]} & {piece.place.global_rank for piece in group}:
                first = int(targets[claimed][0])
                raise held_twice(key, _common(groups[other], group), _unflatten(first, shape), rows)
            differs = claimed & (mine != bits[targets])
            if bool(differs.any()):
                pair = bits[targets[differs]].view(dtype), mine[differs].view(dtype)
                conflicts.add(groups[other][0].place, group[0].place, pair)
        free = owners < 0
        bits[targets[free]] = mine[free]
        owner[targets[free]] = index
    return values.view(shape), (owner >= 0).view(shape)


def _common(first: _Group, second: _Group) -> Piece:
    """The piece in the second group of a rank that is in both."""
    ranks = {piece.place.global_rank for piece in first}
    return next(piece for piece in second if piece.place.global_rank in ranks)


def _unflatten(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        position, place = divmod(position, size)
        index.append(place)
    return tuple(reversed(index))
