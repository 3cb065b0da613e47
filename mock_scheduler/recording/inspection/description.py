"""Describes a recording and the content of its steps.

Contract: every chosen step is read once, one at a time, its digests checked; an unreadable step is listed with
its error beside the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import MockSchedulerError, StepNotFoundError
from mock_scheduler.recording.inspection.statistics import RecordingStatistics, RecordingTotals, StepStatistics
from mock_scheduler.recording.paths import format_present
from mock_scheduler.recording.reading.browse import FolderListing, list_recording, open_place
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.retention import load_retention
from mock_scheduler.support.digests import JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderDescription:
    """The steps of one scheduler and mode, as ``train``.

    ``present``: all present steps, as ranges; ``chosen``: the ones asked for; ``removed``: steps removed by
    retention; ``gaps``: the other steps missing between them. ``forms``: file, compressed file or shards
    -> number of chosen steps. ``steps``: the readable ones of them; ``totals`` over these.
    """

    folder: str
    present: str
    chosen: str
    gaps: str
    removed: str
    forms: Mapping[str, int]
    steps: tuple[StepStatistics, ...]
    totals: RecordingTotals


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingDescription:
    """A recording. ``start_points``: steps from which a saved checkpoint goes on, where retention has noted any;
    ``ignored``: files in it that are no step; ``problems``: the errors of unreadable steps."""

    location: str
    run_id: str
    contract: tuple[Mapping[str, JSON], ...]
    provenance: Mapping[str, JSON]
    start_points: tuple[int, ...]
    folders: tuple[FolderDescription, ...]
    ignored: tuple[str, ...]
    problems: tuple[str, ...]


def describe_recording(
    reader: RecordingReader, steps: StepRanges | None = None, *, on_step: Callable[[int, int], None] | None = None
) -> RecordingDescription:
    """Read the chosen steps (``None``: all) and describe the recording; folders without any of these are left out.

    ``on_step`` is called with how many steps were read, of how many, after each. Raises ``StepNotFoundError`` where
    none of the chosen steps is recorded.
    """
    listings = list_recording(reader.storage)
    if steps is not None:
        listings = [listing for listing in listings if listing.chosen(steps)]
        if not listings:
            raise StepNotFoundError(missing_text(reader, steps))
    problems = [problem for listing in listings for problem in listing.problems]
    retention = load_retention(reader.storage)
    num_chosen = sum(len(listing.chosen(steps)) for listing in listings)
    num_read = 0
    folders = []
    for listing in listings:
        statistics, described = RecordingStatistics(), []
        for place in listing.chosen(steps):
            try:
                opened = open_place(reader, place)
                batch, size_bytes = opened.load(), reader.storage.size_on_disk(place.name)
            except MockSchedulerError as error:
                problems.append(str(error))
            else:
                described.append(statistics.add(listing.folder, batch, opened.info, size_bytes=size_bytes))
            num_read += 1
            if on_step is not None:
                on_step(num_read, num_chosen)
        removed = retention.removed.get(listing.folder, StepRanges(()))
        folders.append(_describe_folder(listing, steps, removed, statistics=statistics, described=tuple(described)))
    manifest = reader.manifest
    return RecordingDescription(
        location=reader.dump_dir,
        run_id=manifest.run_id,
        contract=tuple(
            {"name": field.name, "rule": field.rule.value, "match": field.match.value, "value": field.value}
            for field in manifest.contract.fields
        ),
        provenance=dict(manifest.provenance),
        start_points=retention.start_points,
        folders=tuple(folders),
        ignored=tuple(text for listing in listings for text in (*listing.misnamed, *listing.ignored)),
        problems=tuple(problems),
    )


def missing_text(reader: RecordingReader, steps: StepRanges) -> str:
    """The message where none of the chosen steps is recorded, with the recorded ones."""
    return (
        f"none of the steps {steps} is recorded in {reader.dump_dir}; steps present: {format_present(reader.steps())}"
    )


def _describe_folder(
    listing: FolderListing,
    steps: StepRanges | None,
    removed: StepRanges,
    *,
    statistics: RecordingStatistics,
    described: tuple[StepStatistics, ...],
) -> FolderDescription:
    chosen = listing.chosen(steps)
    return FolderDescription(
        folder=listing.folder,
        present=str(StepRanges.of(listing.places)),
        chosen=str(StepRanges.of(place.step for place in chosen)),
        gaps=str(listing.gaps_beside(removed)),
        removed=str(removed),
        forms=dict(Counter(place.form for place in chosen)),
        steps=described,
        totals=statistics.totals(),
    )
