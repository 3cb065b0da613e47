"""The page and the text of the report: everything is in them, escaped, bounded, and loaded from nowhere."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from mock_scheduler.correction.report.format import number, percent
from mock_scheduler.correction.report.page import MAX_STEPS, render_correction_page, write_correction_page
from mock_scheduler.correction.report.text import print_correction
from mock_scheduler.correction.report.view import CorrectionReport
from mock_scheduler.display import pages
from mock_scheduler.errors import ConfigError
from tests.correction.report.reports import make_report, make_step
from tests.report.pages import figures_of, text_of
from tests.report.recordings import make_console

EVIL = '</script><script>alert("1")</script><b>'


@pytest.fixture(autouse=True)
def _small_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plotly's script is the same 5 MB in every page."""
    monkeypatch.setattr(pages, "get_plotlyjs", lambda: "/* plotly */")


def make_full() -> CorrectionReport:
    values = {"rollout_is": "sequence", "rollout_is_threshold": 5.0, "rollout_token_veto_threshold": 1e-4}
    spec = RolloutCorrectionConfig.model_validate(values).spec
    steps = [make_step((0.5, -0.25), (-12.0,), step=0), make_step((0.01,), (math.nan,), step=1)]
    return make_report(*steps, configured=spec, presets=("decoupled_token_is", "aipo"), texts={3: "Left", 4: EVIL})


def make_unmeasured() -> CorrectionReport:
    step = replace(make_step((0.0, 0.0), (0.0,)), train_logprobs=None)
    return make_report(step, next_command="mock-scheduler launch NAME 'trace.kinds=[score]'")


def render(report: CorrectionReport, width: int = 120) -> str:
    console, text = make_console(width)
    print_correction(report, console, files={})
    return text.getvalue()


@pytest.mark.parametrize("make", [make_full, make_unmeasured])
def test_a_page_loads_nothing_and_has_an_element_for_every_figure(
    make: Callable[[], CorrectionReport],
) -> None:
    page = render_correction_page(make())
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "@import" not in page
    for element in figures_of(page):
        assert page.count(f'id="{element}"') == 1
    assert page.count("<section") == page.count("</section>")


def test_plotly_is_in_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert len(render_correction_page(make_unmeasured())) > 1_000_000


def test_a_page_has_advice_figures_and_every_table() -> None:
    page = render_correction_page(make_full())
    assert [unescape(title) for title in re.findall(r"<h2>(.*?)</h2>", page)] == [
        "Advice",
        "Log ratios",
        "The two policies",
        "By position and policy lag",
        "What each configuration would do",
        "Worst",
        "Steps",
    ]
    assert set(figures_of(page)) == {"tokens", "sequences", "steps"}
    text = text_of(page)
    assert "Too many sequences vetoed rollout_is_veto_fraction 0.5 > 0.1 at step 0" in text
    assert "response token 0, id 3 'Left' step 0, default/group 0/episode 0/env 1/turn 0 -12 -14 -2" in text


def test_texts_of_a_recording_are_escaped() -> None:
    report = replace(make_full(), recording=EVIL)
    page = render_correction_page(report)
    assert EVIL not in page
    assert "&lt;b&gt;" in page


def test_figures_draw_counts_on_a_log_axis() -> None:
    figure = figures_of(render_correction_page(make_full()))["tokens"]
    assert sum(figure["data"][0]["y"]) == 4
    assert figure["layout"]["yaxis"]["type"] == "log"
    assert figure["layout"]["shapes"][0]["x0"] == 0


def test_steps_are_drawn_where_there_are_several_that_were_measured() -> None:
    report = make_report(make_step((0.1,), (0.2,), step=2), make_step((0.3,), (0.1,), step=5))
    figure = figures_of(render_correction_page(report))["steps"]
    assert figure["data"][0]["x"] == [2, 5]
    assert figure["data"][0]["y"] == pytest.approx([step.k3_kl for step in report.steps])


def test_a_long_recording_is_cut_and_says_so() -> None:
    report = make_unmeasured()
    report = replace(report, steps=tuple(replace(report.steps[0], step=step) for step in range(MAX_STEPS + 7)))
    assert "and 7 more (all with --json)" in text_of(render_correction_page(report))
    assert f"and {MAX_STEPS + 7 - 20} steps between (all with --json, some with --steps)" in render(report)


def test_what_was_not_measured_has_no_numbers_and_a_next_command() -> None:
    for text in (text_of(render_correction_page(make_unmeasured())), " ".join(render(make_unmeasured()).split())):
        assert "No training log-probabilities are known" in text
        assert "mock-scheduler launch NAME 'trace.kinds=[score]'" in text
        assert "KL(rollout || training)" not in text


def test_a_page_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/page.html cannot be written: .*/file is not a folder"):
        write_correction_page(make_unmeasured(), tmp_path / "file" / "page.html")


def test_the_text_is_advice_numbers_and_outcomes() -> None:
    text = render(make_full())
    assert text.splitlines()[0] == "rollout correction: 1 problem and 1 warning"
    assert "\nwarning: Too many sequences vetoed\n  rollout_is_veto_fraction 0.5 > 0.1 at step 0, with" in text
    lines = [line.rstrip() for line in text.splitlines()]
    own = next(number for number, line in enumerate(lines) if line.lstrip().startswith("configured "))
    assert lines[own + 1].lstrip().startswith("weights per sequence; truncate weights at 5; ")
    assert "      weights per token; truncate weights at 2; also aipo (bypass)" in lines
    assert any(line.split()[:4] == ["-12", "0", "3", "'Left'"] for line in lines)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_line_ends_in_a_space_or_is_too_wide(width: int) -> None:
    for line in render(make_full(), width).splitlines():
        assert line == line.rstrip()
        assert len(line) <= width


def test_text_bars_are_as_long_as_the_logarithm_of_their_counts() -> None:
    report = make_report(make_step((0.0,) * 999 + (1.0,), (0.0,)))
    lines = render(report, 80).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("log ratio of tokens"))
    found = [line for line in lines[start:] if "█" in line][:2]
    most, least = (line.count("█") for line in found)
    assert [line.split()[3] for line in found] == ["1,000", "1"]
    assert least == round(most * math.log(2) / math.log(1001))


def test_numbers_and_fractions_never_round_to_all_or_nothing() -> None:
    assert [percent(value) for value in (None, 0.0, 1.0, 0.5, 0.00001, 0.99996, 0.9999999)] == [
        *("-", "0.0 %", "100.0 %", "50.0 %", "0.001 %", "100 %", "> 99.999 %"),
    ]
    assert [number(value) for value in (None, math.nan, math.inf, 0.123456)] == ["-", "nan", "inf", "0.1235"]
