"""The script for a GPU: each check's judge says "failed" of a planted wrong value, and bad input is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import __main__ as script
from benchmarks.gpu_check import cost, determinism, example, faults, fp8, gemm_orders, graphs, training
from benchmarks.gpu_check.cases import differing, distance
from benchmarks.gpu_check.checks import CHECKS, LIMIT_S, find_obstacle
from benchmarks.gpu_check.findings import (
    CheckResult,
    Finding,
    FindingsLog,
    Outcome,
    conclude,
    exit_code_of,
    read_findings,
)
from benchmarks.gpu_check.machine import NEEDED, Machine
from benchmarks.gpu_check.wheels import WheelError, check_wheel, choose_lacking, join_parts
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.sketch.totals import Totals
from tests.faults.own.campaign import OwnJudgement

ROOT = Path(__file__).parents[2]
NO_GPU = Machine(device="cuda", torch="2.13.0+cpu", cuda_problem="no CUDA GPU is visible")
ONE_GPU = Machine(device="cuda", gpus=("NVIDIA H200",), capability=(9, 0), transformer_engine="")


@pytest.fixture
def log(tmp_path: Path) -> FindingsLog:
    return FindingsLog(tmp_path / "findings.json")


def failed(log: FindingsLog) -> dict[str, str]:
    """What was said of the questions that failed; they are also in the file."""
    found, _ = read_findings(log.path)
    assert list(found) == log.findings
    return {item.name: item.found for item in found if item.outcome is Outcome.FAILED}


def verdict(kind: str, **more: Any) -> Any:
    """A candidate of an alignment, as the checks read it."""
    values = {"name": "tp2", "verdict": SimpleNamespace(kind=SimpleNamespace(value=kind)), "run": SimpleNamespace()}
    return SimpleNamespace(**{**values, "log_path": None, **more})


@pytest.fixture
def plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (example, fp8):
        monkeypatch.setattr(module, "describe", lambda item: item.verdict.kind.value)


# ---- the judges


def test_a_setting_without_effect_fails_by_name(log: FindingsLog) -> None:
    from mock_scheduler.determinism.guard import read_back

    values = read_back({}) | {"torch.deterministic_algorithms": "False"}
    determinism.hold_settings(log, values)
    assert "torch.deterministic_algorithms is False, must be True" in failed(log)["settings of a deterministic run"]


def test_an_operation_that_does_not_repeat_fails_by_name_and_a_refused_one_does_not(log: FindingsLog) -> None:
    calls = iter(range(1000))

    def refused() -> tuple[torch.Tensor, ...]:
        raise RuntimeError("index_add_cuda does not have a deterministic implementation\nmore")

    operations = {
        "drifting": lambda: (torch.full((3,), float(next(calls))),),
        "steady": lambda: (torch.ones(3),),
        "refused": refused,
    }
    before = torch.are_deterministic_algorithms_enabled()
    try:
        determinism.repeat_operations(log, operations)
    finally:
        torch.use_deterministic_algorithms(before)
    assert failed(log) == {"operations repeat in deterministic mode, or are refused": "drifting"}
    assert dict(row[:2] for row in log.tables[0].rows) == {
        "drifting": "differs at repetition 1",
        "steady": "repeats",
        "refused": "refused: index_add_cuda does not have a deterministic implementation",
    }


@pytest.mark.parametrize(
    ("change", "text"),
    [({"num_digests": 2}, "does not repeat, equal bits"), ({"digest": "other"}, "repeats, other bits on both ranks")],
)
def test_a_collective_that_does_not_repeat_or_agree_fails(log: FindingsLog, change: dict[str, Any], text: str) -> None:
    good = {"num_digests": 1, "digest": "a", "order": "by rank"}
    determinism.hold_collectives(log, "nccl", [{"all-reduce": good}, {"all-reduce": good}])
    assert failed(log) == {}
    determinism.hold_collectives(log, "nccl", [{"all-reduce": good}, {"all-reduce": good | change}])
    assert text in failed(log)["all-reduce over nccl"]


def test_the_order_of_a_sum_is_told() -> None:
    parts = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    ascending, descending = (parts[0] + parts[1]) + parts[2], (parts[2] + parts[1]) + parts[0]
    middle = torch.tensor([1.0])  # exact
    orders = [determinism.describe_order(found, parts, torch.add) for found in (ascending, middle)]
    assert orders == ["by rank", "another"]
    assert torch.equal(ascending, descending)
    assert determinism.describe_order(parts[1] + parts[0], parts[:2], torch.add) == "by rank"


def test_attention_that_differs_fails_with_its_backend_and_an_absent_backend_is_not_run(log: FindingsLog) -> None:
    determinism.hold_attention(
        log, "attention, fused", "Selected backend = FusedAttention\ndiffers at repetition 3", ""
    )
    assert failed(log) == {"attention, fused": "differs at repetition 3 (Selected backend = FusedAttention)"}
    determinism.hold_attention(log, "attention, flash", "refused: no backend supports it", "")
    assert log.findings[-1].outcome is Outcome.NOT_RUN
    assert log.findings[-1].found == "refused: no backend supports it"


def test_steps_with_one_other_bit_fail_by_the_tensors_name(log: FindingsLog) -> None:
    key = TraceKey(step=0, update=0, kind="gradient", name="decoder.final_layernorm.weight")
    value = torch.tensor([1.0, 2.0])
    other = value.clone()
    other.view(torch.int32)[1] ^= 1
    assert differing({key: value}, {key: value.clone()}) == []
    assert differing({}, {}) == ["nothing was traced"]
    assert differing({key: value}, {}) == [f"{key.describe()} (on one side)"]
    training.hold_equal(log, "twice", differing({key: value}, {key: other}))
    assert failed(log) == {"twice": f"1 differ, first {key.describe()}"}


def test_gradients_beyond_the_other_rounding_fail(log: FindingsLog) -> None:
    wide = {"weight": torch.tensor([3.0, 4.0], dtype=torch.float64)}
    own = distance({"weight": torch.tensor([3.0, 4.5], dtype=torch.float64)}, wide)
    assert own == pytest.approx(0.1)
    assert distance({}, wide) == float("inf")
    for value in (own, float("inf"), float("nan")):
        training.hold_rounding(log, str(value), training.Distances(own=value, other=0.02, what="the CPU's float32"))
    assert list(failed(log)) == [str(own), "inf", "nan"]
    training.hold_rounding(log, "near", training.Distances(own=own, other=0.03, what="the CPU's float32"))
    assert "near" not in failed(log)


@pytest.mark.usefixtures("plain_words")
def test_a_layout_that_diverges_fails(log: FindingsLog) -> None:
    context: Any = SimpleNamespace(log=log)
    for kind in ("identical", "identical (emulated)", "rounding", "suspect", "diverged", "incomparable", "unverified"):
        example.hold_passing(context, kind, verdict(kind))
    assert list(failed(log)) == ["suspect: tp2", "diverged: tp2", "incomparable: tp2", "unverified: tp2"]


def test_a_product_whose_bits_depend_on_its_shape_fails_by_its_row(log: FindingsLog) -> None:
    shapes = ((8, 16, 12),)
    gemm_orders.compare_all(log, shapes, torch.device("cpu"), torch.matmul, title="plain")
    assert failed(log) == {}
    assert len(log.tables[0].rows) == 2 * 2 * 3  # dtypes, degrees (8 does not divide 12), splits

    def of_small_tiles(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        found = left @ right
        return (
            found
            if right.shape[-1] == 12
            else found.nextafter(torch.tensor(9.0))
            if found.dtype == torch.float32
            else found
        )

    gemm_orders.compare_all(log, shapes, torch.device("cpu"), of_small_tiles, title="planted")
    found = failed(log)["planted: emulation has the candidate's bits"]
    assert found.startswith("2 of 12 not, first 8 x 16 x 12, float32, output features, 2, 0.0%")


def judgement(**changes: Any) -> OwnJudgement:
    values = {"precision": "float32", "model": "dense", "run": "dense tp2", "fault": "second-beta", "sentence": "it is"}
    values |= {"verdict": "diverged", "place": "update, update 0, x", "is_placed": True, "fired": 2}
    return OwnJudgement(**{**values, **changes})


def test_a_fault_that_is_missed_or_misplaced_or_never_fired_fails_by_name(log: FindingsLog) -> None:
    context: Any = SimpleNamespace(log=log)
    assert len(faults.FAULTS) == len(set(faults.FAULTS)) == 10
    faults.hold_judgement(context, judgement(), "diverged: it is")
    assert failed(log) == {}
    for changes in ({"is_placed": False}, {"verdict": "identical"}, {"failure": "the fault never fired"}):
        faults.hold_judgement(context, judgement(**changes), "diverged: it is")
    faults.hold_judgement(context, judgement(fault="", verdict="rounding"), "rounding")
    assert [item.name for item in log.findings if item.outcome is Outcome.FAILED] == ["second-beta"] * 3 + ["no fault"]
    assert "the fault never fired" in log.findings[3].found


def test_waits_that_grow_with_the_model_fail_and_copies_are_counted(log: FindingsLog) -> None:
    names = ["cudaStreamSynchronize", "cudaLaunchKernel", "Memcpy DtoH (Device -> Pinned)", "cudaMemcpy", "aten::add"]
    assert cost.count_events(names) == cost.HostCounts(waits=2, copies=1)
    plain = {1: cost.HostCounts(waits=4, copies=1), 3: cost.HostCounts(waits=6, copies=1)}
    even = {1: cost.HostCounts(waits=9, copies=3), 3: cost.HostCounts(waits=11, copies=3)}
    growing = {1: cost.HostCounts(waits=9, copies=3), 3: cost.HostCounts(waits=31, copies=9)}
    cost.hold_waits(log, "sketches", plain=plain, traced=even)
    assert failed(log) == {}
    cost.hold_waits(log, "whole tensors", plain=plain, traced=growing)
    assert failed(log) == {"whole tensors: waits of the host that a step gets": "5 and 25 with 1 and 3 layers"}
    assert cost.count_events(["cudaEventSynchronize"]).waits == 0  # of the thread in the background
    cost.hold_ratio(log, 2048, 1.2)
    assert failed(log)["sketches of the default kinds, hidden size 2048"] == "1.200 times a step"


def test_a_sketch_with_another_fingerprint_or_slot_fails(log: FindingsLog) -> None:
    good = Totals.zero(torch.device("cpu"))
    good.slots.fill_(2.0)
    wrong = [Totals.zero(torch.device("cpu")) for _ in range(2)]
    for item in wrong:
        item.slots.copy_(good.slots)
    wrong[0].counts[0] += 1
    wrong[1].slots[5] += 1e-6
    cost.hold_sketch(log, "good", good, good)
    for number, item in enumerate(wrong):
        cost.hold_sketch(log, str(number), good, item)
    assert failed(log) == {"0": "fingerprint another, slots equal", "1": "fingerprint equal, slots off by 1e-08"}


@pytest.mark.usefixtures("plain_words")
def test_fp8_that_was_off_or_does_not_repeat_or_is_emulated_fails(log: FindingsLog) -> None:
    run = SimpleNamespace(order_limits=("fp8 is 'hybrid'",), unobserved_modules=("mlp.linear_fc1",))
    good = {"again": verdict("identical", run=run), "bfloat16": verdict("diverged"), "tp2": verdict("suspect")}
    fp8.judge(log, "delayed", good)
    assert failed(log) == {}
    bare = SimpleNamespace(order_limits=(), unobserved_modules=())
    wrong = {"again": verdict("diverged", run=bare), "bfloat16": verdict("identical"), "tp2": verdict("suspect")}
    fp8.judge(log, "block", wrong)
    assert list(failed(log)) == [
        "FP8, block: again",
        "FP8, block: bfloat16 instead has other bits",
        "FP8, block: emulation refuses it by name",
    ]


def test_a_capture_that_nobody_speaks_of_fails(log: FindingsLog) -> None:
    graphs.hold_refused(log, "a layer", "")
    graphs.hold_refused(
        log, "a key", "attach cannot follow this training: CUDA graphs: a replayed graph calls no hooks"
    )
    assert failed(log) == {"a layer": "nothing was said"}


# ---- outcomes and exit codes


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


def test_exit_codes() -> None:
    held = CheckResult(name="a", outcome=Outcome.HELD)
    partly = CheckResult(
        name="b", outcome=Outcome.HELD, findings=(Finding(name="x", outcome=Outcome.NOT_RUN, found="y"),)
    )
    assert exit_code_of([held], is_rehearsal=False) == 0
    assert exit_code_of([held], is_rehearsal=True) == 4
    assert exit_code_of([held, partly], is_rehearsal=False) == 4
    assert exit_code_of([partly, CheckResult(name="c", outcome=Outcome.FAILED)], is_rehearsal=False) == 1


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
    assert "not all was run" in page
    assert "determinism: not run (0 s): no CUDA GPU is visible" in capsys.readouterr().out


def test_a_check_beyond_its_time_is_ended_and_a_rehearsal_says_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process leaves a finding with a tag of HTML, and never ends."""
    finding = {"name": "<b>found</b>", "outcome": "held", "found": "1", "expected": "1"}
    content = json.dumps({"findings": [finding], "tables": []})
    sleeper = tmp_path / "python"
    sleeper.write_text(f"#!/bin/sh\nprintf '%s' '{content}' > \"$6\"\nexec sleep 60\n", encoding="utf-8")
    sleeper.chmod(0o755)
    monkeypatch.setattr(script, "_read_machine", lambda *arguments: Machine(device="cpu"))
    monkeypatch.setattr(script, "_LEAST_S", 0.0)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    arguments = ["--output", str(tmp_path / "out"), "--only", "gemm_orders", "--device", "cpu", "--limit", "40"]
    assert script.main(arguments) == 4
    report = json.loads((tmp_path / "out" / "gpu_check.json").read_text(encoding="utf-8"))
    (check,) = report["checks"]
    assert (check["outcome"], check["reason"].split(",")[0]) == ("not run", "stopped after 2 s")
    assert check["findings"] == [finding]
    page = (tmp_path / "out" / "gpu_check.html").read_text(encoding="utf-8")
    assert "A rehearsal on the CPU: nothing here says anything about a GPU." in page
    assert "&lt;b&gt;found&lt;/b&gt;" in page


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
    wheels = join_parts(tmp_path, tmp_path / "joined")
    assert wheels == [installed, tmp_path / "joined" / whole.name]
    assert wheels[1].read_bytes() == content
    assert choose_lacking(wheels) == [wheels[1]]
    (tmp_path / f"{whole.name}.part001").unlink()
    with pytest.raises(WheelError, match=rf"{whole.name} lacks part 001 of \d+; carry it too"):
        join_parts(tmp_path, tmp_path / "joined")


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
