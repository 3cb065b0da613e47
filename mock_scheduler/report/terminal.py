"""The terminal report of an alignment run; reads well from 100 columns on, and as plain text in a file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mock_scheduler.compare.findings import Finding
from mock_scheduler.compare.results import AlignmentResult, CandidateResult, RunSummary
from mock_scheduler.compare.tensors import JUDGED_KINDS, TensorComparison
from mock_scheduler.compare.verdict import Divergence, Verdict
from mock_scheduler.config.schema import ToleranceConfig
from mock_scheduler.report.metrics_table import metrics_table
from mock_scheduler.trace.kinds import TraceKind

_PLAIN_WIDTH = 120
_NUM_SHOWN = 5
_NAME_WIDTH = 21
#: How a verdict's word looks in a terminal.
VERDICT_STYLES: Mapping[Verdict, str] = {
    Verdict.IDENTICAL: "bold green",
    Verdict.EMULATED: "bold green",
    Verdict.ROUNDING: "green",
    Verdict.SUSPECT: "bold yellow",
    Verdict.DIVERGED: "bold red",
    Verdict.INCOMPARABLE: "bold yellow",
    Verdict.UNVERIFIED: "bold yellow",
}
_LEGEND: Mapping[Verdict, str] = {
    Verdict.IDENTICAL: "every metric, gradient, parameter and replica is equal to the last bit",
    Verdict.EMULATED: "equal to the last bit to a reference that adds in the candidate's order",
    Verdict.ROUNDING: "differs, and nothing is beyond the tolerance below",
    Verdict.SUSPECT: "within the tolerance, but with a systematic slope or concentrated in one place",
    Verdict.DIVERGED: "something is beyond tolerance or missing, or replicas disagree",
    Verdict.INCOMPARABLE: "the run failed, or nothing could be compared",
    Verdict.UNVERIFIED: "the runs are not shown to be deterministic, so a difference between them proves nothing",
}


def build_console() -> Console:
    """A console on stdout; as wide as the terminal or as ``COLUMNS`` says, or 120 columns where there is neither."""
    console = Console()
    is_width_known = console.is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    return console if is_width_known else Console(width=_PLAIN_WIDTH)


def print_report(result: AlignmentResult, console: Console, *, files: Mapping[str, Path]) -> None:
    """Print each candidate's metrics, then the verdicts, where the eye ends up, the legend and where the files are.

    ``files``: what lies where; ``result``, where it is among them, is the JSON file that holds all of the result.
    """
    more = f", all in {files['result']}" if "result" in files else ""
    for candidate in result.candidates:
        _print_candidate(candidate, result.tolerance, console, more=more)
    console.print()
    console.print(_candidates_table(result))
    _print_legend(result, console)
    for what, path in files.items():
        console.print(Text(f"{what:<13}{path}"), soft_wrap=True)


def _candidates_table(result: AlignmentResult) -> Table:
    table = Table(title=f"Alignment of {escape(result.config_name)}", title_justify="left", show_lines=True)
    for header in ("candidate", "verdict", "first divergence", "worst relative\ndifference", "rollout\n/ total"):
        table.add_column(header, no_wrap=header == "verdict")
    baseline = result.baseline
    table.add_row(_stack("baseline", baseline.layout), "", "", "", _describe_times(baseline))
    for candidate in result.candidates:
        alignment = candidate.alignment
        table.add_row(
            _stack(candidate.name, candidate.layout, *candidate.overrides),
            Text(alignment.verdict.value, style=VERDICT_STYLES[alignment.verdict]),
            _describe_first(alignment.first_divergence),
            Text("\n").join(_describe_worst(alignment.tensors, kind) for kind in JUDGED_KINDS),
            _describe_times(candidate.run) if candidate.run else "failed",
        )
    return table


def _print_candidate(candidate: CandidateResult, tolerance: ToleranceConfig, console: Console, *, more: str) -> None:
    alignment = candidate.alignment
    console.print()
    console.print(
        Text.assemble((candidate.name, "bold"), ": ", (alignment.verdict.value, VERDICT_STYLES[alignment.verdict]))
    )
    console.print(Padding(Text(alignment.reason), (0, 0, 0, 2)))
    if candidate.run is not None:
        console.print(f"  in this run: {describe_built(candidate.run.built)}", highlight=False)
    if alignment.metrics is not None:
        console.print(metrics_table(alignment.metrics.differences, tolerance))
        _print_first(_messages(alignment.metrics.findings), console, more=more)
    if alignment.tensors is not None:
        _print_first(_messages(alignment.tensors.findings), console, more=more)
        conflicts = [f"replicas: {conflict.describe()}" for conflict in alignment.tensors.candidate_conflicts]
        _print_first(conflicts, console, more=more)


def describe_built(built: Mapping[str, int]) -> str:
    """What a run built, out of its ledger: ``engines built 0, environments built 0``."""
    return ", ".join(f"{what}s built {count}" for what, count in built.items()) or "nothing counted in its ledger"


def _messages(findings: Sequence[Finding]) -> list[str]:
    return [finding.message for finding in findings]


def _print_first(messages: Sequence[str], console: Console, *, more: str) -> None:
    """The first few messages, and how many there are beside them; ``more`` says where."""
    for message in messages[:_NUM_SHOWN]:
        console.print(Text(f"  {message}", style="red"))
    if len(messages) > _NUM_SHOWN:
        rest = f"  and {len(messages) - _NUM_SHOWN:,} more{more}"
        console.print(Text(rest, style="red"), soft_wrap=True)


def _print_legend(result: AlignmentResult, console: Console) -> None:
    tolerance = result.tolerance
    console.print()
    for verdict, meaning in _LEGEND.items():
        console.print(Text.assemble((f"{verdict.value:<13}", VERDICT_STYLES[verdict]), meaning))
    console.print()
    console.print(
        f"Tolerance: metric |a-b| / max(|a|, |b|, {tolerance.metric_floor:g}) at most {tolerance.metric:g}; "
        f"gradient ||a-b|| / ||a|| at most {tolerance.gradient:g}; parameter: of the change d by an update, "
        f"||d_a-d_b|| / ||d_a|| beyond rounding at most {tolerance.update:g}",
        highlight=False,
    )
    console.print("a is the baseline, b the candidate; NaN equals NaN only.", highlight=False)


def _stack(name: str, *lines: str) -> Text:
    return Text.assemble((name, "bold"), *(("\n" + _wrap_name(line), "dim") for line in lines))


def _describe_first(divergence: Divergence | None) -> Text:
    if divergence is None:
        return Text("-")
    update = f" update {divergence.update}" if divergence.update else ""
    value = "" if divergence.value is None else f"\n{divergence.value:.2e} > {divergence.tolerance:g}"
    return Text(f"step {divergence.step}{update}: {divergence.kind}\n{_wrap_name(divergence.name)}{value}")


def _describe_worst(tensors: TensorComparison | None, kind: TraceKind) -> Text:
    group = tensors.group(kind) if tensors is not None else None
    if group is None:
        return Text(f"{kind} -")
    if group.num_bit_equal == group.num_compared:
        return Text(f"{kind} 0")
    worst = group.worst
    style = "red" if worst.exceeds else ""
    return Text(f"{kind} {worst.relative:.1e}\n{_wrap_name(worst.key.name)}", style=style)


def _describe_times(run: RunSummary) -> str:
    return f"{run.rollout_s:.1f} s\n{run.elapsed_s:.1f} s"


def _wrap_name(name: str) -> str:
    """Break a dotted name or override after separators, so that it fits a column and its parts stay whole."""
    lines = [""]
    for part in re.findall(r"[^._=/]*[._=/]|[^._=/]+", name):
        if lines[-1] and len(lines[-1]) + len(part) > _NAME_WIDTH:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
