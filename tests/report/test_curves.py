"""Curves of runs as a page that opens offline."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from mock_scheduler.display import pages
from mock_scheduler.errors import ConfigError, TraceError
from mock_scheduler.report.curves import plot_runs
from tests.report.chromium import look_at, need_chromium
from tests.report.pages import figures_of, text_of

EVIL = "<b>run<img src=x onerror=alert(1)>"


def write_run(folder: Path, values: list[float]) -> Path:
    folder.mkdir()
    lines = [json.dumps({"step": step, "metrics": {"success": value}}) for step, value in enumerate(values)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_a_page_holds_every_run_and_loads_nothing_from_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "get_plotlyjs", lambda: "/* plotly */")
    runs = [write_run(tmp_path / "first", [0.0, 0.5]), write_run(tmp_path / "second", [0.25, 1.0])]
    page = tmp_path / "pages" / "curves.html"
    plot_runs(runs, ["success"], page)
    text = page.read_text(encoding="utf-8")
    (figure,) = figures_of(text).values()
    assert [(curve["name"], curve["x"], curve["y"]) for curve in figure["data"]] == [
        ("first", [0, 1], [0.0, 0.5]),
        ("second", [0, 1], [0.25, 1.0]),
    ]
    assert figure["layout"]["title"]["text"] == "success"
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert "Metrics of 2 runs" in text_of(text)


def test_chromium_draws_every_panel_light_and_dark(tmp_path: Path) -> None:
    need_chromium()
    page = tmp_path / "curves.html"
    plot_runs([write_run(tmp_path / EVIL, [0.0, math.nan, 0.5])], None, page)
    measures = {
        "curves": "document.querySelectorAll('.scatterlayer .trace').length",
        "legend": "document.querySelector('.legendtext').textContent",
        "ink": "getComputedStyle(document.body).color",
    }
    for is_dark, ink in ((False, "rgb(28, 36, 48)"), (True, "rgb(228, 233, 240)")):
        seen = look_at(page, measures, is_dark=is_dark)
        assert seen.values == {"curves": 1, "legend": EVIL, "ink": ink, "errors": [], "requests": []}


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.0])
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"file/curves.html cannot be written"):
        plot_runs([run], ["success"], tmp_path / "file" / "curves.html")


def test_two_runs_of_one_folder_name_stay_two_curves(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    runs = [write_run(tmp_path / "a" / "run", [0.0]), write_run(tmp_path / "b" / "run", [1.0])]
    page = tmp_path / "curves.html"
    plot_runs(runs, ["success"], page)
    (figure,) = figures_of(page.read_text(encoding="utf-8")).values()
    assert [curve["name"] for curve in figure["data"]] == ["a/run", "b/run"]


def test_an_unknown_metric_is_refused_with_the_nearest(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.0])
    with pytest.raises(ConfigError) as caught:
        plot_runs([run], ["sucess"], tmp_path / "curves.html")
    assert str(caught.value) == "no run logged the metric 'sucess'; nearest: success\nlogged: success"


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"metrics.jsonl: metrics cannot be read: No such file"):
        plot_runs([tmp_path / "none"], ["success"], tmp_path / "curves.html")
