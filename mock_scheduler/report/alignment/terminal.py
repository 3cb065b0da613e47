"""The terminal report of an alignment run; reads well from 100 columns on, and as plain text in a file.

Contract: nothing is cut off, lines are wrapped. Verdicts come first, one for each candidate, then what is known of
those that do not pass, what the verdicts mean, and where the files are. Drawn from the view that page and JSON are
drawn from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mock_scheduler.display.console import print_labelled, print_wrapped
from mock_scheduler.display.tables import FittedTable, TextColumn
from mock_scheduler.report.alignment.view import AlignmentView, CandidateView
from mock_scheduler.report.comparison.view import VERDICT_STYLES
from mock_scheduler.verdict.wording.legend import LEGEND, PROOF_MARKS

_NUM_SHOWN = 5
_NUM_TENSORS = 3
_NAME_WIDTH, _PROVED_WIDTH = 22, 16  # above which their cells are folded before a column goes
_TONE_STYLES = {"good": "green", "bad": "red", "warn": "yellow"}


def print_report(view: AlignmentView, console: Console, *, files: Mapping[str, Path]) -> None:
    """Print the verdicts, details of candidates that do not pass, the legend and where the files are.

    ``files``: what lies where; ``result``, where it is among them, is the JSON file that holds all of the result.
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
    """One row for each run, and beneath it the verdict in words."""
    table = FittedTable(_columns(view), console, indent=0)
    table.print_header("dim")
    table.print_row(0)
    _print_beneath(view.baseline_layout, console, style="dim")
    for number, candidate in enumerate(view.candidates, start=1):
        table.print_row(number)
        own = (*candidate.overrides, *([f"entry={candidate.entry}"] if candidate.entry else []))
        _print_beneath(" ".join((candidate.layout, *own)), console, style="dim")
        _print_beneath(candidate.headline, console, style="" if candidate.passes else _TONE_STYLES[candidate.tone])
        if candidate.smallest_error:
            _print_beneath(f"would have been found: {candidate.smallest_error}", console, style="dim")


def _columns(view: AlignmentView) -> list[TextColumn]:
    """The columns of the table, of which each has the baseline's cell first."""
    candidates = view.candidates
    names = ["baseline", *(item.name for item in candidates)]
    verdicts = [Text(item.verdict.value, VERDICT_STYLES[item.verdict]) for item in candidates]
    worst = [
        Text("–") if item.worst is None else Text(item.worst.ratio, "red" if item.worst.exceeds else "")
        for item in candidates
    ]
    seconds = [f"{item.seconds[0][1]:,.1f}" if item.run_dir else "failed" for item in candidates]
    return [
        TextColumn(
            header="candidate", cells=[Text(name, "bold") for name in names], least_width=_NAME_WIDTH, justify="left"
        ),
        TextColumn(header="verdict", cells=["", *verdicts], justify="left"),
        TextColumn(
            header="proved by",
            cells=["", *(item.proved_by for item in candidates)],
            drop_order=2,
            least_width=_PROVED_WIDTH,
            justify="left",
        ),
        TextColumn(header="worst against baseline", cells=["", *worst], drop_order=1, justify="left"),
        TextColumn(header="seconds", cells=[f"{view.baseline_seconds[0][1]:,.1f}", *seconds]),
    ]


def _print_beneath(text: str, console: Console, *, style: str) -> None:
    print_wrapped(console, Text(text, style=style), indent=2)


def _print_details(candidate: CandidateView, console: Console, *, more: str) -> None:
    """What is known of a candidate that does not pass."""
    console.print()
    title = Text.assemble((candidate.name, "bold"), ": ", (candidate.verdict.value, VERDICT_STYLES[candidate.verdict]))
    console.print(title, soft_wrap=True)
    for text in dict.fromkeys((candidate.first_divergence, candidate.reason)):
        if text and text != candidate.headline:
            print_wrapped(console, Text(text), indent=2)
    rows = [(f"{PROOF_MARKS[proof.outcome]} {proof.name}", proof.text) for proof in candidate.proofs]
    if any(proof.outcome != "not tried" for proof in candidate.proofs):
        print_labelled(console, rows, indent=2)
    if candidate.localisation:
        print_labelled(console, [*candidate.localisation, ("open", candidate.command)], indent=2)
    _print_lines("consequence", [text for text in (candidate.consequence_text,) if text], 1, console, more=more)
    tensors = [
        f"{line.kind} of {line.name} at step {line.step}, update {line.update}: {line.relative}, bound {line.bound} "
        f"({line.ratio})"
        for line in candidate.tensors[:_NUM_TENSORS]
    ]
    _print_lines(candidate.tensors_heading, tensors, candidate.num_tensors, console, more=more)
    _print_lines(
        "metrics that differ", candidate.differing_metrics, candidate.num_differing_metrics, console, more=more
    )
    for title_text, lines, number in candidate.lists:
        _print_lines(title_text, lines, number, console, more=more)
    if candidate.versions:
        _print_lines("other versions", candidate.versions, len(candidate.versions), console, more=more)
    if candidate.log_path:
        print_labelled(console, [("its output", candidate.log_path)], indent=2)


def _print_lines(title: str, lines: Sequence[str], number: int, console: Console, *, more: str) -> None:
    """The first few lines under a title, and how many there are beside them; ``more`` says where."""
    if not lines:
        return
    print_wrapped(console, Text(title, style="dim"), indent=2)
    for line in lines[:_NUM_SHOWN]:
        print_wrapped(console, Text(line), indent=4)
    rest = number - min(len(lines), _NUM_SHOWN)
    if rest > 0:
        console.print(Text(f"    and {rest:,} more{more}"), soft_wrap=True)


def _print_built(view: AlignmentView, console: Console) -> None:
    """What candidates built: in one line where it is the same for all that ran."""
    built = {candidate.name: candidate.built for candidate in view.candidates if candidate.built}
    if not built:
        return
    console.print()
    if len(set(built.values())) == 1:
        print_wrapped(console, Text(f"Each candidate: {next(iter(built.values()))}"))
        return
    print_labelled(console, built.items())


def _print_seconds(view: AlignmentView, console: Console) -> None:
    """Where the seconds of the whole went; nothing where it has not ended."""
    if view.total_s is None:
        return
    parts = ", ".join(f"{label} {seconds:,.1f}" for label, seconds in view.seconds if seconds)
    print_wrapped(console, Text(f"Seconds: {view.total_s:,.1f} in all: {parts}"))


def _print_legend(view: AlignmentView, console: Console) -> None:
    """What the verdicts that occur mean, and what tensors were held to."""
    console.print()
    rows = [(verdict.value, LEGEND[verdict]) for verdict, _ in view.counts]
    print_labelled(console, rows)
    print_wrapped(console, Text(f"Bounds: {view.bounds}", style="dim"))
    console.print()
