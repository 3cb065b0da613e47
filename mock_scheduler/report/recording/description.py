"""Prints a description of a recording, and the findings of ``verify``.

Contract: reads well from 80 columns on, without colour, and as plain text in a file. Long lists are cut, with the
number of the rest; JSON has all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from mock_scheduler.batch.versions import Staleness
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import TextColumn, cut, print_labelled, print_table, print_wrapped
from mock_scheduler.recording.contract import Rule
from mock_scheduler.recording.inspection.description import (
    FolderDescription,
    RecordingDescription,
    RecordingTotals,
    StepStatistics,
)
from mock_scheduler.recording.inspection.histogram import Bar, Spread
from mock_scheduler.recording.inspection.verification import VerifyResult
from mock_scheduler.recording.matching import Match, show
from mock_scheduler.recording.reading.browse import name_steps
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.text import count_of, format_bytes, format_range, in_words, list_some, shorten

_NUM_STEPS = 20
_NUM_LINES = 10
_VALUE_WIDTH = 60
_NUM_TAGS = 12
_NUM_FINDINGS = 6
_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEAST_WIDTH = 4
_SHOWN_ALONE = ("git", "library_git", "python", "packages", "platform", "imported")


def print_description(description: RecordingDescription, console: Console) -> None:
    """Print everything, the totals and histograms of each folder last in it, then unreadable files."""
    console.print(Text.assemble("recording ", (description.location, "bold")), soft_wrap=True)
    print_labelled(console, _head_rows(description))
    for folder in description.folders:
        _print_folder(folder, console)
    if not description.folders:
        console.print()
        console.print("no step is recorded")
    _print_list("beside the steps", description.ignored, console, style="yellow")
    _print_list("cannot be read", description.problems, console, style="red")


def _head_rows(description: RecordingDescription) -> Iterator[tuple[str, str]]:
    provenance = description.provenance
    yield "run id", description.run_id
    yield "made with", ", ".join(_describe_provenance(provenance)) or "not recorded"
    imported = provenance.get("imported")
    if isinstance(imported, Mapping):
        yield "imported from", f"{imported.get('framework')}, {imported.get('source')}"
        lacks = imported.get("not_in_source")
        yield "not in it", ", ".join(map(str, lacks)) if isinstance(lacks, list) and lacks else "nothing"
    others = [name for name in provenance if name not in _SHOWN_ALONE]
    if others:
        yield "also holds", ", ".join(others)
    for index, line in enumerate(_contract_lines(description.contract)):
        yield "" if index else "contract", line
    checkpoints = [str(step) for step in description.start_points if step]
    if checkpoints:
        yield "checkpoints", f"before step {', '.join(checkpoints)}"


def _contract_lines(contract: Sequence[Mapping[str, JSON]]) -> Iterator[str]:
    """Yields the first few fields, obligatory ones before the others, and how many more there are."""
    ordered = sorted(contract, key=lambda field: field["rule"] == Rule.MAY_DIFFER)
    for field in ordered[:_NUM_LINES]:
        value = shorten(show(field["value"], Match(str(field["match"]))), _VALUE_WIDTH)
        yield f"{field['name']} = {value} ({_describe_rule(field)})"
    if len(ordered) > _NUM_LINES:
        more = Counter(_describe_rule(field) for field in ordered[_NUM_LINES:])
        kinds = ", ".join(f"{count} that {rule}" for rule, count in more.items())
        yield f"and {kinds} (all with --json)"


def _describe_rule(field: Mapping[str, JSON]) -> str:
    return in_words(str(field["rule"]))


def _describe_provenance(provenance: Mapping[str, JSON]) -> Iterator[str]:
    packages = provenance.get("packages")
    for what, key in (("code", "git"), ("mock-scheduler", "library_git")):
        git = provenance.get(key)
        if isinstance(git, Mapping):
            yield f"{what} {describe_revision(git, with_root=key == 'git')}"
    if provenance.get("python") is not None:
        yield f"python {provenance['python']}"
    if isinstance(packages, Mapping):
        yield from (f"{name} {version}" for name, version in packages.items() if version is not None)
    if provenance.get("platform") is not None:
        yield str(provenance["platform"])


def describe_revision(git: Mapping[str, JSON], *, with_root: bool) -> str:
    """Returns ``my_project 0123456789ab (modified)``."""
    root = str(git.get("root", "")) if with_root else ""
    modified = "(modified)" if git.get("is_modified") else ""
    return " ".join(filter(None, (root, str(git.get("revision"))[:12], modified)))


def _print_folder(folder: FolderDescription, console: Console) -> None:
    totals = folder.totals
    forms = ", ".join(count_of(count, form) for form, count in folder.forms.items() if form != "shards")
    sharded = f"{count_of(folder.forms['shards'], 'step')} in shards" if "shards" in folder.forms else ""
    console.print()
    console.print(Text.assemble((folder.folder, "bold"), f"  {_describe_steps(folder)}"), soft_wrap=True)
    print_labelled(console, _folder_rows(folder, " and ".join(filter(None, (forms, sharded)))), indent=2)
    if not folder.steps:
        return
    console.print()
    _print_steps(folder.steps, console)
    if len(folder.steps) > _NUM_STEPS:
        hidden = len(folder.steps) - _NUM_STEPS
        console.print(f"  and {count_of(hidden, 'step')} between (all with --json, some with --steps)")
    _print_histogram("reward", totals.reward, totals.reward_bars, console)
    _print_histogram("response length", totals.response_length, totals.response_length_bars, console)


def _describe_steps(folder: FolderDescription) -> str:
    """Returns ``steps 0-4``; with the present steps beside the chosen ones."""
    if not folder.present:
        return "no step"
    beside = "" if folder.chosen == folder.present else f" of {folder.present}"
    return f"{name_steps(StepRanges.parse(folder.chosen))}{beside}"


def _folder_rows(folder: FolderDescription, forms: str) -> Iterator[tuple[str, str]]:
    totals = folder.totals
    if folder.gaps:
        yield "gaps", f"{folder.gaps} (not recorded)"
    if folder.removed:
        yield "removed", f"{folder.removed} (by retention)"
    yield "stored as", forms
    if not totals.num_steps:
        return
    yield "size", f"{format_bytes(totals.size_bytes)}, {format_bytes(totals.size_bytes / totals.num_steps)} per step"
    yield "rows", _describe_rows(folder.steps, totals)
    yield "tokens", f"{totals.num_tokens:,}, of which {totals.num_response_tokens:,} sampled"
    yield "ended", ", ".join(f"{name} {count:,}" for name, count in totals.terminations.items())
    if totals.finish_reasons:
        yield "finished", ", ".join(f"{name} {count:,}" for name, count in totals.finish_reasons.items())
    yield from _policy_rows(folder.steps)
    tags = [f"{name} {count:,}" for name, count in totals.tags.items() if name]
    if tags:
        yield "tags", list_some(tags, _NUM_TAGS, ", ")
    for index, (name, kinds) in enumerate(totals.extras.items()):
        yield "" if index else "extras", f"{name}: {' or '.join(kinds)}"
    yield from _oddities(folder.steps, totals)


def _describe_rows(steps: Sequence[StepStatistics], totals: RecordingTotals) -> str:
    sizes = sorted({step.group_size for step in steps if step.group_size is not None})
    of_size = f" of {' or '.join(map(str, sizes))}" if sizes and all(step.group_size for step in steps) else ""
    trajectories = count_of(totals.num_trajectories, "trajectory", "trajectories")
    return f"{totals.num_rows:,}: {trajectories} in {count_of(totals.num_groups, 'group')}{of_size}"


def _policy_rows(steps: Sequence[StepStatistics]) -> Iterator[tuple[str, str]]:
    versions = [version for step in steps for version in step.policy_versions or ()]
    ages = [age for step in steps if step.staleness for age in (step.staleness.minimum, step.staleness.maximum)]
    if versions:
        staleness = f"staleness {format_range(min(ages), max(ages))}" if ages else "staleness not told by the mask"
        num_mixed = sum(step.num_mixed_trajectories for step in steps)
        mixed = f"; of several versions {count_of(num_mixed, 'trajectory', 'trajectories')}" if num_mixed else ""
        yield "policy", f"version {format_range(min(versions), max(versions))}, {staleness}{mixed}"


def _oddities(steps: Sequence[StepStatistics], totals: RecordingTotals) -> Iterator[tuple[str, str]]:
    """Yield warnings for a person who would train on it, with an example each."""
    implausible = [(step, text) for step in steps for text in step.findings]
    for number, (step, text) in enumerate(implausible[:_NUM_FINDINGS]):
        yield "" if number else "implausible", f"step {step.step}: {text}"
    if len(implausible) > _NUM_FINDINGS:
        yield "", f"and {len(implausible) - _NUM_FINDINGS} more (all with --json)"
    if totals.num_duplicate_rows:
        step = next(step for step in steps if step.duplicates)
        yield "duplicates", f"{totals.num_duplicate_rows:,}, for example in step {step.step}: {step.duplicates[0]}"
    if totals.num_partial_groups:
        step = next(step for step in steps if step.partial_groups)
        example = f"for example in step {step.step}: {step.partial_groups[0]}"
        yield "partial groups", f"{totals.num_partial_groups:,}, {example}"
    if totals.num_rows_without_response:
        yield "no response", count_of(totals.num_rows_without_response, "row")


def _print_steps(steps: Sequence[StepStatistics], console: Console) -> None:
    half = _NUM_STEPS // 2
    shown = steps if len(steps) <= _NUM_STEPS else [*steps[:half], *steps[-half:]]
    spreads = [(step.reward, step.response_length) for step in shown]
    columns = (
        ("step", 0, [str(step.step) for step in shown]),
        ("rows", 2, [f"{step.num_rows:,}" for step in shown]),
        ("tokens", 2, [f"{step.num_tokens:,}" for step in shown]),
        ("reward\nmean", 0, ["-" if reward is None else f"{reward.mean:.3g}" for reward, _ in spreads]),
        ("std", 3, ["-" if reward is None else f"{reward.std:.3g}" for reward, _ in spreads]),
        ("min", 1, ["-" if reward is None else f"{reward.minimum:.3g}" for reward, _ in spreads]),
        ("max", 1, ["-" if reward is None else f"{reward.maximum:.3g}" for reward, _ in spreads]),
        ("response\nmedian", 2, ["-" if length is None else f"{length.median:g}" for _, length in spreads]),
        ("p90", 3, ["-" if length is None else f"{length.p90:g}" for _, length in spreads]),
        ("policy", 4, ["-" if step.policy_versions is None else format_range(*step.policy_versions) for step in shown]),
        ("stale", 3, [_describe_staleness(step.staleness) for step in shown]),
        ("size", 1, [format_bytes(step.size_bytes) for step in shown]),
    )
    print_table([TextColumn(header=header, drop_order=order, cells=cells) for header, order, cells in columns], console)


def _describe_staleness(staleness: Staleness | None) -> str:
    return "-" if staleness is None else format_range(staleness.minimum, staleness.maximum)


def _print_histogram(title: str, spread: Spread | None, bars: Sequence[Bar], console: Console) -> None:
    if spread is None:
        return
    console.print()
    if spread.minimum == spread.maximum:
        console.print(
            Text.assemble("  ", (title, "bold"), f"  {spread.minimum:g} in all {count_of(spread.count, 'row')}")
        )
        return
    values = (f"{name} {value:.4g}" for name, value in _named(spread))
    print_wrapped(console, Text.assemble((title, "bold"), f"  {', '.join(values)}"), indent=2)
    ascii_only = console.options.ascii_only
    for line in draw_bars(bars, width=console.width - 4, ascii_only=ascii_only):
        console.print(Text(f"    {line}"), soft_wrap=True)


def draw_bars(bars: Sequence[Bar], *, width: int, ascii_only: bool = False) -> Iterator[str]:
    """Yield lines of at most ``width`` columns, as long as labels and counts leave room: ``0.5   12 ██████``.

    The longest bar fills its column; a bar with any count shows something.
    """
    labels = [_name_bar(bar) for bar in bars]
    counts = [f"{bar.count:,}" for bar in bars]
    label_width, count_width = (max(map(len, texts), default=0) for texts in (labels, counts))
    room = max(width - label_width - count_width - 3, _LEAST_WIDTH)
    most = max((bar.count for bar in bars), default=0)
    for label, count, bar in zip(labels, counts, bars, strict=True):
        drawn = _draw(bar.count / most if most else 0.0, room, ascii_only=ascii_only)
        yield f"{label:>{label_width}}  {count:>{count_width}} {drawn}".rstrip()


def _name_bar(bar: Bar) -> str:
    return f"{bar.low:g}" if bar.low == bar.high else f"{bar.low:g} to {bar.high:g}"


def _draw(fraction: float, room: int, *, ascii_only: bool) -> str:
    if ascii_only:
        return "#" * (round(fraction * room) or (fraction > 0))
    eighths = round(fraction * room * 8) or (fraction > 0)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _named(spread: Spread) -> tuple[tuple[str, float], ...]:
    return (
        ("mean", spread.mean),
        ("std", spread.std),
        ("min", spread.minimum),
        ("median", spread.median),
        ("p90", spread.p90),
        ("max", spread.maximum),
    )


def _print_list(title: str, lines: Sequence[str], console: Console, *, style: str) -> None:
    if not lines:
        return
    console.print()
    console.print(Text(title, style=f"bold {style}"))
    for line in cut(lines, _NUM_LINES):
        console.print(Text(f"  {line}", style=style), soft_wrap=True)  # a path that is broken cannot be copied


_NUM_NOTES = 10
_NUM_PROBLEMS = 50


def print_verification(result: VerifyResult, console: Console) -> None:
    """Print whether the recording is whole, and its problems."""
    where = f"{result.location}: {count_of(result.num_steps, 'step')}, {format_bytes(result.num_bytes)}"
    for note in cut(result.notes, _NUM_NOTES):
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    if result.is_whole:
        console.print(
            Text.assemble((f"{where}: ", ""), ("whole", "bold green"), ", every digest matches"), soft_wrap=True
        )
        return
    found = count_of(len(result.problems), "problem")
    whole = f"{format_bytes(result.num_bytes)} whole" if result.num_bytes else "nothing whole"
    read = f"{count_of(result.num_steps, 'step')} read, {whole}" if result.num_steps else "no step read"
    console.print(Text.assemble(f"{result.location}: ", (found, "bold red"), f" ({read}):"), soft_wrap=True)
    for problem in cut(result.problems, _NUM_PROBLEMS):
        console.print(Text(f"  - {problem}", style="red"), soft_wrap=True)
