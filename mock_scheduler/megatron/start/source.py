"""Writes the start of a baseline beside its trace; runs of any layout that start alike read it.

The trace of a step has parameters and buffers (kind ``initial``). What no traced kind has lies in a trace of its own,
``start/`` beside ``trace/``: moments of an optimizer that had been updated before (kind ``optimizer``, here before the
step), and padding rows of the vocabulary (``{name}.padding``). ``start.json`` says how many updates had been counted.

Contract: whole tensors are read one at a time, and each is given up before the next one.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch

from mock_scheduler.errors import TraceError
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.probe.state import StatePiece, read_state
from mock_scheduler.megatron.start.state import count_padding_rows, padding_spec
from mock_scheduler.support.run_files import START_FOLDER
from mock_scheduler.trace.entries import RankPlace, StepFooter, TraceEntry, TraceKey
from mock_scheduler.trace.full.files import find_steps
from mock_scheduler.trace.full.reader import MergedTensor, TraceReader, open_trace
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.shards import ShardSpec, cut_shard
from mock_scheduler.trace.start_report import StartKind, load_start

_KINDS: tuple[StartKind, ...] = ("initial", "optimizer")


def write_start(model: ObservedModel, output_dir: Path, *, step: int, has_moments: bool) -> None:
    """Writes this rank's part of ``start/``; nothing where a layout pads no vocabulary and had no update.

    Raises:
        TraceError: it cannot be written.
    """
    if not has_moments and not _count_rows(model):
        return
    ranks = model.ranks
    place = RankPlace(global_rank=ranks.global_rank, coordinates=ranks.coordinates)
    sink = FullSink(output_dir / START_FOLDER, step=step, place=place, world_size=ranks.world_size)
    try:
        for kind in _KINDS if has_moments else _KINDS[:1]:
            for piece in read_state(model, kind):
                if kind == "optimizer":
                    sink.add(TraceEntry(update=0, kind=kind, spec=piece.spec, tensor=piece.tensor, dims=piece.dims))
                _add_padding(sink, piece, kind, model)
    except BaseException:
        sink.abandon()
        raise
    sink.close(StepFooter(ranks=tuple(range(ranks.world_size)), kinds=_KINDS))


def _add_padding(sink: FullSink, piece: StatePiece, kind: StartKind, model: ObservedModel) -> None:
    spec = padding_spec(piece.spec, model)
    if spec is not None:
        placed = ShardSpec(
            name=spec.name,
            global_shape=spec.global_shape,
            local_shape=spec.local_shape,
            splits=spec.splits,
            flat_range=piece.spec.flat_range,
        )
        sink.add(TraceEntry(update=0, kind=kind, spec=placed, tensor=piece.tensor, dims=piece.dims))


def _count_rows(model: ObservedModel) -> int:
    """Counts the padding rows of the vocabulary on the ranks of this stage."""
    return max((count_padding_rows(piece.spec, model) for piece in read_state(model, "initial")), default=0)


class StartSource:
    """The start of a baseline before ``step``; a context manager.

    num_updates: counted before it; ``None`` where nothing says so.
    """

    def __init__(self, trace_dir: Path, step: int) -> None:
        self.trace_dir = trace_dir
        self.step = step
        self._stack = ExitStack()
        report = load_start(trace_dir.parent)
        self.num_updates = None if report is None else report.num_updates
        self.num_padding_rows = {} if report is None else dict(report.num_padding_rows)

    def __enter__(self) -> StartSource:
        self._trace = self._open(self.trace_dir)
        start_dir = self.trace_dir.parent / START_FOLDER
        self._start = self._open(start_dir) if start_dir.is_dir() and find_steps(start_dir) else None
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def _open(self, folder: Path) -> TraceReader:
        trace = self._stack.enter_context(open_trace(folder, num_tensors=1))
        if self.step not in trace.steps:
            steps = ", ".join(map(str, trace.steps)) or "none"
            raise TraceError(
                f"{folder} has no step {self.step}, but {steps}; trace the baseline with level full from that step on"
            )
        return trace

    def names(self, kind: StartKind) -> tuple[str, ...]:
        """Lists the canonical names of a kind, sorted."""
        reader = self._trace if kind == "initial" else self._start
        keys = () if reader is None else reader.keys(self.step)
        return tuple(sorted(key.name for key in keys if key.kind == kind and not key.name.endswith(".padding")))

    def form(self, kind: StartKind, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Returns the dtype and shape of a whole tensor."""
        return self._reader(kind).dtype_and_shape(self._key(kind, name))

    def read(self, kind: StartKind, spec: ShardSpec, padding: ShardSpec | None) -> torch.Tensor:
        """This rank's local tensor, on the CPU; padding rows that the baseline does not have are 0.

        Raises:
            TraceError: the files cannot be read, or ranks of the baseline did not write their part.
        """
        local = _cut(self._merge(self._reader(kind), self._key(kind, spec.name)), spec)
        if padding is not None and self._start is not None and self._start.has(self._key(kind, padding.name)):
            _put_padding(local, self._merge(self._start, self._key(kind, padding.name)), padding)
        return local

    def _merge(self, reader: TraceReader, key: TraceKey) -> torch.Tensor:
        merged: MergedTensor = reader.merge(key)
        if merged.present is not None:
            raise TraceError(
                f"{key.describe()}: the baseline's trace has only a part of it; let all ranks write (trace.ranks=null)"
            )
        return merged.tensor

    def _reader(self, kind: StartKind) -> TraceReader:
        if kind == "initial":
            return self._trace
        assert self._start is not None  # asked for a name that it listed
        return self._start

    def _key(self, kind: StartKind, name: str) -> TraceKey:
        return TraceKey(step=self.step, update=0, kind=kind, name=name)


def _cut(tensor: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """The local tensor; the whole one itself where this rank holds all of it."""
    return cut_shard(tensor, spec) if spec.splits else tensor


def _put_padding(local: torch.Tensor, rows: torch.Tensor, spec: ShardSpec) -> None:
    """Puts the rows that both layouts have into a local tensor over the vocabulary."""
    (block,) = spec.splits[0].blocks
    length = max(0, min(block.length, rows.shape[0] - block.global_start))
    local[block.local_start : block.local_start + length] = rows[block.global_start : block.global_start + length]
