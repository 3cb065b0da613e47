"""Opens the files of a trace: reads every header, and checks that the ranks' parts are all there and fit together.

Tensors are not read here. Names come first: a rank without a file is said when two headers of its step were read, of
however many. What ranks and pieces have in common is kept once (``Shared``), so memory follows from their number alone.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from mock_scheduler.errors import TraceError
from mock_scheduler.trace.entries import RankPlace, StepFooter, TraceKey
from mock_scheduler.trace.full.files import FORMAT_VERSION, OLD_RANK_FILE, PART_FILE, SKETCH_FILE, find_steps, part_name
from mock_scheduler.trace.full.header import shared_statements
from mock_scheduler.trace.full.part import Part, another_release, read_part
from mock_scheduler.trace.full.pieces import Piece, Shared, check_size
from mock_scheduler.trace.rows import DensePlaces, is_virtual, unite_footers

_NUM_NAMED = 20
#: Of all opened steps that are kept together, headers alone: half a kilobyte each, so 100 MB.
_MOST_PIECES_KEPT = 200_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFiles:
    """Holds one rank's step: all of its parts, in order, and the pieces they store."""

    place: RankPlace
    world_size: int
    paths: tuple[Path, ...]
    pieces: tuple[Piece, ...]
    footer: StepFooter


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedStep:
    """Holds a complete step. ranks: ascending by global rank. pieces: by tensor, ascending by global rank.

    is_by_content: the places of rows follow from their identities; footers and pieces have them one after another.
    """

    ranks: tuple[RankFiles, ...]
    pieces: Mapping[TraceKey, tuple[Piece, ...]]
    is_by_content: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether every rank of the run wrote."""
        return len(self.ranks) == self.ranks[0].world_size


def open_steps(trace_dir: Path, *, steps: Collection[int] | None = None) -> dict[int, OpenedStep]:
    """The steps of a trace, of ``steps`` alone where they are given; raises ``TraceError`` as ``reader.open_trace``."""
    listed = check_ranks(trace_dir, steps=steps)
    return {step: _open_again(paths, trace_dir) for step, paths in listed.items()}


#: A file as the system knows it: whoever changes its content changes one of these numbers.
_FileState = tuple[Path, tuple[int, ...]]


class _KeptSteps:
    """Opened steps, to be given again while their files are unchanged; those asked for longest ago go first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: OrderedDict[tuple[tuple[_FileState, ...], Path], OpenedStep] = OrderedDict()
        self._num_pieces = 0

    def give(self, files: tuple[_FileState, ...], trace_dir: Path) -> OpenedStep:
        """Opens a step, or gives it again; raises ``TraceError`` as ``open_steps``."""
        with self._lock:
            known = self._steps.get((files, trace_dir))
            if known is not None:
                self._steps.move_to_end((files, trace_dir))
                return known
        opened = _open_step([path for path, _ in files], trace_dir)
        with self._lock:
            if (files, trace_dir) not in self._steps:
                self._steps[files, trace_dir] = opened
                self._num_pieces += _count_pieces(opened)
            while self._num_pieces > _MOST_PIECES_KEPT:
                self._num_pieces -= _count_pieces(self._steps.popitem(last=False)[1])
        return opened


def _count_pieces(step: OpenedStep) -> int:
    """Counts the pieces of a step; a rank with none counts as one."""
    return sum(max(len(rank_files.pieces), 1) for rank_files in step.ranks)


_KEPT = _KeptSteps()


def _open_again(paths: Sequence[Path], trace_dir: Path) -> OpenedStep:
    """Opens a step, or gives it again: an alignment compares its baseline with every run, and parsing is dear."""
    try:
        # Of what a link leads to, since that is what is read.
        states = [(path, path.stat()) for path in paths]
    except OSError as error:
        raise TraceError(f"{paths[0].parent}: cannot be looked into: {error.strerror or error}") from error
    files = tuple(
        (path, (is_.st_dev, is_.st_ino, is_.st_size, is_.st_mtime_ns, is_.st_ctime_ns)) for path, is_ in states
    )
    return _KEPT.give(files, trace_dir)


def check_ranks(trace_dir: Path, *, steps: Collection[int] | None = None) -> dict[int, tuple[Path, ...]]:
    """Finds the files of every step by their names, and reads the header of one rank of each, or of two.

    ``steps``: other ones are passed over, unread; ``None``: all.

    Raises:
        TraceError: there is no trace; or ranks have no file, named at once with the files that they should have. Where
            the last rank's file is misplaced, that explains them, and opening says it.
    """
    found = find_steps(trace_dir)
    if not found:
        raise TraceError(f"{trace_dir}: no trace here; run with trace.level=full")
    listed: dict[int, tuple[Path, ...]] = {}
    for step, folder in found:
        if steps is not None and step not in steps:
            continue
        paths = listed[step] = _list_parts(folder)
        by_rank = {_named(path)[0]: path for path in paths}
        # Its highest part: the last one says which ranks write the trace.
        part = read_part(by_rank[min(by_rank)], trace_dir)
        if part.ending is not None:
            world_size = part.rank_step.world_size
            missing = name_missing(by_rank, list_writers(part.ending.footer.ranks, world_size), world_size, part_name)
            if missing and not _is_misplaced(by_rank[max(by_rank)], trace_dir, world_size):
                raise TraceError(f"{folder}: {missing}")
    return listed


def _is_misplaced(path: Path, trace_dir: Path, world_size: int) -> bool:
    """Whether a file is of a run of another size, or of another rank than its name says; opening says all of that."""
    try:
        part = read_part(path, trace_dir)
    except TraceError:
        return False
    return (part.rank_step.world_size, part.rank) != (world_size, _named(path)[0])


def list_folder(folder: Path) -> list[Path]:
    """Lists the files of a step, sorted; raises ``TraceError`` where the folder cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise TraceError(f"{folder}: cannot be looked into: {error.strerror or error}") from error


def _list_parts(folder: Path) -> tuple[Path, ...]:
    paths = list_folder(folder)
    for path in paths:
        if OLD_RANK_FILE.fullmatch(path.name):
            raise TraceError(f"{path}: {another_release('format version 2 or less', FORMAT_VERSION)}")
    parts = tuple(path for path in paths if PART_FILE.fullmatch(path.name))
    if not parts:
        if any(SKETCH_FILE.fullmatch(path.name) for path in paths):
            raise TraceError(
                f"{folder}: sketches, where other steps have whole tensors, as of a run that was resumed with another "
                "trace.level; move the step folders of one level to another folder"
            )
        raise TraceError(f"{folder}: no rank file; the run ended before any rank wrote this step")
    return parts


def _named(path: Path) -> tuple[int, int]:
    """Returns the global rank and the part that a file is named after."""
    name = PART_FILE.fullmatch(path.name)
    assert name is not None
    return int(name[1]), int(name[2])


def _open_step(paths: Sequence[Path], trace_dir: Path) -> OpenedStep:
    folder, shared = paths[0].parent, Shared()
    parts = [read_part(path, trace_dir, shared=shared) for path in paths]
    # All problems of a step are listed at once: a lost file mostly explains several of them.
    by_rank: dict[int, list[Part]] = {}
    for part in parts:
        by_rank.setdefault(part.rank, []).append(part)
    problems = _name_problems(folder, parts)
    for rank in sorted(by_rank):
        problems += _part_problems(rank, by_rank[rank])
    stated = {part.rank: part.ending.footer for part in parts if part.ending is not None}
    world_sizes = {part.rank: part.rank_step.world_size for part in parts}
    footers, row_problems = unite_footers(stated)
    problems += row_problems + writer_problems(world_sizes, footers)
    if problems:
        raise TraceError(f"{folder}: " + "; ".join(problems))
    ranks = tuple(_join_parts(by_rank[rank], footers[rank]) for rank in sorted(by_rank))
    rows = ranks[0].footer.rows
    ranks = _close_gaps(ranks, DensePlaces.of(rows)) if rows.starts else ranks
    pieces: dict[TraceKey, list[Piece]] = {}
    for rank_files in ranks:
        for piece in rank_files.pieces:
            if is_virtual(piece.record.dims, piece.spec.global_shape):
                raise TraceError(
                    f"{piece.path}: {piece.record.stored_name} has rows by content; no rank lists these rows"
                )
            pieces.setdefault(piece.record.key, []).append(piece)
    return OpenedStep(
        ranks=ranks, pieces={key: tuple(found) for key, found in pieces.items()}, is_by_content=bool(rows.starts)
    )


def _close_gaps(ranks: Sequence[RankFiles], places: DensePlaces) -> tuple[RankFiles, ...]:
    """Lays the rows of a step one after another, in the footers and in the pieces of token tensors."""
    return tuple(
        replace(
            rank_files,
            pieces=tuple(_move_piece(piece, places) for piece in rank_files.pieces),
            footer=replace(rank_files.footer, rows=places.rows),
        )
        for rank_files in ranks
    )


def _move_piece(piece: Piece, places: DensePlaces) -> Piece:
    record = piece.record
    if record.dims[:1] != ("token",):
        return piece
    try:
        if not is_virtual(record.dims, record.spec.global_shape):
            raise ValueError(f"{record.key.name}: {record.spec.global_shape[0]} tokens, where rows are by content")
        spec = places.move(record.spec)
        check_size(spec.name, record.dtype, spec.global_shape)
    except ValueError as error:
        raise TraceError(f"{piece.path}: the metadata is not that of a trace: {error}") from error
    return replace(piece, record=replace(record, spec=spec))


def _name_problems(folder: Path, parts: Sequence[Part]) -> list[str]:
    """Lists files whose content does not match their path, and parts that are there twice."""
    problems = []
    seen: dict[tuple[int, int], str] = {}
    for part in parts:
        named = (int(folder.name.removeprefix("step_")), *_named(part.path))
        if named != (part.rank_step.step, part.rank, part.index):
            problems.append(
                f"{part.path.name} holds part {part.index} of step {part.rank_step.step} of global rank {part.rank}"
            )
        earlier = seen.setdefault((part.rank, part.index), part.path.name)
        if earlier != part.path.name:
            problems.append(f"{earlier} and {part.path.name} are both part {part.index} of global rank {part.rank}")
    return problems


def _part_problems(rank: int, parts: Sequence[Part]) -> list[str]:
    """Lists missing parts of one rank, and parts of another run than its last part."""
    by_index = {part.index: part for part in parts}
    last = next((part for part in parts if part.ending is not None), None)
    if last is None or last.ending is None:
        found = ", ".join(map(str, sorted(by_index)))
        return [f"global rank {rank} has no last part, only part {found}: it did not end this step, or a file is lost"]
    problems = []
    if last.index != last.num_parts - 1:
        problems.append(f"{last.path.name} says that it is the last of {last.num_parts} parts")
    missing = [index for index in range(len(last.ending.earlier_parts)) if index not in by_index]
    if missing:
        problems.append(f"no part {', '.join(map(str, missing))} of {last.num_parts} of global rank {rank}")
    beyond = [part.path.name for part in parts if part.index >= last.num_parts]
    if beyond:
        problems.append(f"{', '.join(beyond)} beyond the {last.num_parts} parts of global rank {rank}")
    for index, digest in enumerate(last.ending.earlier_parts):
        # Parts of two runs may both be sound; the last part's digests tell which ones belong to it.
        if index in by_index and by_index[index].digest != digest:
            problems.append(f"{by_index[index].path.name} is not of the same run as {last.path.name}")
    return problems


def writer_problems(world_sizes: Mapping[int, int], footers: Mapping[int, StepFooter]) -> list[str]:
    """Lists missing ranks, unexpected ranks, and ranks that say otherwise of the step.

    Args:
        world_sizes: by global rank, of every rank with a file.
        footers: by global rank, of every rank at the step's end.
    """
    problems = []
    if len(set(world_sizes.values())) > 1:
        problems.append(f"files of runs with different world sizes {sorted(set(world_sizes.values()))}")
    world_size = max(world_sizes.values())
    # Ranks mostly say the same: their lists are looked at once.
    stated = set().union(*{footer.ranks for footer in footers.values()})
    writers = list_writers(stated, world_size)
    missing = name_missing(world_sizes, writers, world_size)
    problems += [missing] if missing else []
    strangers = sorted(rank for rank in world_sizes if rank not in writers)
    if strangers:
        listed = ", ".join(map(str, writers)) if len(writers) < world_size else f"0 to {world_size - 1}"
        problems.append(f"a file of global rank {', '.join(map(str, strangers))}, where ranks {listed} write the trace")
    statements = {rank: shared_statements(footers[rank]) for rank in sorted(footers)}
    first = min(statements, default=0)
    for rank, said in statements.items():
        differing = [name for name, value in said.items() if value != statements[first][name]]
        if differing:
            problems.append(f"global rank {rank} says other {', '.join(differing)} than global rank {first}")
    return problems


def list_writers(stated: Collection[int], world_size: int) -> Mapping[int, None] | range:
    """Lists the ranks that write a trace, ascending; ``stated``: the ranks that a footer names, empty for all."""
    return dict.fromkeys(sorted(stated)) if stated else range(world_size)


def name_missing(
    present: Collection[int],
    writers: Mapping[int, None] | range,
    world_size: int,
    file_of: Callable[[int], str] | None = None,
) -> str:
    """Names the writers without a file; empty where there are none.

    Args:
        present: the global ranks with a file; a set or mapping.
        writers: the ranks that write the trace.
        world_size: of the run.
        file_of: gives the name of a rank's file, to name the first missing one too.
    """
    num_missing = len(writers) - sum(rank in writers for rank in present)
    if not num_missing:
        return ""
    # A header may say a million ranks: some are named, and none but those are listed.
    named = list(islice((rank for rank in writers if rank not in present), _NUM_NAMED))
    rest = f" and {num_missing - len(named)} more" if num_missing > len(named) else ""
    text = f"no file of global rank {', '.join(map(str, named))}{rest} of {world_size}"
    if file_of is None:
        return text
    return f"{text} ({'first ' if num_missing > 1 else ''}{file_of(named[0])})"


def _join_parts(parts: Sequence[Part], footer: StepFooter) -> RankFiles:
    """Returns the parts of one rank, checked before; ``footer``: of its last one, with the rows of all ranks."""
    ordered = sorted(parts, key=lambda part: part.index)
    last = ordered[-1]
    place = last.rank_step.place
    return RankFiles(
        place=place,
        world_size=last.rank_step.world_size,
        paths=tuple(part.path for part in ordered),
        pieces=tuple(
            Piece(place=last.rank_step.place, path=part.path, record=record)
            for part in ordered
            for record in part.records
        ),
        footer=footer,
    )
