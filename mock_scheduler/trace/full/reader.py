"""Reads a trace of level ``full``: gives whole tensors, whatever layout wrote them.

Files are mapped into memory and merged one tensor at a time: memory is bounded by the largest tensor. Whatever several
ranks hold must agree bit for bit; where it does not, the merge says who differs from whom. The format is in ``files``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError

from mock_scheduler.errors import TraceError
from mock_scheduler.support.fetched_folders import complete
from mock_scheduler.support.text import list_some
from mock_scheduler.trace.entries import STEP_KINDS, DimName, RankPlace, StepFooter, TraceKey
from mock_scheduler.trace.full.memory import MemoryPool
from mock_scheduler.trace.full.merging import MergedTensor, check_digests, merge_pieces
from mock_scheduler.trace.full.opening import OpenedStep, RankFiles, open_steps
from mock_scheduler.trace.full.part import Handle, open_file
from mock_scheduler.trace.full.pieces import DAMAGED, Piece, describe_wrong_digest, has_crc32, has_sha256
from mock_scheduler.trace.full.presence import Expectation
from mock_scheduler.trace.geometry import holds_element
from mock_scheduler.trace.replicas import ReplicaConflict

__all__ = ["MergedTensor", "Piece", "ReplicaConflict", "TraceReader", "open_trace"]

_MAX_LISTED = 10
#: Files mapped at once. The ranks of a pipeline stage hold the same tensors, which are read one after another: with
#: fewer, each of their files would be mapped anew for each tensor. A process may have 65,530 maps on Linux.
_MAX_MAPPED_FILES = 4096
#: A gradient, and a parameter before and after an update, which are compared together.
_NUM_TENSORS = 3


def open_trace(
    trace_dir: Path, *, num_tensors: int = _NUM_TENSORS, steps: Collection[int] | None = None
) -> TraceReader:
    """Read the headers of every file of a trace, and check that they are complete and fit together.

    ``num_tensors``: merged tensors that are used together; memory of as many is kept to be used again.
    ``steps``: the only ones to open, as far as they are there; ``None``: all.

    Raises ``TraceError`` listing everything wrong with a step: a missing rank or part, a file that does not
    match its name, ranks that disagree about the step; and at once where there is no trace, or a
    file is unreadable.
    """
    return TraceReader(open_steps(trace_dir, steps=steps), num_tensors=num_tensors)


class TraceReader:
    """Reads an opened trace; a context manager, closed by ``close``.

    Holds at most 4,096 files mapped at a time, all of one step, and none open. One thread at a time uses a reader;
    several readers are independent.
    """

    def __init__(self, steps: dict[int, OpenedStep], *, num_tensors: int = _NUM_TENSORS) -> None:
        self._steps = steps
        self._open_step: int | None = None
        self._handles: OrderedDict[Path, tuple[Handle, ExitStack]] = OrderedDict()
        self._memory = MemoryPool(num_tensors=num_tensors)
        self._expected: dict[tuple[int, int | None], torch.Tensor] = {}
        self._sizes: dict[int, int] = {}

    @property
    def steps(self) -> tuple[int, ...]:
        """Returns the traced steps, ascending."""
        return tuple(sorted(self._steps))

    def ranks(self, step: int) -> tuple[RankPlace, ...]:
        """Returns the ranks that wrote ``step``, by global rank."""
        return tuple(rank_files.place for rank_files in self._steps[step].ranks)

    def is_complete(self, step: int) -> bool:
        """Whether all ranks of the run wrote ``step``; otherwise merged tensors may have gaps."""
        return self._steps[step].is_complete

    def is_by_content(self, step: int) -> bool:
        """Whether rows are by content: their places in ranks' files follow from their identities, and are closed up."""
        return self._steps[step].is_by_content

    def keys(self, step: int) -> frozenset[TraceKey]:
        """Returns every tensor of any rank at ``step``."""
        return frozenset(self._steps[step].pieces)

    def has(self, key: TraceKey) -> bool:
        """Whether any rank wrote this tensor."""
        return key.step in self._steps and key in self._steps[key.step].pieces

    def footer(self, step: int) -> StepFooter:
        """The first rank's statements about the whole step; rows and selection are the same on every rank."""
        return self._steps[step].ranks[0].footer

    def footers(self, step: int) -> tuple[tuple[RankPlace, StepFooter], ...]:
        """Each rank's statements, by global rank: ledgers are its own."""
        return tuple((rank_files.place, rank_files.footer) for rank_files in self._steps[step].ranks)

    def size_bytes(self, step: int) -> int:
        """Returns all stored tensors of a step."""
        return sum(piece.record.size_bytes for rank_files in self._steps[step].ranks for piece in rank_files.pieces)

    def pieces(self, key: TraceKey) -> tuple[Piece, ...]:
        """The pieces ranks stored of a tensor, by global rank; raises ``TraceError`` where no rank wrote it."""
        if not self.has(key):
            raise TraceError(f"no rank wrote the {key.describe()}")
        return self._steps[key.step].pieces[key]

    def dtype_and_shape(self, key: TraceKey) -> tuple[torch.dtype, tuple[int, ...]]:
        """The dtype and shape of the whole tensor, as the first rank says."""
        record = self.pieces(key)[0].record
        return record.dtype, record.spec.global_shape

    def dims(self, key: TraceKey) -> tuple[DimName, ...]:
        """The name of each dimension; empty where nobody said."""
        return self.pieces(key)[0].record.dims

    def is_masked(self, key: TraceKey) -> bool:
        """Whether it is a token tensor defined at some tokens only."""
        return self.pieces(key)[0].record.is_masked

    def holders(self, key: TraceKey, index: tuple[int, ...]) -> tuple[RankPlace, ...]:
        """Returns the ranks holding an element, by global rank."""
        found = {piece.place.global_rank: piece.place for piece in self.pieces(key) if holds_element(piece.spec, index)}
        return tuple(found.values())

    def merge(
        self, key: TraceKey, *, ranks: Collection[int] | None = None, may_lack_tokens: bool = False
    ) -> MergedTensor:
        """Returns the whole tensor from all ranks' pieces, and disagreeing replicas.

        A tensor one piece holds entirely is a view of the mapped file; writing to it changes no file.
        Raises ``TraceError`` where no rank holds the tensor, ranks disagree on its form, stored bytes do not have their
        CRC-32, or one rank holds an element twice; where all ranks of the run wrote, also where an element is held by
        none. Where the trace tells the rows of an update, a token tensor with a token of another row is an error, and
        (unless it is masked) so is a token of its rows held by no rank.
        ``may_lack_tokens``: the run is being judged, and a row it left out is a finding, told by ``missing``.
        ``ranks``: put together the pieces of these global ranks and nothing else; other elements are absent.
        """
        pieces, rows = self.pieces(key), self.footer(key.step).rows
        if ranks is None:
            expectation = Expectation(
                # A rank writes what it alone recomputed otherwise.
                is_complete=self.is_complete(key.step) and key.kind != "recomputed",
                rows=rows,
                find_tokens=partial(self._expected_tokens, key) if self.footer(key.step).update_rows else None,
                stored_bytes=self._stored_bytes(key.step),
            )
        else:
            pieces = tuple(piece for piece in pieces if piece.place.global_rank in ranks)
            stored_bytes = self._stored_bytes(key.step)
            expectation = Expectation(is_complete=False, rows=rows, find_tokens=None, stored_bytes=stored_bytes)
        if not pieces:
            raise TraceError(f"none of global ranks {sorted(ranks or ())} wrote the {key.describe()}")
        merged = merge_pieces(key, pieces, self._load, expectation, self._memory)
        if merged.missing and not may_lack_tokens:
            raise TraceError(f"{key.describe()}: {merged.missing}")
        return merged

    def verify(self) -> int:
        """Read every byte and check it against its SHA-256; the number of bytes.

        Raises ``TraceError`` naming the file and tensor of whatever does not match.
        """
        problems: list[str] = []
        num_bytes = 0
        for step in self.steps:
            for rank_files in self._steps[step].ranks:
                problems += self._find_damage(rank_files)
            num_bytes += self.size_bytes(step)
        if problems:
            raise TraceError(f"{list_some(problems, _MAX_LISTED)}; {DAMAGED}")
        return num_bytes

    def check_digests(self, key: TraceKey) -> None:
        """Read all pieces of one tensor and check them against their SHA-256.

        Raises ``TraceError`` naming file and tensor of whatever does not match.
        """
        check_digests((piece, self._load(piece)) for piece in self.pieces(key))

    def close(self) -> None:
        """Close the open files; merged tensors stay valid."""
        self._memory.clear()
        self._close_files()

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _close_files(self) -> None:
        for _, stack in self._handles.values():
            stack.close()
        self._handles.clear()
        self._open_step = None

    def _stored_bytes(self, step: int) -> int:
        if step not in self._sizes:
            self._sizes[step] = self.size_bytes(step)
        return self._sizes[step]

    def _expected_tokens(self, key: TraceKey) -> torch.Tensor:
        """bool ``[T]``: tokens of the rows the key's step or update has."""
        place = key.step, None if key.kind in STEP_KINDS else key.update
        if place not in self._expected:
            self._expected[place] = _tokens_of(self.footer(key.step), place[1])
        return self._expected[place]

    def _find_damage(self, rank_files: RankFiles) -> list[str]:
        problems = []
        # Pieces come part by part.
        for path, pieces in groupby(rank_files.pieces, key=lambda piece: piece.path):
            complete(path)
            with open_file(path, inside=path.parents[1]) as handle:
                for piece in pieces:
                    problems += _name_wrong_digests(piece, _read(handle, piece))
        return problems

    def _load(self, piece: Piece) -> torch.Tensor:
        """The stored elements as they were written: of the local shape, or flat for a flat range."""
        tensor = _read(self._handle_of(piece), piece)
        # CRC-32 here, since every read pays; ``verify`` compares SHA-256.
        if not has_crc32(piece, tensor):
            raise TraceError(f"{describe_wrong_digest(piece, 'CRC-32')}; {DAMAGED}")
        return tensor

    def _handle_of(self, piece: Piece) -> Handle:
        """The mapped file of a piece; the one that was asked for longest ago goes where there are too many."""
        if self._open_step != piece.record.key.step:
            self._close_files()
            self._open_step = piece.record.key.step
        known = self._handles.pop(piece.path, None)
        if known is None:
            if len(self._handles) >= _MAX_MAPPED_FILES:
                _, (_, oldest) = self._handles.popitem(last=False)
                oldest.close()
            with ExitStack() as stack:
                complete(piece.path)
                handle = stack.enter_context(open_file(piece.path, inside=piece.path.parents[1]))
                known = handle, stack.pop_all()
        self._handles[piece.path] = known
        return known[0]


def _read(handle: Handle, piece: Piece) -> torch.Tensor:
    try:
        return handle.get_tensor(piece.record.stored_name)
    except SafetensorError as error:
        raise TraceError(f"{piece.path}: {piece.record.stored_name} cannot be read: {error}") from error


def _name_wrong_digests(piece: Piece, tensor: torch.Tensor) -> list[str]:
    """Describes the first digest that stored elements do not have; nothing where they have both."""
    if not has_crc32(piece, tensor):
        return [describe_wrong_digest(piece, "CRC-32")]
    return [] if has_sha256(piece, tensor) else [describe_wrong_digest(piece, "SHA-256")]


def _tokens_of(footer: StepFooter, update: int | None) -> torch.Tensor:
    """Returns bool ``[T]``: tokens of an update's rows, or of all rows for ``None``."""
    rows: Sequence[int] = range(len(footer.rows.lengths))
    if update is not None:
        rows = footer.update_rows[update] if update < len(footer.update_rows) else ()
    is_in = torch.zeros(len(footer.rows.lengths), dtype=torch.bool)
    is_in[list(rows)] = True
    return torch.repeat_interleave(is_in, torch.tensor(footer.rows.lengths, dtype=torch.int64))
