"""Opens the files of a trace of level ``sketch``: reads and checks each, and that the ranks' files fit together.

Nothing in a header is believed before its digest is checked. The format is in ``sketch_files``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from mock_scheduler.errors import TraceError
from mock_scheduler.support.digests import compute_tensor_digest, open_sealed
from mock_scheduler.support.tensor_bytes import DTYPES
from mock_scheduler.trace.entries import DIM_NAMES, DimName, RankPlace, StepFooter, TraceKey
from mock_scheduler.trace.full.files import SKETCH_FILE, find_steps
from mock_scheduler.trace.full.footers import as_count, as_counts, as_world_size, parse_footer, shared_statements
from mock_scheduler.trace.full.opening import DAMAGED, open_file
from mock_scheduler.trace.kinds import TRACE_KINDS
from mock_scheduler.trace.rectangles import ElementSet, Rectangle
from mock_scheduler.trace.sketch.sketch import Sketch

FORMAT_VERSION = 1
METADATA_KEY = "mock_scheduler.sketch"

_TABLES = ("sums", "squares", "counts")
_TableMap = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredSketch:
    """What a rank holds of one tensor. part: which elements; none where it is empty."""

    sketch: Sketch
    dtype: str
    global_shape: tuple[int, ...]
    dims: tuple[DimName, ...]
    is_masked: bool
    part: ElementSet


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankSketches:
    """One file: everything that a rank traced of a step."""

    path: Path
    step: int
    place: RankPlace
    world_size: int
    tensors: Mapping[TraceKey, StoredSketch]
    footer: StepFooter


def open_sketch_steps(trace_dir: Path) -> dict[int, tuple[RankSketches, ...]]:
    """All steps of a trace, ranks ascending; raises ``TraceError`` as ``sketch_reader.open_sketches`` does."""
    steps = find_steps(trace_dir)
    if not steps:
        raise TraceError(f"{trace_dir}: no trace here; run with trace.level=sketch")
    return {step: _open_step(folder) for step, folder in steps}


def _open_step(folder: Path) -> tuple[RankSketches, ...]:
    ranks = [_read_file(path) for path in sorted(folder.iterdir()) if SKETCH_FILE.fullmatch(path.name)]
    if not ranks:
        raise TraceError(
            f"{folder}: no sketches; the run ended before any rank wrote this step, or trace.level is full"
        )
    problems = _name_problems(folder, ranks) + _step_problems(ranks)
    if problems:
        raise TraceError(f"{folder}: " + "; ".join(problems))
    return tuple(sorted(ranks, key=lambda rank: rank.place.global_rank))


def _name_problems(folder: Path, ranks: Sequence[RankSketches]) -> list[str]:
    """Files that are not what their path says."""
    problems = []
    for rank in ranks:
        name = SKETCH_FILE.fullmatch(rank.path.name)
        assert name is not None
        if (int(folder.name.removeprefix("step_")), int(name[1])) != (rank.step, rank.place.global_rank):
            problems.append(f"{rank.path.name} holds step {rank.step} of global rank {rank.place.global_rank}")
    return problems


def _step_problems(ranks: Sequence[RankSketches]) -> list[str]:
    """Ranks that are missing, that should not be there, or that do not say the same of the step."""
    problems = []
    for what, values in (
        ("world sizes", {rank.world_size for rank in ranks}),
        ("numbers of buckets", {item.sketch.num_buckets for rank in ranks for item in rank.tensors.values()}),
    ):
        if len(values) > 1:
            problems.append(f"files of runs with different {what} {sorted(values)}")
    world_size = max(rank.world_size for rank in ranks)
    found = {rank.place.global_rank for rank in ranks}
    writers = {writer for rank in ranks for writer in rank.footer.ranks} or set(range(world_size))
    if writers - found:
        missing = ", ".join(map(str, sorted(writers - found)))
        problems.append(f"no file of global rank {missing} of {world_size}")
    if found - writers:
        listed = ", ".join(map(str, sorted(writers)))
        strangers = ", ".join(map(str, sorted(found - writers)))
        problems.append(f"a file of global rank {strangers}, where ranks {listed} write the trace")
    first = ranks[0]
    for rank in ranks[1:]:
        said, expected = shared_statements(rank.footer), shared_statements(first.footer)
        differing = [name for name, value in said.items() if value != expected[name]]
        if differing:
            problems.append(
                f"global rank {rank.place.global_rank} says other {', '.join(differing)} than global rank "
                f"{first.place.global_rank}"
            )
    return problems


def _read_file(path: Path) -> RankSketches:
    with open_file(path) as handle:
        metadata = handle.metadata() or {}
        if METADATA_KEY not in metadata:
            raise TraceError(f"{path}: no metadata key {METADATA_KEY!r}; these are no sketches")
        if set(handle.keys()) != set(_TABLES):
            raise TraceError(f"{path}: tables {sorted(handle.keys())}, expected {sorted(_TABLES)}; {DAMAGED}")
        try:
            tables = {name: handle.get_tensor(name).clone() for name in _TABLES}
        except SafetensorError as error:
            raise TraceError(f"{path}: it cannot be read: {error}") from error
    content = _open_metadata(path, metadata[METADATA_KEY])
    try:
        for name, table in tables.items():
            if compute_tensor_digest(table) != content["tables"][name]:
                raise TraceError(f"{path}: table {name} does not match its digest; {DAMAGED}")
        return _parse_file(path, content, tables)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path}: the metadata is not that of sketches: {error!r}") from error


def _open_metadata(path: Path, text: str) -> dict[str, Any]:
    """The metadata's JSON: its digest is checked before anything in it is believed, then its version."""
    try:
        content = open_sealed(text)
    except ValueError as error:
        raise TraceError(f"{path}: the metadata {error}; {DAMAGED}") from error
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise TraceError(
            f"{path}: format version {version!r}, expected {FORMAT_VERSION}; another release wrote it: run it again "
            "with this one"
        )
    return content


def _parse_file(path: Path, content: Mapping[str, Any], tables: _TableMap) -> RankSketches:
    step = as_count(content["step"])
    _check_tables(tables)
    parts = [
        tuple(Rectangle(origin=as_counts(origin), sizes=as_counts(sizes)) for origin, sizes in part)
        for part in content["parts"]
    ]
    tensors: dict[TraceKey, StoredSketch] = {}
    rows = zip(content["tensors"], tables["sums"], tables["squares"].tolist(), tables["counts"].tolist(), strict=True)
    for record, sums, squares, counts in rows:
        key, stored = _parse_stored(record, _parse_sketch(sums, squares, counts), parts, step=step)
        if key in tensors:
            raise ValueError(f"the {key.describe()} is listed twice")
        tensors[key] = stored
    return RankSketches(
        path=path,
        step=step,
        place=RankPlace(
            global_rank=as_count(content["global_rank"]),
            coordinates={axis: as_count(place) for axis, place in content["coordinates"].items()},
        ),
        world_size=as_world_size(content["world_size"]),
        tensors=tensors,
        footer=parse_footer(content["footer"]),
    )


def _check_tables(tables: _TableMap) -> None:
    """Raise ``ValueError`` for tables of another dtype or number of dimensions than are written."""
    found = {name: (table.dtype, table.dim()) for name, table in tables.items()}
    expected = {"sums": (torch.float64, 2), "squares": (torch.float64, 1), "counts": (torch.int64, 2)}
    if found != expected:
        raise ValueError(f"tables {found}; expected {expected}")


def _parse_sketch(sums: torch.Tensor, squares: float, counts: Sequence[int]) -> Sketch:
    num_elements, num_nan, num_infinite, fingerprint = counts
    if squares < 0.0 or num_nan + num_infinite > num_elements:
        raise ValueError(f"a sum of squares of {squares}, and {num_nan + num_infinite} of {num_elements} not finite")
    return Sketch(
        sums=sums,
        sum_of_squares=squares,
        num_elements=as_count(num_elements),
        num_nan=as_count(num_nan),
        num_infinite=as_count(num_infinite),
        fingerprint=fingerprint % (1 << 64),
    )


def _parse_stored(
    record: Sequence[Any], sketch: Sketch, parts: Sequence[ElementSet], *, step: int
) -> tuple[TraceKey, StoredSketch]:
    update, kind, name, dtype, shape, dims, is_masked, position = record
    if kind not in TRACE_KINDS or dtype not in DTYPES or not DIM_NAMES.issuperset(dims):
        raise ValueError(f"unknown kind, dtype or dimension in {record}")
    part, global_shape = parts[as_count(position)], as_counts(shape)
    if not isinstance(name, str) or not all(_lies_in(rectangle, global_shape) for rectangle in part):
        raise ValueError(f"{name!r} has a part that does not lie in its shape {list(global_shape)}")
    if sum(rectangle.num_elements for rectangle in part) != sketch.num_elements:
        raise ValueError(f"{name} has {sketch.num_elements} elements, its part another number")
    return TraceKey(step=step, update=as_count(update), kind=kind, name=name), StoredSketch(
        sketch=sketch,
        dtype=dtype,
        global_shape=global_shape,
        dims=tuple(dims),
        is_masked=bool(is_masked),
        part=part,
    )


def _lies_in(rectangle: Rectangle, shape: Sequence[int]) -> bool:
    spans = (rectangle.origin, rectangle.sizes, shape)
    return len({len(span) for span in spans}) == 1 and all(
        start + size <= whole for start, size, whole in zip(*spans, strict=True)
    )
