"""A rank's part of a parameter as its dump holds it, and the whole parameter out of all ranks' parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mock_scheduler.adapters.nexrl.parameters import NamedRows
from mock_scheduler.errors import TraceError
from mock_scheduler.support.tensor_bytes import dtype_name
from mock_scheduler.trace.geometry import places_along
from mock_scheduler.trace.shards import ShardSpec, owned_mask


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """A rank's part of a named tensor.

    tensor: ``[n, ...]``, the rank's entries only. indices: of each dimension, int64 where its entries lie in the whole
    tensor; None: it is held whole, in order. owned: bool of the tensor's shape, True where this rank's value counts;
    None: everywhere.
    """

    name: str
    global_shape: tuple[int, ...]
    tensor: torch.Tensor
    indices: tuple[torch.Tensor | None, ...]
    owned: torch.Tensor | None = None


def cut_piece(named: NamedRows, spec: ShardSpec, local: torch.Tensor) -> Piece | None:
    """The part of a named tensor a shard holds; None where that is nothing.

    local: ``[*spec.local_shape]``, or flat with just the elements of ``spec.flat_range``.
    """
    whole_local = _unflatten(local, spec)
    owned = None if spec.flat_range is None else owned_mask(spec)
    num_rows = spec.global_shape[0] if named.rows is None else len(named.rows)
    indices: list[torch.Tensor | None] = []
    for dim in range(len(spec.global_shape)):
        local_places, global_places = places_along(spec, dim)
        if dim == 0:
            local_places, global_places = _choose_rows(named.rows, local_places, global_places)
        whole_local = whole_local.index_select(dim, local_places)
        owned = None if owned is None else owned.index_select(dim, local_places)
        size = num_rows if dim == 0 else spec.global_shape[dim]
        is_whole = len(global_places) == size and bool((global_places == torch.arange(size)).all())
        indices.append(None if is_whole else global_places)
    if whole_local.numel() == 0 or (owned is not None and not bool(owned.any())):
        return None
    return Piece(
        name=named.name,
        global_shape=(num_rows, *spec.global_shape[1:]),
        tensor=whole_local,
        indices=tuple(indices),
        owned=None if owned is None or bool(owned.all()) else owned,
    )


def _unflatten(local: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """The local tensor in its shape; elements outside of ``flat_range`` are 0 where only the range was given."""
    if tuple(local.shape) == spec.local_shape:
        return local.detach().cpu()
    assert spec.flat_range is not None  # the only other form that a shard has
    start, stop = spec.flat_range
    filled = torch.zeros(spec.local_shape, dtype=local.dtype)
    filled.view(-1)[start:stop] = local.detach().cpu().reshape(-1)
    return filled


def _choose_rows(
    rows: torch.Tensor | None, local_places: torch.Tensor, global_places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses rows among those of a shard: their local places, and their numbers among the chosen rows."""
    if rows is None:
        return local_places, global_places
    local_of = {place: local for local, place in zip(local_places.tolist(), global_places.tolist(), strict=True)}
    held = [(local_of[row], number) for number, row in enumerate(rows.tolist()) if row in local_of]
    pairs = torch.tensor(held, dtype=torch.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MergedPieces:
    """The whole tensor; absent: bool of its shape, True where no piece has a value. num_conflicts: elements a
    further rank holds with another value than the first, whose value counts."""

    tensor: torch.Tensor
    absent: torch.Tensor
    num_conflicts: int


def merge_pieces(pieces: Sequence[Piece], *, where: str) -> MergedPieces:
    """The whole tensor out of all ranks' pieces of one name, at least one.

    Raises ``TraceError`` (its message begins with ``where``) for pieces of several shapes or dtypes.
    """
    forms = {(piece.global_shape, piece.tensor.dtype) for piece in pieces}
    if len(forms) > 1:
        listed = ", ".join(sorted(f"{dtype_name(dtype)} {list(shape)}" for shape, dtype in forms))
        raise TraceError(f"{where}: its parts are of several forms: {listed}")
    merged = torch.zeros(pieces[0].global_shape, dtype=pieces[0].tensor.dtype)
    absent = torch.ones(pieces[0].global_shape, dtype=torch.bool)
    num_conflicts = 0
    for piece in pieces:
        sizes = piece.global_shape
        places = [torch.arange(size) if at is None else at for at, size in zip(piece.indices, sizes, strict=True)]
        grid = torch.meshgrid(*places, indexing="ij")
        is_owned = torch.ones(piece.tensor.shape, dtype=torch.bool) if piece.owned is None else piece.owned
        there, was_absent = merged[grid], absent[grid]
        # NaN equals NaN here, as in the whole comparison of dumps.
        are_nan = there.isnan() & piece.tensor.isnan()
        num_conflicts += int((is_owned & ~was_absent & (there != piece.tensor) & ~are_nan).sum())
        # The first rank's value counts.
        merged[grid] = torch.where(is_owned & was_absent, piece.tensor, there)
        absent[grid] = was_absent & ~is_owned
    return MergedPieces(tensor=merged, absent=absent, num_conflicts=num_conflicts)


def piece_content(piece: Piece) -> dict[str, object]:
    """A piece as a file holds it; ``read_piece`` is the inverse."""
    return {
        "name": piece.name,
        "global_shape": list(piece.global_shape),
        "tensor": piece.tensor,
        "indices": list(piece.indices),
        "owned": piece.owned,
    }


def read_piece(content: object, where: str) -> Piece:
    """A piece out of a file; raises ``TraceError`` for anything else."""
    try:
        fields: dict[str, Any] = dict(content)  # type: ignore[call-overload]  # checked by what follows
        indices = tuple(fields["indices"])
        piece = Piece(
            name=str(fields["name"]),
            global_shape=tuple(fields["global_shape"]),
            tensor=fields["tensor"],
            indices=indices,
            owned=fields["owned"],
        )
        held = [size if at is None else len(at) for at, size in zip(indices, piece.global_shape, strict=True)]
        is_whole = list(piece.tensor.shape) == held and all(
            at is None or not len(at) or 0 <= int(at.min()) <= int(at.max()) < size
            for at, size in zip(indices, piece.global_shape, strict=True)
        )
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise TraceError(f"{where} holds no part of a parameter: {error}") from error
    if not is_whole:
        raise TraceError(
            f"{where}, {piece.name}: is {list(piece.tensor.shape)}; its indices say {held} of "
            f"{list(piece.global_shape)}"
        )
    return piece
