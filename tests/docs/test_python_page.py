"""The page on Python: its code runs in order as it stands there, on small runs at the paths that it names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path

import pytest
import yaml

import mock_scheduler as ms
from mock_scheduler.api import align as alignments
from mock_scheduler.commands.compare import CompareOptions
from tests.alignment.test_align import NORM, FakeLauncher
from tests.commands.test_compare import Runs
from tests.programs import run_program
from tests.recording.recordings import record

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
PLUGIN = "mock_scheduler.pytest_plugin"
MY_CHANGE = """
exp_name: my_change
output_dir: output/my_change
system_envs:
  NCCL_ALGO: Ring
  NVTE_ALLOW_NONDETERMINISTIC_ALGO: '0'
  CUBLAS_WORKSPACE_CONFIG: ':4096:8'
  DETERMINISTIC_MODE: '1'
align:
  candidates:
    - {name: tp2-sp, overrides: [parallel.tensor_model_parallel_size=2]}
    - {name: my-reduction}
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the page's runs; ``my-reduction`` has another gradient, and alignments start nothing."""
    folder = tmp_path / "output" / "my_change" / "align"
    folder.mkdir(parents=True)
    runs = Runs(folder)
    runs.make("baseline")
    runs.make("tp2-sp")
    runs.make("my-reduction", gradient=1.5)
    record(folder / "recording", (0, 1))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "my_change.yaml").write_text(MY_CHANGE)
    run_alignment = alignments.run_alignment
    monkeypatch.setattr(
        alignments, "run_alignment", lambda order: run_alignment(replace(order, make_launch=FakeLauncher().make))
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_block(block: str, names: dict[str, object]) -> None:
    exec(compile(block, "python.md", "exec"), names)


def test_the_blocks_run_in_order_and_find_the_planted_gradient(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    align_blocks = [block for block in BLOCKS if "ms.align(" in block]
    assert len(align_blocks) == 1
    for block in BLOCKS:
        if "assert_aligned" not in block and block not in align_blocks:
            run_block(block, names)
    printed = capsys.readouterr().out
    assert printed.startswith("diverged 1 False\ndiverged: step 0, update 0, backward: gradient of " + NORM)
    assert f"\n0 0 gradient {NORM} 0.5 " in printed
    narrow = names["narrow"]
    assert isinstance(narrow, ms.Verdict)
    assert (narrow.kind, narrow.metrics) == (ms.VerdictKind.DIVERGED, None)
    assert (checkout / "comparison.html").read_text().startswith("<!DOCTYPE html>")
    assert json.loads((checkout / "comparison.json").read_text())["verdict"] == "diverged"
    assert "\n3 6 0\n[0, 1]\n" in printed  # one rank holds every tensor once: nothing to check
    assert printed.endswith(f"{NORM} (2,)\n")


def test_the_alignment_gives_a_verdict_for_each_candidate(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in BLOCKS if "ms.align(" in block)
    names: dict[str, object] = {"ms": ms}
    run_block(block.replace('"my_change", ', '"my_change", output_dir="aligned", overrides='), names)
    assert [line.split(" ")[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["tp2-sp", "identical"],
        ["my-reduction", "identical"],
    ]
    assert (checkout / "align.junit.xml").read_text().count("<testcase ") == 2


def test_the_fixture_passes_equal_runs_and_fails_the_others_with_the_verdict(checkout: Path) -> None:
    (block,) = (block for block in BLOCKS if "assert_aligned" in block)
    (checkout / "my_tests.py").write_text(block)
    is_loaded = any(point.value == PLUGIN for point in entry_points(group="pytest11"))
    plugin = [] if is_loaded else ["-p", PLUGIN]
    given = ["-q", *plugin, "my_tests.py", "--mock-scheduler-html", "failed"]
    done = run_program("pytest", given, cwd=checkout)
    assert (done.returncode, "1 failed, 1 passed" in done.stdout) == (1, True), done.stdout + done.stderr
    runs = "output/my_change/align"
    assert f"diverged: {runs}/my-reduction against {runs}/baseline\nfirst divergence: step 0, update 0" in done.stdout
    page = "failed/my_tests.py-test_gradients_of_the_first_step_are_equal.html"
    assert f"page: {page}" in done.stdout
    assert (checkout / page).is_file()
    assert f"page: {page}\n" in TEXT


def test_its_configuration_is_the_one_that_the_tutorial_explains() -> None:
    (shown,) = re.findall(r"```yaml\n.*?```\n", TEXT, re.DOTALL)
    assert shown in (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    assert all(f"name: {item['name']}" in shown for item in yaml.safe_load(MY_CHANGE)["align"]["candidates"])


def test_every_argument_and_attribute_of_the_tables_is_there() -> None:
    arguments, attributes, errors = (
        re.findall(rf"\| {title} \|.*?\n(.*?)\n\n", TEXT, re.DOTALL)[0] for title in ("argument", "attribute", "error")
    )

    def first_cells(table: str) -> set[str]:
        return {name for line in table.splitlines()[1:] for name in re.findall(r"`([^`]+)`", line.split("|")[1])}

    assert first_cells(arguments) == set(signature(ms.compare).parameters)
    assert {name for name in first_cells(attributes) if not hasattr(ms.Verdict, name)} == set()
    assert {
        name for name in first_cells(errors) if not issubclass(getattr(ms, name[3:]), ms.MockSchedulerError)
    } == set()
    assert CompareOptions.__dataclass_fields__.keys() >= {"tolerance", "noise", "has_metrics"}
