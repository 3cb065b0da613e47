"""One candidate of an alignment's page: what its verdict rests on, figures, where it began, and what it ran with.

Contract: HTML out of a view alone; every text is escaped, and what a list does not show is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from mock_scheduler.report.alignment.environment import EnvironmentView, ValueDifference
from mock_scheduler.report.alignment.figures import bar_table, curve_figure, heat_legend, heat_table
from mock_scheduler.report.alignment.heat import ErrorMap
from mock_scheduler.report.alignment.trajectory import sample_html
from mock_scheduler.report.alignment.view import CandidateView, ProofView, TensorLine
from mock_scheduler.report.comparison.page_parts import facts
from mock_scheduler.support.text import count_of
from mock_scheduler.verdict.wording.legend import PROOF_MARKS

_NUM_DETAILED = 5


def candidate_html(candidate: CandidateView, *, is_open: bool) -> str:
    """The whole section, which opens and closes."""
    parts = [
        _verdict_part(candidate),
        _part("Proofs, strongest first", proofs_table(candidate.proofs)),
        _localisation_part(candidate),
        _consequence_part(candidate),
        _curves_part(candidate),
        _map_part(candidate.error_map),
        _tensors_part(candidate),
        *(_list_part(title, lines, number) for title, lines, number in candidate.lists),
        "" if candidate.sample is None else _part("The worst sample, turn by turn", sample_html(candidate.sample)),
        *_environment_parts(candidate),
        _seconds_part(candidate),
    ]
    opened = " open" if is_open else ""
    return (
        f'<details class="cand g-{candidate.tone}" id="{candidate.anchor}"{opened}><summary>'
        f"<h3>{escape(candidate.name)}</h3>{verdict_word(candidate)} {escape(_first_sentence(candidate.headline))}"
        f'</summary><div class="in">{"".join(parts)}</div></details>'
    )


def verdict_word(candidate: CandidateView) -> str:
    """The verdict in its colour."""
    return f'<span class="v v-{candidate.tone}">{escape(candidate.verdict.value)}</span>'


def chips(proofs: Sequence[ProofView], *, is_passing: bool) -> str:
    """The ladder in one line: a sign and a name for each proof."""
    return f'<span class="chips">{"".join(_chip(proof, is_passing=is_passing) for proof in proofs)}</span>'


def _chip(proof: ProofView, *, is_passing: bool) -> str:
    """Of a candidate that passes, a stronger proof that is open or does not hold is no alarm."""
    words = escape(f"{proof.name}: {proof.outcome}. {proof.text}")
    shade = "weak" if is_passing and proof.outcome in ("open", "refuted") else proof.outcome.split()[0]
    return (
        f'<span class="chip p-{shade}" title="{words}">{PROOF_MARKS[proof.outcome]} {proof.name}'
        f'<span class="sr"> {proof.outcome}</span></span>'
    )


def chip_legend() -> str:
    """What the signs of the chips say."""
    return "Proofs: " + ", ".join(f"{mark} {outcome}" for outcome, mark in PROOF_MARKS.items()) + "; strongest first."


def _first_sentence(text: str, width: int = 190) -> str:
    return text if len(text) <= width else f"{text[: text.rfind(' ', 0, width)]} …"


def _part(title: str, body: str) -> str:
    return f"<h4>{escape(title)}</h4>{body}" if body else ""


def _verdict_part(candidate: CandidateView) -> str:
    rows = [("layout", candidate.layout), ("overrides", " ".join(candidate.overrides))]
    code = (f"its module {candidate.entry}",) if candidate.entry else ()
    rows += [("entry", candidate.entry), ("may move a bit", ", ".join((*candidate.changes, *code)))]
    rows += [("proved by", candidate.proved_by)]
    rows += [("would have been found", candidate.smallest_error)]
    if candidate.worst is not None:
        worst = candidate.worst
        where = f"{worst.kind} of {worst.name} at step {worst.step}, update {worst.update}"
        rows.append(("worst against the baseline", f"{where}: {worst.relative}, bound {worst.bound} ({worst.ratio})"))
    rows += [("in its order", candidate.emulated), ("other versions", ", ".join(candidate.versions))]
    rows += [("metrics", candidate.metrics), ("run", candidate.run_dir), ("its output", candidate.log_path)]
    sentence = candidate.first_divergence if candidate.first_divergence != candidate.headline else ""
    texts = [text for text in (candidate.headline, sentence, candidate.reason) if text]
    words = "".join(
        f'<p class="{"" if number == 0 else "note"}">{escape(text)}</p>'
        for number, text in enumerate(dict.fromkeys(texts))
    )
    return words + facts((label, text) for label, text in rows if text)


def proofs_table(proofs: Sequence[ProofView]) -> str:
    """Every proof with its outcome and its words."""
    rows = "".join(
        f'<tr><th scope="row">{proof.name}</th><td class="tight"><span class="chip p-{proof.outcome.split()[0]}">'
        f"{PROOF_MARKS[proof.outcome]} {proof.outcome}</span></td><td>{escape(proof.text)}</td>"
        f'<td class="n">{f"{proof.num_equal:,} of {proof.num_compared:,}" if proof.num_compared else ""}</td></tr>'
        for proof in proofs
    )
    return (
        '<table class="rows"><thead><tr><th scope="col">proof</th><th scope="col">outcome</th><th scope="col">what it '
        'found</th><th scope="col" class="n">equal tensors</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _localisation_part(candidate: CandidateView) -> str:
    if not candidate.localisation:
        return ""
    opens = f"<p>Open the traces: <code>{escape(candidate.command)}</code></p>" if candidate.command else ""
    return _part("Where it begins", facts(candidate.localisation) + opens)


def _consequence_part(candidate: CandidateView) -> str:
    if not candidate.consequence_text and not candidate.consequence:
        return ""
    text = f"<p>{escape(candidate.consequence_text)}</p>" if candidate.consequence_text else ""
    return _part("What it does to the training", text + facts(candidate.consequence))


def _curves_part(candidate: CandidateView) -> str:
    if not candidate.curves:
        return ""
    drawn = sum(not curve.bit_equal for curve in candidate.curves)
    note = ""
    if drawn < candidate.num_differing_metrics:
        note = f'<p class="note">Drawn are {drawn} of {candidate.num_differing_metrics} metrics that differ.</p>'
    figures = "".join(curve_figure(curve) for curve in candidate.curves)
    return _part("Metrics of both runs", f'{note}<div class="curves">{figures}</div>')


def _map_part(error_map: ErrorMap | None) -> str:
    if error_map is None:
        return ""
    which = "in which the runs first part" if error_map.is_parting else "which is nearest to its bounds"
    note = (
        f"The worst tensor of each part of the model at step {error_map.step}, update {error_map.update}, {which}; "
        "each number is the share of that tensor's own bound."
    )
    tables = [heat_table(table) for table in error_map.layers]
    if error_map.steps is not None:
        tables.append(heat_table(error_map.steps))
    maps = f'<div class="maps">{"".join(tables)}</div>'
    return _part("The error's path through layers and steps", f'<p class="note">{note}</p>{heat_legend()}{maps}')


def _tensors_part(candidate: CandidateView) -> str:
    if not candidate.tensors:
        return ""
    rows = "".join(
        _tensor_row(line, has_details=number < _NUM_DETAILED) for number, line in enumerate(candidate.tensors)
    )
    rest = candidate.num_tensors - len(candidate.tensors)
    more = f'<p class="note">and {rest:,} more, in the JSON result</p>' if rest > 0 else ""
    table = (
        '<div class="scroll"><table class="rows"><thead><tr><th scope="col">step, update</th><th scope="col">kind</th>'
        '<th scope="col">tensor</th><th scope="col" class="n">relative difference</th><th scope="col" class="n">bound'
        f'</th><th scope="col">is</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )
    return _part(candidate.tensors_heading, table + more)


def _tensor_row(line: TensorLine, *, has_details: bool) -> str:
    details = "".join(
        f'<span class="words"><b>{escape(label)}</b> {escape(text)}</span>'
        for label, text in (line.details if has_details else ())
    )
    tone = " t-diverged" if line.exceeds else ""
    return (
        f'<tr><td class="tight">{line.step}, {line.update}</td><td class="tight">{escape(line.kind)}</td>'
        f'<td class="name">{escape(line.name)}{details}</td><td class="n">{escape(line.relative)}</td>'
        f'<td class="n">{escape(line.bound)}</td><td class="tight{tone}">{escape(line.ratio)}</td></tr>'
    )


def _list_part(title: str, lines: Sequence[str], number: int) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    rest = number - len(lines)
    more = f'<p class="note">and {rest:,} more, in the JSON result</p>' if rest > 0 else ""
    return _part(title, f"<ul>{items}</ul>{more}")


def _environment_parts(candidate: CandidateView) -> Iterable[str]:
    found = candidate.environment
    if found is None:
        return []
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in found.notes)
    return [
        _part("Configuration, settings and versions", _differences(found) + notes),
        _part("Contract", f"<p>{escape(_describe_contract(found))}</p>"),
        _part("Ledger", facts(found.ledger)),
    ]


def _differences(found: EnvironmentView) -> str:
    groups = (
        ("configuration", found.config, found.num_config),
        ("settings read back", found.settings, found.num_settings),
        ("versions", found.packages, found.num_packages),
    )
    equal = [f"{number:,} of {label}" for label, _, number in groups if number]
    rows = "".join(_difference_row(label, item) for label, items, _ in groups for item in items)
    note = f'<p class="note">Equal to the baseline: {escape(", ".join(equal))}.</p>' if equal else ""
    if not rows:
        return note
    return (
        '<table class="rows"><thead><tr><th scope="col">differs</th><th scope="col">name</th><th scope="col">baseline'
        '</th><th scope="col">candidate</th><th scope="col">contract</th></tr></thead><tbody>'
        f"{rows}</tbody></table>{note}"
    )


def _difference_row(label: str, item: ValueDifference) -> str:
    tone = ' class="t-diverged"' if item.rule == "must match" else ""
    return (
        f'<tr><td class="tight">{escape(label)}</td><td class="name">{escape(item.name)}</td><td class="name">'
        f'{escape(item.baseline)}</td><td class="name">{escape(item.candidate)}</td><td{tone}>'
        f"{escape(item.rule or 'not in it')}</td></tr>"
    )


def _describe_contract(found: EnvironmentView) -> str:
    """What must match, and what does not although it must."""
    if not found.num_must_match:
        return "The recording's contract is not known."
    fields = count_of(found.num_must_match, "field")
    if found.breaches:
        return f"Of {fields} that must match, these do not: {', '.join(found.breaches)}."
    return f"{fields} must match and do, or the run would not have started; they are listed under the baseline."


def _seconds_part(candidate: CandidateView) -> str:
    if not candidate.seconds:
        return ""
    return _part("Timings", bar_table(candidate.seconds, total=None, caption="Seconds of this candidate."))
