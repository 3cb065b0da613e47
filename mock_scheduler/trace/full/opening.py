"""Opens the files of a trace: reads every header, and checks that the ranks' parts are all there and fit together.

Tensors are not read here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path

from mock_scheduler.errors import TraceError
from mock_scheduler.trace.entries import RankPlace, StepFooter, TraceKey
from mock_scheduler.trace.full.files import FORMAT_VERSION, OLD_RANK_FILE, PART_FILE, SKETCH_FILE, find_steps
from mock_scheduler.trace.full.header import shared_statements
from mock_scheduler.trace.full.part import Part, another_release, read_part
from mock_scheduler.trace.full.pieces import Piece, check_size
from mock_scheduler.trace.rows import DensePlaces, is_virtual, unite_footers

_NUM_NAMED = 20
_NUM_KEPT = 64  # opened steps: headers alone


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


def open_steps(trace_dir: Path) -> dict[int, OpenedStep]:
    """All steps of a trace; raises ``TraceError`` as ``reader.open_trace`` does."""
    steps = find_steps(trace_dir)
    if not steps:
        raise TraceError(f"{trace_dir}: no trace here; run with trace.level=full")
    return {step: _open_unchanged(folder, trace_dir, _look_at(folder)) for step, folder in steps}


#: A file as the system knows it: whoever changes its content changes one of these numbers.
_FileState = tuple[Path, tuple[int, ...]]


def _look_at(folder: Path) -> tuple[_FileState, ...]:
    try:
        states = [(path, path.lstat()) for path in sorted(folder.iterdir())]
    except OSError as error:
        raise TraceError(f"{folder}: cannot be looked into: {error.strerror or error}") from error
    return tuple((path, (is_.st_ino, is_.st_size, is_.st_mtime_ns, is_.st_ctime_ns)) for path, is_ in states)


@lru_cache(maxsize=_NUM_KEPT)
def _open_unchanged(folder: Path, trace_dir: Path, files: tuple[_FileState, ...]) -> OpenedStep:
    """Opens a step, or gives it again: an alignment compares its baseline with every run, and parsing is dear."""
    return _open_step(folder, trace_dir, [path for path, _ in files])


def _open_step(folder: Path, trace_dir: Path, paths: Sequence[Path]) -> OpenedStep:
    for path in paths:
        if OLD_RANK_FILE.fullmatch(path.name):
            raise TraceError(f"{path}: {another_release('format version 2 or less', FORMAT_VERSION)}")
    parts = [read_part(path, trace_dir) for path in paths if PART_FILE.fullmatch(path.name)]
    if not parts:
        if any(SKETCH_FILE.fullmatch(path.name) for path in paths):
            raise TraceError(
                f"{folder}: sketches, where other steps have whole tensors, as of a run that was resumed with another "
                "trace.level; move the step folders of one level to another folder"
            )
        raise TraceError(f"{folder}: no rank file; the run ended before any rank wrote this step")
    # All problems of a step are listed at once: a lost file mostly explains several of them.
    by_rank: dict[int, list[Part]] = {}
    for part in parts:
        by_rank.setdefault(part.rank, []).append(part)
    problems = _name_problems(folder, parts)
    for rank in sorted(by_rank):
        problems += _rank_problems(rank, by_rank[rank])
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
        name = PART_FILE.fullmatch(part.path.name)
        assert name is not None
        named = (int(folder.name.removeprefix("step_")), int(name[1]), int(name[2]))
        if named != (part.rank_step.step, part.rank, part.index):
            problems.append(
                f"{part.path.name} holds part {part.index} of step {part.rank_step.step} of global rank {part.rank}"
            )
        earlier = seen.setdefault((part.rank, part.index), part.path.name)
        if earlier != part.path.name:
            problems.append(f"{earlier} and {part.path.name} are both part {part.index} of global rank {part.rank}")
    return problems


def _rank_problems(rank: int, parts: Sequence[Part]) -> list[str]:
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
    stated = {rank for footer in footers.values() for rank in footer.ranks}
    writers: Mapping[int, None] | range = dict.fromkeys(sorted(stated)) if stated else range(world_size)
    num_present = sum(rank in writers for rank in world_sizes)
    if num_present < len(writers):
        # A header may say a million ranks: some are named, and none but those are listed.
        named = list(islice((rank for rank in writers if rank not in world_sizes), _NUM_NAMED))
        more = len(writers) - num_present - len(named)
        rest = f" and {more} more" if more else ""
        problems.append(f"no file of global rank {', '.join(map(str, named))}{rest} of {world_size}")
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
