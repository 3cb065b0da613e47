"""Prints the report of an alignment run; reads well from 100 columns on, and as plain text in a file.

Contract: nothing is cut off, lines are wrapped. Verdicts come first, one for each candidate, then details of every
failing one, the meanings of the verdicts, and the files. Page and JSON are drawn from the same view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.text import Text

from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import FittedTable, TextColumn, print_labelled, print_wrapped
from mock_scheduler.report.alignment.view import AlignmentView, CandidateView
from mock_scheduler.report.comparison.view import VERDICT_STYLES
from mock_scheduler.verdict.wording.verdicts import LEGEND, PROOF_MARKS

_NUM_SHOWN = 5
_NUM_TENSORS = 3
_NAME_WIDTH, _PROVED_WIDTH = 22, 16  # above which their cells are folded before a column goes
_TONE_STYLES = {"good": "green", "bad": "red", "warn": "yellow"}


def print_report(view: AlignmentView, console: Console, *, files: Mapping[str, Path]) -> None:
    """Print the verdicts, details of failing candidates, the legend and the files.

    ``files``: paths by their role; ``result``, where it is among them, is the JSON file of the whole result.
    """
    more = f", all in {files['result']}" if "result" in files else ""
    console.print()
    print_wrapped(console, Text(f"Alignment of {view.config_name}: {view.headline}", style="bold"))
    console.print()
    _print_table(view, console)
    for candidate in view.candidates:
        if not candidate.passes:
            _print_details(candidate, console, more=more)
    _print_built(view, console)
    _print_seconds(view, console)
    _print_legend(view, console)
    for what, path in files.items():
        console.print(Text(f"{what:<13}{path}"), soft_wrap=True)


def _print_table(view: AlignmentView, console: Console) -> None:
    """Print one row for each run, and beneath it the verdict in words."""
    table = FittedTable(_columns(view), console, indent=0)
    table.print_header("dim")
    table.print_row(0)
    _print_beneath(view.baseline_layout, console, style="dim")
    if view.baseline_code:
        _print_beneath(f"own code: {view.baseline_code}", console, style="dim")
    for number, candidate in enumerate(view.candidates, start=1):
        setup, verdict = candidate.setup, candidate.verdict
        table.print_row(number)
        own = (*setup.overrides, *([f"entry={setup.entry}"] if setup.entry else []))
        _print_beneath(" ".join((setup.layout, *own)), console, style="dim")
        _print_beneath(verdict.headline, console, style="" if verdict.passes else _TONE_STYLES[verdict.tone])
        if candidate.consequence.is_asked and candidate.consequence.text:
            _print_beneath(f"consequence: {candidate.consequence.text}", console, style="")
        if candidate.start.text:
            _print_beneath(candidate.start.text, console, style="dim")
        if setup.own_code:
            _print_beneath(f"own code: {setup.own_code}", console, style="dim")
        if verdict.outside:
            _print_beneath(f"outside the proof: {verdict.outside}", console, style="dim")
        if verdict.smallest_error:
            _print_beneath(f"would have been found: {verdict.smallest_error}", console, style="dim")


def _columns(view: AlignmentView) -> list[TextColumn]:
    """Build the columns of the table, each with the baseline's cell first."""
    candidates = view.candidates
    names = ["baseline", *(item.name for item in candidates)]
    verdicts = [Text(item.verdict.kind.value, VERDICT_STYLES[item.verdict.kind]) for item in candidates]
    nearest = [item.differences.worst for item in candidates]
    worst = [Text("–") if line is None else Text(line.ratio, "red" if line.exceeds else "") for line in nearest]
    seconds = [f"{item.run.seconds[0][1]:,.1f}" if item.run.run_dir else "failed" for item in candidates]
    return [
        TextColumn(
            header="candidate", cells=[Text(name, "bold") for name in names], least_width=_NAME_WIDTH, justify="left"
        ),
        TextColumn(header="verdict", cells=["", *verdicts], justify="left"),
        TextColumn(
            header="proved by",
            cells=["", *(item.verdict.proved_by for item in candidates)],
            drop_order=2,
            least_width=_PROVED_WIDTH,
            justify="left",
        ),
        TextColumn(header="worst against baseline", cells=["", *worst], drop_order=1, justify="left"),
        TextColumn(header="seconds", cells=[f"{view.baseline_seconds[0][1]:,.1f}", *seconds]),
    ]


def _print_beneath(text: str, console: Console, *, style: str) -> None:
    for line in text.split("\n"):  # a failed run says the last lines of its output
        print_wrapped(console, Text(line, style=style), indent=2)


def _print_details(candidate: CandidateView, console: Console, *, more: str) -> None:
    """Print all details of a failing candidate."""
    verdict, origin, versions = candidate.verdict, candidate.origin, candidate.setup.versions
    console.print()
    title = Text.assemble((candidate.name, "bold"), ": ", (verdict.kind.value, VERDICT_STYLES[verdict.kind]))
    console.print(title, soft_wrap=True)
    for text in dict.fromkeys((verdict.first_divergence, verdict.reason)):
        if text and text != verdict.headline:
            print_wrapped(console, Text(text), indent=2)
    rows = [(f"{PROOF_MARKS[proof.outcome]} {proof.name}", proof.text) for proof in candidate.proofs]
    if any(proof.outcome != "not tried" for proof in candidate.proofs):
        print_labelled(console, rows, indent=2)
    if origin.localisation:
        print_labelled(console, [*origin.localisation, ("open", origin.command)], indent=2)
    _print_lines("consequence", [text for text in (candidate.consequence.text,) if text], 1, console, more=more)
    _print_differences(candidate, console, more=more)
    _print_lines("other versions", versions, len(versions), console, more=more)
    if candidate.run.log_path:
        print_labelled(console, [("its output", candidate.run.log_path)], indent=2)


def _print_differences(candidate: CandidateView, console: Console, *, more: str) -> None:
    """Print the first few differing tensors and metrics, and further findings."""
    differences, metrics = candidate.differences, candidate.metrics
    tensors = [
        f"{line.kind} of {line.name} at step {line.step}, update {line.update}: {line.relative}, bound {line.bound} "
        f"({line.ratio})"
        for line in differences.tensors[:_NUM_TENSORS]
    ]
    _print_lines(differences.tensors_heading, tensors, differences.num_tensors, console, more=more)
    _print_lines("metrics that differ", metrics.differing, metrics.num_differing, console, more=more)
    for title, lines, number in differences.lists:
        _print_lines(title, lines, number, console, more=more)


def _print_lines(title: str, lines: Sequence[str], number: int, console: Console, *, more: str) -> None:
    """Print the first few lines under a title, and how many more there are; ``more`` says where."""
    if not lines:
        return
    print_wrapped(console, Text(title, style="dim"), indent=2)
    for line in lines[:_NUM_SHOWN]:
        print_wrapped(console, Text(line), indent=4)
    rest = number - min(len(lines), _NUM_SHOWN)
    if rest > 0:
        console.print(Text(f"    and {rest:,} more{more}"), soft_wrap=True)


def _print_built(view: AlignmentView, console: Console) -> None:
    """Print the numbers of engines and environments each run built, in one line where they are the same."""
    built = {item.name: item.run.built for item in view.candidates if item.run.built}
    if not built:
        return
    console.print()
    if len(set(built.values())) == 1:
        print_wrapped(console, Text(f"Each candidate: {next(iter(built.values()))}"))
        return
    print_labelled(console, built.items())


def _print_seconds(view: AlignmentView, console: Console) -> None:
    """Print how the seconds of the whole were spent; nothing before its end."""
    if view.total_s is None:
        return
    parts = ", ".join(f"{label} {seconds:,.1f}" for label, seconds in view.seconds if seconds)
    print_wrapped(console, Text(f"Seconds: {view.total_s:,.1f} in all: {parts}"))


def _print_legend(view: AlignmentView, console: Console) -> None:
    """Print the meanings of the verdicts at hand, and the bounds."""
    console.print()
    rows = [(verdict.value, LEGEND[verdict]) for verdict, _ in view.counts]
    print_labelled(console, rows)
    print_wrapped(console, Text(f"Bounds: {view.bounds}", style="dim"))
    console.print()
