"""A comparison as a page: self-contained, escaped, bounded, and with every part of the result in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from mock_scheduler.comparison.walk.metrics import compare_metrics
from mock_scheduler.display import pages
from mock_scheduler.display.pages import MAX_STEPS
from mock_scheduler.errors import AlignmentError
from mock_scheduler.report.comparison.page import render_comparison_page, write_comparison_page
from mock_scheduler.run_folder.inputs import ComparedInput
from mock_scheduler.verdict.results import ComparisonResult
from mock_scheduler.verdict.verdict import VerdictKind
from tests.report.chromium import look_at, need_chromium
from tests.report.comparisons import (
    BOUNDS,
    FAULT,
    SENTENCE,
    diverged,
    identical,
    incomparable,
    infinite,
    make_metrics,
    rounding,
    sketched,
    write_logs,
)
from tests.report.pages import figures_of, text_of

EVIL = '</script><script>alert("1")</script><b>'
ALL = [identical, rounding, diverged, sketched, incomparable, infinite]


@pytest.fixture(autouse=True)
def _small_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plotly's script is the same 5 MB in every page."""
    monkeypatch.setattr(pages, "get_plotlyjs", lambda: "/* plotly */")


def headings_of(page: str) -> list[str]:
    return [unescape(text) for text in re.findall(r"<h2>(.*?)</h2>", page)]


@pytest.mark.parametrize("make", ALL)
def test_a_page_loads_nothing_and_has_an_element_for_every_figure(
    make: Callable[[Path], ComparisonResult], tmp_path: Path
) -> None:
    page = render_comparison_page(make(tmp_path))
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "@import" not in page
    for element in figures_of(page):
        assert page.count(f'id="{element}"') == 1
    assert page.count("<section") == page.count("</section>")


def test_plotly_is_in_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    path = tmp_path / "deep" / "page.html"
    write_comparison_page(identical(tmp_path), path)
    page = path.read_text(encoding="utf-8")
    assert "plotly.js v" in page
    assert 4_000_000 < len(page) < 6_000_000
    assert [item.name for item in path.parent.iterdir()] == ["page.html"]


def test_a_divergence_has_its_sentence_on_top_and_every_section(tmp_path: Path) -> None:
    result = diverged(tmp_path)
    write_logs(result, *make_metrics(steps=3, relative=2e-3))
    page = render_comparison_page(result)
    assert headings_of(page) == [
        "How far apart, by kind",
        "The error's path",
        "Where in the model",
        "Over steps",
        "Beyond their bound: 301 of 316 tensors, as computed",
        "Metrics",
        "Without a number",
        "Replicas",
        "Choice of experts",
        "Calls",
        "Not compared",
    ]
    text = text_of(page)
    assert text.index(f"diverged {SENTENCE}") < text.index("How far apart")
    assert '<section class="verdict bad"' in page
    for expected in (
        "Every tensor of step 0, update 0, in which the runs first part, in the order in which it is computed.",
        "where channels 32 to 63 hold 98.0 % of the difference (32 of 64 channels): just the piece of one rank",
        "looks like the part of tp1 is missing from the candidate",
        "sample train/g0/e1/v3/t0 token 5, element [17, 40]: 0.125 in the baseline, 0.1281 in the candidate",
        "and 251 more (as many as 1,000 with --json)",
        "in the candidate: decoder.layers.0.input_layernorm.weight: ranks tp0 and tp1 hold different gradients",
        "2 of 3 metrics equal to the last bit over 3 steps.",
        "not in the candidate: fused into the linear layer after it",
    ):
        assert expected in text
    assert list(figures_of(page)) == ["path", "layers0", "layers1", "layers2", "layers3", "steps", "metric0"]


def test_the_path_marks_the_first_divergence_and_draws_the_bounds(tmp_path: Path) -> None:
    figure = figures_of(render_comparison_page(diverged(tmp_path)))["path"]
    traces = {trace["name"]: trace for trace in figure["data"]}
    assert list(traces) == ["bound", "identical (15)", "beyond its bound (143)", "no number (1)"]
    assert set(traces["bound"]["y"]) == {1e-4, 5e-3, None}
    assert traces["beyond its bound (143)"]["y"][0] == 3.1e-3
    marks = [note for note in figure["layout"]["annotations"] if "first divergence" in note["text"]]
    assert [(mark["x"], mark["text"]) for mark in marks] == [(15, f"first divergence\n{FAULT}")]
    floor, top = figure["layout"]["yaxis"]["tickvals"][0], figure["layout"]["yaxis"]["tickvals"][-1]
    assert (figure["layout"]["yaxis"]["ticktext"][0], figure["layout"]["yaxis"]["ticktext"][-1]) == (
        "identical",
        "no number",
    )
    assert set(traces["identical (15)"]["y"]) == {floor}
    assert traces["no number (1)"]["y"] == [top]
    assert all("error_y" not in trace for trace in figure["data"])


def test_who_points_at_a_tensor_reads_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_chromium()
    monkeypatch.undo()
    path = tmp_path / "page.html"
    write_comparison_page(diverged(tmp_path), path)
    hovered = """(() => {
        Plotly.Fx.hover("path", [{curveNumber: 2, pointNumber: 0}]);
        const lines = document.querySelectorAll("#path .hoverlayer tspan.line");
        return Array.from(lines).map(item => item.textContent);
    })()"""
    bold = "document.querySelector('#path .hoverlayer tspan.line tspan').style.fontWeight"
    seen = look_at(path, {"lines": hovered, "bold": bold}, is_dark=True)
    assert (seen.values["errors"], seen.values["requests"], seen.values["bold"]) == ([], [], "bold")
    assert seen.values["lines"][:4] == [
        FAULT,
        f"activation of {FAULT} at step 0, update 0",
        "diverged: relative 3.1e-03, bound 1.0e-04",
        "max |a-b| 3.100e-03, 52,009 ULP; slope 0.99896667, cosine 0.99999039",
    ]


def test_a_sketch_is_called_estimated_and_has_error_bars(tmp_path: Path) -> None:
    page = render_comparison_page(sketched(tmp_path))
    text = text_of(page)
    assert "level sketch: relative differences are estimated" in text
    assert "Estimated from sketches, with error bars." in text
    assert "relative (estimated)" in text
    assert "run both again with trace.level=full trace.steps='0' trace.patterns=['decoder.layers.2.*']" in text
    traces = {trace["name"]: trace for trace in figures_of(page)["path"]["data"]}
    undecided = traces["undecided (37)"]
    assert (undecided["y"][0], undecided["error_y"]["array"][0]) == (1e-4, 1e-4)
    assert undecided["error_y"]["arrayminus"][0] == pytest.approx(5e-5)
    assert "(estimated) ~1.0e-04 (5.0e-05 to 2.0e-04)" in undecided["hovertext"][0]


def test_an_incomparable_result_is_a_verdict_with_its_reason(tmp_path: Path) -> None:
    page = render_comparison_page(incomparable(tmp_path))
    assert headings_of(page) == []
    assert (
        "incomparable the two runs trained on other rollouts from step 1 on (2 of 3 steps), so nothing in"
        in text_of(page)
    )
    assert '<section class="verdict warn"' in page


def test_an_identical_result_says_that_replicas_agree(tmp_path: Path) -> None:
    page = render_comparison_page(identical(tmp_path))
    assert '<section class="verdict good"' in page
    assert "Every tensor of step 0, update 0, where all are identical, in the order in" in text_of(page)
    assert "Every element that several ranks hold is equal on all of them, in both runs." in text_of(page)
    assert "Their curves are not drawn, since the logs cannot be read any more." in text_of(page)


def test_no_text_of_a_run_becomes_part_of_the_page(tmp_path: Path) -> None:
    result = diverged(tmp_path, metric=EVIL)
    tensors, first = result.verdict.tensors, result.verdict.first
    assert tensors is not None
    assert first is not None
    differences = tuple(
        replace(item, key=replace(item.key, name=f"{item.key.name}{EVIL}")) for item in tensors.differences
    )
    verdict = replace(
        result.verdict,
        full_dump=(EVIL,),
        tensors=replace(tensors, differences=differences, notes=(EVIL,)),
        first=replace(first, name=f"{first.name}{EVIL}", evidence=differences[0]),
    )
    result = replace(result, verdict=verdict, candidate=replace(result.candidate, name=EVIL))
    write_logs(result, *make_metrics(steps=3, relative=2e-3, name=EVIL))
    page = render_comparison_page(result)
    assert "alert(" in page
    assert "<script>alert" not in page
    assert page.count("<script") == page.count("</script>") == 4
    figure = figures_of(page)["metric0"]
    assert figure["layout"]["title"]["text"] == (
        "&lt;/script&gt;&lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt;&lt;b&gt;"
    )
    assert "<script" not in json.dumps(figures_of(page))


def test_metric_curves_have_both_runs_and_their_difference(tmp_path: Path) -> None:
    result = diverged(tmp_path)
    write_logs(result, *make_metrics(steps=3, relative=2e-3))
    figure = figures_of(render_comparison_page(result))["metric0"]
    baseline, candidate, bars = figure["data"]
    assert (baseline["name"], candidate["name"]) == ("base", "tp2")
    assert (baseline["x"], baseline["y"][0], candidate["y"][0]) == ([0, 1, 2], 0.5, 0.5 * 1.002)
    assert bars["y"][0] == pytest.approx(0.002 / 1.002)
    assert figure["layout"]["yaxis2"]["ticktext"] == ["1e-3", "1e-2"]


def test_metrics_alone_are_drawn_from_their_files(tmp_path: Path) -> None:
    logs = make_metrics(steps=2 * MAX_STEPS + 2, relative=1e-9)
    logs[0][0]["pg_loss"] = float("nan")
    logs[1][0]["pg_loss"] = float("inf")
    result = identical(tmp_path)
    write_logs(result, *logs)
    sides = [
        ComparedInput(name=side.name, path=side.path / "metrics.jsonl", kind="metrics", level=None)
        for side in (result.baseline, result.candidate)
    ]
    verdict = replace(
        result.verdict,
        kind=VerdictKind.DIVERGED,
        tensors=None,
        metrics=compare_metrics(*logs, bounds=BOUNDS),
    )
    page = render_comparison_page(replace(result, baseline=sides[0], candidate=sides[1], verdict=verdict))
    figure = figures_of(page)["metric0"]
    assert len(figure["data"][0]["x"]) <= MAX_STEPS
    assert figure["data"][0]["y"][0] is None
    assert headings_of(page) == ["Metrics"]


def test_thousands_of_tensors_make_a_page_of_bounded_size_that_says_so(tmp_path: Path) -> None:
    page = render_comparison_page(diverged(tmp_path, layers=250, steps=1))
    assert len(page) < 4_000_000
    assert "A mark is the worst of one part of a layer or more, so that 6,015 tensors are 1,014 marks." in page
    assert page.count('<td class="name">decoder') <= 50
    names = [trace["name"] for trace in figures_of(page)["path"]["data"]]
    assert names == ["bound", "identical (15)", "beyond its bound (5,999)", "no number (1)"]


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    path = tmp_path / "file" / "page.html"
    with pytest.raises(AlignmentError) as caught:
        write_comparison_page(identical(tmp_path), path)
    assert str(caught.value) == f"{path} cannot be written: {path.parent} is not a folder"
    assert caught.value.exit_code == 5  # 3 would be a verdict
