"""The script for a GPU without one: outcomes, exit codes, the report, bad input, carried wheels."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu_check import __main__ as script
from benchmarks.gpu_check import wheels as wheels_module
from benchmarks.gpu_check.checks import CHECKS, LIMIT_S, find_obstacle
from benchmarks.gpu_check.findings import CheckResult, Finding, Outcome, conclude, exit_code_of, read_alignments
from benchmarks.gpu_check.machine import NEEDED, Machine
from benchmarks.gpu_check.wheels import WheelError, check_wheel, install_lacking, join_parts

ROOT = Path(__file__).parents[2]
NO_GPU = Machine(device="cuda", torch="2.13.0+cpu", cuda_problem="no CUDA GPU is visible")
ONE_GPU = Machine(device="cuda", gpus=("NVIDIA H200",), capability=(9, 0), transformer_engine="")


def test_a_check_that_crashes_fails_and_one_that_is_stopped_keeps_what_it_had() -> None:
    held = Finding(name="x", outcome=Outcome.HELD, found="1", expected="1")
    result = CheckResult(name="cost", limit_s=60, findings=(held,))
    assert conclude(result, exit_code=0, last_lines="").outcome is Outcome.HELD
    crashed = conclude(result, exit_code=-11, last_lines="CUDA error: an illegal memory access was encountered")
    assert (crashed.outcome, crashed.findings) == (Outcome.FAILED, (held,))
    assert crashed.reason.startswith("its process ended with signal 11: CUDA error: an illegal memory access")
    stopped = conclude(result, exit_code=None, last_lines="")
    assert (stopped.outcome, stopped.findings) == (Outcome.NOT_RUN, (held,))
    assert stopped.reason == "stopped after 60 s, its share of the time; what it had found is kept"
    assert conclude(CheckResult(name="cost"), exit_code=0, last_lines="").outcome is Outcome.NOT_RUN
    failed = CheckResult(name="cost", findings=(held, replace(held, outcome=Outcome.FAILED)))
    assert conclude(failed, exit_code=1, last_lines="CUDA out of memory").reason.endswith("1: CUDA out of memory")


def test_exit_codes() -> None:
    held = CheckResult(name="a", outcome=Outcome.HELD)
    partly = CheckResult(
        name="b", outcome=Outcome.HELD, findings=(Finding(name="x", outcome=Outcome.NOT_RUN, found="y"),)
    )
    assert exit_code_of([held], is_partial=False) == 0
    assert exit_code_of([held], is_partial=True) == 4
    assert exit_code_of([held, partly], is_partial=False) == 4
    assert exit_code_of([partly, CheckResult(name="c", outcome=Outcome.FAILED)], is_partial=False) == 1


def test_obstacles_are_named_and_the_shares_fit_the_time() -> None:
    assert sum(check.budget_s for check in CHECKS) <= LIMIT_S - 30
    assert {find_obstacle(check, NO_GPU) for check in CHECKS} == {"no CUDA GPU is visible"}
    assert {find_obstacle(check, ONE_GPU) for check in CHECKS} == {""}
    lacking = Machine(device="cuda", gpus=("GPU",), lacking=("hydra-core", "plotly"))
    assert find_obstacle(CHECKS[0], lacking) == (
        "this Python lacks hydra-core, plotly; carry their wheels (--wheels FOLDER)"
    )
    of_fp8 = next(check for check in CHECKS if check.name == "fp8")
    older = Machine(device="cuda", gpus=("A100",), capability=(8, 0), transformer_engine="")
    assert find_obstacle(of_fp8, older) == "FP8 products need compute capability 8.9, and the GPU has 8.0"
    without = Machine(
        device="cuda", gpus=("H100",), capability=(9, 0), transformer_engine="TransformerEngine is not there"
    )
    assert find_obstacle(of_fp8, without) == "TransformerEngine is not there"


def test_an_import_that_ends_the_process_leaves_what_was_known_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = tmp_path / "python"
    known = replace(ONE_GPU, transformer_engine="the import of transformer_engine.pytorch ended the process")
    dying.write_text(f"#!/bin/sh\necho '{json.dumps(asdict(known))}'\necho 'Fatal Python error'\nkill -SEGV $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    assert script._read_machine("cuda", {}, tmp_path) == known
    dying.write_text("#!/bin/sh\necho 'no driver' >&2\nexit 1\n")
    assert (
        script._read_machine("cuda", {}, tmp_path).cuda_problem == "the process that looked for a GPU ended: no driver"
    )


def test_time_that_a_check_leaves_or_cannot_use_is_there_for_the_later_ones() -> None:
    without = replace(ONE_GPU, transformer_engine="TransformerEngine is not installed")
    assert script.share_of_time(CHECKS, ONE_GPU, left_s=570.0) == pytest.approx(90.0)
    assert script.share_of_time(CHECKS, without, left_s=570.0) == pytest.approx(90.0 * 570 / 510)
    assert script.share_of_time(CHECKS[-2:], without, left_s=200.0) == pytest.approx(200.0)
    assert script.share_of_time(CHECKS[-1:], without, left_s=200.0) == 0.0


def test_verdicts_of_an_alignment_that_was_stopped_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "layouts-float32" / "alignment" / "align.json"
    path.parent.mkdir(parents=True)
    candidates = [
        {"name": "tp2", "verdict": "rounding", "reason": "r", "sentence": "within the noise"},
        {"name": "pp2", "verdict": "incomparable", "reason": "not judged yet", "sentence": None},
    ]
    path.write_text(json.dumps({"candidates": candidates}), encoding="utf-8")
    (table,) = read_alignments(tmp_path)
    assert table.title == "verdicts of layouts-float32"
    assert table.rows == (("tp2", "rounding", "within the noise"), ("pp2", "incomparable", "not judged yet"))


def test_what_this_project_installs_is_what_is_looked_for() -> None:
    text = (ROOT / "setup.py").read_text(encoding="utf-8").partition("install_requires=[")[2].partition("]")[0]
    assert set(re.findall(r"""["']([a-z][a-z0-9-]*)[><=]""", text)) == set(NEEDED)


# ---- the script


def test_without_a_gpu_all_checks_are_reported_as_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "_read_machine", lambda *arguments: NO_GPU)
    assert script.main(["--output", str(tmp_path)]) == 4
    report = json.loads((tmp_path / "gpu_check.json").read_text(encoding="utf-8"))
    assert (report["exit_code"], report["is_rehearsal"]) == (4, False)
    assert [(item["name"], item["outcome"], item["reason"]) for item in report["checks"]] == [
        (check.name, "not run", "no CUDA GPU is visible") for check in CHECKS
    ]
    page = (tmp_path / "gpu_check.html").read_text(encoding="utf-8")
    assert all(check.title in page for check in CHECKS)
    assert "nothing was run" in page
    assert "determinism: not run (0 s): no CUDA GPU is visible" in capsys.readouterr().out


def test_a_check_beyond_its_time_is_ended_and_a_rehearsal_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process leaves a finding with a tag of HTML, and never ends."""
    finding = {"name": "<b>found</b>", "outcome": "held", "found": "1", "expected": "1"}
    content = json.dumps({"findings": [finding], "tables": []})
    sleeper = tmp_path / "python"
    own = "setsid sleep 61 &"  # a session of its own: it ends by its TMPDIR
    sleeper.write_text(f"#!/bin/sh\nprintf '%s' '{content}' > \"$6\"\n{own}\nexec sleep 60\n", encoding="utf-8")
    sleeper.chmod(0o755)
    monkeypatch.setattr(script, "_read_machine", lambda *arguments: Machine(device="cpu"))
    monkeypatch.setattr(script, "_LEAST_S", 0.0)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    monkeypatch.setattr(script, "_CLOSING_S", 0.0)
    arguments = ["--output", str(tmp_path / "out"), "--only", "gemm_orders", "--device", "cpu", "--limit", "2"]
    assert script.main(arguments) == 4
    assert not [item for item in psutil.process_iter(["cmdline"]) if item.info["cmdline"] == ["sleep", "61"]]
    report = json.loads((tmp_path / "out" / "gpu_check.json").read_text(encoding="utf-8"))
    (check,) = report["checks"]
    assert (check["outcome"], check["reason"].split(",")[0]) == ("not run", "stopped after 2 s")
    assert check["findings"] == [finding]
    page = (tmp_path / "out" / "gpu_check.html").read_text(encoding="utf-8")
    assert "A rehearsal on the CPU: nothing here says anything about a GPU." in page
    assert "&lt;b&gt;found&lt;/b&gt;" in page


def test_a_termination_ends_the_running_check_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminating = tmp_path / "python"
    terminating.write_text("#!/bin/sh\nkill -TERM $PPID\nexec sleep 60\n", encoding="utf-8")
    terminating.chmod(0o755)
    monkeypatch.setattr(script, "_read_machine", lambda *arguments: Machine(device="cpu"))
    monkeypatch.setattr(sys, "executable", str(terminating))
    assert script.main(["--output", str(tmp_path / "out"), "--only", "graphs,cost", "--device", "cpu"]) == 4
    report = json.loads((tmp_path / "out" / "gpu_check.json").read_text(encoding="utf-8"))
    reasons = [(item["name"], item["outcome"], item["reason"]) for item in report["checks"]]
    assert reasons == [("graphs", "not run", "the script was ended from outside"), ("cost", "not run", "not begun")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fast"], "unrecognized arguments: --fast"),
        (["--only", "speed"], "--only speed: known are determinism, gemm_orders, graphs,"),
        (["--limit", "-1"], "--limit -1: expected a positive number of seconds"),
        (["--limit", "soon"], "invalid float value: 'soon'"),
        (["--wheels", "{tmp}/none"], "none is no folder; name the folder that holds the wheels"),
        (["--output", "/proc/gpu_check"], "--output /proc/gpu_check cannot be written: "),
    ],
)
def test_bad_input_ends_with_5(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = [] if "--output" in arguments else ["--output", str(tmp_path / "out")]
    assert script.main([*place, *(text.format(tmp=tmp_path) for text in arguments)]) == 5
    assert message in capsys.readouterr().err


def test_a_machine_without_python_ends_with_5() -> None:
    environment = {**os.environ, "PYTHON": "/no/python3.12"}
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / "gpu_check.sh")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 5
    assert done.stderr.startswith("gpu_check: no Python: /no/python3.12 cannot be run; set PYTHON=")


# ---- wheels


def make_wheel(folder: Path, name: str = "some_package") -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nVersion: 1.0\n")
        archive.writestr(f"{name}/__init__.py", "x = 1\n" * 1000)
    return path


def test_parts_of_a_wheel_are_joined_and_only_lacking_ones_are_chosen(tmp_path: Path) -> None:
    whole = make_wheel(tmp_path)
    content = whole.read_bytes()
    for number, start in enumerate(range(0, len(content), 100)):
        (tmp_path / f"{whole.name}.part{number:03d}").write_bytes(content[start : start + 100])
    whole.unlink()
    installed = make_wheel(tmp_path, "torch")
    wheels, problems = join_parts(tmp_path, tmp_path / "joined")
    assert (wheels, problems) == ([installed, tmp_path / "joined" / whole.name], [])
    assert wheels[1].read_bytes() == content
    (tmp_path / f"{whole.name}.part001").unlink()
    wheels, (problem,) = join_parts(tmp_path, tmp_path / "joined")
    assert wheels == [installed]
    assert re.fullmatch(rf".*{whole.name} lacks part 001 of \d+; carry it too", problem)


def test_a_wheel_of_another_python_costs_no_other_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carried = tmp_path / "wheels"
    carried.mkdir()
    good, installed = make_wheel(carried), make_wheel(carried, "torch")
    other = good.with_name("compiled-1.0-cp37-cp37m-manylinux_2_28_x86_64.whl")
    shutil.copyfile(good, other)
    broken = good.with_name("broken-1.0-py3-none-any.whl")
    broken.write_bytes(installed.read_bytes()[:-30])
    asked: list[tuple[set[str], tuple[str, ...]]] = []

    def pip(wheels: Sequence[Path], target: Path, *options: str) -> str:
        asked.append(({path.name for path in wheels}, options))
        return "not a supported wheel on this platform" if other in wheels else ""

    monkeypatch.setattr(wheels_module, "_pip", pip)
    problems = install_lacking(carried, tmp_path / "packages", work=tmp_path / "work")
    assert [text.partition(":")[0] for text in problems] == [
        f"{broken} is a broken wheel",
        f"pip cannot install {other.name}",
    ]
    assert asked[0] == ({good.name, other.name}, ())
    assert asked[-1] == ({good.name}, ())
    assert all(options == ("--dry-run",) for _, options in asked[1:-1])


def test_broken_wheels_are_named(tmp_path: Path) -> None:
    cut = make_wheel(tmp_path)
    cut.write_bytes(cut.read_bytes()[:-30])
    with pytest.raises(WheelError, match=r"some_package-1\.0-py3-none-any\.whl is a broken wheel: .*; copy it again"):
        check_wheel(cut)
    empty = tmp_path / "other-1.0-py3-none-any.whl"
    with zipfile.ZipFile(empty, "w"):
        pass
    with pytest.raises(WheelError, match=r"is a broken wheel: it holds no METADATA; copy it again"):
        check_wheel(empty)
    with pytest.raises(WheelError, match=r"is not named as a wheel is"):
        check_wheel(tmp_path / "package.whl")


@pytest.mark.all
@pytest.mark.timeout(3600)
def test_a_rehearsal_on_the_cpu_runs_every_check_that_needs_no_gpu_and_holds(tmp_path: Path) -> None:
    assert script.main(["--output", str(tmp_path), "--device", "cpu", "--limit", "3000"]) == 4
    report = json.loads((tmp_path / "gpu_check.json").read_text(encoding="utf-8"))
    outcomes = {item["name"]: item["outcome"] for item in report["checks"]}
    assert outcomes == {check.name: "not run" if check.name == "fp8" else "held" for check in CHECKS}
