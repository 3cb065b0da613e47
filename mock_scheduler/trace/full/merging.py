"""Puts a tensor together from all ranks' pieces, and tells disagreeing replicas.

Pieces at the same places are replicas: their bits are compared, and the lowest rank's are taken. Pieces that cut the
tensor along one dimension stay where they are, and it is read from them (``whole``); others are copied block by block
to their places. Only where pieces overlap in part, or flat ranges leave a part of a local tensor out, is
every element looked at on its own. What no rank holds is judged in ``presence``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.support.tensor_bytes import have_equal_bytes, view_as_bits
from mock_scheduler.support.text import list_some
from mock_scheduler.trace.entries import DimName, RowTable, TraceKey
from mock_scheduler.trace.full.memory import MemoryPool
from mock_scheduler.trace.full.pieces import DAMAGED, Piece, describe_wrong_digest, has_sha256
from mock_scheduler.trace.full.presence import Expectation, check_present, held_twice
from mock_scheduler.trace.full.whole import WholeTensor, find_cut, slice_up
from mock_scheduler.trace.geometry import count_cells, element_places, fill_local_tensor, unflatten
from mock_scheduler.trace.replicas import ConflictTally, ReplicaConflict
from mock_scheduler.trace.shards import place_shard

Load = Callable[[Piece], torch.Tensor]
#: How many elements a merged tensor may have for each byte that its step's files store, and in any case. A trace of one
#: rank of 64 in bfloat16 has 32, one of the response tokens alone, a hundredth of all, 50.
_ELEMENTS_PER_BYTE = 256
_MIN_ELEMENTS = 1 << 22
#: Replicas: pieces of several ranks at the same places, by ascending rank.
_Group = list[Piece]
#: The groups of one local tensor: one, or several that hold flat ranges of it.
_Family = list[_Group]
_MAX_LISTED = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedTensor:
    """A whole tensor put together from all ranks; among conflicting replicas the lowest rank's value is taken.

    values: where it is read from, by ranges. present: bool, True where there is a value, of the tensor's shape or
    ``[T, 1, ...]`` where whole tokens are absent; ``None`` where every element is there. missing: in words, the tokens
    the run should have and no rank holds; empty where there are none. dims: the name of each dimension; empty where
    nobody said.
    stated: by the places of each piece, the SHA-256 that its header states; ``None`` where pieces overlap. Nothing is
    concluded from it but that a digest is wrong.
    """

    values: WholeTensor
    conflicts: tuple[ReplicaConflict, ...]
    present: torch.Tensor | None = None
    missing: str = ""
    dims: tuple[DimName, ...] = ()
    stated: Mapping[tuple[object, ...], str] | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """Returns all of it, in one place."""
        return self.values.whole()


def merge_pieces(
    key: TraceKey, pieces: Sequence[Piece], load: Load, expectation: Expectation, memory: MemoryPool
) -> MergedTensor:
    """The whole tensor. pieces: at least one, by ascending rank. load: gives a piece's stored elements, checked.
    memory: where the tensor is put together, if it is.

    Raises ``TraceError`` where ranks disagree on the tensor's form, a rank holds an element twice, or an element is
    missing, or a token there, against the expectation. Missing whole tokens are told of in the result.
    """
    _check_agreement(key, pieces, expectation)
    _check_size(key, pieces, expectation)
    dims = pieces[0].record.dims
    # By places, not by rank: which axis replicates a tensor is nothing the trace has to say.
    groups = _group_replicas(key, pieces, expectation.rows)
    families = _group_families(groups)
    conflicts = ConflictTally(key)
    if all(fill_local_tensor([group[0].spec for group in family]) for family in families):
        coverage = count_cells(pieces[0].spec.global_shape, [family[0][0].spec for family in families])
        # Whole blocks can be copied; where pieces overlap, every element is asked for its holder.
        if coverage.is_disjoint:
            held = None if coverage.is_full else coverage.present()
            present, missing = check_present(key, pieces, held, expectation)
            values = _lay_out(groups, load, conflicts, memory) if coverage.is_full else None
            if values is None:
                copied = _copy_families(families, load, conflicts, memory, is_full=coverage.is_full)
                values = WholeTensor.of(copied)
            stated = {group[0].spec.elements: group[0].record.sha256 for group in groups}
            return MergedTensor(
                values=values, conflicts=conflicts.all(), present=present, missing=missing, dims=dims, stated=stated
            )
    elements, held = _copy_elements(key, groups, load, conflicts, memory, rows=expectation.rows)
    present, missing = check_present(key, pieces, None if bool(held.all()) else held, expectation)
    values = WholeTensor.of(elements)
    return MergedTensor(values=values, conflicts=conflicts.all(), present=present, missing=missing, dims=dims)


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
    record, num_tokens = pieces[0].record, expectation.rows.num_tokens
    is_stated = record.dims[:1] == ("token",) and expectation.find_tokens is not None
    if is_stated and num_tokens != record.spec.global_shape[0]:
        raise TraceError(
            f"{key.describe()}: has {record.spec.global_shape[0]} tokens, the step's batch has {num_tokens}"
        )


def _check_size(key: TraceKey, pieces: Sequence[Piece], expectation: Expectation) -> None:
    """Raises before memory is taken for a whole tensor that the step's files do not account for.

    Whatever is merged is as large as the whole tensor, though tokens may be masked out and ranks may be left out.
    """
    numel = math.prod(pieces[0].spec.global_shape)
    most = max(_MIN_ELEMENTS, _ELEMENTS_PER_BYTE * expectation.stored_bytes)
    if numel > most:
        raise TraceError(
            f"{key.describe()}: has {numel} elements, where the files of its step store {expectation.stored_bytes} "
            f"bytes, from which at most {most} elements are put together; trace more ranks, or more of its tokens"
        )


def _group_replicas(key: TraceKey, pieces: Sequence[Piece], rows: RowTable) -> list[_Group]:
    """Pieces at the same places, each of another rank. Pieces without elements are left out where there are others."""
    groups: dict[tuple[object, ...], _Group] = {}
    for piece in pieces:
        spec = piece.spec
        group = groups.setdefault(spec.elements, [])
        if group and group[-1].place.global_rank == piece.place.global_rank:
            _, targets = element_places(spec)
            if len(targets):
                raise held_twice(key, piece, unflatten(int(targets[0]), spec.global_shape), rows)
        group.append(piece)
    # A rank without an element of the tensor (an empty flat range) holds no replica of it.
    filled = [group for group in groups.values() if math.prod(group[0].record.stored_shape)]
    return filled or list(groups.values())[:1]


def _group_families(groups: Sequence[_Group]) -> list[_Family]:
    families: dict[tuple[object, ...], _Family] = {}
    for group in groups:
        spec = group[0].spec
        families.setdefault((spec.splits, spec.local_shape), []).append(group)
    return list(families.values())


def _load_group(group: _Group, load: Load, conflicts: ConflictTally) -> torch.Tensor:
    """Loads the first rank's elements; the others' are read, checked and compared with them."""
    first, stored = group[0], load(group[0])
    for other in group[1:]:
        replica = load(other)
        is_equal = have_equal_bytes(stored, replica)
        if is_equal != (other.record.sha256 == first.record.sha256):
            check_digests([(first, stored), (other, replica)])
        if not is_equal:
            conflicts.compare((first.place, other.place), first.spec, (stored, replica))
    return stored


def check_digests(pieces: Iterable[tuple[Piece, torch.Tensor]]) -> None:
    """Raises ``TraceError`` naming file and tensor of every piece whose stored elements have another SHA-256."""
    wrong = [describe_wrong_digest(piece, "SHA-256") for piece, stored in pieces if not has_sha256(piece, stored)]
    if wrong:
        raise TraceError(f"{list_some(wrong, _MAX_LISTED)}; {DAMAGED}")


def _lay_out(groups: list[_Group], load: Load, conflicts: ConflictTally, memory: MemoryPool) -> WholeTensor | None:
    """Leaves pieces that hold every element once where they are; ``None`` where they cut no single dimension."""
    specs = [group[0].spec for group in groups]
    dim = find_cut(specs)
    if dim is None:
        return None
    slices = slice_up(specs, dim, lambda number: _load_group(groups[number], load, conflicts))
    return WholeTensor(specs[0].global_shape, slices, memory)


def _copy_families(
    families: list[_Family], load: Load, conflicts: ConflictTally, memory: MemoryPool, *, is_full: bool
) -> torch.Tensor:
    """Copies whole local tensors that do not overlap; elements held by none are 0."""
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
                raise held_twice(key, _common(groups[other], group), unflatten(first, shape), rows)
            differs = claimed & (mine != bits[targets])
            if bool(differs.any()):
                pair = bits[targets[differs]].view(dtype), mine[differs].view(dtype)
                conflicts.add((groups[other][0].place, group[0].place), pair)
        # The lowest rank's value stays: groups come in ascending order of their first rank.
        free = owners < 0
        bits[targets[free]] = mine[free]
        owner[targets[free]] = index
    return values.view(shape), (owner >= 0).view(shape)


def _common(first: _Group, second: _Group) -> Piece:
    """The piece in the second group of a rank that is in both."""
    ranks = {piece.place.global_rank for piece in first}
    return next(piece for piece in second if piece.place.global_rank in ranks)
