"""The report of rollout correction on the terminal; reads well from 80 columns on, and as plain text in a file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mock_scheduler.recording.inspection.histogram import Bar
from mock_scheduler.report.columns import TextColumn, lay_out
from mock_scheduler.report.correction_advice import Advice
from mock_scheduler.report.correction_format import (
    headline,
    lag_text,
    number,
    outcome_cells,
    policy_rows,
    recording_rows,
)
from mock_scheduler.report.correction_presets import CONFIGURED, Outcome
from mock_scheduler.report.correction_view import Bucket, CorrectionReport, Measured, StepHealth, WorstToken
from mock_scheduler.report.text import print_labelled, print_wrapped
from mock_scheduler.text import shorten

_STYLES = {"problem": "bold red", "warning": "bold yellow", "note": "bold"}
_NUM_STEPS = 20
_OUTCOME_HEADERS = (
    *(
        "mean\nraw",
        "mean\napplied",
        "std\napplied",
        "max\napplied",
        "ESS\napplied",
        "tokens\nkept",
        "sequences\nrejected",
    ),
)


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
    cells = [TextColumn(header=header, drop_order=order, cells=values) for header, order, values in columns]
    for line in lay_out(cells, width=console.width - 2):
        console.print(Text(f"  {line}"), soft_wrap=True)


def _print_measured(measured: Measured, console: Console) -> None:
    _print_title("the two policies", console)
    print_labelled(console, policy_rows(measured), indent=2)
    quantiles = ", ".join(f"{name} {number(value, digits=3)}" for name, value in measured.quantiles.items())
    _print_bars("log ratio of tokens", quantiles, measured.token_bars, console)
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
    if measured.worst_sequences:
        _print_title("worst trajectories", console, "by |sum of log ratios|")
    for item in measured.worst_sequences:
        tag = f" {item.tag}" if item.tag else ""
        head = (
            f"{number(item.log_ratio_sum)} over {item.length} tokens (mean {number(item.log_ratio_mean)})  step "
            f"{item.step}, {item.identity}{tag}, reward {number(item.reward)}"
        )
        print_wrapped(console, Text(head), indent=2)
        print_wrapped(console, Text(f"worst token: {_describe_token(item.worst_token)}", style="dim"), indent=6)
    if measured.worst_tokens:
        _print_title("worst tokens", console, "by |log ratio|")
    for token in measured.worst_tokens:
        print_wrapped(console, Text(f"{_describe_token(token)}  step {token.step}, {token.identity}"), indent=2)


def _describe_token(token: WorstToken) -> str:
    text = "" if token.text is None else f" {shorten(token.text, 24)!r}"
    return (
        f"{number(token.log_ratio)} (training {number(token.train_logprob)}, rollout {number(token.rollout_logprob)}) "
        f"response token {token.position}, {token.token_id}{text}"
    )


def _print_outcomes(outcomes: Sequence[Outcome], console: Console) -> None:
    if not outcomes:
        return
    _print_title("what each configuration would do to these steps", console, "without training")
    cells = [outcome_cells(outcome) for outcome in outcomes]
    orders = (2, 1, 2, 3, 0, 0, 1)
    columns = [("", 0, [outcome.name for outcome in outcomes])]
    columns += [
        (header, order, [row[index] for row in cells])
        for index, (header, order) in enumerate(zip(_OUTCOME_HEADERS, orders, strict=True))
    ]
    _print_table(columns, console)
    for outcome in outcomes:
        if outcome.name == CONFIGURED or len(outcomes) <= 2:
            print_wrapped(console, Text(f"{outcome.name}: {outcome.description}"), indent=2)
    noted: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.note:
            noted.setdefault(outcome.note, []).append(outcome.name)
    for note, names in noted.items():
        print_wrapped(console, Text(f"{', '.join(names)}: {note}", style="dim"), indent=2)
