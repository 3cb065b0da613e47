"""The findings of ``mock-scheduler compare`` and ``replicas`` on the terminal: the verdict first, then why.

Contract: reads well from 100 columns on and as plain text in a file; less than a screen where all is identical.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.text import Text

from mock_scheduler.comparison.findings import Finding
from mock_scheduler.comparison.tensors import LedgerComparison, TensorComparison
from mock_scheduler.comparison.walk.metrics import MetricComparison
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import print_wrapped
from mock_scheduler.errors import ExitCode
from mock_scheduler.report.comparison.text_tables import print_metrics, print_tensors, print_tiers
from mock_scheduler.report.comparison.view import (
    VERDICT_STYLES,
    count_tiers,
    describe_equal_metrics,
    metrics_to_show,
    name_sides,
    unmatched,
)
from mock_scheduler.report.recording.diff import print_differences
from mock_scheduler.support.text import count_of
from mock_scheduler.verdict.results import ComparisonResult, ReplicaResult
from mock_scheduler.verdict.wording.bounds import describe_bounds
from mock_scheduler.verdict.wording.coverage import describe_unseen
from mock_scheduler.verdict.wording.findings import describe_finding, describe_unmatched
from mock_scheduler.verdict.wording.reasons import describe_rest
from mock_scheduler.verdict.wording.tensors import describe_flips, describe_ledgers, describe_not_compared
from mock_scheduler.verdict.wording.verdicts import NOT_LOOKED_AT, describe_sentence

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
    print_wrapped(
        console, Text.assemble((verdict.kind.value, style), ": ", (f"{candidate} against {baseline}", "bold"))
    )
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
    """Replicas, routing flips and ledgers."""
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
