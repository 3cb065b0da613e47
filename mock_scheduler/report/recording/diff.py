"""Shows the findings of ``mock-scheduler diff``, on the terminal and as JSON: one object, ``format_version`` 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from mock_scheduler.config.steps import StepRanges
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import print_wrapped
from mock_scheduler.errors import ExitCode
from mock_scheduler.recording.inspection.comparison import (
    NAMES,
    ContractDifference,
    RecordingDifferences,
    StepDifference,
)
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.documents import to_json
from mock_scheduler.support.text import count_of

FORMAT_VERSION = 1
_NUM_DETAILED = 3
_NUM_LISTED = 20
_NUM_ALLOWED = 10


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
    """Print the obligatory fields, then the first few others."""
    allowed = [field for field in differences if not field.must_match]
    for field in [field for field in differences if field.must_match] + allowed[:_NUM_ALLOWED]:
        print_wrapped(console, Text(f"contract: {field.describe()}", style="red" if field.must_match else ""))
    if len(allowed) > _NUM_ALLOWED:
        console.print(f"contract: and {len(allowed) - _NUM_ALLOWED:,} more that may differ (all with --json)")


def _print_steps(steps: Sequence[StepDifference], console: Console) -> None:
    for step in steps[:_NUM_DETAILED]:
        console.print()
        console.print(Text(f"{step.folder} step {step.step}", style="bold red"))
        lines = [difference.describe(NAMES) for difference in step.info]
        if not step.batch.is_identical:
            lines.append(step.batch.describe(NAMES))
        for line in "\n".join(lines).split("\n"):
            print_wrapped(console, Text(line), indent=2)
    rest = steps[_NUM_DETAILED:]
    for step in rest[:_NUM_LISTED]:
        print_wrapped(console, Text(f"{step.folder} step {step.step}: {step.summarise()}", style="red"))
    if len(rest) > _NUM_LISTED:
        more = count_of(len(rest) - _NUM_LISTED, "more step that differs", "more steps that differ")
        console.print(f"and {more} (all with --json)")


def _verdict(differences: RecordingDifferences) -> Text:
    if differences.exit_code is ExitCode.INCOMPARABLE:
        return Text("nothing to compare: no step is in both", style="bold yellow")
    if differences.exit_code is ExitCode.ALIGNED:
        return Text("identical: every step is equal to the last bit", style="bold green")
    if not differences.steps:
        has_more = any(differences.only)
        where = "one has steps that the other lacks" if has_more else "in the contract alone"
        return Text.assemble(("different", "bold red"), f", {where}: every step in both is equal to the last bit")
    first = differences.steps[0]
    return Text.assemble(("different", "bold red"), f", first in {first.folder} step {first.step}: {first.first()}")


def differences_to_json(differences: RecordingDifferences) -> dict[str, JSON]:
    """Returns all of it as JSON values; rows as text identities."""
    return {
        "format_version": FORMAT_VERSION,
        "a": differences.locations[0],
        "b": differences.locations[1],
        "exit_code": int(differences.exit_code),
        "contract": to_json(differences.contract),
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
        "info": to_json(step.info),
        "whole_batch": to_json(batch.whole),
        "num_rows": list(batch.num_rows),
        "only_a": [str(identity) for identity in batch.only_a],
        "only_b": [str(identity) for identity in batch.only_b],
        "num_different_rows": batch.num_different_rows,
        "rows_by_field": dict(batch.field_counts),
        "rows": [{"identity": str(row.identity), "fields": to_json(row.fields)} for row in batch.rows],
    }


def _ranges_to_json(steps: Mapping[str, StepRanges]) -> JSON:
    return {folder: str(ranges) for folder, ranges in steps.items()}


def _format(steps: Mapping[str, StepRanges]) -> str:
    return "; ".join(f"{folder} {ranges}" for folder, ranges in steps.items())
