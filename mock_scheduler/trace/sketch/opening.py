"""Opens the files of a trace of level ``sketch``: reads and checks each, and that the ranks' files fit together.

Nothing in a header is believed before its digest is checked. The format is in ``sketch.files``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from safetensors import SafetensorError

from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.errors import TraceError
from mock_scheduler.support.documents import AsRow, Count, Document
from mock_scheduler.support.tensor_bytes import compute_tensor_digest, find_dtype
from mock_scheduler.trace.entries import DimName, RankPlace, RowTable, StepFooter, TraceKey
from mock_scheduler.trace.full.files import SKETCH_FILE, find_steps, sketch_name
from mock_scheduler.trace.full.header import TensorName, parse_footer, parse_rank_step
from mock_scheduler.trace.full.opening import list_folder, list_writers, name_missing, writer_problems
from mock_scheduler.trace.full.part import open_file, read_metadata
from mock_scheduler.trace.full.pieces import DAMAGED, Shared
from mock_scheduler.trace.geometry import ElementSet, Rectangle
from mock_scheduler.trace.rows import check_tokens, is_virtual, unite_footers
from mock_scheduler.trace.sketch.constants import MAX_BUCKETS
from mock_scheduler.trace.sketch.sketch import Sketch

FORMAT_VERSION = 1
METADATA_KEY = "mock_scheduler.sketch"

_MAX_ELEMENTS = 2**62
_NUM_COUNTS = 4
_TABLES = ("sums", "squares", "counts")
_TableMap = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredSketch:
    """A rank's sketch of one tensor. part: the elements it covers; empty where there are none."""

    sketch: Sketch
    dtype: str
    global_shape: tuple[int, ...]
    dims: tuple[DimName, ...]
    is_masked: bool
    part: ElementSet


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor as a file's header lists it; ``part`` is a position in the header's ``parts``."""

    update: Count
    kind: TraceKind
    name: TensorName
    dtype: str
    global_shape: tuple[Count, ...]
    dims: tuple[DimName, ...]
    is_masked: bool
    part: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensors:
    """Holds a header's lists of tensors and of parts, and the digest of each table."""

    tensors: tuple[Annotated[StoredTensor, AsRow()], ...]
    parts: tuple[tuple[Annotated[Rectangle, AsRow()], ...], ...]
    tables: dict[str, str]


STORED_TENSORS = Document[StoredTensors](StoredTensors)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankSketches:
    """Holds one file: a rank's whole trace of a step."""

    path: Path
    step: int
    place: RankPlace
    world_size: int
    tensors: Mapping[TraceKey, StoredSketch]
    footer: StepFooter


def open_sketch_steps(trace_dir: Path) -> dict[int, tuple[RankSketches, ...]]:
    """All steps of a trace, ranks ascending; raises ``TraceError`` as ``sketch.reader.open_sketches`` does."""
    listed = check_sketch_ranks(trace_dir)
    return {step: _open_step(paths, trace_dir) for step, paths in listed.items()}


def check_sketch_ranks(trace_dir: Path) -> dict[int, tuple[Path, ...]]:
    """Finds the files of every step by their names, and reads that of one rank of each.

    Raises:
        TraceError: there is no trace; or ranks have no file, named at once with the files that they should have. Where
            the last rank's file is misplaced, that explains them, and opening says it.
    """
    steps = find_steps(trace_dir)
    if not steps:
        raise TraceError(f"{trace_dir}: no trace here; run with trace.level=sketch")
    listed: dict[int, tuple[Path, ...]] = {}
    for step, folder in steps:
        named = [(name, path) for path in list_folder(folder) if (name := SKETCH_FILE.fullmatch(path.name))]
        if not named:
            raise TraceError(
                f"{folder}: no sketches; the run ended before any rank wrote this step, or trace.level is full"
            )
        by_rank = {int(name[1]): path for name, path in named}
        first = _read_file(by_rank[min(by_rank)], trace_dir)
        writers = list_writers(first.footer.ranks, first.world_size)
        missing = name_missing(by_rank, writers, first.world_size, sketch_name)
        if missing and not _is_misplaced(by_rank[max(by_rank)], trace_dir, first.world_size):
            raise TraceError(f"{folder}: {missing}")
        listed[step] = tuple(path for _, path in named)
    return listed


def _is_misplaced(path: Path, trace_dir: Path, world_size: int) -> bool:
    """Whether a file is of a run of another size, or of another rank than its name says."""
    try:
        rank = _read_file(path, trace_dir)
    except TraceError:
        return False
    return (rank.world_size, sketch_name(rank.place.global_rank)) != (world_size, path.name)


def _open_step(paths: Sequence[Path], trace_dir: Path) -> tuple[RankSketches, ...]:
    folder, shared = paths[0].parent, Shared()
    ranks = [_read_file(path, trace_dir, shared) for path in paths]
    footers, problems = unite_footers({rank.place.global_rank: rank.footer for rank in ranks})
    ranks = [replace(rank, footer=footers[rank.place.global_rank]) for rank in ranks]
    problems = _name_problems(folder, ranks) + problems + _step_problems(ranks)
    if problems:
        raise TraceError(f"{folder}: " + "; ".join(problems))
    return tuple(sorted(ranks, key=lambda rank: rank.place.global_rank))


def _name_problems(folder: Path, ranks: Sequence[RankSketches]) -> list[str]:
    """Lists files whose content does not match their path."""
    problems = []
    for rank in ranks:
        name = SKETCH_FILE.fullmatch(rank.path.name)
        assert name is not None
        if (int(folder.name.removeprefix("step_")), int(name[1])) != (rank.step, rank.place.global_rank):
            problems.append(f"{rank.path.name} holds step {rank.step} of global rank {rank.place.global_rank}")
    return problems


def _step_problems(ranks: Sequence[RankSketches]) -> list[str]:
    """Lists missing ranks, unexpected ranks, and ranks that do not fit the others."""
    sizes = {item.sketch.num_buckets for rank in ranks for item in rank.tensors.values()}
    problems = [f"files of runs with different numbers of buckets {sorted(sizes)}"] if len(sizes) > 1 else []
    return problems + writer_problems(
        {rank.place.global_rank: rank.world_size for rank in ranks},
        {rank.place.global_rank: rank.footer for rank in ranks},
    )


def _read_file(path: Path, trace_dir: Path, shared: Shared | None = None) -> RankSketches:
    with open_file(path, inside=trace_dir) as handle:
        content = read_metadata(path, handle, METADATA_KEY, version=FORMAT_VERSION, kind="file of sketches")
        if set(handle.keys()) != set(_TABLES):
            raise TraceError(f"{path}: tables {sorted(handle.keys())}, expected {sorted(_TABLES)}; {DAMAGED}")
        try:
            tables = {name: handle.get_tensor(name).clone() for name in _TABLES}
        except SafetensorError as error:
            raise TraceError(f"{path}: it cannot be read: {error}") from error
    try:
        stored = STORED_TENSORS.load(content)
        for name, table in tables.items():
            if compute_tensor_digest(table) != stored.tables.get(name):
                raise TraceError(f"{path}: table {name} does not match its digest; {DAMAGED}")
        return _parse_file(path, content, stored, tables, Shared() if shared is None else shared)
    except ValueError as error:
        raise TraceError(f"{path}: the metadata is not that of sketches: {error}") from error


def _parse_file(
    path: Path, content: Mapping[str, Any], stored: StoredTensors, tables: _TableMap, shared: Shared
) -> RankSketches:
    rank_step, footer = parse_rank_step(content), parse_footer(content.get("footer"), shared)
    _check_tables(tables)
    tensors: dict[TraceKey, StoredSketch] = {}
    parts = tuple(map(shared.of, stored.parts))
    rows = zip(stored.tensors, tables["sums"], tables["squares"].tolist(), tables["counts"].tolist(), strict=True)
    for record, sums, squares, counts in rows:
        key = TraceKey(step=rank_step.step, update=record.update, kind=record.kind, name=record.name)
        if key in tensors:
            raise ValueError(f"the {key.describe()} is listed twice")
        tensors[shared.of(key)] = _check_stored(record, _parse_sketch(sums, squares, counts), parts, footer.rows)
    return RankSketches(
        path=path,
        step=rank_step.step,
        place=rank_step.place,
        world_size=rank_step.world_size,
        tensors=tensors,
        footer=footer,
    )


def _check_tables(tables: _TableMap) -> None:
    """Raise ``ValueError`` for tables of another dtype or number of dimensions than are written."""
    found = {name: (table.dtype, table.dim()) for name, table in tables.items()}
    expected = {"sums": (torch.float64, 2), "squares": (torch.float64, 1), "counts": (torch.int64, 2)}
    if found != expected:
        raise ValueError(f"tables {found}; expected {expected}")
    shapes = [tuple(tables[name].shape) for name in _TABLES]
    if not 1 <= shapes[0][1] <= MAX_BUCKETS or shapes[2][1] != _NUM_COUNTS or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"tables of shapes {shapes}; expected rows of 1 to {MAX_BUCKETS}, 1 and {_NUM_COUNTS} numbers")


def _parse_sketch(sums: torch.Tensor, squares: float, counts: Sequence[int]) -> Sketch:
    num_elements, num_nan, num_infinite, fingerprint = counts
    # A digest proves what was written, not that it can be: a square root is taken of this.
    if squares < 0.0 or min(counts[:3]) < 0 or num_nan + num_infinite > num_elements:
        raise ValueError(f"a sum of squares of {squares}, and {num_nan + num_infinite} of {num_elements} not finite")
    return Sketch(
        sums=sums,
        sum_of_squares=squares,
        num_elements=num_elements,
        num_nan=num_nan,
        num_infinite=num_infinite,
        fingerprint=fingerprint % (1 << 64),
    )


def _check_stored(record: StoredTensor, sketch: Sketch, parts: Sequence[ElementSet], rows: RowTable) -> StoredSketch:
    try:
        find_dtype(record.dtype)
    except ValueError as error:
        raise ValueError(f"{record.name} {error}") from error
    if record.part >= len(parts):
        raise ValueError(f"{record.name}: part {record.part} of {len(parts)}")
    part, shape = parts[record.part], record.global_shape
    if not all(_lies_in(rectangle, shape) for rectangle in part):
        raise ValueError(f"{record.name!r} has a part that does not lie in its shape {list(shape)}")
    if record.dims[:1] == ("token",) and (rows.starts or is_virtual(record.dims, shape)):
        check_tokens(record.name, shape, [(item.origin[0], item.sizes[0]) for item in part], rows)
        shape = (rows.num_tokens, *shape[1:])
    # Places are counted in 64 bits. A size of 0 must not hide the others.
    if math.prod(size or 1 for size in shape) > _MAX_ELEMENTS:
        raise ValueError(f"{record.name}: shape {list(shape)} has more than {_MAX_ELEMENTS} elements")
    if sum(rectangle.num_elements for rectangle in part) != sketch.num_elements:
        raise ValueError(f"{record.name} has {sketch.num_elements} elements, its part another number")
    return StoredSketch(
        sketch=sketch,
        dtype=record.dtype,
        global_shape=record.global_shape,
        dims=record.dims,
        is_masked=record.is_masked,
        part=part,
    )


def _lies_in(rectangle: Rectangle, shape: Sequence[int]) -> bool:
    spans = (rectangle.origin, rectangle.sizes, shape)
    return len({len(span) for span in spans}) == 1 and all(
        0 <= start <= start + size <= whole for start, size, whole in zip(*spans, strict=True)
    )
