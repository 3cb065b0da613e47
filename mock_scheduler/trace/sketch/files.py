"""Writes trace files of level ``sketch``: one small safetensors file per step and rank.

This is the format, version 1::

    {trace_dir}/step_000000/rank_00000.sketch.safetensors

A file is written aside, fsynced and renamed: its presence is its completeness. It stores three tables with one row for
each traced tensor the rank holds in whole or in part: ``sums`` float64 ``[K, B]``, ``squares`` float64 ``[K]`` and
``counts`` int64 ``[K, 4]``: elements, NaN, infinities, and the fingerprint as a signed integer (``sketch`` defines
them). One metadata key, ``mock_scheduler.sketch``, holds canonical JSON that carries its own SHA-256 as ``digest``
(``digests.seal``):

- ``format_version``, ``step``, ``global_rank``, ``world_size``, ``coordinates`` (of the rank, by axis);
- ``tensors``: in the tables' order ``[update, kind, name, dtype, global shape, dims, is_masked, position in parts]``;
- ``parts``: the elements of the whole tensor a rank holds: lists of rectangles ``[origin, sizes]``, put together
  where they touch, so ranks holding the same elements say the same. Of rows by content, tokens are at the places of
  ``rows`` in the footer, in a dimension of 2^62;
- ``tables``: by name the digest of each (``digests.compute_tensor_digest``); ``footer``: as in ``files``.

Equal content gives equal bytes. ``sketch.reader`` reads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mock_scheduler.errors import TraceError
from mock_scheduler.support.digests import JSON, canonical_json, seal
from mock_scheduler.support.files import written_aside
from mock_scheduler.support.tensor_bytes import compute_tensor_digest, dtype_name
from mock_scheduler.trace.entries import DimName, RankPlace, StepFooter, TraceEntry, TraceKey
from mock_scheduler.trace.full.files import (
    PART_FILE,
    SKETCH_FILE,
    check_unwritten,
    find_steps,
    sketch_name,
    step_folder,
)
from mock_scheduler.trace.full.header import check_footer, footer_as_json, rank_step_as_json
from mock_scheduler.trace.full.pieces import RankStep, check_spec
from mock_scheduler.trace.geometry import ElementSet, Rectangle, count_union, join
from mock_scheduler.trace.sketch.opening import (
    FORMAT_VERSION,
    METADATA_KEY,
    STORED_TENSORS,
    StoredTensor,
    StoredTensors,
)
from mock_scheduler.trace.sketch.sketch import NUM_BUCKETS, Sketch, finish_sketches
from mock_scheduler.trace.sketch.sums import SketchSums


def has_full(trace_dir: Path) -> bool:
    """Whether whole tensors are in a trace."""
    return _has_file(trace_dir, PART_FILE)


def has_sketches(trace_dir: Path) -> bool:
    """Whether sketches are in a trace."""
    return _has_file(trace_dir, SKETCH_FILE)


def sketch_path(trace_dir: Path, *, step: int, global_rank: int) -> Path:
    """Returns the file of one step and rank."""
    return step_folder(trace_dir, step) / sketch_name(global_rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """Holds the common form of all pieces of a tensor."""

    dtype: torch.dtype
    global_shape: tuple[int, ...]
    dims: tuple[DimName, ...]
    is_masked: bool


@dataclass(kw_only=True, slots=True, eq=False)
class _Held:
    """The part of one tensor a rank has given."""

    form: _Form
    sums: SketchSums
    rectangles: list[Rectangle] = field(default_factory=list)


_Joined = dict[tuple[Rectangle, ...], tuple[ElementSet, int]]
"""The set of the elements of some rectangles, and how many it has."""


class SketchSink:
    """Takes one rank's entries of one step into sketches; a ``TraceSink``.

    Nothing of an entry is kept. Raises ``TraceError`` where this rank's step is traced already. One thread calls it.
    Without ``close`` nothing is written.
    """

    def __init__(
        self, trace_dir: Path, *, step: int, place: RankPlace, world_size: int, num_buckets: int = NUM_BUCKETS
    ) -> None:
        self._trace_dir = trace_dir
        self._path = sketch_path(trace_dir, step=step, global_rank=place.global_rank)
        self._rank_step = RankStep(step=step, place=place, world_size=world_size)
        self._num_buckets = num_buckets
        self._held: dict[TraceKey, _Held] = {}
        self._is_closed = False
        check_unwritten(self._trace_dir, self._rank_step)

    def add(self, entry: TraceEntry) -> None:
        """Add one piece to its tensor's sketch.

        Raises ``TraceError`` for a tensor that does not have its spec's shape or is complex, for a spec that
        contradicts itself, and for a tensor given twice that is not by token.
        """
        self._check_open()
        spec = entry.spec
        where = f"{self._rank_step.describe()}: {entry.kind} of {spec.name}"
        try:
            check_spec(spec)
        except ValueError as error:
            raise TraceError(f"{where}: the shard spec contradicts itself: {error}") from error
        key = TraceKey(step=self._rank_step.step, update=entry.update, kind=entry.kind, name=spec.name)
        form = _Form(
            dtype=entry.tensor.dtype, global_shape=spec.global_shape, dims=entry.dims, is_masked=entry.is_masked
        )
        held = self._held.get(key)
        if held is not None and not entry.is_by_token:
            raise TraceError(f"{where} is given twice")
        if held is not None and held.form != form:
            raise TraceError(f"{where} has pieces of different form: {held.form} and {form}")
        try:
            sums = held.sums if held is not None else SketchSums(entry.tensor.dtype, entry.tensor.device)
            rectangles = sums.add(entry.tensor, spec)
        except TraceError as error:
            raise TraceError(f"{where}: {error}") from error
        if held is None:
            held = self._held[key] = _Held(form=form, sums=sums)
        held.rectangles += rectangles

    def close(self, footer: StepFooter) -> None:
        """Write the file; raises ``TraceError`` where it cannot be, and where a row or an element was given twice."""
        self._check_open()
        self._is_closed = True
        check_footer(footer, self._rank_step)
        # Again, since another process may have written the step while this one collected.
        check_unwritten(self._trace_dir, self._rank_step)
        held = sorted(self._held.items(), key=lambda item: (item[0].update, item[0].kind, item[0].name))
        joined: _Joined = {}
        parts = [self._own_part(key, item, joined) for key, item in held]
        tables = _tables(finish_sketches([item.sums for _, item in held], num_buckets=self._num_buckets))
        if not held:
            tables["sums"] = torch.zeros(0, self._num_buckets, dtype=torch.float64)
        positions = {part: position for position, part in enumerate(dict.fromkeys(parts))}
        stored = StoredTensors(
            tensors=tuple(
                _store_tensor(key, item.form, positions[part]) for (key, item), part in zip(held, parts, strict=True)
            ),
            parts=tuple(positions),
            tables={name: compute_tensor_digest(table) for name, table in tables.items()},
        )
        content: dict[str, JSON] = {
            "format_version": FORMAT_VERSION,
            **rank_step_as_json(self._rank_step),
            **STORED_TENSORS.dump(stored),
            "footer": footer_as_json(footer),
        }
        try:
            with written_aside(self._path) as aside:
                save_file(tables, aside, metadata={METADATA_KEY: canonical_json(seal(content))})
        except (OSError, SafetensorError) as error:
            raise TraceError(f"{self._path}: the trace cannot be written: {error}") from error
        self._held = {}

    def abandon(self) -> None:
        """Write nothing."""
        self._is_closed = True
        self._held = {}

    def _own_part(self, key: TraceKey, held: _Held, joined: _Joined) -> ElementSet:
        """Gives the rank's part. joined: parts found already, as many tensors of a step have the same rectangles."""
        rectangles = tuple(held.rectangles)
        if rectangles not in joined:
            joined[rectangles] = join(rectangles), count_union(rectangles)
        part, num_elements = joined[rectangles]
        # Sums would count an element twice, and no reader could tell.
        if num_elements != held.sums.num_elements:
            twice = held.sums.num_elements - num_elements
            raise TraceError(f"{self._rank_step.describe()}: {twice} elements of the {key.describe()} are given twice")
        return part

    def _check_open(self) -> None:
        if self._is_closed:
            raise TraceError(f"{self._rank_step.describe()}: the trace of this step is closed")


def _has_file(trace_dir: Path, name: re.Pattern[str]) -> bool:
    return any(name.fullmatch(path.name) for _, folder in find_steps(trace_dir) for path in folder.iterdir())


def _store_tensor(key: TraceKey, form: _Form, position: int) -> StoredTensor:
    return StoredTensor(
        update=key.update,
        kind=key.kind,
        name=key.name,
        dtype=dtype_name(form.dtype),
        global_shape=form.global_shape,
        dims=form.dims,
        is_masked=form.is_masked,
        part=position,
    )


def _tables(sketches: Sequence[Sketch]) -> dict[str, torch.Tensor]:
    counts = [[item.num_elements, item.num_nan, item.num_infinite, _as_signed(item.fingerprint)] for item in sketches]
    return {
        "sums": torch.stack([item.sums for item in sketches]) if sketches else torch.empty(0),
        "squares": torch.tensor([item.sum_of_squares for item in sketches], dtype=torch.float64),
        "counts": torch.tensor(counts, dtype=torch.int64).view(-1, 4),
    }


def _as_signed(fingerprint: int) -> int:
    return fingerprint - (1 << 64) if fingerprint >= 1 << 63 else fingerprint
