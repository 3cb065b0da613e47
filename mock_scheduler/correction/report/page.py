"""The report of rollout correction as one HTML page that opens offline: advice first, then its evidence.

Contract: it looks as the pages of comparisons do, and each list counts the lines it leaves out. Figures are plotly's
JSON; their colours are names of the page's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.config.steps import StepRanges
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
    Bucket,
    CorrectionReport,
    Measured,
    Outcome,
    StepHealth,
    WorstSequence,
    WorstToken,
)
from mock_scheduler.display.pages import (
    axis_title,
    finite_or_none,
    plain_layout,
    render_page,
    soft_font,
    thin_out,
    write_page,
)
from mock_scheduler.errors import ConfigError
from mock_scheduler.recording.inspection.histogram import Bar
from mock_scheduler.recording.reading.browse import name_steps
from mock_scheduler.support.digests import JSON

MAX_STEPS = 200
_TONES = {"problem": "bad", "warning": "warn", "note": "good"}
_SEVERITY_CLASSES = {"problem": "t-diverged", "warning": "t-undecided", "note": "dim"}
_FOOTER = (
    "Log ratio: log-probability of a token by the training policy before the step's first update, less that with "
    "which it was sampled. Effective sample size: (Σw)² / (N·Σw²)."
)

#: Names and numbers of a table's row.
_Row = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _OutcomeRow:
    """Configurations that compute the same. is_own: whether the run's own is among them."""

    name: str
    words: tuple[str, ...]
    sources: str
    is_own: bool
    numbers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _MeasuredPart:
    """Everything computed from training log-probabilities. plots: elements; policies: labels and numbers in halves.

    lags: ``None`` where the recording does not name the policy of each token.
    """

    note: str
    plots: tuple[str, ...]
    policies: tuple[Sequence[tuple[str, str]], ...]
    positions: tuple[_Row, ...]
    lags: tuple[_Row, ...] | None
    outcomes: tuple[_OutcomeRow, ...]
    worst_sequences: tuple[_Row, ...]
    worst_tokens: tuple[_Row, ...]


def write_correction_page(report: CorrectionReport, path: Path) -> None:
    """Write the page to ``path``, whole or not at all; folders are made. Raises ``ConfigError`` where it cannot be."""
    write_page(render_correction_page(report), path, ConfigError)


def render_correction_page(report: CorrectionReport) -> str:
    """Render the page; nearly all of its 5 MB are plotly's script."""
    figures: list[JSON] = []
    word, sentence = headline(report)
    severities = {advice.severity for advice in report.advice} | {"note" if report.measured is not None else "warning"}
    rows = list(recording_rows(report))
    if report.next_command:
        rows.append(("next", f"{report.next_command} and then mock-scheduler correction … --run OUTPUT_DIR"))
    measured = None if report.measured is None else _measured_part(report.measured, figures)
    has_steps_plot = sum(step.k3_kl is not None for step in report.steps) > 1
    if has_steps_plot:
        figures.append(steps_figure(report.steps, "steps"))
    title = f"rollout correction: {report.recording}"
    return render_page(
        "mock_scheduler.correction.report",
        "correction.html",
        title=title,
        heading=title,
        footer=_FOOTER,
        tone=next(tone for severity, tone in _TONES.items() if severity in severities),
        word=word,
        sentence=sentence,
        rows=rows,
        advice=report.advice,
        severity_classes=_SEVERITY_CLASSES,
        measured=measured,
        has_steps_plot=has_steps_plot,
        steps=[_step_row(step) for step in report.steps[:MAX_STEPS]],
        num_more_steps=len(report.steps) - MAX_STEPS,
        figures=figures,
    )


def _measured_part(measured: Measured, figures: list[JSON]) -> _MeasuredPart:
    tokens, sequences = "response tokens", "trajectories"
    drawn = [
        ("tokens", measured.token_bars, "log ratio of a token", tokens),
        ("sequences", measured.sequence_bars, "sum of a trajectory's log ratios", sequences),
    ]
    if measured.middle_bars:
        drawn.append(("middle", measured.middle_bars, "log ratio, 1st to 99th percentile", tokens))
    figures += [histogram_figure(bars, element, x_title=x, y_title=y) for element, bars, x, y in drawn]
    quantiles = ", ".join(f"{name} {number(value, digits=3)}" for name, value in measured.quantiles.items())
    rows = list(policy_rows(measured))
    half = -(-len(rows) // 2)
    return _MeasuredPart(
        note=f"Counts on a log axis, of {name_steps(StepRanges.of(measured.steps))}. Quantiles of tokens: {quantiles}.",
        plots=tuple(element for element, *_ in drawn),
        policies=(rows[:half], rows[half:]),
        positions=tuple(map(_bucket_row, measured.positions)),
        lags=None if measured.lags is None else tuple(map(_bucket_row, measured.lags)),
        outcomes=tuple(_outcome_row(group) for group in group_outcomes(measured.outcomes)),
        worst_sequences=tuple(map(_sequence_row, measured.worst_sequences)),
        worst_tokens=tuple(map(_token_row, measured.worst_tokens)),
    )


def _outcome_row(group: Sequence[Outcome]) -> _OutcomeRow:
    first = group[0]
    return _OutcomeRow(
        name=name_outcome(first),
        words=tuple(filter(None, (first.computation, others_text(group), first.note))),
        sources="; ".join(dict.fromkeys(outcome.source for outcome in group if outcome.source)),
        is_own=first.name == CONFIGURED,
        numbers=tuple(outcome_cells(first)),
    )


def _bucket_row(bucket: Bucket) -> _Row:
    numbers = (
        f"{bucket.tokens:,}",
        number(bucket.kl),
        number(bucket.k3_kl),
        number(bucket.mean_ratio, digits=6),
        number(bucket.effective_sample_size),
    )
    return (bucket.name,), numbers


def _sequence_row(item: WorstSequence) -> _Row:
    token = item.worst_token
    tag = f", {item.tag}" if item.tag else ""
    names = f"step {item.step}, {item.identity}{tag}", f"{number(token.log_ratio)} at {_name_token(token)}"
    return names, (
        number(item.log_ratio_sum),
        number(item.log_ratio_mean),
        f"{item.length:,}",
        number(item.reward),
    )


def _token_row(token: WorstToken) -> _Row:
    names = _name_token(token), f"step {token.step}, {token.identity}"
    return names, (number(token.log_ratio), number(token.train_logprob), number(token.rollout_logprob))


def _name_token(token: WorstToken) -> str:
    text = "" if token.text is None else f" {token.text!r}"
    return f"response token {token.position}, id {token.token_id}{text}"


def _step_row(step: StepHealth) -> _Row:
    return (), (
        *(str(step.step), f"{step.trajectories:,}", f"{step.response_tokens:,}", str(step.policy_version)),
        *(lag_text(step), f"{step.zeros:,}", f"{step.positive:,}", f"{step.made_up_rows:,}"),
        *(f"{step.invalid:,}" if step.has_valid_column else "-", number(step.kl), number(step.k3_kl)),
        *(number(step.effective_sample_size), number(step.smallest_log_ratio, digits=3)),
        number(step.largest_log_ratio, digits=3),
    )


_MAX_MARKED = 20


def histogram_figure(bars: Sequence[Bar], element: str, *, x_title: str, y_title: str) -> JSON:
    """Counts on a log axis, with a line where the two policies agree."""
    shown = [bar for bar in bars if bar.count]
    most = max((bar.count for bar in bars), default=1)
    width = (bars[0].high - bars[0].low) or 1.0 if bars else 1.0
    data: JSON = [
        {
            "type": "bar",
            "x": [(bar.low + bar.high) / 2 for bar in shown],
            "y": [bar.count for bar in shown],
            "width": 0.94 * width,
            "hovertext": [f"{bar.low:g} to {bar.high:g}: {bar.count:,}" for bar in shown],
            "hoverinfo": "text",
            "marker": {"color": "theme:tolerance"},
        }
    ]
    # From a half on, so that a count of 1 has a bar.
    log_axis: dict[str, JSON] = {"type": "log", "range": [math.log10(0.5), math.log10(most) + 0.15], "dtick": 1}
    layout: dict[str, JSON] = {
        **plain_layout(height=260),
        "margin": {"l": 58, "r": 10, "t": 12, "b": 44},
        "showlegend": False,
        "xaxis": {**_axis(x_title), "showgrid": False},
        "yaxis": {**_axis(y_title), **log_axis},
        "shapes": [_line_at_zero()],
    }
    return {"id": element, "data": data, "layout": layout}


def steps_figure(steps: Sequence[StepHealth], element: str) -> JSON:
    """Returns k3 and the effective sample size over steps, each on its own axis."""
    measured = thin_out([step for step in steps if step.k3_kl is not None])
    numbers: list[JSON] = [step.step for step in measured]
    mode = "lines+markers" if len(measured) <= _MAX_MARKED else "lines"
    curves = (
        ("KL (k3)", [step.k3_kl for step in measured], "y", "theme:candidate", "solid"),
        ("effective sample size", [step.effective_sample_size for step in measured], "y2", "theme:tolerance", "dot"),
    )
    data: JSON = [
        {
            "type": "scatter",
            "mode": mode,
            "name": name,
            "x": numbers,
            "y": [finite_or_none(value) for value in values],
            "yaxis": axis,
            "line": {"color": colour, "width": 2, "dash": dash},
            "marker": {"size": 6},
        }
        for name, values, axis, colour, dash in curves
    ]
    ticks: dict[str, JSON] = {"tickvals": numbers} if len(measured) <= _MAX_MARKED else {"nticks": 10}
    layout: dict[str, JSON] = {
        **plain_layout(height=240),
        "margin": {"l": 64, "r": 64, "t": 28, "b": 40},
        "legend": {"orientation": "h", "x": 0, "y": 1.18, "font": soft_font(11)},
        "xaxis": {**_axis("step"), **ticks, "showgrid": False},
        "yaxis": {**_axis("KL (k3)"), "rangemode": "tozero"},
        "yaxis2": {**_axis("effective sample size"), "overlaying": "y", "side": "right", "showgrid": False},
    }
    return {"id": element, "data": data, "layout": layout}


def _axis(title: str) -> dict[str, JSON]:
    return {
        "title": axis_title(title),
        "gridcolor": "theme:line",
        "zeroline": False,
        "tickfont": soft_font(11),
    }


def _line_at_zero() -> JSON:
    line: JSON = {"color": "theme:candidate", "width": 1, "dash": "dot"}
    return {"type": "line", "x0": 0, "x1": 0, "y0": 0, "y1": 1, "yref": "paper", "line": line}
