"""Prints the report of rollout correction; reads well from 80 columns on, and as plain text in a file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rich.text import Text

from mock_scheduler.correction.report.format import (
    group_outcomes,
    headline,
    lag_text,
    name_outcome,
    number,
    others_text,
    outcome_cells,
    policy_rows,
    recording_rows,
)
from mock_scheduler.correction.report.presets import CONFIGURED
from mock_scheduler.correction.report.view import (
    Advice,
    Bucket,
    CorrectionReport,
    Measured,
    Outcome,
    StepHealth,
    WorstToken,
)
from mock_scheduler.display.console import Console
from mock_scheduler.display.terminal import FittedTable, TextColumn, print_labelled, print_table, print_wrapped
from mock_scheduler.recording.inspection.histogram import Bar
from mock_scheduler.support.text import shorten

_STYLES = {"problem": "bold red", "warning": "bold yellow", "note": "bold"}
_NUM_STEPS = 20
_OUTCOME_COLUMNS = (
    *(("mean\nraw", 2), ("mean\napplied", 1), ("std\napplied", 2), ("max\napplied", 3)),
    *(("ESS\napplied", 0), ("tokens\nkept", 0), ("sequences\nrejected", 1)),
)
_MAX_LINES = 21


def print_correction(report: CorrectionReport, console: Console, *, files: Mapping[str, Path]) -> None:
    """Print everything, advice before numbers; ``files``: what was written where."""
    word, sentence = headline(report)
    console.print(Text.assemble("rollout correction: ", (word, "bold")), soft_wrap=True)
    print_wrapped(console, Text(sentence))
    print_labelled(console, recording_rows(report))
    for advice in report.advice:
        _print_advice(advice, console)
    _print_steps(report.steps, console)
    if report.measured is not None:
        _print_measured(report.measured, console)
    if report.next_command:
        _print_title("training log-probabilities come from", console)
        console.print(Text(f"  {report.next_command}"), soft_wrap=True)
        console.print(Text(f"  mock-scheduler correction {report.recording} --run OUTPUT_DIR"), soft_wrap=True)
    for what, path in files.items():
        console.print(Text(f"{what:<6}{path}"), soft_wrap=True)


def _print_title(title: str, console: Console, note: str = "") -> None:
    print_wrapped(console, Text(""))
    print_wrapped(console, Text.assemble((title, "bold"), f"  {note}" if note else ""))


def _print_advice(advice: Advice, console: Console) -> None:
    print_wrapped(console, Text(""))
    print_wrapped(console, Text.assemble((f"{advice.severity}: {advice.title}", _STYLES[advice.severity])))
    print_wrapped(console, Text(advice.condition), indent=2)
    for remedy in advice.remedies:
        print_wrapped(console, Text(remedy), indent=4, label="  -")


def _print_steps(steps: Sequence[StepHealth], console: Console) -> None:
    shown = steps if len(steps) <= _NUM_STEPS else [*steps[: _NUM_STEPS // 2], *steps[-_NUM_STEPS // 2 :]]
    columns = [
        ("step", 0, [str(step.step) for step in shown]),
        ("trajec-\ntories", 3, [f"{step.trajectories:,}" for step in shown]),
        ("response\ntokens", 1, [f"{step.response_tokens:,}" for step in shown]),
        ("policy", 2, [str(step.policy_version) for step in shown]),
        ("lag", 2, [lag_text(step) for step in shown]),
        ("exact\n0.0", 3, [f"{step.zeros:,}" for step in shown]),
    ]
    if any(step.kl is not None for step in steps):
        columns += [
            ("KL", 0, [number(step.kl, digits=3) for step in shown]),
            ("k3", 0, [number(step.k3_kl, digits=3) for step in shown]),
            ("chi²\ntoken", 3, [number(step.chi2_token, digits=3) for step in shown]),
            ("ESS\ntoken", 1, [number(step.effective_sample_size) for step in shown]),
            ("log ratio\nsmallest", 1, [number(step.smallest_log_ratio, digits=3) for step in shown]),
            ("log ratio\nlargest", 1, [number(step.largest_log_ratio, digits=3) for step in shown]),
        ]
    _print_title("steps", console)
    _print_table(columns, console)
    if len(steps) > len(shown):
        console.print(f"  and {len(steps) - len(shown)} steps between (all with --json, some with --steps)")


def _print_table(columns: Sequence[tuple[str, int, Sequence[str]]], console: Console) -> None:
    print_table(
        [TextColumn(header=header, drop_order=order, cells=values) for header, order, values in columns], console
    )


def _print_measured(measured: Measured, console: Console) -> None:
    _print_title("the two policies", console)
    print_labelled(console, policy_rows(measured), indent=2)
    quantiles = ", ".join(f"{name} {number(value, digits=3)}" for name, value in measured.quantiles.items())
    _print_bars("log ratio of tokens", quantiles, measured.token_bars, console)
    if measured.middle_bars:
        _print_bars("log ratio of tokens", "1st to 99th percentile", measured.middle_bars, console)
    note = "one for each trajectory"
    _print_bars("sum of log ratios", note, measured.sequence_bars, console)
    _print_buckets("by position in the trajectory", measured.positions, console)
    if measured.lags is not None:
        _print_buckets("by policy lag", measured.lags, console)
    _print_worst(measured, console)
    _print_outcomes(measured.outcomes, console)


def _print_bars(title: str, note: str, bars: Sequence[Bar], console: Console) -> None:
    _print_title(title, console, note)
    for line in _draw(bars, width=console.width - 2, ascii_only=console.options.ascii_only):
        console.print(Text(f"  {line}"), soft_wrap=True)


def _draw(bars: Sequence[Bar], *, width: int, ascii_only: bool) -> Iterator[str]:
    """Lines as long as the logarithm of their counts; runs of empty bars are one line."""
    bars = bars if len(bars) <= _MAX_LINES else list(_in_threes(bars))
    labels = [f"{bar.low:g}" if bar.low == bar.high else f"{bar.low:g} to {bar.high:g}" for bar in bars]
    label_width = max(map(len, labels), default=0)
    count_width = max((len(f"{bar.count:,}") for bar in bars), default=0)
    room = max(width - label_width - count_width - 4, 4)
    most = max((math.log1p(bar.count) for bar in bars), default=0.0)
    is_gap = False
    for label, bar in zip(labels, bars, strict=True):
        if not bar.count:
            if not is_gap:
                yield f"{'...':>{label_width}}"
            is_gap = True
            continue
        is_gap = False
        length = max(round(room * math.log1p(bar.count) / most), 1)
        yield f"{label:>{label_width}}  {bar.count:>{count_width},} {('#' if ascii_only else '█') * length}"


def _in_threes(bars: Sequence[Bar]) -> Iterator[Bar]:
    """Bars three times as wide, the one around 0 in the middle of its three."""
    width = bars[0].high - bars[0].low
    for _, group in groupby(bars, key=lambda bar: round((bar.low + bar.high) / 2 / width / 3)):
        three = list(group)
        yield Bar(low=three[0].low, high=three[-1].high, count=sum(bar.count for bar in three))


def _print_buckets(title: str, buckets: Sequence[Bucket], console: Console) -> None:
    _print_title(title, console)
    _print_table(
        [
            ("", 0, [bucket.name for bucket in buckets]),
            ("tokens", 1, [f"{bucket.tokens:,}" for bucket in buckets]),
            ("KL", 0, [number(bucket.kl) for bucket in buckets]),
            ("k3", 0, [number(bucket.k3_kl) for bucket in buckets]),
            ("mean ratio", 1, [number(bucket.mean_ratio, digits=6) for bucket in buckets]),
            ("ESS", 1, [number(bucket.effective_sample_size) for bucket in buckets]),
        ],
        console,
    )


def _print_worst(measured: Measured, console: Console) -> None:
    sequences, tokens = measured.worst_sequences, measured.worst_tokens
    if sequences:
        _print_title("worst trajectories", console, "by |sum of log ratios|")
        columns = [
            ("sum", 0, [number(item.log_ratio_sum) for item in sequences]),
            ("mean", 0, [number(item.log_ratio_mean) for item in sequences]),
            ("tokens", 1, [f"{item.length:,}" for item in sequences]),
            ("reward", 3, [number(item.reward) for item in sequences]),
            *_token_columns([item.worst_token for item in sequences], "worst\n"),
            ("tag", 4, [shorten(item.tag, 20) for item in sequences]),
            ("step", 1, [str(item.step) for item in sequences]),
            ("trajectory", 0, [item.identity for item in sequences]),
        ]
        _print_table(columns, console)
    if tokens:
        _print_title("worst tokens", console, "by |log ratio|; tokens are counted from 0 in the trajectory's response")
        columns = [
            *_token_columns(tokens, ""),
            ("training", 1, [number(token.train_logprob) for token in tokens]),
            ("rollout", 1, [number(token.rollout_logprob) for token in tokens]),
            ("step", 1, [str(token.step) for token in tokens]),
            ("row", 0, [token.identity for token in tokens]),
        ]
        _print_table(columns, console)


def _token_columns(tokens: Sequence[WorstToken], before: str) -> list[tuple[str, int, Sequence[str]]]:
    columns: list[tuple[str, int, Sequence[str]]] = [
        (f"{before}log ratio", 0, [number(token.log_ratio) for token in tokens]),
        (f"{before}at token", 1, [f"{token.position:,}" for token in tokens]),
        (f"{before}id", 2, [str(token.token_id) for token in tokens]),
    ]
    if any(token.text is not None for token in tokens):
        texts = ["" if token.text is None else shorten(repr(token.text), 20) for token in tokens]
        columns.append((f"{before}text", 2, texts))
    return columns


def _print_outcomes(outcomes: Sequence[Outcome], console: Console) -> None:
    """A line of numbers for all that compute the same, under it what this is."""
    if not outcomes:
        return
    note = "computed, not trained; those that compute the same share a line"
    _print_title("what each configuration would do to these steps", console, note)
    groups = group_outcomes(outcomes)
    cells = [outcome_cells(group[0]) for group in groups]
    columns = [TextColumn(header="", cells=[name_outcome(group[0]) for group in groups])]
    columns += [
        TextColumn(header=header, drop_order=order, cells=[row[index] for row in cells])
        for index, (header, order) in enumerate(_OUTCOME_COLUMNS)
    ]
    table = FittedTable(columns, console)
    table.print_header()
    for row, group in enumerate(groups):
        table.print_row(row, style="bold" if group[0].name == CONFIGURED else "")
        texts = [group[0].computation, others_text(group), group[0].note]
        print_wrapped(console, Text("; ".join(filter(None, texts)), style="dim"), indent=6)
