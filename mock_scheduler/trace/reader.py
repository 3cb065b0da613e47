"""Reads trace files: puts a tensor together from all ranks' pieces, and says which replicas disagree.

Files are mapped into memory and merged one tensor at a time: memory is bounded by the largest tensor. Whatever several
ranks hold must agree bit for bit; where it does not, the merge says who differs from whom. The format is in ``files``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from mock_scheduler.digests import compute_tensor_digest, open_sealed
from mock_scheduler.errors import TraceError
from mock_scheduler.trace.entries import DimName, RankPlace, StepFooter, TraceKey
from mock_scheduler.trace.files import FORMAT_VERSION, METADATA_KEY, RANK_FILE, STEP_FOLDER, view_as_bits
from mock_scheduler.trace.footers import as_count, as_counts, parse_footer
from mock_scheduler.trace.kinds import TRACE_KINDS
from mock_scheduler.trace.shards import Block, ShardSpec, Split, owned_mask, place_shard

_METADATA_KEYS = ("step", "global_rank", "world_size", "coordinates", "tensors", "footer")
_DAMAGED = "the file was changed or damaged after it was written"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaConflict:
    """Two ranks that hold different bits for the same elements of one tensor.

    ``max_abs``: the largest absolute difference; 0 where only the sign of a zero differs, nan or inf where one is.
    """

    key: TraceKey
    first: RankPlace
    second: RankPlace
    num_elements: int
    max_abs: float

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes on which the two ranks stand apart."""
        mine, other = self.first.coordinates, self.second.coordinates
        return tuple(axis for axis in mine if mine[axis] != other.get(axis))

    def describe(self) -> str:
        """One line: the tensor, the axes with both coordinates, what differs and when."""
        axes = self.axes
        if axes:
            first = " ".join(f"{axis}{self.first.coordinates[axis]}" for axis in axes)
            second = " ".join(f"{axis}{self.second.coordinates.get(axis)}" for axis in axes)
        else:
            first, second = f"global {self.first.global_rank}", f"global {self.second.global_rank}"
        elements = "1 element" if self.num_elements == 1 else f"{self.num_elements} elements"
        update = f", update {self.key.update}" if self.key.update else ""
        return (
            f"{self.key.name}: ranks {first} and {second} hold different {self.key.kind}s at step {self.key.step}"
            f"{update} ({elements}, by up to {self.max_abs:.3g})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MergedTensor:
    """A whole tensor put together from all ranks; among conflicting replicas the lowest rank's value is taken.

    ``present``: bool, where there is a value, of the tensor's shape or ``[T, 1, ...]`` where whole tokens are absent;
    ``None`` where every element is there. ``dims``: what each dimension counts; empty where nobody said.
    """

    tensor: torch.Tensor
    conflicts: tuple[ReplicaConflict, ...]
    present: torch.Tensor | None = None
    dims: tuple[DimName, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredTensor:
    """What the metadata says about one stored tensor."""

    key: TraceKey
    stored_name: str
    dtype: str
    spec: ShardSpec
    digest: str
    dims: tuple[DimName, ...]
    is_masked: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankFile:
    """One file, with its checked metadata."""

    path: Path
    step: int
    place: RankPlace
    world_size: int
    tensors: Mapping[TraceKey, tuple[_StoredTensor, ...]]
    footer: StepFooter


class _Handle(Protocol):
    """What is used of an open safetensors file (its own class is untyped in safetensors 0.8)."""

    def metadata(self) -> dict[str, str] | None: ...
    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


def open_trace(trace_dir: Path) -> TraceReader:
    """Read the metadata of every file of a trace, and check that no rank's file is missing.

    Raises ``TraceError`` where there is no trace, a file is missing, unreadable or not what its name says.
    """
    folders = sorted(path for path in trace_dir.glob("step_*") if STEP_FOLDER.fullmatch(path.name) and path.is_dir())
    if not folders:
        raise TraceError(f"{trace_dir}: no trace here; run with trace.level=full")
    steps: dict[int, tuple[_RankFile, ...]] = {}
    for folder in folders:
        rank_files = tuple(_read_rank_file(path) for path in sorted(folder.iterdir()) if RANK_FILE.fullmatch(path.name))
        _check_ranks(folder, rank_files)
        steps[rank_files[0].step] = rank_files
    return TraceReader(steps)


@dataclass(slots=True)
class TraceReader:
    """An opened trace. Holds open the files of one step at a time; a context manager, closed by ``close``."""

    _files: dict[int, tuple[_RankFile, ...]]
    _open_step: int | None = None
    _handles: dict[int, _Handle] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def steps(self) -> tuple[int, ...]:
        """The traced steps, ascending."""
        return tuple(sorted(self._files))

    def ranks(self, step: int) -> tuple[RankPlace, ...]:
        """The ranks that wrote ``step``, by global rank."""
        return tuple(rank_file.place for rank_file in self._files[step])

    def keys(self, step: int) -> frozenset[TraceKey]:
        """Every tensor that any rank wrote at ``step``."""
        return frozenset(key for rank_file in self._files[step] for key in rank_file.tensors)

    def footer(self, step: int) -> StepFooter:
        """What the first rank says of the whole step; rows and selection are the same on every rank."""
        return self._files[step][0].footer

    def has(self, key: TraceKey) -> bool:
        """Whether any rank wrote this tensor."""
        return any(key in rank_file.tensors for rank_file in self._files.get(key.step, ()))

    def merge(self, key: TraceKey) -> MergedTensor:
        """The whole tensor from all ranks' pieces, and the replicas that disagree.

        Raises ``TraceError`` where no rank holds the tensor, an element is held by none, ranks disagree on its
        shape or dtype, or stored bytes do not have their digest.
        """
        holders = [
            (rank_file, piece) for rank_file in self._files[key.step] for piece in rank_file.tensors.get(key, ())
        ]
        if not holders:
            raise TraceError(f"no rank wrote the {key.describe()}")
        _check_agreement(key, holders)
        if len(holders) == 1 and holders[0][1].spec.is_whole:
            return MergedTensor(tensor=self._load(*holders[0]), conflicts=(), dims=holders[0][1].dims)
        return self._merge_pieces(key, holders)

    def close(self) -> None:
        """Close the open files."""
        self._stack.close()
        self._handles = {}
        self._open_step = None

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _merge_pieces(self, key: TraceKey, holders: list[tuple[_RankFile, _StoredTensor]]) -> MergedTensor:
        shape = holders[0][1].spec.global_shape
        values: torch.Tensor | None = None
        owner = torch.full(shape, -1, dtype=torch.int32)
        conflicts: list[ReplicaConflict] = []
        for index, (rank_file, stored) in enumerate(holders):
            piece, mask = _place_piece(self._load(rank_file, stored), stored.spec)
            if values is None:
                values = torch.zeros_like(piece)
            differs = mask & (owner >= 0) & (view_as_bits(values) != view_as_bits(piece))
            for other in torch.unique(owner[differs]).tolist():
                where = differs & (owner == other)
                conflicts.append(
                    ReplicaConflict(
                        key=key,
                        first=holders[other][0].place,
                        second=rank_file.place,
                        num_elements=int(where.sum()),
                        max_abs=float((values[where].double() - piece[where].double()).abs().max()),
                    )
                )
            unclaimed = mask & (owner < 0)
            view_as_bits(values).masked_scatter_(unclaimed, view_as_bits(piece)[unclaimed])
            owner.masked_fill_(unclaimed, index)
        assert values is not None
        first = holders[0][1]
        present = owner >= 0
        if first.dims[:1] == ("token",):
            by_token = present.flatten(1).all(dim=1) if present.dim() > 1 else present
            present = by_token.view(-1, *([1] * (values.dim() - 1)))
        if bool(present.all()):
            return MergedTensor(tensor=values, conflicts=tuple(conflicts), dims=first.dims)
        if first.dims[:1] != ("token",):
            _check_covered(key, owner, holders)
        return MergedTensor(tensor=values, conflicts=tuple(conflicts), present=present, dims=first.dims)

    def _load(self, rank_file: _RankFile, stored: _StoredTensor) -> torch.Tensor:
        """The stored elements as they were written: ``local_shape``, or flat for a ``flat_range``."""
        handle = self._handle(rank_file)
        name = stored.stored_name
        try:
            tensor = handle.get_tensor(name)
        except SafetensorError as error:
            raise TraceError(f"{rank_file.path}: {name} cannot be read: {error}") from error
        if compute_tensor_digest(tensor) != stored.digest:
            raise TraceError(f"{rank_file.path}: {name} does not match its digest; {_DAMAGED}")
        return tensor

    def _handle(self, rank_file: _RankFile) -> _Handle:
        if self._open_step != rank_file.step:
            self.close()
            self._open_step = rank_file.step
        global_rank = rank_file.place.global_rank
        if global_rank not in self._handles:
            self._handles[global_rank] = self._stack.enter_context(_open_file(rank_file.path))
        return self._handles[global_rank]


@contextmanager
def _open_file(path: Path) -> Iterator[_Handle]:
    try:
        opened = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise TraceError(f"{path}: not a readable safetensors file: {error}") from error
    with opened as handle:
        yield handle


def _read_rank_file(path: Path) -> _RankFile:
    with _open_file(path) as handle:
        metadata = handle.metadata() or {}
        stored_names = set(handle.keys())
    if METADATA_KEY not in metadata:
        raise TraceError(f"{path}: no metadata key {METADATA_KEY!r}; this is no trace file")
    content = _open_metadata(path, metadata[METADATA_KEY])
    try:
        rank_file = _parse_rank_file(path, content)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: the metadata is not that of a trace: {error!r}") from error
    if stored_names != {piece.stored_name for pieces in rank_file.tensors.values() for piece in pieces}:
        raise TraceError(f"{path}: the stored tensors are not those that the metadata lists; {_DAMAGED}")
    return rank_file


def _open_metadata(path: Path, text: str) -> dict[str, Any]:
    """The metadata's JSON: its digest is checked before anything in it is believed, then its version and keys."""
    try:
        content = open_sealed(text)
    except ValueError as error:
        raise TraceError(f"{path}: the metadata {error}; {_DAMAGED}") from error
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise TraceError(
            f"{path}: format version {version!r}, expected {FORMAT_VERSION}; another release wrote it: run it again "
            "with this one"
        )
    missing = [name for name in _METADATA_KEYS if name not in content]
    if missing:
        raise TraceError(f"{path}: the metadata has no {', '.join(missing)}")
    return content


def _parse_rank_file(path: Path, content: Mapping[str, Any]) -> _RankFile:
    step, coordinates = as_count(content["step"]), content["coordinates"]
    by_key: dict[TraceKey, list[_StoredTensor]] = {}
    for name, record in content["tensors"].items():
        piece = _parse_stored(name, record, step)
        by_key.setdefault(piece.key, []).append(piece)
    return _RankFile(
        path=path,
        step=step,
        place=RankPlace(
            global_rank=as_count(content["global_rank"]),
            coordinates={axis: as_count(place) for axis, place in coordinates.items()},
        ),
        world_size=as_count(content["world_size"]),
        tensors={key: tuple(pieces) for key, pieces in by_key.items()},
        footer=parse_footer(content["footer"]),
    )


def _parse_stored(name: str, record: Mapping[str, Any], step: int) -> _StoredTensor:
    kind, flat_range = record["kind"], record["flat_range"]
    if kind not in TRACE_KINDS:
        raise ValueError(f"unknown kind {kind!r}")
    key = TraceKey(step=step, update=as_count(record["update"]), kind=kind, name=record["name"])
    spec = ShardSpec(
        name=key.name,
        global_shape=as_counts(record["global_shape"]),
        local_shape=as_counts(record["local_shape"]),
        splits=tuple(
            Split(
                dim=as_count(dim),
                blocks=tuple(
                    Block(local_start=local, global_start=start, length=length)
                    for local, start, length in map(as_counts, blocks)
                ),
            )
            for dim, blocks in record["splits"]
        ),
        flat_range=None if flat_range is None else (as_count(flat_range[0]), as_count(flat_range[1])),
    )
    return _StoredTensor(
        key=key,
        stored_name=name,
        dtype=record["dtype"],
        spec=spec,
        digest=record["digest"],
        dims=tuple(record["dims"]),
        is_masked=bool(record["is_masked"]),
    )


def _check_ranks(folder: Path, rank_files: Sequence[_RankFile]) -> None:
    """Every file is the rank and step that its path says, and no rank of the world is missing."""
    if not rank_files:
        raise TraceError(f"{folder}: no rank file; the run ended before any rank wrote this step")
    problems = []
    for rank_file in rank_files:
        named_rank = int(rank_file.path.name.removeprefix("rank_").removesuffix(".safetensors"))
        named_step = int(folder.name.removeprefix("step_"))
        found = (rank_file.step, rank_file.place.global_rank)
        if found != (named_step, named_rank):
            problems.append(f"{rank_file.path.name} holds step {found[0]} of global rank {found[1]}")
    world_sizes = {rank_file.world_size for rank_file in rank_files}
    if len(world_sizes) > 1:
        problems.append(f"files of runs with different world sizes {sorted(world_sizes)}")
    world_size = max(world_sizes)
    missing = sorted(set(range(world_size)) - {rank_file.place.global_rank for rank_file in rank_files})
    if missing:
        problems.append(f"no file of global rank {', '.join(map(str, missing))} of {world_size}")
    if problems:
        raise TraceError(f"{folder}: " + "; ".join(problems))


def _check_agreement(key: TraceKey, holders: Sequence[tuple[_RankFile, _StoredTensor]]) -> None:
    """All ranks that hold the tensor say the same whole shape and dtype."""
    forms = {
        (stored.dtype, stored.spec.global_shape): f"global rank {rank_file.place.global_rank}"
        for rank_file, stored in reversed(holders)
    }
    if len(forms) > 1:
        found = ", ".join(f"{where}: {dtype} {list(shape)}" for (dtype, shape), where in forms.items())
        raise TraceError(f"{key.describe()}: ranks disagree on dtype or whole shape ({found})")


def _check_covered(key: TraceKey, owner: torch.Tensor, holders: Sequence[tuple[_RankFile, _StoredTensor]]) -> None:
    gap = (owner < 0).nonzero()
    if len(gap):
        ranks = ", ".join(str(rank_file.place.global_rank) for rank_file, _ in holders)
        raise TraceError(
            f"{key.describe()}: {len(gap)} of {owner.numel()} elements are held by no rank, the first at index "
            f"{gap[0].tolist()}; pieces come from global rank {ranks}"
        )


def _place_piece(stored: torch.Tensor, spec: ShardSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's elements at their place in the whole tensor (0 elsewhere), and a bool mask of where they are."""
    local = stored
    if spec.flat_range is not None:
        start, stop = spec.flat_range
        local = stored.new_zeros(spec.local_shape)
        local.view(-1)[start:stop] = stored
    piece = stored.new_zeros(spec.global_shape)
    mask = torch.zeros(spec.global_shape, dtype=torch.bool)
    place_shard(piece, local, spec)
    place_shard(mask, owned_mask(spec), spec)
    return piece, mask
