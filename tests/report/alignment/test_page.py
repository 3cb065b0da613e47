"""An alignment's page: what it says and in which order, that it loads nothing, and what Chromium makes of it."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path

import pytest

from mock_scheduler.errors import AlignmentError
from mock_scheduler.report.alignment.builder import build_view
from mock_scheduler.report.alignment.page import render_alignment_page, write_alignment_page
from mock_scheduler.verdict.results import AlignmentResult
from tests.report.alignments import EVIL, SENTENCE, WORST_SAMPLE, command, make_result, with_amplifiers
from tests.report.chromium import look_at, need_chromium, print_pdf
from tests.report.pages import text_of
from tests.report.pdf_text import read_pdf_text


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> AlignmentResult:
    return make_result(tmp_path_factory.mktemp("alignment"))


@pytest.fixture(scope="module")
def page(result: AlignmentResult) -> str:
    return render_alignment_page(build_view(result))


def elements(page: str, pattern: str) -> list[str]:
    """The texts of elements whose opening tag matches."""
    return [unescape(re.sub("<[^>]+>", "", text)) for text in re.findall(f"<{pattern}>(.*?)</", page, re.DOTALL)]


def test_the_sections_come_in_order_verdict_first(page: str) -> None:
    headings = [unescape(text) for text in re.findall(r"<h2>(.*?)</h2>", page)]
    assert headings == [
        "Matrix of candidates",
        "Candidates",
        "The baseline and its contract",
        "Timings",
        "How to read a verdict",
    ]
    text = text_of(page)
    start = text.index("diverged 3 of 7 candidates pass: 1 diverged, 1 suspect")
    assert start < text.index("Exit code 1: at least one candidate diverged.") < text.index(SENTENCE)
    assert text.index(SENTENCE) < text.index("Matrix of candidates")


def test_it_begins_with_date_revision_and_command_and_then_with_what_each_candidate_changes(
    result: AlignmentResult,
) -> None:
    origin = (
        ("made", "2026-11-30 20:10 UTC"),
        ("revision", "lake 0123456789ab"),
        ("command", "mock-scheduler align x"),
    )
    text = text_of(render_alignment_page(replace(build_view(result, is_full=False), origin=origin)))
    start = "made 2026-11-30 20:10 UTC revision lake 0123456789ab command mock-scheduler align x diverged 3 of 7"
    assert start in text
    assert "loose exp_name=loose, torch 2.12.0 instead of 2.13.0 unverified" in text


def test_its_landmarks_and_headings_are_those_of_a_document(page: str) -> None:
    assert [page.count(f"<{name}>") for name in ("header", "main", "h1")] == [1, 1, 1]
    assert page.count("<section") == len(re.findall(r"<section [^>]*aria-label=", page))
    levels = [int(level) for level in re.findall(r"<h(\d)", page)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert page.count('class="scroll"') == page.count('class="scroll" tabindex="0" role="region" aria-label=')


def test_equal_bits_never_stand_beside_a_share_of_a_bound_without_a_word(page: str) -> None:
    assert ">emulation</small>" in page[page.index("<h2>Matrix") : page.index("<h2>Candidates")]
    part = page[page.index('id="candidate-tp2.plain"') : page.index('id="candidate-tp2.clip"')]
    assert "of its bound): its distance from the baseline is that order's alone, and decides nothing" in unescape(part)


def test_a_candidate_has_all_its_parts(result: AlignmentResult, page: str) -> None:
    start = page.index('id="candidate-tp2.clip"')
    part = page[start : page.index('id="candidate-pp2.plain"')]
    assert [unescape(text) for text in re.findall(r"<h4>(.*?)</h4>", part)] == [
        "Proofs, strongest first",
        "Where it begins",
        "What it does to the training",
        "Metrics of both runs",
        "The error's path through layers and steps",
        "Beyond their bound: 2 of 26 tensors, as computed",
        "The worst sample, turn by turn",
        "Configuration, settings and versions",
        "Contract",
        "Ledger",
        "Timings",
    ]
    text = text_of(part)
    for expected in (
        f"Open the traces: {command(result)}",
        "The baseline clips 2 of 24 response tokens (each counted in every update); 3 (12.5 %) change their clip state",
        f"{WORST_SAMPLE} , step 1: terminated, reward 1, 7 tokens, 3 of them sampled",
        "3 turn 0 Right 2.5e-01",
        "configuration pg_clip 0.2 0.1 may differ",
        "2 fields must match and do, or the run would not have started",
        "suppressed: had no effect suspend 4",
    ):
        assert expected in text
    assert '<mark class="m4 worst" title="largest |a-b| 2.5e-01">Right</mark>' in part
    assert 'aria-label="pg_loss of baseline and candidate over 2 steps: largest |a-b| 2.5e-01, 3,333 times' in part


def test_proofs_have_a_column_for_each_thing_that_is_said_of_them(page: str) -> None:
    start = page.index("Proofs, strongest first")
    part = page[start : page.index("</table>", start)]
    headers = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', part)
    assert headers == ["proof", "outcome", "what it found", "equal tensors"]
    assert part.count("<td") == 3 * part.count('<th scope="row"')


def test_a_module_of_its_own_is_named_as_what_may_move_a_bit(result: AlignmentResult, page: str) -> None:
    own = replace(result, candidates=(replace(result.candidates[1], entry="my.kernel", module="my.kernel"),))
    text = text_of(render_alignment_page(build_view(own)))
    own_code = "my.kernel put no function and no class of its own into a package before the run"
    assert f"overrides exp_name=tp2.clip entry my.kernel own code {own_code}" in text
    assert "may move a bit parallel.tensor_model_parallel_size, its module my.kernel proved by" in text
    assert "its module" not in text_of(page)


def test_five_that_only_pass_it_on_are_listed_and_the_rest_is_counted(result: AlignmentResult) -> None:
    five, eight = (text_of(render_alignment_page(build_view(with_amplifiers(result, number)))) for number in (5, 8))
    fifth = "module.4 (activation): only passes on what decoder.layers.1.mlp does: 0.1, as it is"
    assert f"{fifth} and 3 more, in the JSON result traces" in eight
    assert f"{fifth} traces" in five
    assert "module.5" not in eight


def test_the_matrix_has_layouts_by_options_and_the_others_beside_it(page: str) -> None:
    part = page[page.index("<h2>Matrix") : page.index("<h2>Candidates")]
    assert elements(part, 'th scope="col"') == ["layout", "plain", "clip"]
    assert elements(part, 'th scope="row"') == ["tp2", "pp2", "dp2"]
    cells = re.findall(r'<a class="cell v-(\w+)" href="#([\w.-]+)">(?:<b>[^<]*</b> )?<b>(.*?)</b>', part)
    assert cells == [
        ("good", "candidate-tp2.plain", "identical (emulated)"),
        ("bad", "candidate-tp2.clip", "diverged"),
        ("good", "candidate-pp2.plain", "identical"),
        ("good", "candidate-dp2.plain", "rounding"),
        ("warn", "candidate-dp2.clip", "suspect"),
        ("warn", "candidate-broken", "incomparable"),
        ("warn", "candidate-loose", "unverified"),
    ]
    assert "Beside the matrix" in part


def test_candidates_without_layouts_in_their_names_have_no_matrix(result: AlignmentResult) -> None:
    named = tuple(replace(item, name=f"kernel-{number}") for number, item in enumerate(result.candidates))
    page = render_alignment_page(build_view(replace(result, candidates=named), is_full=False))
    assert "Matrix of candidates" not in page


def test_only_candidates_that_do_not_pass_lie_open(page: str) -> None:
    opened = re.findall(r'<details class="cand g-(\w+)" id="[\w.-]+"( open)?>', page)
    assert opened == [
        ("good", ""),
        ("bad", " open"),
        ("good", ""),
        ("good", ""),
        ("warn", " open"),
        ("warn", " open"),
        ("warn", " open"),
    ]


def test_the_page_loads_nothing_and_no_text_of_a_run_becomes_part_of_it(page: str) -> None:
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "@import" not in page
    assert "url(" not in page
    assert page.count("<script") == page.count("</script>") == 1
    assert EVIL not in page
    assert f"the run failed: {EVIL}" in unescape(page)
    for element in ("section", "details", "table", "div", "svg"):
        assert page.count(f"<{element}") - page.count(f"<{element}-") == page.count(f"</{element}>")


def test_every_table_has_a_caption_and_headers_and_every_figure_words(page: str) -> None:
    for table in re.findall(r"<table.*?</table>", page, re.DOTALL):
        assert 'scope="col"' in table
        assert re.search(r"<caption[^>]*>[^<]", table)
    figures = re.findall(r"<svg[^>]*>", page)
    assert figures
    assert all('role="img"' in figure and "aria-label=" in figure for figure in figures)
    beyond = {float(text[:-1].replace(",", "")) for text in re.findall(r'<td class="h-out\d[^>]*>(.*?)</td>', page)}
    logprobs, gradient = sorted(beyond)  # 0.0945 and 1, by 1e-4 and a little rounding
    assert 900 < logprobs < 945
    assert 9_500 < gradient < 10_000


def test_a_hundred_candidates_stay_below_a_few_megabytes(result: AlignmentResult) -> None:
    many = tuple(replace(result.candidates[1], name=f"tp2.option{number}") for number in range(100))
    page = render_alignment_page(build_view(replace(result, candidates=many)))
    assert len(page) < 4_000_000
    assert page.count('<details class="cand') == 100
    assert page.count(" open><summary>") == 6


def test_a_page_is_written_whole_and_one_that_cannot_be_is_named(result: AlignmentResult, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "align.html"
    write_alignment_page(build_view(result), path)
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert [item.name for item in path.parent.iterdir()] == ["align.html"]
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(AlignmentError) as caught:
        write_alignment_page(build_view(result), tmp_path / "file" / "align.html")
    assert str(caught.value).startswith(f"{tmp_path / 'file' / 'align.html'} cannot be written")


_MEASURES = {
    "background": "getComputedStyle(document.body).backgroundColor",
    "ink": "getComputedStyle(document.body).color",
    "width": "document.documentElement.scrollWidth",
    "verdict": "document.querySelector('.verdict .word').textContent",
    "verdicts": "Array.from(document.querySelectorAll('section.verdict .v')).map(item => item.textContent)",
    "chips": "document.querySelectorAll('section.verdict .chip').length",
    "curves": "document.querySelectorAll('svg.curve').length",
    "closed": "document.querySelectorAll('details.cand:not([open])').length",
    "identical": "document.getElementById('candidate-pp2.plain').open",
    "beyond": "getComputedStyle(document.querySelector('td.h-out3')).backgroundColor",
}


@pytest.mark.parametrize(
    ("is_dark", "background", "ink", "beyond"),
    [
        (False, "rgb(246, 247, 249)", "rgb(28, 36, 48)", "rgb(161, 29, 12)"),
        (True, "rgb(18, 22, 28)", "rgb(228, 233, 240)", "rgb(255, 143, 106)"),
    ],
)
def test_chromium_shows_it_without_an_error_or_a_request(
    page: str, tmp_path: Path, is_dark: bool, background: str, ink: str, beyond: str
) -> None:
    need_chromium()
    path = tmp_path / "align.html"
    path.write_text(page, encoding="utf-8")
    seen = look_at(path, _MEASURES, is_dark=is_dark)
    assert seen.console == ()
    assert seen.values == {
        "background": background,
        "ink": ink,
        "width": 1280,
        "verdict": "diverged",
        "verdicts": [
            "identical (emulated)",
            "diverged",
            "identical",
            "rounding",
            "suspect",
            "incomparable",
            "unverified",
        ],
        "chips": 42,
        "curves": 6,
        "closed": 3,
        "identical": False,
        "beyond": beyond,
        "errors": [],
        "requests": [],
    }


def test_an_address_of_a_candidate_opens_it(page: str, tmp_path: Path) -> None:
    need_chromium()
    path = tmp_path / "align.html"
    path.write_text(page, encoding="utf-8")
    seen = look_at(
        path,
        {"opened": "document.getElementById('candidate-pp2.plain').open"},
        is_dark=False,
        anchor="candidate-pp2.plain",
    )
    assert seen.values["opened"] is True


def test_an_address_of_a_tensor_opens_its_candidate_and_a_phone_shows_all_of_the_width(
    page: str, tmp_path: Path
) -> None:
    need_chromium()
    path = tmp_path / "align.html"
    path.write_text(page.replace(" open><summary>", "><summary>"), encoding="utf-8")
    address = "candidate-tp2.clip/1.0/gradient/decoder.layers.1.mlp.linear_fc1.weight"
    assert f'<a href="#{address}">' in page
    measures = {
        "opened": "document.getElementById('candidate-tp2.clip').open",
        "others": "document.querySelectorAll('details.cand[open]').length",
        "width": "document.documentElement.scrollWidth <= window.innerWidth",
    }
    seen = look_at(path, measures, is_dark=False, width=500, anchor=address)
    assert (seen.values["opened"], seen.values["others"], seen.values["width"]) == (True, 1, True)


def test_paper_has_the_verdicts_and_what_was_closed(page: str, tmp_path: Path) -> None:
    need_chromium()
    path, pdf = tmp_path / "align.html", tmp_path / "align.pdf"
    path.write_text(page, encoding="utf-8")
    print_pdf(path, pdf)
    text = read_pdf_text(pdf)
    for expected in (
        "diverged3of7candidatespass:1diverged,1suspect",
        "Exitcode1:atleastonecandidatediverged.",
        SENTENCE.replace(" ", ""),
        "addsintheorderoftp2pp1dp1",  # of a candidate that lies closed on the screen
        "Howtoreadaverdict",
    ):
        assert expected in text
