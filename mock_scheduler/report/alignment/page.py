"""An alignment as one HTML page that opens offline: verdicts first, then each candidate with all that it rests on.

Contract: self-contained, without a request and without a library: figures are HTML and SVG, so that a page of a hundred
candidates stays below a few megabytes. Light or dark as the reader's system is, and printable. Texts are escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from mock_scheduler.display import page_assets
from mock_scheduler.display.page_document import write_document
from mock_scheduler.errors import AlignmentError, ExitCode
from mock_scheduler.report.alignment import style as alignment_style
from mock_scheduler.report.alignment.figures import bar_table
from mock_scheduler.report.alignment.sections import candidate_html, chip_legend, chips, verdict_word
from mock_scheduler.report.alignment.view import AlignmentView, CandidateView
from mock_scheduler.report.comparison.page_parts import facts
from mock_scheduler.verdict.wording.legend import EXIT_MEANINGS, LEGEND, PROOF_MEANINGS

_NUM_OPEN = 6
_READING = (
    "A verdict holds for the steps, layers and tokens that were run: a change that they never exercise is identical.",
    "Equal losses prove nothing; gradients, parameters and, where traced, what lies between them decide.",
    "Bounds are each tensor's own, and a share of 100 % is the bound; what is not judged is no larger than rounding.",
    "a is the baseline, b the candidate; relative difference: ||a-b|| / ||a||, of a parameter that of its change.",
)


def write_alignment_page(view: AlignmentView, path: Path) -> None:
    """Write the page to ``path``, whole or not at all; folders are made.

    Raises ``AlignmentError`` where it cannot be written.
    """
    write_document(render_alignment_page(view), path, AlignmentError)


def render_alignment_page(view: AlignmentView) -> str:
    """The page's text."""
    title = f"Alignment of {view.config_name}: {view.headline}"
    sections = [
        _verdict_section(view),
        _matrix_section(view) if view.is_matrix else "",
        "<h2>Candidates</h2>",
        *(candidate_html(item, is_open=is_open) for item, is_open in _opened(view.candidates)),
        _baseline_section(view),
        _seconds_section(view),
        _reading_section(),
    ]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>\n<style>{page_assets.STYLE}{alignment_style.STYLE}</style></head>",
            f"<body><main>\n<h1>Alignment of {escape(view.config_name)}</h1>",
            *filter(None, sections),
            f"<footer><p>Results in {escape(view.output_dir)}</p></footer></main>",
            f"<script>{alignment_style.SCRIPT}</script>\n</body></html>\n",
        ]
    )


def _opened(candidates: Sequence[CandidateView]) -> list[tuple[CandidateView, bool]]:
    """Each with whether it lies open: the first few that do not pass; the only one in any case."""
    failing = [item.anchor for item in candidates if not item.passes][:_NUM_OPEN]
    return [(item, item.anchor in failing or len(candidates) == 1) for item in candidates]


def _verdict_section(view: AlignmentView) -> str:
    word = view.counts[0][0].value if view.counts else "nothing to compare"
    meaning = EXIT_MEANINGS[ExitCode(view.exit_code)]
    rows = "".join(
        f'<tr><th scope="row"><a href="#{item.anchor}">{escape(item.name)}</a></th>'
        f"<td>{verdict_word(item)}</td><td>{escape(item.headline)}</td>"
        f"<td>{chips(item.proofs, is_passing=item.passes)}</td><td>{escape(item.smallest_error or '–')}</td></tr>"
        for item in view.candidates
    )
    return (
        f'<section class="verdict long {view.tone}"><div class="word">{escape(word)}</div>'
        f'<p class="sentence">{escape(view.headline)}. Exit code {view.exit_code}: {escape(meaning)}.</p>'
        '<table class="rows"><thead><tr><th scope="col" style="width:12%">candidate</th><th scope="col">verdict</th>'
        '<th scope="col" style="width:34%">in words</th><th scope="col">proofs</th><th scope="col" style="width:15%">'
        f"smallest error that would have been found</th></tr></thead><tbody>{rows}</tbody></table>"
        f'<p class="note">{escape(chip_legend())}</p></section>'
    )


def _matrix_section(view: AlignmentView) -> str:
    """Layouts by options; candidates whose names are neither stand in a line beneath."""
    placed = [item for item in view.candidates if item.layout_name]
    cells = {(item.layout_name, item.option): item for item in placed}
    options = list(dict.fromkeys(item.option for item in placed))
    head = "".join(f'<th scope="col">{escape(option)}</th>' for option in options)
    rows = "".join(
        f'<tr><th scope="row">{escape(layout)}</th>'
        + "".join(f"<td>{_matrix_cell(cells.get((layout, option)))}</td>" for option in options)
        + "</tr>"
        for layout in dict.fromkeys(item.layout_name for item in placed)
    )
    others = [item for item in view.candidates if not item.layout_name]
    beside = "".join(f"<li>{_matrix_cell(item, has_name=True)}</li>" for item in others)
    also = (
        f'<h3>Beside the matrix</h3><ul class="chips" style="list-style:none;padding:0">{beside}</ul>' if others else ""
    )
    return (
        '<section><h2>Matrix of candidates</h2><p class="note">Layouts by options; under each verdict, the'
        " largest difference from the baseline in shares of its own bound.</p>"
        '<div class="scroll"><table class="matrix"><thead><tr><th scope="col">layout</th>'
        f"{head}</tr></thead><tbody>{rows}</tbody></table></div>{also}</section>"
    )


def _matrix_cell(item: CandidateView | None, *, has_name: bool = False) -> str:
    if item is None:
        return '<span class="dim">–</span>'
    small = item.proved_by if item.worst is None else item.worst.ratio
    name = f"<b>{escape(item.name)}</b> " if has_name else ""
    return (
        f'<a class="cell v-{item.tone}" href="#{item.anchor}">{name}<b>{escape(item.verdict.value)}</b>'
        f"<small>{escape(small)}</small></a>"
    )


def _baseline_section(view: AlignmentView) -> str:
    rows = [("layout", view.baseline_layout), ("recording", view.recording_dir or "none"), *view.baseline_ledger]
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in view.notes)
    tables = [
        ("Must match in every replay", view.must_match),
        ("May differ, and was", view.may_differ),
        ("Settings read back", view.settings),
        ("Versions", view.packages),
    ]
    details = "".join(
        f"<details><summary>{escape(title)} ({len(values)})</summary>{_value_table(values)}</details>"
        for title, values in tables
        if values
    )
    known = "".join(f"<li>{escape(fact)}</li>" for fact in view.facts)
    facts_list = f"<h3>What it also rests on</h3><ul>{known}</ul>" if known else ""
    return (
        f'<section class="long" id="baseline"><h2>The baseline and its contract</h2>{facts(rows)}{notes}{facts_list}'
        f"{details}{bar_table(view.baseline_seconds, total=None, caption='Seconds of the baseline.')}</section>"
    )


def _value_table(values: Sequence[tuple[str, str]]) -> str:
    rows = "".join(
        f'<tr><td class="name">{escape(name)}</td><td class="name">{escape(value)}</td></tr>' for name, value in values
    )
    return (
        '<table><thead><tr><th scope="col">name</th><th scope="col">value</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _seconds_section(view: AlignmentView) -> str:
    if view.total_s is None:
        return (
            '<section><h2>Timings</h2><p class="note">The alignment is still going, or was interrupted: it has no '
            "total.</p></section>"
        )
    table = bar_table(view.seconds, total=("total", view.total_s), caption="Where the seconds of the whole went.")
    return f"<section><h2>Timings</h2>{table}</section>"


def _reading_section() -> str:
    verdicts = "".join(
        f'<tr><th scope="row">{escape(verdict.value)}</th><td>{escape(meaning)}</td>'
        f'<td class="n">{int(verdict.exit_code)}</td></tr>'
        for verdict, meaning in LEGEND.items()
    )
    proofs = facts(PROOF_MEANINGS.items())
    lines = "".join(f"<li>{escape(line)}</li>" for line in _READING)
    return (
        '<section><h2>How to read a verdict</h2><table><thead><tr><th scope="col">verdict</th><th scope="col">means'
        f'</th><th scope="col" class="n">exit code</th></tr></thead><tbody>{verdicts}</tbody></table>'
        f"<h3>What each proof shows where it holds, strongest first</h3>{proofs}<ul>{lines}</ul></section>"
    )
