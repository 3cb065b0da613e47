"""Prints the findings of ``mock-scheduler compare`` and ``replicas``: the verdict first, then why, in tables.

Contract: reads well from 100 columns on and as plain text in a file; less than a screen where all is identical.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.text import Text

from mock_scheduler.comparison.findings import Finding
from mock_scheduler.comparison.tensors import LedgerComparison, TensorComparison, TensorDifference
from mock_scheduler.comparison.thresholds import NUM_ULPS
from mock_scheduler.comparison.walk.metrics import MetricComparison, MetricDifference
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import FittedTable, TextColumn, print_table, print_wrapped
from mock_scheduler.errors import ExitCode
from mock_scheduler.report.comparison.view import (
    VERDICT_STYLES,
    TierCounts,
    count_tiers,
    describe_equal_metrics,
    metrics_to_show,
    name_sides,
    tensors_to_show,
    unmatched,
)
from mock_scheduler.report.recording.diff import print_differences
from mock_scheduler.support.text import count_of, in_words
from mock_scheduler.verdict.results import ComparisonResult, ReplicaResult
from mock_scheduler.verdict.wording.bounds import describe_bounds
from mock_scheduler.verdict.wording.coverage import describe_begin, describe_unseen
from mock_scheduler.verdict.wording.findings import describe_finding, describe_unmatched
from mock_scheduler.verdict.wording.reasons import describe_rest
from mock_scheduler.verdict.wording.tensors import (
    describe_details,
    describe_flips,
    describe_ledgers,
    describe_not_compared,
    format_bound,
    format_bound_share,
    format_size,
    format_slope,
)
from mock_scheduler.verdict.wording.verdicts import NOT_LOOKED_AT, describe_sentence

_NUM_ROWS = 10
_NUM_NEAREST = 3
_NUM_DETAILED = 3
_LEAST_NAME_WIDTH = 64  # up to which columns go rather than that a name is folded
_NONE = "-"


def print_tiers(counts: Sequence[TierCounts], console: Console) -> None:
    """Print how many tensors of each kind are how far apart: one row for each, and no column of zeros."""
    if not counts:
        return
    columns = (
        ("identical", [item.identical for item in counts], "green"),
        (f"{NUM_ULPS} ulp", [item.ulp for item in counts], ""),
        ("in\nbound", [item.tolerance for item in counts], ""),
        ("un-\ndecided", [item.undecided for item in counts], "yellow"),
        ("diverged", [item.diverged for item in counts], "red"),
        ("missing", [item.missing for item in counts], "red"),
        ("un-\nobserved", [item.unobserved for item in counts], "dim"),
        ("not\njudged", [item.unjudged for item in counts], "dim"),
    )
    kinds = [in_words(item.kind) for item in counts]
    shown = [
        TextColumn(header="tensors by kind", cells=kinds, least_width=_LEAST_NAME_WIDTH, justify="left"),
        TextColumn(header="compared", cells=[f"{item.compared:,}" for item in counts]),
        *(
            TextColumn(header=header, cells=[_count(value, style) for value in values])
            for header, values, style in columns
            if any(values)
        ),
    ]
    console.print()
    print_table(shown, console)


def _count(value: int, style: str) -> Text:
    return Text(f"{value:,}", style) if value else Text(_NONE, "dim")


def print_tensors(tensors: TensorComparison, console: Console, *, more: str) -> None:
    """Print those beyond their bound, or else the nearest to it; ``more`` says where the others are."""
    heading, chosen = tensors_to_show(tensors)
    if not chosen:
        return
    is_nearest = not tensors.exceeding and not tensors.undecided
    shown = chosen[: _NUM_NEAREST if is_nearest else _NUM_ROWS]
    table = FittedTable(_tensor_columns(shown, is_sketch=tensors.level == "sketch"), console, indent=4)
    console.print()
    console.print(Text(heading, style="bold"), soft_wrap=True)
    table.print_header("dim")
    group = ""
    for number, difference in enumerate(shown):
        key = difference.key
        if group != (group := f"  step {key.step}, update {key.update}: {in_words(key.kind)}"):
            console.print(Text(group, style="dim"), soft_wrap=True)
        table.print_row(number)
        if number < _NUM_DETAILED:
            for label, text in describe_details(difference):
                print_wrapped(console, Text(text, style="dim"), indent=18, label=f"      {label}")
    if len(chosen) > len(shown) and not is_nearest:
        console.print(Text(f"  and {len(chosen) - len(shown):,} more{more}"), soft_wrap=True)


def _tensor_columns(shown: Sequence[TensorDifference], *, is_sketch: bool) -> list[TextColumn]:
    names = [Text(item.key.name, "red" if item.exceeds else "yellow" if item.is_undecided else "") for item in shown]
    columns = [
        TextColumn(header="", cells=names, least_width=_LEAST_NAME_WIDTH, justify="left"),
        TextColumn(
            header="estimated" if is_sketch else "relative", cells=[format_size(item.relative) for item in shown]
        ),
    ]
    if is_sketch:
        columns.append(TextColumn(header="error bar", cells=list(map(_error_bar, shown))))
    columns.append(TextColumn(header="bound", cells=list(map(format_bound, shown))))
    if not is_sketch:
        figures = list(map(_figures, shown))
        columns += [
            TextColumn(header=header, drop_order=order, cells=[row[order - 1] for row in figures])
            for order, header in enumerate(("max |a-b|", "ULP", "slope", "cosine"), start=1)
        ]
    return columns


def _error_bar(difference: TensorDifference) -> str:
    if difference.low is None or difference.high is None:
        return _NONE
    return f"{format_size(difference.low)} to {format_size(difference.high)}"


def _figures(difference: TensorDifference) -> tuple[str, ...]:
    figures, size = difference.figures, format_size(difference.max_abs)
    if figures is None:
        return (size, _NONE, _NONE, _NONE)
    ulp = figures.max_ulp
    short = _NONE if ulp is None else f"{ulp:,}" if ulp < 1_000_000 else f"{ulp:.1e}"
    return (size, short, format_slope(figures.slope), f"{figures.cosine:.6f}")


def print_metrics(differences: Sequence[MetricDifference], console: Console) -> None:
    """Print one row per differing metric: its largest differences, and how many times its bound; red beyond that."""
    headers = ("max |a-b|", "max relative", "at step", "first differs", "of bound")
    styles = ["red" if item.first_exceeding_step is not None else "" for item in differences]
    rows = [
        (
            f"{item.max_abs:.2e}",
            f"{item.max_relative:.2e}",
            str(item.max_relative_step),
            str(item.first_different_step),
            format_bound_share(item),
        )
        for item in differences
    ]
    names = [item.name for item in differences]
    table = FittedTable(
        [
            TextColumn(header="metric", cells=names, least_width=_LEAST_NAME_WIDTH, justify="left"),
            *(TextColumn(header=header, cells=[row[place] for row in rows]) for place, header in enumerate(headers)),
        ],
        console,
    )
    table.print_header("bold")
    for number, style in enumerate(styles):
        table.print_row(number, style)


_NUM_SHOWN = 5
_NUM_METRICS = 12


def print_comparison(result: ComparisonResult, console: Console, *, files: Mapping[str, Path]) -> None:
    """Print the verdict, the first divergence in a sentence, counts, tensors, metrics, replicas and the next command.

    ``files``: paths of written files by their role; ``json``, where it is among them, has everything.
    """
    verdict = result.verdict
    more = _say_where(files)
    _print_verdict(result, console)
    if result.recordings is not None:
        print_differences(result.recordings, console)
    if verdict.tensors is not None:
        print_tiers(count_tiers(verdict.tensors), console)
        print_tensors(verdict.tensors, console, more=more)
    _print_findings(unmatched(verdict.metrics, verdict.tensors), console, more=more)
    if verdict.tensors is not None:
        _print_ranks(verdict.tensors, console, more=more)
    if verdict.metrics is not None:
        _print_metrics(verdict.metrics, console, more=more)
    if verdict.tensors is not None:
        _print_list("Not compared", describe_not_compared(verdict.tensors), console, more=more)
    _print_next(verdict.full_dump, console)
    console.print()
    if verdict.tensors is not None or verdict.metrics is not None:
        print_wrapped(console, Text(f"Bounds: {describe_bounds(result.bounds)}", style="dim"))
    for what, path in files.items():
        console.print(Text(f"{what}: {path}"), soft_wrap=True)


def print_replicas(result: ReplicaResult, console: Console, *, files: Mapping[str, Path]) -> None:
    """Print whether the copies within one run agree, and each disagreement with its ranks."""
    more = _say_where(files)
    styles = {ExitCode.ALIGNED: "bold green", ExitCode.DIVERGED: "bold red"}
    console.print(Text.assemble((_describe_replicas(result), styles.get(result.exit_code, "bold yellow"))))
    copies = ", ".join(f"{axis} {count:,}" for axis, count in result.num_copies.items()) or "none"
    steps = count_of(len(result.steps), "step")
    print_wrapped(
        console,
        Text(f"{count_of(result.num_tensors, 'tensor')} of {steps} in {result.path}; copies by axis: {copies}"),
        indent=2,
    )
    _print_list("Replicas", [conflict.describe() for conflict in result.conflicts], console, more=more, style="red")
    _print_ledgers(result.ledgers, console, more=more)
    for what, path in files.items():
        console.print(Text(f"{what}: {path}"), soft_wrap=True)


def _say_where(files: Mapping[str, Path]) -> str:
    """Name the place of everything not shown."""
    return f", in {files['json']}" if "json" in files else " (with --json)"


def _describe_replicas(result: ReplicaResult) -> str:
    if result.exit_code is ExitCode.ALIGNED:
        return "replicas agree: every copy is equal to the last bit"
    if result.exit_code is ExitCode.INCOMPARABLE and result.unmatched:
        return f"less compared than was chosen: {describe_unmatched(result.unmatched)}"
    if result.exit_code is ExitCode.INCOMPARABLE:
        return "nothing compared: no element of this trace is held twice"
    num_ledgers = sum(ledger.difference is not None for ledger in result.ledgers)
    parts = [count_of(len(result.conflicts), "tensor")] if result.conflicts else []
    parts += [f"the calls of {count_of(num_ledgers, 'step')}"] if num_ledgers else []
    return f"replicas disagree: in {' and '.join(parts)}"


def _print_verdict(result: ComparisonResult, console: Console) -> None:
    verdict = result.verdict
    baseline, candidate = name_sides(result)
    style = VERDICT_STYLES[verdict.kind]
    begin = describe_begin(verdict.unseen)
    what = f"{candidate} against {baseline}{', ' if begin else ''}{begin}"
    print_wrapped(console, Text.assemble((verdict.kind.value, style), ": ", (what, "bold")))
    for name, side in ((baseline, result.baseline), (candidate, result.candidate)):
        if side.run is not None and side.run.layout:
            print_wrapped(console, Text(f"{name}: {side.run.layout}", style="dim"), indent=2)
    if verdict.tensors is not None and verdict.tensors.level == "sketch":
        note = "level sketch: relative differences are estimated, and what stands beside them is their error bar"
        print_wrapped(console, Text(note, style="yellow"), indent=2)
    unseen = describe_unseen(verdict.unseen)
    if unseen:
        print_wrapped(console, Text(f"{NOT_LOOKED_AT}: {unseen}", style="yellow"), indent=2)
    sentence = describe_sentence(verdict)
    if sentence:
        console.print()
        print_wrapped(console, Text(sentence, style="bold"), indent=2)
    rest = describe_rest(verdict)
    if rest:
        console.print()
        print_wrapped(console, Text(rest), indent=2)


def _print_findings(findings: Sequence[Finding], console: Console, *, more: str) -> None:
    _print_list("Without a number", [describe_finding(item) for item in findings], console, more=more, style="red")


def _print_ranks(tensors: TensorComparison, console: Console, *, more: str) -> None:
    """Prints replicas, routing flips and ledgers."""
    lines = [f"in the candidate: {conflict.describe()}" for conflict in tensors.candidate_conflicts]
    lines += [f"in the baseline: {conflict.describe()}" for conflict in tensors.baseline_conflicts]
    _print_list("Replicas that disagree", lines, console, more=more, style="red")
    flips = [describe_flips(item) for item in tensors.flips if item.num_flipped]
    _print_list("Choice of experts", flips, console, more=more)
    _print_ledgers(tensors.ledgers, console, more=more)


def _print_ledgers(ledgers: Sequence[LedgerComparison], console: Console, *, more: str) -> None:
    lines = describe_ledgers(ledgers)
    style = "red" if any(ledger.difference is not None for ledger in ledgers) else ""
    _print_list("Calls", lines, console, more=more, style=style)


def _print_metrics(metrics: MetricComparison, console: Console, *, more: str) -> None:
    differing = metrics_to_show(metrics)
    equal = describe_equal_metrics(metrics)
    if not differing and not equal:
        return
    console.print()
    console.print(Text(f"Metrics{f': {equal}' if equal else ''}", style="bold"), soft_wrap=True)
    if differing:
        print_metrics(differing[:_NUM_METRICS], console)
    if len(differing) > _NUM_METRICS:
        console.print(Text(f"  and {len(differing) - _NUM_METRICS:,} more that differ{more}"), soft_wrap=True)


def _print_list(heading: str, lines: Sequence[str], console: Console, *, more: str, style: str = "") -> None:
    """The first few lines under a heading, and how many there are beside them; nothing where there are none."""
    if not lines:
        return
    console.print()
    console.print(Text(heading, style="bold"))
    for line in lines[:_NUM_SHOWN]:
        print_wrapped(console, Text(line, style=style), indent=2)
    if len(lines) > _NUM_SHOWN:
        console.print(Text(f"  and {len(lines) - _NUM_SHOWN:,} more{more}", style=style), soft_wrap=True)


def _print_next(full_dump: Sequence[str], console: Console) -> None:
    if not full_dump:
        return
    console.print()
    console.print(
        Text("Next: a full trace of the place, in both runs, shows its elements; run them again with", "bold")
    )
    console.print(Text(f"  {' '.join(full_dump)}"), soft_wrap=True)
