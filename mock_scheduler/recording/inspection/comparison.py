"""Compares two recordings, from their contracts down to the first bit.

Contract: equal are recordings of the same steps with bit-equal batches, policy versions, data cursors and scheduler
states, with contracts that agree in every field that must match. The form of storage, the recorder and measurements on
the way (metrics, provenance) are not compared. An unreadable step is an error, never a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import ExitCode
from mock_scheduler.recording.contract import Contract, Rule
from mock_scheduler.recording.inspection.diff import BatchDifferences, compare_batches
from mock_scheduler.recording.inspection.diff_fields import ABSENT, FieldDifference, json_difference
from mock_scheduler.recording.reading.browse import StepPlace, list_recording, open_place
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.step.step_info import StepInfo, moved_elsewhere
from mock_scheduler.support.digests import JSON, canonical_json, compute_json_digest

#: What the two recordings are called.
NAMES = ("A", "B")


@dataclass(frozen=True, kw_only=True, slots=True)
class ContractDifference:
    """A field whose values differ, both as they are printed; ``must_match``: by B's rule, they may not."""

    name: str
    a: str
    b: str
    reason: str
    must_match: bool

    def describe(self) -> str:
        """Returns ``layout: A "tp1", B "tp2" (may differ)``."""
        notes = "; ".join([*filter(None, [self.reason]), *([] if self.must_match else ["may differ"])])
        return f"{self.name}: A {self.a}, B {self.b}{f' ({notes})' if notes else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDifference:
    """A step of both recordings that differs; ``info``: differences in its description of itself."""

    folder: str
    step: int
    info: tuple[FieldDifference, ...]
    batch: BatchDifferences

    def first(self) -> str:
        """Returns the first difference in one line."""
        return self.info[0].describe(NAMES) if self.info else self.batch.first(NAMES)

    def summarise(self) -> str:
        """How much differs, in one line."""
        info = [f"{difference.field} differs" for difference in self.info]
        return "; ".join([*info, *([] if self.batch.is_identical else [self.batch.summarise(NAMES)])])


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingDifferences:
    """Holds all differences of two recordings; steps by folder. ``limit``: rows in detail per step."""

    locations: tuple[str, str]
    contract: tuple[ContractDifference, ...]
    only: tuple[Mapping[str, StepRanges], Mapping[str, StepRanges]]
    identical: Mapping[str, StepRanges]
    steps: tuple[StepDifference, ...]

    @property
    def exit_code(self) -> ExitCode:
        """Aligned, diverged, or incomparable where they have no step in common."""
        if not self.identical and not self.steps:
            return ExitCode.INCOMPARABLE
        is_different = self.steps or any(self.only) or any(field.must_match for field in self.contract)
        return ExitCode.DIVERGED if is_different else ExitCode.ALIGNED


def compare_recordings(
    readers: tuple[RecordingReader, RecordingReader],
    steps: StepRanges | None = None,
    *,
    limit: int,
    on_step: Callable[[int, int], None] | None = None,
) -> RecordingDifferences:
    """Compare the chosen steps (``None``: all), one at a time; ``limit``: rows to give in detail per step.

    Raises ``RecordingError`` where a step of either side cannot be read, or lies there in two forms.
    """
    places = [_choose_places(reader, steps) for reader in readers]
    # In the order of the first side, so that the first difference is the earliest step.
    common = [key for key in places[0] if key in places[1]]
    differing, identical = [], []
    for number, key in enumerate(common, start=1):
        difference = _compare_step(readers, (places[0][key], places[1][key]), limit=limit)
        if difference is None:
            identical.append(key)
        else:
            differing.append(difference)
        if on_step is not None:
            on_step(number, len(common))
    only = [[key for key in own if key not in other] for own, other in (places, places[::-1])]
    contracts = [reader.manifest.contract for reader in readers]
    return RecordingDifferences(
        locations=(readers[0].dump_dir, readers[1].dump_dir),
        contract=tuple(_contract_differences(contracts[0], contracts[1])),
        only=(_by_folder(only[0]), _by_folder(only[1])),
        identical=_by_folder(identical),
        steps=tuple(differing),
    )


def _choose_places(reader: RecordingReader, steps: StepRanges | None) -> dict[tuple[str, int], StepPlace]:
    chosen: dict[tuple[str, int], StepPlace] = {}
    for listing in list_recording(reader.storage):
        listing.raise_problems()
        chosen |= {(place.folder, place.step): place for place in listing.chosen(steps)}
    return chosen


def _compare_step(
    readers: tuple[RecordingReader, RecordingReader], places: tuple[StepPlace, StepPlace], *, limit: int
) -> StepDifference | None:
    """Compares one step; ``None`` where nothing differs."""
    opened = [open_place(reader, place) for reader, place in zip(readers, places, strict=True)]
    batch = compare_batches(opened[0].load(), opened[1].load(), limit=limit)
    info = tuple(_info_differences(opened[0].info, opened[1].info))
    if batch.is_identical and not info:
        return None
    return StepDifference(folder=places[0].folder, step=places[0].step, info=info, batch=batch)


def _info_differences(a: StepInfo, b: StepInfo) -> Iterator[FieldDifference]:
    values: tuple[tuple[str, JSON, JSON], ...] = (
        ("policy_version", a.policy_version, b.policy_version),
        ("data_cursor", a.data_cursor, b.data_cursor),
        ("scheduler_state", a.scheduler_state, b.scheduler_state),
    )
    for name, value_a, value_b in values:
        if canonical_json(value_a) != canonical_json(value_b):
            yield json_difference(name, value_a, value_b)
    for field, states in (
        ("random_states", (a.random_states, b.random_states)),
        ("late_random_states", (a.late_random_states, b.late_random_states)),
    ):
        for name in moved_elsewhere(*states):
            # The states themselves say nothing to a reader.
            digests = [compute_json_digest(found[name][1]) for found in states if found]
            yield json_difference(f"{field}.{name}", *digests)


def _contract_differences(a: Contract, b: Contract) -> Iterator[ContractDifference]:
    for difference in b.differences(a):
        # A field that must differ between a recording and its replay may be equal in two recordings.
        if difference.rule is not Rule.MUST_DIFFER:
            yield ContractDifference(
                name=difference.name,
                a=ABSENT if difference.recorded is None else difference.recorded,
                b=ABSENT if difference.current is None else difference.current,
                reason=difference.reason,
                must_match=difference.is_blocking,
            )


def _by_folder(keys: Sequence[tuple[str, int]]) -> dict[str, StepRanges]:
    folders: dict[str, list[int]] = {}
    for folder, step in keys:
        folders.setdefault(folder, []).append(step)
    return {folder: StepRanges.of(steps) for folder, steps in folders.items()}
