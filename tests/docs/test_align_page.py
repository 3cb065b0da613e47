"""The page on alignments: its YAML is planned as the text says, and its workflow asks for what there is."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mock_scheduler.alignment.plan.plan import RECORDING_NAME, RESERVED_NAMES, plan_alignment
from mock_scheduler.alignment.plan.planned_run import PROOFS_NAME
from mock_scheduler.cli import app
from mock_scheduler.config.align import AlignConfig
from mock_scheduler.config.layout import LAYOUT_AXES
from mock_scheduler.run_folder.command_folder import ALIGN_MARKER
from mock_scheduler.support.run_files import BASELINE_NAME
from pipelines.config.loading import build_loader
from pipelines.program import PROGRAM

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "align.md").read_text(encoding="utf-8")
WORKFLOW = ROOT / "docs" / "examples" / "github_actions.yml"
YAML_BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)


def planned_names(block: str, folder: Path) -> dict[str, bool]:
    """Whether each candidate must be exact, by name, of a block behind the quickstart."""
    for path in (ROOT / "configs").glob("*.yaml"):
        shutil.copy(path, folder)
    (folder / "page.yaml").write_text(f"defaults: [quickstart, _self_]\nexp_name: page\n{block}")
    plan = plan_alignment(build_loader("page", folder), program=PROGRAM, overrides=[], output_dir=folder / "out")
    return {run.name: run.must_be_exact for run in plan.candidates}


@pytest.mark.parametrize(
    ("block", "names"),
    [
        (YAML_BLOCKS[0], {"replay": True, "lr": False, "packing": False}),
        (YAML_BLOCKS[1], {"tp2": False, "next-version": False}),
        (
            YAML_BLOCKS[2],
            {
                "replay": True,
                "tp2": True,
                "tp2.recompute": True,
                "tp2-sp": True,
                "tp2-sp.recompute": True,
                "pp2": True,
                "dp2": True,
                "dp2.recompute": True,
            },
        ),
    ],
)
def test_every_configuration_of_the_page_is_planned(
    block: str, names: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(YAML_BLOCKS) == 5
    for module in ("my_optimizer", "my_optimizer_2"):
        (tmp_path / f"{module}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert planned_names(block, tmp_path) == names


def test_the_page_names_every_axis() -> None:
    axes = ", ".join(f"`{axis}`" for axis in LAYOUT_AXES)
    assert f"of the axes {axes} and `sp`" in TEXT


@pytest.fixture
def steps() -> list[dict[str, Any]]:
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert set(workflow) == {"name", True, "permissions", "jobs"}  # YAML 1.1 reads the key `on` as true
    job = workflow["jobs"]["align"]
    assert job["env"] == {"CONFIG": "quickstart", "OUTPUT": "align-output"}
    assert (ROOT / "configs" / "quickstart.yaml").is_file()
    found: list[dict[str, Any]] = job["steps"]
    assert all(("uses" in step) != ("run" in step) for step in found)
    return found


def test_the_workflow_caches_what_may_be_taken_again(steps: list[dict[str, Any]]) -> None:
    (cache,) = (step["with"] for step in steps if step.get("uses", "").startswith("actions/cache@"))
    assert cache["path"].split() == [
        f"align-output/{name}" for name in (ALIGN_MARKER.name, BASELINE_NAME, RECORDING_NAME, f"{PROOFS_NAME}/noise-*")
    ]
    assert cache["key"].startswith(cache["restore-keys"].strip())


def test_the_workflow_runs_an_alignment_with_options_that_there_are(steps: list[dict[str, Any]]) -> None:
    (command,) = (step["run"] for step in steps if "mock-scheduler" in step.get("run", ""))
    words = command.split()
    assert words[:3] == [".venv/bin/mock-scheduler", "align", '"$CONFIG"']
    shown = CliRunner().invoke(app, ["align", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    assert [word for word in words if word.startswith("--") and word not in shown] == []
    (install,) = (step["run"] for step in steps if step.get("name") == "Install")
    script = ROOT / install.split()[1]
    subprocess.run(["bash", "-n", script], check=True)


def test_the_workflow_keeps_page_and_junit_file_of_a_failed_job_too(steps: list[dict[str, Any]]) -> None:
    (upload,) = (step for step in steps if step.get("uses", "").startswith("actions/upload-artifact@"))
    assert upload["if"] == "always()"
    paths = upload["with"]["path"].split()
    names = [name for name in RESERVED_NAMES if "." in name]
    assert {f"align-output/{name}" for name in names} <= set(paths)
    assert {"align.html", "align.junit.xml"} <= set(names)


@pytest.mark.parametrize(("block", "kind"), [(YAML_BLOCKS[3], "slurm"), (YAML_BLOCKS[4], "ray")])
def test_every_executor_of_the_page_is_one(block: str, kind: str) -> None:
    executor = AlignConfig.model_validate(yaml.safe_load(block)["align"]).executor
    assert (executor.kind, executor.model_dump()["gpus_per_process"]) == (kind, 1)


def test_the_gitlab_job_aligns_as_the_workflow_does(steps: list[dict[str, Any]]) -> None:
    job = yaml.safe_load((ROOT / "docs/examples/gitlab_ci.yml").read_text(encoding="utf-8"))["align"]
    (command,) = (step["run"] for step in steps if "mock-scheduler" in step.get("run", ""))
    assert job["script"] == ["bash launch/setup_venv.sh", command]
    assert job["artifacts"]["reports"] == {"junit": "align-output/align.junit.xml"}
    assert job["artifacts"]["when"] == "always"
    kept = {path.strip("/").removeprefix("align-output/") for path in job["cache"]["paths"]}
    assert kept == {ALIGN_MARKER.name, BASELINE_NAME, RECORDING_NAME, PROOFS_NAME}


def test_the_slurm_job_is_a_script_that_asks_for_a_configuration() -> None:
    script = ROOT / "docs/examples/slurm_ci.sbatch"
    done = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert (done.returncode, "usage: sbatch slurm_ci.sbatch CONFIG" in done.stderr) == (1, True)
    assert "mock-scheduler align" in script.read_text(encoding="utf-8")
