"""Alignments of a command that no instrument knows: ladder, localisation, resume, reports; without rollouts."""

from __future__ import annotations

import importlib
import io
import json
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mock_scheduler import cli
from mock_scheduler import compare as compare_runs
from mock_scheduler.alignment.plan.plan import plan_alignment
from mock_scheduler.alignment.prove.proof_runs import order_reductions, plan_perturbed
from mock_scheduler.command_program.command import build_command
from mock_scheduler.command_program.program import PROGRAM, own_config
from mock_scheduler.commands import minimise as minimise_command
from mock_scheduler.commands.align import AlignOptions, run_align
from mock_scheduler.commands.minimise import MinimiseOptions, run_minimise
from mock_scheduler.display.console import Console
from mock_scheduler.errors import AlignmentError, ConfigError
from tests.command_program.fake_training import UNOBSERVED
from tests.command_program.simulated import DP2, TP2, Runs, write_config

FEW = {"proofs": {"num_perturbations": 2}}
#: Nothing beyond the noise of one run.
QUICK = {"num_perturbations": 1, "localise": False, "referee": "never", "consequence": False}


@pytest.fixture
def runs() -> Runs:
    return Runs()


def align(path: Path, runs: Runs, *overrides: str, **options: Any) -> tuple[int, dict[str, Any], str]:
    output = io.StringIO()
    code = run_align(
        config_name=path.stem,
        config_path=path.parent,
        overrides=overrides,
        options=AlignOptions(**options),
        make_launch=runs.make_launch,
        console=Console(file=output, width=120),
    )
    result = path.parent / "out" / "align" / "align.json"
    return code, json.loads(result.read_text(encoding="utf-8")), output.getvalue()


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["verdict"] for item in result["candidates"]}


def candidate(result: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(item for item in result["candidates"] if item["name"] == name)
    return found


def proof(result: dict[str, Any], name: str, kind: str) -> str:
    proofs = candidate(result, name)["report"]["proofs"]
    return next(item["text"] for item in proofs if item["name"] == kind)


def test_layouts_of_a_command_are_proved_as_far_as_it_goes(tmp_path: Path, runs: Runs) -> None:
    path = write_config(
        tmp_path,
        {"same": [], "recompute": ["options.recompute=true"], "tp2": [TP2], "dp2": [DP2]},
        align=FEW,
    )
    code, result, text = align(path, runs)
    assert verdicts(result) == {
        "same": "identical",
        "recompute": "identical",
        "tp2": "identical (emulated)",
        "dp2": "rounding",
    }
    assert code == 0
    # The run of dp2 says itself that its order cannot be followed, so no reference is started, and the ladder goes on.
    assert "cannot be followed: the loss function adds by itself" in proof(result, "dp2", "emulation")
    assert runs.made == [
        *("baseline", "same", "recompute", "tp2", "dp2"),
        *("emulated-tp2", "noise-0", "noise-1"),
    ]
    order = "a reference in one process that adds in the order of tp2 pp1 dp1"
    assert f"to {order}, but for the loss function's own sums: " in proof(result, "tp2", "emulation")
    assert result["recording_dir"] is None
    for word in ("recording", "engines", "rollout", "dump", "mock"):
        assert word not in text.replace("mock-scheduler", "").replace("mock_scheduler", ""), word


def test_every_run_begins_with_the_baselines_initial_state(tmp_path: Path, runs: Runs) -> None:
    """The fake's own first weights depend on its layout, so without this nothing would be equal."""
    path = write_config(tmp_path, {"tp2": [TP2]}, align=FEW)
    align(path, runs)
    root = tmp_path / "out" / "align"
    told = {
        file.parent.name: json.loads(file.read_text(encoding="utf-8"))["initial_state"]
        for file in root.rglob("attached_run.json")
    }
    trace = str(root / "baseline" / "trace")
    assert told == {
        "baseline": None,
        **dict.fromkeys(["tp2", "emulated-tp2"], trace),
    }


def test_the_start_of_each_run_is_said_on_the_terminal_the_page_and_in_the_result(tmp_path: Path, runs: Runs) -> None:
    path = write_config(tmp_path, {"same": [], "tp2": [TP2]}, align={"proofs": QUICK})
    _, result, text = align(path, runs)
    equal = "Starts as the baseline does: 2 parameters and buffers were equal already, and nothing was set."
    first = "decoder.layers.0.mlp.linear_fc1.weight"
    changed = (
        f"Starts from the baseline's state: 2 of 2 parameters and buffers (first {first}) were another and were set."
    )
    starts = {item["name"]: item["start"] for item in result["candidates"]}
    assert (starts["same"]["text"], starts["tp2"]["text"]) == (equal, changed)
    assert starts["tp2"]["kinds"] == {
        "initial": {"num_equal": 0, "num_set": 2, "first": [{"name": first, "relative": 1.5}]}
    }
    words = " ".join(text.split())
    assert equal in words
    assert changed in words
    page = (tmp_path / "out" / "align" / "align.html").read_text(encoding="utf-8")
    assert "What it started from" in page
    assert f"{first} (1.5e+00 apart), and 1 more" in page


def test_a_passing_verdict_names_what_it_did_not_look_at_and_its_share(tmp_path: Path, runs: Runs) -> None:
    """Planted: a module whose output nothing shows."""
    path = write_config(tmp_path, {"same": ["options.fault=hidden"]}, effects={"fault": "nothing"})
    _, result, text = align(path, runs, is_ci=True)
    assert verdicts(result) == {"same": "identical"}
    missed = candidate(result, "same")["unseen"]
    sentence = "the output of 1 module with 50.0 % of the compared parameters (decoder.layers.1.mlp.linear_fc1)"
    assert missed == {
        "text": sentence,
        "modules": [{"name": name, "reason": reason} for name, reason in UNOBSERVED.items()],
        "num_modules": 1,
        "module_share": 0.5,
        "parameters": [],
        "num_parameters": 0,
        "parameter_share": 0.0,
        "steps": [],
        "last_state": False,
    }
    assert f"not looked at in same: {sentence}" in text
    page = (tmp_path / "out" / "align" / "align.html").read_text(encoding="utf-8")
    assert f"; not looked at: {sentence}" in page
    root = tmp_path / "out" / "align"
    assert f"not looked at: {sentence}" in (root / "align.junit.xml").read_text(encoding="utf-8")
    compared = compare_runs(root / "baseline", root / "same")
    assert str(compared).endswith(f"; not looked at: {sentence}")
    assert compare_runs(root / "baseline", root / "same", kinds="gradient").unseen is None


def test_a_fault_is_found_and_localised_with_grafts_and_the_page_speaks_of_no_recording(
    tmp_path: Path, runs: Runs
) -> None:
    path = write_config(tmp_path, {"same": [], "fault": [TP2, "options.fault=scale"]}, align=FEW)
    code, result, _ = align(path, runs)
    assert code == 1
    assert verdicts(result)["same"] == "identical"
    found = candidate(result, "fault")
    assert found["verdict"] == "diverged"
    assert found["localisation"]["causes"][0]["name"] == "decoder.layers.0.mlp.linear_fc1"
    assert any("graft" in name for name in runs.made)
    referee = proof(result, "fault", "referee")
    assert referee.startswith("it cannot be run in float64: ")
    assert "nothing passes precision to the command, which is float64 here and float32 in the file" in referee
    page = (tmp_path / "out" / "align" / "align.html").read_text(encoding="utf-8")
    body = page[page.index("<body") :]
    for words in ("recording", "contract", "Contract", "Ledger", "engines built", "nothing counted", ">rollout<"):
        assert words not in body, words
    assert "decoder.layers.0.mlp.linear_fc1" in body


def test_the_referee_judges_where_precision_has_arguments(tmp_path: Path, runs: Runs) -> None:
    arguments = {
        "parallel.data_parallel_size": {2: ["--layout", "dp2"]},
        "precision": {"float64": ["--dtype", "float64"]},
    }
    path = write_config(
        tmp_path,
        {"dp2": [DP2]},
        command=["{python}", "fake_training.py"],
        arguments=arguments,
        options={},
        effects={},
        reductions={},
        align={"proofs": {"num_perturbations": 2, "referee": "always", "consequence": False}},
    )
    code, result, _ = align(path, runs)
    assert (code, {"float64-baseline", "float64-dp2"} <= set(runs.made)) == (0, True)
    proofs = {item["name"]: item["outcome"] for item in candidate(result, "dp2")["report"]["proofs"]}
    assert proofs["referee"] == "proved"


FAILURES = {
    "crash": ("no error.json; the last lines of its output:", "ValueError: the optimizer has no such group"),
    "refuse": ("UnsupportedModelError: CUDA graphs replay what no hook sees; turn them off", ""),
    "detached": ("AlignmentError: the command ended with exit code 0 and wrote no run.json", "megatron.attach("),
    "short": ("AlignmentError: the command ended after step 0, and max_steps=2 asks for", ""),
    "other_layout": ("LayoutError: the command trained with the layout tp4 pp1 dp1, and tp1 pp1 dp1 was asked", ""),
}


def test_a_run_that_fails_is_incomparable_with_its_own_words(tmp_path: Path, runs: Runs) -> None:
    path = write_config(tmp_path, {name: [f"options.fault={name}"] for name in FAILURES}, align=FEW)
    code, result, _ = align(path, runs)
    assert code == 3
    for name, texts in FAILURES.items():
        found = candidate(result, name)
        assert found["verdict"] == "incomparable"
        for text in texts:
            assert text in found["reason"], name
    assert runs.made == ["baseline", *FAILURES]


def test_a_baseline_without_attach_ends_the_alignment_with_advice(tmp_path: Path, runs: Runs) -> None:
    path = write_config(tmp_path, {"tp2": [TP2]})
    with pytest.raises(
        AlignmentError, match=r"^the baseline failed \(exit code 3\), so no candidate was run: "
    ) as caught:
        align(path, runs, "options.fault=detached")
    assert "Call run = megatron.attach(model_chunks, optimizer)" in str(caught.value)


def test_an_interrupted_alignment_goes_on_where_it_was(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"same": [], "tp2": [TP2]}, align=FEW)

    def interrupt(name: str) -> None:
        if name == "tp2":
            raise KeyboardInterrupt

    first = Runs(before=interrupt)
    with pytest.raises(KeyboardInterrupt):
        align(path, first)
    assert first.made == ["baseline", "same"]
    second = Runs()
    code, result, text = align(path, second)
    assert (code, second.made[0], "baseline" in second.made) == (0, "tp2", False)
    assert "taken again from an earlier alignment" in text
    third = Runs()
    align(path, third)
    assert third.made == []
    assert verdicts(result)["tp2"] == "identical (emulated)"


def test_a_run_is_made_anew_where_the_programs_code_or_the_initial_state_changed(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("a = 1\n", encoding="utf-8")
    path = write_config(tmp_path, {"same": []}, align=FEW)
    align(path, Runs())
    (tmp_path / "model.py").write_text("a = 2\n", encoding="utf-8")
    again = Runs()
    _, _, text = align(path, again)
    assert again.made == ["baseline", "same"]
    assert "code.sources has changed: model.py" in text
    align(path, Runs(), "options.lr=0.02")
    other = Runs()
    _, _, text = align(path, other, "options.lr=0.03")
    assert "config.options.lr was 0.02 and is 0.03" in text


def test_a_file_that_is_edited_while_the_alignment_runs_gives_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module beside the program, and one of its sources; finished runs of the present code are taken again."""
    (tmp_path / "model.py").write_text("a = 1\n", encoding="utf-8")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    kernel = elsewhere / "edited_kernel.py"

    def write_kernel(text: str) -> None:
        kernel.write_text(text, encoding="utf-8")
        os.utime(kernel, (0, 0))  # written long before the process that loads it was started

    write_kernel("scale = 1.0\n")
    monkeypatch.syspath_prepend(elsewhere)
    importlib.import_module("edited_kernel")
    path = write_config(tmp_path, {"same": [], "kernel": [], "source": []}, align=FEW)

    def edit(name: str) -> None:
        if name == "kernel":
            write_kernel("scale = 2.0\n")
        if name == "source":
            write_kernel("scale = 1.0\n")
            (tmp_path / "model.py").write_text("a = 2\n", encoding="utf-8")

    code, result, _ = align(path, Runs(before=edit))
    assert (code, verdicts(result)) == (3, {"same": "identical", "kernel": "incomparable", "source": "incomparable"})
    reasons = [candidate(result, name)["reason"] for name in ("kernel", "source")]
    assert all("its code changed while the alignment ran" in reason for reason in reasons)
    assert "edited_kernel.py is not as baseline loaded it" in reasons[0]
    assert "model.py has changed since the alignment began" in reasons[1]
    (tmp_path / "model.py").write_text("a = 1\n", encoding="utf-8")
    again = Runs()
    _, result, _ = align(path, again)
    assert (again.made, set(verdicts(result).values())) == (["kernel", "source"], {"identical"})


def test_copies_of_its_code_that_a_run_leaves_are_no_change_of_it(tmp_path: Path) -> None:
    path = write_config(tmp_path, {"same": []}, align=FEW)

    def keep_code(name: str) -> None:
        (tmp_path / f"code_of_{name}.py").write_text("a = 1\n", encoding="utf-8")

    code, result, _ = align(path, Runs(before=keep_code))
    assert (code, verdicts(result)) == (0, {"same": "identical"})


def test_a_matrix_of_layouts_and_options_writes_junit(tmp_path: Path, runs: Runs) -> None:
    matrix = {"layouts": ["tp2", "dp2"], "options": {"plain": [], "again": ["options.recompute=true"]}}
    path = write_config(tmp_path, align={**FEW, "matrix": matrix, "at_once": 2})
    code, result, text = align(path, runs, is_ci=True)
    assert code == 0
    assert list(verdicts(result)) == ["tp2", "tp2.again", "dp2", "dp2.again"]
    suite = ElementTree.parse(tmp_path / "out" / "align" / "align.junit.xml").getroot()
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "0", "0")
    assert "4 candidates pass" in text


def test_a_recording_is_refused_for_a_program_without_rollouts(tmp_path: Path, runs: Runs) -> None:
    path = write_config(tmp_path, {"tp2": [TP2]})
    with pytest.raises(ConfigError, match="this program has no rollout_mock section"):
        align(path, runs, recording_dir=tmp_path)
    assert runs.made == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("initial_state=/x", "an alignment run sets initial_state itself; remove it from"),
        ("trace.patterns=[decoder.*]", "trace.patterns would leave some of it out; trace step 0 whole"),
        ("trace.exclude=[output_layer*]", "trace.exclude would leave some of it out"),
        ("trace.steps='1'", "trace.steps would leave some of it out"),
    ],
)
def test_what_would_cut_the_initial_state_is_refused_before_anything_runs(
    tmp_path: Path, runs: Runs, override: str, message: str
) -> None:
    is_own = override.startswith("initial_state")
    path = write_config(tmp_path, {"tp2": [TP2, *([override] if is_own else [])]})
    with pytest.raises(ConfigError) as caught:
        align(path, runs, *([] if is_own else [override]))
    assert message in str(caught.value)
    assert runs.made == []


def test_finished_runs_of_a_command_are_compared_and_checked_as_any_others(tmp_path: Path, runs: Runs) -> None:
    path = write_config(
        tmp_path, {"tp2": [TP2], "fault": [TP2, "options.fault=scale"]}, align={"proofs": {**QUICK, "emulate": False}}
    )
    align(path, runs)
    folder = tmp_path / "out" / "align"
    assert compare_runs(folder / "baseline", folder / "fault").exit_code == 1
    stated = compare_runs(folder / "baseline", folder / "tp2", tolerance={"gradient": 1e-5, "update": 1e-5})
    assert stated.exit_code == 0
    assert cli.main(["replicas", str(folder / "tp2")]) == 0
    assert cli.main(["replicas", str(folder / "baseline")]) == 3  # one process holds no copies


def test_a_layout_without_arguments_is_refused_by_the_name_of_its_key(tmp_path: Path, runs: Runs) -> None:
    path = write_config(tmp_path, align={"matrix": {"layouts": ["pp2"]}})
    with pytest.raises(ConfigError) as caught:
        align(path, runs)
    assert "candidate 'pp2': " in str(caught.value)
    assert "nothing passes parallel.pipeline_model_parallel_size to the command" in str(caught.value)


@pytest.mark.all
def test_minimise_reduces_steps_layout_and_stated_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs()
    path = write_config(
        tmp_path,
        {"fault": [TP2, "options.fault=scale", "options.recompute=true"]},
        align={"proofs": {"num_perturbations": 1, "emulate": False, "referee": "never"}},
    )

    def align_here(*, make_launch: object = None, **values: Any) -> int:
        return run_align(make_launch=runs.make_launch, **values)

    monkeypatch.setattr(minimise_command, "run_align", align_here)
    output = io.StringIO()
    code = run_minimise(
        "fake",
        "fault",
        MinimiseOptions(),
        config_path=path.parent,
        overrides=(),
        console=Console(file=output, width=200),
    )
    result = json.loads((tmp_path / "out" / "minimise" / "minimise.json").read_text(encoding="utf-8"))
    assert (code, result["verdict"], result["is_complete"]) == (1, "diverged", True)
    assert sorted(result["overrides"]) == ["max_steps=1", "options.layers=1"]
    assert result["candidate_overrides"] == [TP2, "options.fault=scale"]


def test_a_program_with_a_scheduler_records_in_the_baseline_and_replays_in_the_others(tmp_path: Path) -> None:
    """What its proxy does reaches it by the run file, as everything else."""
    path = write_config(tmp_path, {"tp2": [TP2]}, rollout_mock={"enable": True})
    load = PROGRAM.build_loader(path.stem, path.parent)
    plan = plan_alignment(load, program=PROGRAM, overrides=(), output_dir=tmp_path / "align")
    noise = plan_perturbed(plan.baseline, 0, load=load, root=plan.proofs_dir)
    asked = [
        build_command(own_config(run.config), folder=tmp_path, python=run.python).run.rollout_mock
        for run in (*plan.runs, noise)
    ]
    recording = str(tmp_path / "align" / "recording")
    assert plan.recording_dir == Path(recording)
    assert [(mock.effective_mode, mock.dump_dir) for mock in asked if mock is not None] == [
        ("dump", recording),
        ("mock", recording),
        ("mock", recording),
    ]
    assert [run.begins_from for run in (*plan.runs, noise)] == [None, *[plan.baseline.output_dir / "trace"] * 2]


def test_sums_over_more_than_two_processes_are_made_in_the_order_of_ranks(tmp_path: Path) -> None:
    """A library's own order over more ranks is nobody's to follow, so a reference could not equal the candidate."""
    arguments = {"parallel": {"tensor_model_parallel_size": ["--tp", "{}"], "data_parallel_size": ["--dp", "{}"]}}
    values = {"arguments": arguments, "command": ["{python}", "a.py"], "options": {}, "effects": {}, "reductions": {}}
    path = write_config(tmp_path, {"tp2": [TP2], "dp4": ["parallel.data_parallel_size=4"]}, **values)
    load = PROGRAM.build_loader(path.stem, path.parent)
    plan = plan_alignment(load, program=PROGRAM, overrides=(), output_dir=tmp_path / "align")
    ordered = order_reductions(plan, load=load)
    assert [run.config.order.ordered_reductions for run in ordered.runs] == [False, False, True]
