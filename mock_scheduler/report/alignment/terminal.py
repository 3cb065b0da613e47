"""The terminal report of an alignment run; reads well from 100 columns on, and as plain text in a file.

Contract: nothing is cut off, lines are wrapped. Verdicts come first, one for each candidate, then what is known of
those that do not pass, what the verdicts mean, and where the files are. Drawn from the view that page and JSON are
drawn from.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mock_scheduler.display.text import print_labelled, print_wrapped
from mock_scheduler.report.alignment.view import AlignmentView, CandidateView
from mock_scheduler.report.comparison.view import VERDICT_STYLES
from mock_scheduler.verdict.wording.legend import LEGEND, PROOF_MARKS

_NUM_SHOWN = 5
_NUM_TENSORS = 3
_GAP = "  "
_WIDE = 90  # columns, from which on every column is in the table
_VERDICT_WIDTH, _PROVED_WIDTH, _WORST_WIDTH, _SECONDS_WIDTH = 20, 20, 22, 8
_LEAST_NAME_WIDTH = 16
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
    """One line of columns for each candidate, and beneath it the verdict in words."""
    widths = _widths(console.width)
    headers = ("candidate", "verdict", "proved by", "worst against baseline", "seconds")
    _print_row(_chosen([(header, "dim") for header in headers], widths), widths, console)
    seconds = f"{view.baseline_seconds[0][1]:,.1f}"
    _print_row(_chosen([("baseline", "bold"), ("", ""), ("", ""), ("", ""), (seconds, "")], widths), widths, console)
    _print_beneath(view.baseline_layout, console, style="dim")
    for candidate in view.candidates:
        worst = "–" if candidate.worst is None else candidate.worst.ratio
        seconds = f"{candidate.seconds[0][1]:,.1f}" if candidate.run_dir else "failed"
        cells = [
            (candidate.name, "bold"),
            (candidate.verdict.value, VERDICT_STYLES[candidate.verdict]),
            (candidate.proved_by, ""),
            (worst, "red" if candidate.worst is not None and candidate.worst.exceeds else ""),
            (seconds, ""),
        ]
        _print_row(_chosen(cells, widths), widths, console)
        own = (*candidate.overrides, *([f"entry={candidate.entry}"] if candidate.entry else []))
        _print_beneath(" ".join((candidate.layout, *own)), console, style="dim")
        _print_beneath(candidate.headline, console, style="" if candidate.passes else _TONE_STYLES[candidate.tone])
        if candidate.smallest_error:
            _print_beneath(f"would have been found: {candidate.smallest_error}", console, style="dim")


def _widths(width: int) -> tuple[int, ...]:
    """Of the columns; where the terminal is narrow, of name, verdict and seconds alone."""
    if width < _WIDE:
        name = max(width - _VERDICT_WIDTH - _SECONDS_WIDTH - 2 * len(_GAP), _LEAST_NAME_WIDTH)
        return (name, _VERDICT_WIDTH, _SECONDS_WIDTH)
    others = (_VERDICT_WIDTH, _PROVED_WIDTH, _WORST_WIDTH, _SECONDS_WIDTH)
    return (width - sum(others) - len(others) * len(_GAP), *others)


def _chosen(cells: Sequence[tuple[str, str]], widths: Sequence[int]) -> list[tuple[str, str]]:
    """The cells that have a column."""
    return list(cells) if len(cells) == len(widths) else [*cells[:2], cells[-1]]


def _print_row(cells: Sequence[tuple[str, str]], widths: Sequence[int], console: Console) -> None:
    """Cells side by side, each wrapped in its column; the last one is aligned to the right."""
    columns = [textwrap.wrap(text, width) or [""] for (text, _), width in zip(cells, widths, strict=True)]
    for number in range(max(map(len, columns))):
        line = Text()
        for place, (lines, (_, style), width) in enumerate(zip(columns, cells, widths, strict=True)):
            text = lines[number] if number < len(lines) else ""
            is_last = place == len(widths) - 1
            line.append(text.rjust(width) if is_last else text.ljust(width), style=style)
            line.append("" if is_last else _GAP)
        line.rstrip()
        console.print(line, soft_wrap=True)


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
