"""The pytest plugin, loaded by a pytest of its own as an installed package's entry point."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from mock_scheduler.trace.entries import RankPlace, StepFooter, TraceEntry
from mock_scheduler.trace.full.writing import FullSink
from mock_scheduler.trace.shards import whole
from tests.programs import run_program

NAME = "decoder.final_layernorm.weight"
TESTS = """
import sys

import pytest


def test_no_torch_until_the_fixture_is_called(assert_aligned):
    assert "torch" not in sys.modules


@pytest.mark.parametrize("candidate", ["same", "other"])
def test_runs(assert_aligned, candidate):
    verdict = assert_aligned("baseline", candidate)
    assert verdict.kind == "identical"


def test_a_wide_tolerance_lets_the_other_one_pass(assert_aligned):
    assert assert_aligned("baseline", "other", tolerance={"gradient": 1.0}).kind == "rounding"


def test_two_comparisons_have_two_pages(assert_aligned):
    for _ in range(2):
        with pytest.raises(pytest.fail.Exception):
            assert_aligned("baseline", "other")
"""


def write_run(folder: Path, gradient: float) -> None:
    """The trace of a run: one step of one rank."""
    place = RankPlace(global_rank=0, coordinates={"tp": 0})
    sink = FullSink(folder, step=0, place=place, world_size=1)
    tensor = torch.tensor([1.0, gradient])
    sink.add(TraceEntry(update=0, kind="gradient", spec=whole(NAME, (2,)), tensor=tensor))
    sink.close(StepFooter())


def prepare(folder: Path, *arguments: str) -> list[str]:
    """Writes tests into a folder; pytest's arguments run them without configuration, the plugin by its entry point."""
    (folder / "test_runs.py").write_text(TESTS)
    for name, gradient in (("baseline", 2.0), ("same", 2.0), ("other", 2.5)):
        write_run(folder / name, gradient)
    return ["-q", "-rA", "-p", "no:cacheprovider", f"--rootdir={folder}", *arguments]


def test_aligned_runs_pass_and_diverging_ones_fail_with_the_verdict_and_its_page(tmp_path: Path) -> None:
    # Torch is there before, in a fork.
    left_out = "--deselect=test_runs.py::test_no_torch_until_the_fixture_is_called"
    given = prepare(tmp_path, "--mock-scheduler-html=pages", left_out, "test_runs.py")
    done = run_program("pytest", given, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "PASSED test_runs.py::test_runs[same]" in lines
    assert "PASSED test_runs.py::test_a_wide_tolerance_lets_the_other_one_pass" in lines
    assert "PASSED test_runs.py::test_two_comparisons_have_two_pages" in lines
    assert [line for line in lines if line.startswith("FAILED test_runs.py::test_runs[other]")]
    assert "diverged: other against baseline" in lines
    assert f"gradient of {NAME} differs by" in done.stdout
    page = "pages/test_runs.py-test_runs-other.html"
    assert f"page: {page}" in lines
    assert "diverged" in (tmp_path / page).read_text(encoding="utf-8")
    assert sorted(path.name for path in (tmp_path / "pages").iterdir()) == [
        "test_runs.py-test_runs-other.html",
        "test_runs.py-test_two_comparisons_have_two_pages-1.html",
        "test_runs.py-test_two_comparisons_have_two_pages.html",
    ]


def test_the_plugin_loads_nothing_and_writes_no_page_unless_asked(tmp_path: Path) -> None:
    given = prepare(tmp_path, "test_runs.py::test_no_torch_until_the_fixture_is_called", "test_runs.py::test_runs")
    command = [sys.executable, "-m", "pytest", *given]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "PASSED test_runs.py::test_no_torch_until_the_fixture_is_called" in done.stdout.splitlines()
    assert "page:" not in done.stdout
    assert not (tmp_path / "pages").exists()
