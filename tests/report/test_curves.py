"""Curves of runs as a page that opens offline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mock_scheduler.errors import ConfigError, TraceError
from mock_scheduler.report.curves import plot_runs


def write_run(folder: Path, values: list[float]) -> Path:
    folder.mkdir()
    lines = [json.dumps({"step": step, "metrics": {"success": value}}) for step, value in enumerate(values)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_a_page_holds_every_run_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "first", [0.0, 0.5]), write_run(tmp_path / "second", [0.25, 1.0])]
    page = tmp_path / "pages" / "curves.html"
    plot_runs(runs, ["success"], page)
    text = page.read_text(encoding="utf-8")
    assert '"name":"first"' in text
    assert '"name":"second"' in text
    assert 'src="http' not in text


def test_two_runs_of_one_folder_name_stay_two_curves(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    runs = [write_run(tmp_path / "a" / "run", [0.0]), write_run(tmp_path / "b" / "run", [1.0])]
    page = tmp_path / "curves.html"
    plot_runs(runs, ["success"], page)
    text = page.read_text(encoding="utf-8")
    assert '"name":"a\\u002frun"' in text or '"name":"a/run"' in text
    assert '"name":"b\\u002frun"' in text or '"name":"b/run"' in text


def test_an_unknown_metric_is_refused_with_the_nearest(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.0])
    with pytest.raises(ConfigError) as caught:
        plot_runs([run], ["sucess"], tmp_path / "curves.html")
    assert str(caught.value) == "no run logged the metric 'sucess'; nearest: success\nlogged: success"


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"metrics.jsonl: metrics cannot be read: No such file"):
        plot_runs([tmp_path / "none"], ["success"], tmp_path / "curves.html")
