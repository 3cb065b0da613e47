"""The report of rollout correction as one HTML page that opens offline: advice first, then what it rests on.

Contract: self-contained, light or dark as the reader's system is, and printable, as pages of comparisons are. Every
text is escaped, and what a list does not show is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from mock_scheduler.config.steps import StepRanges
from mock_scheduler.correction.report.figures import histogram_figure, steps_figure
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
    WorstSequence,
    WorstToken,
)
from mock_scheduler.display.page_document import render_document, write_document
from mock_scheduler.errors import ConfigError
from mock_scheduler.recording.reading.browse import name_steps
from mock_scheduler.report.comparison.page_parts import facts
from mock_scheduler.support.digests import JSON

MAX_STEPS = 200
_TONES = {"problem": "bad", "warning": "warn", "note": "good"}
_SEVERITY_CLASSES = {"problem": "t-diverged", "warning": "t-undecided", "note": "dim"}


def write_correction_page(report: CorrectionReport, path: Path) -> None:
    """Write the page to ``path``, whole or not at all; folders are made. Raises ``ConfigError`` where it cannot be."""
    write_document(render_correction_page(report), path, ConfigError)


def render_correction_page(report: CorrectionReport) -> str:
    """The page's text, of 5 MB, nearly all of which is plotly's script."""
    figures: list[JSON] = []
    sections = [_head_section(report), *_advice_sections(report.advice)]
    if report.measured is not None:
        sections += _measured_sections(report.measured, figures)
    sections.append(_steps_section(report.steps, figures))
    title = f"rollout correction: {report.recording}"
    footer = (
        "Log ratio: log-probability of a token by the training policy before the step's first update, less that with "
        "which it was sampled. Effective sample size: (Σw)² / (N·Σw²)."
    )
    return render_document(title, title, sections, footer=footer, figures=figures)


def _head_section(report: CorrectionReport) -> str:
    word, sentence = headline(report)
    severities = {advice.severity for advice in report.advice} | {"note" if report.measured is not None else "warning"}
    tone = next(_TONES[severity] for severity in _TONES if severity in severities)
    rows = list(recording_rows(report))
    if report.next_command:
        rows.append(("next", f"{report.next_command} and then mock-scheduler correction … --run OUTPUT_DIR"))
    return (
        f'<section class="verdict {tone}"><div class="word">{escape(word)}</div>'
        f'<p class="sentence">{escape(sentence)}</p>{facts(rows)}</section>'
    )


def _advice_sections(advice: Sequence[Advice]) -> list[str]:
    if not advice:
        return []
    parts = []
    for item in advice:
        remedies = "".join(f"<li>{escape(remedy)}</li>" for remedy in item.remedies)
        tag = f'<span class="tag {_SEVERITY_CLASSES[item.severity]}">{item.severity}</span>'
        parts.append(f"<h3>{tag} {escape(item.title)}</h3><p>{escape(item.condition)}</p><ul>{remedies}</ul>")
    return [_section("Advice", "", "".join(parts))]


def _measured_sections(measured: Measured, figures: list[JSON]) -> list[str]:
    figures.append(
        histogram_figure(measured.token_bars, "tokens", x_title="log ratio of a token", y_title="response tokens")
    )
    figures.append(
        histogram_figure(
            measured.sequence_bars, "sequences", x_title="sum of a trajectory's log ratios", y_title="trajectories"
        )
    )
    plots = _plot("tokens") + _plot("sequences")
    if measured.middle_bars:
        figures.append(
            histogram_figure(
                measured.middle_bars, "middle", x_title="log ratio, 1st to 99th percentile", y_title="response tokens"
            )
        )
        plots += _plot("middle")
    quantiles = ", ".join(f"{name} {number(value, digits=3)}" for name, value in measured.quantiles.items())
    note = f"Counts on a log axis, of {name_steps(StepRanges.of(measured.steps))}. Quantiles of tokens: {quantiles}."
    rows = list(policy_rows(measured))
    half = -(-len(rows) // 2)
    tables = _buckets_html("position in the trajectory", measured.positions)
    tables += "" if measured.lags is None else _buckets_html("policy lag", measured.lags)
    unknown = "" if measured.lags is not None else "The recording does not tell which policy sampled which token."
    return [
        _section("Log ratios", note, _two(plots)),
        _section("The two policies", "", _two(facts(rows[:half]) + facts(rows[half:]))),
        _section("By position and policy lag", unknown, _two(tables)),
        _outcomes_section(measured.outcomes),
        _worst_section(measured),
    ]


def _two(content: str) -> str:
    return f'<div class="two">{content}</div>'


def _outcomes_section(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return ""
    headers = [
        *(("configuration", ""), ("mean raw", "n"), ("mean applied", "n"), ("std applied", "n")),
        *(("max applied", "n"), ("ESS applied", "n"), ("tokens kept", "n"), ("sequences rejected", "n")),
    ]
    rows = []
    for group in group_outcomes(outcomes):
        first = group[0]
        texts = (first.computation, others_text(group), first.note)
        words = "".join(f'<span class="words">{escape(text)}</span>' for text in texts if text)
        sources = "; ".join(dict.fromkeys(outcome.source for outcome in group if outcome.source))
        name = f'<td style="width:46%" title="{escape(sources)}"><b>{escape(name_outcome(first))}</b>{words}</td>'
        is_own = " class=first" if first.name == CONFIGURED else ""
        cells = "".join(f'<td class="n">{escape(cell)}</td>' for cell in outcome_cells(first))
        rows.append(f"<tr{is_own}>{name}{cells}</tr>")
    note = (
        "Computed from both log-probabilities, without training; those that compute the same share a row. Applied "
        "weights are 0 where a token is rejected. In bypass the training policy moves with every update; these numbers "
        "are of the one before the first."
    )
    return _section("What each configuration would do", note, _table(headers, rows), is_long=True)


def _buckets_html(what: str, buckets: Sequence[Bucket]) -> str:
    headers = [(what, ""), ("tokens", "n"), ("KL", "n"), ("k3", "n"), ("mean ratio", "n"), ("ESS", "n")]
    rows = [
        _row(
            [bucket.name],
            [
                f"{bucket.tokens:,}",
                number(bucket.kl),
                number(bucket.k3_kl),
                number(bucket.mean_ratio, digits=6),
                number(bucket.effective_sample_size),
            ],
        )
        for bucket in buckets
    ]
    return f"<div>{_table(headers, rows)}</div>"


def _worst_section(measured: Measured) -> str:
    if not measured.worst_tokens:
        return ""
    sequences = _table(
        [
            *(("trajectory", ""), ("worst token", ""), ("sum", "n"), ("mean", "n"), ("tokens", "n"), ("reward", "n")),
        ],
        [_sequence_row(item) for item in measured.worst_sequences],
    )
    tokens = _table(
        [("token", ""), ("where", ""), ("log ratio", "n"), ("training", "n"), ("rollout", "n")],
        [_token_row(token) for token in measured.worst_tokens],
    )
    body = f"<h3>Trajectories by |sum of log ratios|</h3>{sequences}<h3>Tokens by |log ratio|</h3>{tokens}"
    return _section("Worst", "", body, is_long=True)


def _sequence_row(item: WorstSequence) -> str:
    token = item.worst_token
    tag = f", {item.tag}" if item.tag else ""
    cells = [number(item.log_ratio_sum), number(item.log_ratio_mean), f"{item.length:,}", number(item.reward)]
    return _row(
        [f"step {item.step}, {item.identity}{tag}", f"{number(token.log_ratio)} at {_name_token(token)}"], cells
    )


def _token_row(token: WorstToken) -> str:
    cells = [number(token.log_ratio), number(token.train_logprob), number(token.rollout_logprob)]
    return _row([_name_token(token), f"step {token.step}, {token.identity}"], cells)


def _name_token(token: WorstToken) -> str:
    text = "" if token.text is None else f" {token.text!r}"
    return f"response token {token.position}, id {token.token_id}{text}"


def _steps_section(steps: Sequence[StepHealth], figures: list[JSON]) -> str:
    plot = ""
    if sum(step.k3_kl is not None for step in steps) > 1:
        figures.append(steps_figure(steps, "steps"))
        plot = _plot("steps")
    headers = [
        *(("step", "n"), ("trajectories", "n"), ("response tokens", "n"), ("policy", "n"), ("lag", "n")),
        *(("exactly 0.0", "n"), ("above 0", "n"), ("rows of fillers", "n"), ("not valid", "n")),
        *(("KL", "n"), ("k3", "n"), ("ESS", "n"), ("smallest log ratio", "n"), ("largest", "n")),
    ]
    rows = [
        _row(
            [],
            [
                *(str(step.step), f"{step.trajectories:,}", f"{step.response_tokens:,}", str(step.policy_version)),
                *(lag_text(step), f"{step.zeros:,}", f"{step.positive:,}", f"{step.zero_rows:,}"),
                *(f"{step.invalid:,}" if step.has_valid_column else "-", number(step.kl), number(step.k3_kl)),
                *(number(step.effective_sample_size), number(step.smallest_log_ratio, digits=3)),
                number(step.largest_log_ratio, digits=3),
            ],
        )
        for step in steps[:MAX_STEPS]
    ]
    rest = len(steps) - MAX_STEPS
    more = f'<p class="note">and {rest:,} more (all with --json)</p>' if rest > 0 else ""
    return _section("Steps", "", plot + _table(headers, rows) + more, is_long=True)


def _plot(element: str) -> str:
    return f'<div class="plot" id="{element}"></div>'


def _row(names: Iterable[str], numbers: Iterable[str]) -> str:
    cells = "".join(f'<td class="name">{escape(name)}</td>' for name in names)
    return f"<tr>{cells}{''.join(f'<td class=n>{escape(value)}</td>' for value in numbers)}</tr>"


def _table(headers: Sequence[tuple[str, str]], rows: Sequence[str]) -> str:
    head = "".join(f'<th class="{kind}" style="white-space:normal">{escape(text)}</th>' for text, kind in headers)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _section(title: str, note: str, body: str, *, is_long: bool = False) -> str:
    note = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section{' class=long' if is_long else ''}><h2>{escape(title)}</h2>{note}{body}</section>"
