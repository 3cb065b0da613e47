"""Describes a recording and the content of its steps in numbers.

Contract: every chosen step is read once, its digests checked, and nothing of it is kept: a recording is described in
the memory of one step however long it is, or of a few where several are read at once. An unreadable step is listed with
its error beside the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from mock_scheduler.batch import RolloutBatch, Termination
from mock_scheduler.batch.columns import column_kind
from mock_scheduler.batch.engine_columns import list_finish_reasons
from mock_scheduler.batch.plausibility import Finding, find_impossible, find_unlikely
from mock_scheduler.batch.versions import Staleness, count_mixed, measure_staleness
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import MockSchedulerError, StepNotFoundError
from mock_scheduler.recording.inspection.histogram import Bar, NumberCounts, Spread
from mock_scheduler.recording.paths import format_present
from mock_scheduler.recording.reading.at_once import map_steps
from mock_scheduler.recording.reading.browse import FolderListing, StepPlace, list_recording, open_place
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.retention import load_retention
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.support.digests import JSON

_NUM_EXAMPLES = 3
_MAX_BARS = 12
_SUMMED = (
    "size_bytes",
    "num_rows",
    "num_trajectories",
    "num_groups",
    "num_tokens",
    "num_response_tokens",
    "num_rows_without_response",
    "num_duplicate_rows",
    "num_partial_groups",
    "num_mixed_trajectories",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderDescription:
    """Holds the steps of one scheduler and mode, as ``train``.

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
        for found in map_steps(reader.storage, partial(_read_step, reader), listing.chosen(steps)):
            if isinstance(found, MockSchedulerError):
                problems.append(str(found))
            else:
                described.append(statistics.add(listing.folder, found.batch, found.info, size_bytes=found.size_bytes))
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


class _StepRead(NamedTuple):
    """A step, and its stored size."""

    batch: RolloutBatch
    info: StepInfo
    size_bytes: int


def _read_step(reader: RecordingReader, place: StepPlace) -> _StepRead | MockSchedulerError:
    try:
        opened = open_place(reader, place)
        return _StepRead(opened.load(), opened.info, reader.storage.size_on_disk(place.name))
    except MockSchedulerError as error:
        return error


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


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStatistics:
    """Holds one recorded step.

    ``size_bytes`` as stored; ``reward``, ``length`` and ``response_length`` (in tokens) over rows, ``None`` without
    rows; ``policy_version`` is the one asked for, ``policy_versions`` the lowest and highest of its turns (``None``
    without turns); ``staleness`` is of response tokens, ``None`` where their turns are not told apart.
    ``finish_reasons``: what the engine said, by row or by turn, where it is recorded.
    ``num_mixed_trajectories``: of policies of several versions. ``findings``: data that cannot be true, or seldom are.
    ``duplicates``: the first few pairs of rows with equal content;
    ``partial_groups``: the first few groups with fewer trajectories than the largest. ``extras``: name -> dtype and
    shape of an entry.
    """

    folder: str
    step: int
    size_bytes: int
    num_rows: int
    num_trajectories: int
    num_groups: int
    group_size: int | None
    num_tokens: int
    num_response_tokens: int
    num_rows_without_response: int
    num_turns: int
    reward: Spread | None
    length: Spread | None
    response_length: Spread | None
    terminations: Mapping[str, int]
    finish_reasons: Mapping[str, int]
    tags: Mapping[str, int]
    policy_version: int
    policy_versions: tuple[int, int] | None
    staleness: Staleness | None
    num_mixed_trajectories: int
    findings: tuple[str, ...]
    num_duplicate_rows: int
    duplicates: tuple[str, ...]
    num_partial_groups: int
    partial_groups: tuple[str, ...]
    extras: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingTotals:
    """All steps added, together; ``extras`` lists every kind a name had."""

    num_steps: int
    size_bytes: int
    num_rows: int
    num_trajectories: int
    num_groups: int
    num_tokens: int
    num_response_tokens: int
    num_rows_without_response: int
    num_duplicate_rows: int
    num_partial_groups: int
    num_mixed_trajectories: int
    terminations: Mapping[str, int]
    finish_reasons: Mapping[str, int]
    tags: Mapping[str, int]
    extras: Mapping[str, tuple[str, ...]]
    reward: Spread | None
    response_length: Spread | None
    reward_bars: tuple[Bar, ...]
    response_length_bars: tuple[Bar, ...]


class RecordingStatistics:
    """Adds up steps."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._finish_reasons: Counter[str] = Counter()
        self._terminations: Counter[str] = Counter({ending.name.lower(): 0 for ending in Termination})
        self._tags: Counter[str] = Counter()
        self._extras: dict[str, dict[str, None]] = {}
        self._rewards, self._response_lengths = NumberCounts(), NumberCounts()

    def add(self, folder: str, batch: RolloutBatch, info: StepInfo, *, size_bytes: int) -> StepStatistics:
        """Count one more step, and describe it; ``size_bytes``: its stored size."""
        step = describe_step(folder, batch, info, size_bytes=size_bytes)
        self._rewards.add(batch.arrays["rewards"].tolist())
        self._response_lengths.add(batch.arrays["response_lengths"].tolist())
        self._sums["num_steps"] += 1
        for name in _SUMMED:
            self._sums[name] += getattr(step, name)
        self._terminations.update(step.terminations)
        self._finish_reasons.update(step.finish_reasons)
        self._tags.update(step.tags)
        for name, kind in step.extras.items():
            self._extras.setdefault(name, {})[kind] = None
        return step

    def totals(self) -> RecordingTotals:
        """Returns everything added so far."""
        return RecordingTotals(
            **{name: self._sums[name] for name in ("num_steps", *_SUMMED)},
            terminations=dict(self._terminations),
            finish_reasons=dict(sorted(self._finish_reasons.items())),
            tags=dict(sorted(self._tags.items())),
            extras={name: tuple(kinds) for name, kinds in sorted(self._extras.items())},
            reward=self._rewards.spread(),
            response_length=self._response_lengths.spread(),
            reward_bars=self._rewards.bars(_MAX_BARS),
            response_length_bars=self._response_lengths.bars(_MAX_BARS),
        )


def describe_step(folder: str, batch: RolloutBatch, info: StepInfo, *, size_bytes: int) -> StepStatistics:
    """One step in numbers; ``folder`` is its folder in the recording, like ``train``."""
    duplicates, partial_groups = batch.duplicate_rows(), _partial_groups(batch)
    arrays = batch.arrays
    versions = arrays["policy_versions"]
    return StepStatistics(
        folder=folder,
        step=info.step,
        size_bytes=size_bytes,
        num_rows=len(batch),
        num_trajectories=batch.num_trajectories,
        num_groups=batch.num_groups,
        group_size=batch.group_size,
        num_tokens=len(arrays["tokens"]),
        num_response_tokens=len(arrays["rollout_logprobs"]),
        num_rows_without_response=batch.num_rows_without_response,
        num_turns=len(arrays["turn_rewards"]),
        reward=_spread(arrays["rewards"].tolist()),
        length=_spread(arrays["lengths"].tolist()),
        response_length=_spread(arrays["response_lengths"].tolist()),
        terminations={ending.name.lower(): int((arrays["terminations"] == ending).sum()) for ending in Termination},
        finish_reasons=dict(sorted(Counter(list_finish_reasons(batch.extras)).items())),
        tags=dict(sorted(Counter(batch.tags).items())),
        policy_version=info.policy_version,
        policy_versions=(int(versions.min()), int(versions.max())) if len(versions) else None,
        staleness=measure_staleness(batch, info.policy_version),
        num_mixed_trajectories=count_mixed(batch),
        findings=tuple(finding.describe() for finding in implausible_rows(batch, info)),
        num_duplicate_rows=len(duplicates),
        duplicates=tuple(f"{row} repeats {earlier}" for row, earlier in duplicates[:_NUM_EXAMPLES]),
        num_partial_groups=len(partial_groups),
        partial_groups=tuple(partial_groups[:_NUM_EXAMPLES]),
        extras={name: column_kind(column) for name, column in batch.extras.items()},
    )


def implausible_rows(batch: RolloutBatch, info: StepInfo) -> list[Finding]:
    """Finds data of a recorded step that cannot be true, and data that seldom are."""
    return [*find_impossible(batch, latest_version=info.policy_version), *find_unlikely(batch)]


def _spread(values: list[float]) -> Spread | None:
    counts = NumberCounts()
    counts.add(values)
    return counts.spread()


def _partial_groups(batch: RolloutBatch) -> list[str]:
    """Groups with fewer trajectories than the largest; none where the batch itself says that its groups are whole."""
    if batch.group_size is not None or not len(batch):
        return []
    return batch.partial_groups(max(batch.group_sizes.values()))
