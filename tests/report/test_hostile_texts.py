"""Every text of a run, put in each field of each page in turn, stays a text: no element, attribute or script of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from html.parser import HTMLParser
from pathlib import Path
from typing import TypeVar

import pytest

from mock_scheduler.comparison.walk.metrics import MetricLog
from mock_scheduler.correction.report.page import render_correction_page
from mock_scheduler.display import pages
from mock_scheduler.report.alignment.builder import build_view
from mock_scheduler.report.alignment.page import render_alignment_page
from mock_scheduler.report.comparison.page import render_comparison_page
from tests.correction.report.reports import make_report, make_step
from tests.report import alignments, comparisons
from tests.report.chromium import look_at, need_chromium

EVIL = """</script></style></title><img src=x onerror="seen.hacked=1">"'`javascript:seen.hacked=2//{{7*7}}\\"""
#: Fields that hold one of the library's own words, never a text of a run.
OWN_WORDS = {
    *("anchor", "axis", "dim", "format", "kind", "level", "outcome", "rule", "severity", "shade", "side", "tag"),
    *("tier", "tone"),
}

_Value = TypeVar("_Value")


def poison(value: _Value, name: str = "") -> _Value:
    """The value with ``EVIL`` at the end of every text that a run can choose."""
    if isinstance(value, Enum) or name in OWN_WORDS:
        return value
    if isinstance(value, str):
        return f"{value}{EVIL}"
    if isinstance(value, tuple):
        return tuple(poison(item, name) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        owned = {field.name: getattr(value, field.name) for field in fields(value)}
        if "outcome" in owned:  # a proof's name is one of five
            del owned["name"]
        return replace(value, **{key: poison(item, key) for key, item in owned.items()})
    return value


class _Page(HTMLParser):
    """Counts elements, and keeps every attribute that could act."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.acting: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        for name, value in attrs:
            is_link = name in ("src", "href", "action", "srcset") and not str(value).startswith(("#", "data:,"))
            if name.startswith("on") or is_link:
                self.acting.append((name, value))


def alignment_pages(folder: Path) -> tuple[str, str]:
    view = build_view(alignments.make_result(folder))
    return render_alignment_page(view), render_alignment_page(poison(view))


def comparison_pages(folder: Path) -> tuple[str, str]:
    result = comparisons.diverged(folder)
    baseline, candidate = comparisons.make_metrics(steps=3, relative=2e-3)
    comparisons.write_logs(result, baseline, candidate)
    page = render_comparison_page(result)
    comparisons.write_logs(result, _rename(baseline), _rename(candidate))
    return page, render_comparison_page(poison(result))


def _rename(log: MetricLog) -> MetricLog:
    return {step: {f"{name}{EVIL}": value for name, value in values.items()} for step, values in log.items()}


def correction_pages(folder: Path) -> tuple[str, str]:
    steps = (make_step((0.5, -0.25), (-12.0,), step=0), make_step((0.01,), (0.2,), step=1))
    report = make_report(*steps, presets=("decoupled_token_is", "aipo"), texts={3: "Left", 4: "Right"})
    return render_correction_page(report), render_correction_page(poison(report))


@pytest.fixture
def _small_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "get_plotlyjs", lambda: "/* plotly */")


@pytest.mark.usefixtures("_small_script")
@pytest.mark.parametrize("make", [alignment_pages, comparison_pages, correction_pages])
def test_a_hostile_text_adds_no_element_and_nothing_that_acts(
    make: Callable[[Path], tuple[str, str]], tmp_path: Path
) -> None:
    page, hostile = make(tmp_path)
    before, after = _Page(page), _Page(hostile)
    assert hostile.count("hacked") > 40
    assert after.acting == []
    assert {"script", "style", "title"} <= after.elements.keys()
    assert after.elements.keys() == before.elements.keys()
    assert (after.elements["script"], after.elements["img"]) == (before.elements["script"], 0)
    assert "49" not in hostile[hostile.index("hacked") : hostile.index("hacked") + 60]


@pytest.mark.parametrize("make", [alignment_pages, comparison_pages, correction_pages])
def test_chromium_runs_none_of_it(make: Callable[[Path], tuple[str, str]], tmp_path: Path) -> None:
    need_chromium()
    _, hostile = make(tmp_path)
    path = tmp_path / "page.html"
    path.write_text(hostile, encoding="utf-8")
    measures = {
        "images": "document.querySelectorAll('img').length",
        "shown": "document.querySelector('h1').textContent.includes('onerror=\"seen.hacked=1\"')",
        "drawn": "Array.from(document.querySelectorAll('.plot')).every(item => item.querySelector('svg'))",
    }
    seen = look_at(path, measures, is_dark=False)
    assert seen.values == {"images": 0, "shown": True, "drawn": True, "errors": [], "requests": []}
