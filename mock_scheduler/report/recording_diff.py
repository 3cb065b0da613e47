"""``mock-scheduler diff``: what differs between two recordings, from their contracts down to the first bit.

Contract: equal are recordings of the same steps with bit-equal batches, policy versions, data cursors and scheduler
states, whose contracts agree in all that must match. How steps are stored, who recorded them and what was measured on
the way (metrics, provenance) is not compared. A step that cannot be read is an error, never a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from mock_scheduler.config.steps import StepRanges
from mock_scheduler.digests import JSON, canonical_json
from mock_scheduler.errors import ExitCode
from mock_scheduler.recording.browse import StepPlace, list_recording, open_place
from mock_scheduler.recording.contract import Contract, Rule
from mock_scheduler.recording.diff import BatchDifferences, compare_batches
from mock_scheduler.recording.diff_fields import ABSENT, FieldDifference, json_difference
from mock_scheduler.recording.reader import RecordingReader
from mock_scheduler.recording.step_info import StepInfo
from mock_scheduler.report.text import print_wrapped

NAMES = ("A", "B")

_NUM_DETAILED = 3
_NUM_LISTED = 20
_NUM_ALLOWED = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class ContractDifference:
    """A field whose values differ, both as they are printed; ``must_match``: by B's rule, they may not."""

    name: str
    a: str
    b: str
    reason: str
    must_match: bool

    def describe(self) -> str:
        """``layout: A "tp1", B "tp2" (may differ)``."""
        notes = "; ".join([*filter(None, [self.reason]), *([] if self.must_match else ["may differ"])])
        return f"{self.name}: A {self.a}, B {self.b}{f' ({notes})' if notes else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDifference:
    """A step that both have and that differs; ``info``: in what it says about itself."""

    folder: str
    step: int
    info: tuple[FieldDifference, ...]
    batch: BatchDifferences

    def first(self) -> str:
        """The first difference in one line."""
        return self.info[0].describe(NAMES) if self.info else self.batch.first(NAMES)

    def summarise(self) -> str:
        """How much differs, in one line."""
        info = [f"{difference.field} differs" for difference in self.info]
        return "; ".join([*info, *([] if self.batch.is_identical else [self.batch.summarise(NAMES)])])


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingDifferences:
    """All that differs between two recordings; steps by folder. ``limit``: rows in detail per step."""

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


def print_differences(differences: RecordingDifferences, console: Console) -> None:
    """Print the first difference in detail, the others in short, and the verdict last."""
    for name, location in zip(NAMES, differences.locations, strict=True):
        console.print(Text.assemble((name, "bold"), f"  {location}"), soft_wrap=True)
    _print_contract(differences.contract, console)
    for name, only in zip(NAMES, differences.only, strict=True):
        if only:
            print_wrapped(console, Text(f"only in {name}: {_format(only)}", style="red"))
    if differences.identical:
        print_wrapped(console, Text(f"identical: {_format(differences.identical)}", style="green"))
    _print_steps(differences.steps, console)
    print_wrapped(console, _verdict(differences))


def _print_contract(differences: Sequence[ContractDifference], console: Console) -> None:
    """All that must match, then the first few that may differ."""
    allowed = [field for field in differences if not field.must_match]
    for field in [field for field in differences if field.must_match] + allowed[:_NUM_ALLOWED]:
        print_wrapped(console, Text(f"contract: {field.describe()}", style="red" if field.must_match else ""))
    if len(allowed) > _NUM_ALLOWED:
        console.print(f"contract: and {len(allowed) - _NUM_ALLOWED} more that may differ (all with --json)")


def _print_steps(steps: Sequence[StepDifference], console: Console) -> None:
    for step in steps[:_NUM_DETAILED]:
        console.print(Text(f"\n{step.folder} step {step.step}", style="bold red"))
        lines = [difference.describe(NAMES) for difference in step.info]
        if not step.batch.is_identical:
            lines.append(step.batch.describe(NAMES))
        print_wrapped(console, Text("\n".join(lines)), indent=2)
    rest = steps[_NUM_DETAILED:]
    for step in rest[:_NUM_LISTED]:
        print_wrapped(console, Text(f"{step.folder} step {step.step}: {step.summarise()}", style="red"))
    if len(rest) > _NUM_LISTED:
        console.print(f"and {len(rest) - _NUM_LISTED} more steps that differ (all with --json)")


def _verdict(differences: RecordingDifferences) -> Text:
    if differences.exit_code is ExitCode.INCOMPARABLE:
        return Text("nothing to compare: no step is in both", style="bold yellow")
    if differences.exit_code is ExitCode.ALIGNED:
        return Text("identical: every step is equal to the last bit", style="bold green")
    if not differences.steps:
        return Text.assemble(("different", "bold red"), ": every step in both is equal to the last bit")
    first = differences.steps[0]
    return Text.assemble(("different", "bold red"), f", first in {first.folder} step {first.step}: {first.first()}")


def differences_to_json(differences: RecordingDifferences) -> dict[str, JSON]:
    """All of it as JSON values; rows as text identities."""
    return {
        "format_version": 1,
        "a": differences.locations[0],
        "b": differences.locations[1],
        "exit_code": int(differences.exit_code),
        "contract": [
            {
                "name": field.name,
                "a": field.a,
                "b": field.b,
                "reason": field.reason,
                "must_match": field.must_match,
            }
            for field in differences.contract
        ],
        "only_a": _ranges_to_json(differences.only[0]),
        "only_b": _ranges_to_json(differences.only[1]),
        "identical": _ranges_to_json(differences.identical),
        "different": [_step_to_json(step) for step in differences.steps],
    }


def _step_to_json(step: StepDifference) -> JSON:
    batch = step.batch
    return {
        "folder": step.folder,
        "step": step.step,
        "first": step.first(),
        "info": [_field_to_json(difference) for difference in step.info],
        "whole_batch": [_field_to_json(difference) for difference in batch.whole],
        "num_rows": list(batch.num_rows),
        "only_a": [str(identity) for identity in batch.only_a],
        "only_b": [str(identity) for identity in batch.only_b],
        "num_different_rows": batch.num_different_rows,
        "rows_by_field": dict(batch.field_counts),
        "rows": [
            {"identity": str(row.identity), "fields": [_field_to_json(field) for field in row.fields]}
            for row in batch.rows
        ],
    }


def _field_to_json(difference: FieldDifference) -> JSON:
    return {
        "field": difference.field,
        "where": difference.where,
        "a": difference.a,
        "b": difference.b,
        "extent": difference.extent,
    }


def _choose_places(reader: RecordingReader, steps: StepRanges | None) -> dict[tuple[str, int], StepPlace]:
    chosen: dict[tuple[str, int], StepPlace] = {}
    for listing in list_recording(reader.storage):
        listing.raise_problems()
        chosen |= {(place.folder, place.step): place for place in listing.chosen(steps)}
    return chosen


def _compare_step(
    readers: tuple[RecordingReader, RecordingReader], places: tuple[StepPlace, StepPlace], *, limit: int
) -> StepDifference | None:
    """What differs in one step; ``None`` where nothing does."""
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


def _ranges_to_json(steps: Mapping[str, StepRanges]) -> JSON:
    return {folder: str(ranges) for folder, ranges in steps.items()}


def _format(steps: Mapping[str, StepRanges]) -> str:
    return "; ".join(f"{folder} {ranges}" for folder, ranges in steps.items())
