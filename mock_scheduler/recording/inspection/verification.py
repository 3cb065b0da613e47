"""Reads all of a recording and lists everything in it that is not as it was written.

Contract: no step's problem hides another's. Whole is a recording of at least one step whose every file, in every form,
matches its digests, holds a batch, and is the step of the run its name and the manifest say, and where nothing is
named like an absent step. Missing steps between others are noted: they may never have been recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import MockSchedulerError, StepNotFoundError, redact
from mock_scheduler.recording.inspection.description import implausible_rows
from mock_scheduler.recording.paths import format_present
from mock_scheduler.recording.reading.at_once import map_steps
from mock_scheduler.recording.reading.browse import FolderListing, StepPlace, list_recording, name_steps, open_place
from mock_scheduler.recording.reading.open_step import open_step
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.retention import load_retention
from mock_scheduler.recording.shards import load_commit, open_shard
from mock_scheduler.recording.storage import Storage, open_storage


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyResult:
    """``num_bytes``: read and found whole, as stored; ``notes``: oddities that are no problem of a file."""

    location: str
    num_steps: int
    num_bytes: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify_recording(
    dump_dir: str, steps: StepRanges | None = None, *, on_step: Callable[[int, int], None] | None = None
) -> VerifyResult:
    """Verify the chosen steps (``None``: all) and the files beside them.

    ``on_step`` is called with how many steps are done, of how many. Raises ``StepNotFoundError`` where there is no
    recording, and ``RecordingError`` where the location itself cannot be read.
    """
    storage = open_storage(dump_dir)
    reader, problems = _open_reader(dump_dir)
    removed, retention_problems = _load_removed(storage)
    problems += retention_problems
    listings = list_recording(storage)
    problems += [problem for listing in listings for problem in (*listing.problems, *listing.misnamed)]
    places = [place for listing in listings for place in listing.chosen(steps)]
    num_bytes = 0
    implausible: list[str] = []
    for number, found in enumerate(map_steps(storage, partial(_verify_step, storage, reader), places), start=1):
        num_bytes += found.num_bytes
        problems += found.problems
        implausible += found.implausible
        if on_step is not None:
            on_step(number, len(places))
    if not problems:
        problems += _absence_problems(dump_dir, steps, listings)
    return VerifyResult(
        location=redact(dump_dir),
        num_steps=len(places),
        num_bytes=num_bytes,
        problems=tuple(problems),
        notes=(
            *(note for listing in listings for note in _notes(listing, removed, is_whole=steps is None)),
            *implausible,
        ),
    )


def _absence_problems(dump_dir: str, steps: StepRanges | None, listings: Sequence[FolderListing]) -> Iterator[str]:
    """Says that there is no step, or not every chosen one: fewer were verified than were asked for."""
    present = {listing.folder: list(listing.places) for listing in listings if listing.places}
    if steps is None:
        if not present:
            yield f"{dump_dir} holds no step"
        return
    absent = steps.absent_from({step for listed in present.values() for step in listed})
    if absent == steps:
        yield f"none of the steps {steps} is recorded in {dump_dir}; steps present: {format_present(present)}"
    elif absent.ranges:
        yield (
            f"of the steps {steps}, {name_steps(absent)} is not recorded in {dump_dir}; steps present: "
            f"{format_present(present)}"
        )


def _open_reader(dump_dir: str) -> tuple[RecordingReader | None, list[str]]:
    """The reader, or why the manifest cannot be read: the steps are verified by themselves then."""
    try:
        return RecordingReader(dump_dir), []
    except StepNotFoundError:
        raise
    except MockSchedulerError as error:
        return None, [str(error)]


def _load_removed(storage: Storage) -> tuple[Mapping[str, StepRanges], list[str]]:
    """The steps retention removed, by folder, or why its file cannot be read."""
    try:
        return load_retention(storage).removed, []
    except MockSchedulerError as error:
        return {}, [str(error)]


def _notes(listing: FolderListing, removed: Mapping[str, StepRanges], *, is_whole: bool) -> Iterator[str]:
    """Notes files that are no step and, where all steps are verified (``is_whole``), steps missing."""
    yield from listing.ignored
    gaps = listing.gaps_beside(removed.get(listing.folder, StepRanges(())))
    if is_whole and gaps.ranges and not _is_every_nth(listing):
        yield f"{listing.folder} has no {name_steps(gaps)}, between others that are recorded"


def _is_every_nth(listing: FolderListing) -> bool:
    """Whether these are validations at one distance, as ``eval_steps`` asks for."""
    distances = {after - before for before, after in pairwise(sorted(listing.places))}
    return listing.folder.partition(".")[0] == "val" and len(distances) == 1


class _StepVerified(NamedTuple):
    """``num_bytes``: of a sound step; ``implausible``: its data that cannot be true, or seldom are."""

    num_bytes: int
    problems: list[str]
    implausible: list[str]


def _verify_step(storage: Storage, reader: RecordingReader | None, place: StepPlace) -> _StepVerified:
    try:
        opened = open_step(storage, place.name) if reader is None else open_place(reader, place)
        opened.verify()
        findings = implausible_rows(opened.load(verify=False), opened.info)
        implausible = [f"{place.folder} step {place.step}: {finding.describe()}" for finding in findings]
        return _StepVerified(storage.size_on_disk(place.name), [], implausible)
    except MockSchedulerError as error:
        by_shard = list(_shard_problems(storage, place)) if place.form == "shards" else []
        return _StepVerified(0, by_shard or [str(error)], [])


def _shard_problems(storage: Storage, place: StepPlace) -> Iterator[str]:
    """The error of every damaged shard; none where the commit file itself cannot be read."""
    try:
        commit = load_commit(storage, place.name)
    except MockSchedulerError:
        return
    for index in range(len(commit.shards)):
        try:
            open_shard(storage, place.name, commit, index=index).verify()
        except MockSchedulerError as error:
            yield str(error)
