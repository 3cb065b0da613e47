"""The plan of an alignment: its runs, their overrides, and everything that is refused before one starts."""

import sys
from pathlib import Path

import pytest

from mock_scheduler.alignment.plan.interpreters import Interpreter
from mock_scheduler.alignment.plan.plan import plan_alignment
from mock_scheduler.alignment.plan.planned_run import AlignPlan, Changes
from mock_scheduler.alignment.prove.proof_runs import (
    is_one_run,
    is_same_order,
    plan_emulated,
    plan_in_precision,
    plan_perturbed,
    plan_wide,
)
from mock_scheduler.errors import ConfigError
from pipelines.config.loading import build_loader
from pipelines.program import PROGRAM
from tests.recording.recordings import record

CONFIG = """
exp_name: lake-${seed}
seed: 1
output_dir: out
max_steps: 2
model: {num_layers: 4}
align:
  baseline: [seed=7]
"""
TP2 = "parallel.tensor_model_parallel_size=2"
OTHER = Interpreter(
    path="/env/bin/python",
    versions={"python": "3.12.1", "torch": "2.14.1"},
    packages={"torch": "2.14.1", "six": "1.17.0"},
    env={"PYTHONPATH": "/project"},
    sources=(Path("/project/pipelines"),),
)


def read_interpreter(python: str | None) -> Interpreter:
    """This interpreter, with versions that the test knows, or the other one."""
    if python is None:
        return Interpreter(
            path=sys.executable, versions={"python": "3.11.2", "torch": "2.13.0"}, packages={}, env={}, sources=()
        )
    if python != OTHER.path:
        raise ConfigError(f"python: there is no file {python}")
    return OTHER


def plan(
    folder: Path, text: str, *overrides: str, recording: Path | None = None, kinds: tuple[str, ...] = ()
) -> AlignPlan:
    (folder / "lake.yaml").write_text(CONFIG + text)
    return plan_alignment(
        build_loader("lake", folder),
        program=PROGRAM,
        overrides=overrides,
        output_dir=folder / "align",
        recording_dir=recording,
        trace_kinds=kinds,
        read_interpreter=read_interpreter,
    )


def refusal(folder: Path, text: str, *overrides: str, recording: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(folder, text, *overrides, recording=recording)
    return str(caught.value)


def test_a_matrix_is_planned_with_its_layouts_and_options(tmp_path: Path) -> None:
    text = "  matrix: {layouts: [tp1, tp2], options: {plain: [], few: [max_steps=1]}, exclude: [tp1.few]}\n"
    planned = plan(tmp_path, text)
    assert [(run.name, run.config.parallel.world_size, run.config.max_steps) for run in planned.candidates] == [
        ("tp1", 1, 2),
        ("tp2", 2, 2),
        ("tp2.few", 2, 1),
    ]
    assert {run.config.seed for run in planned.runs} == {7}
    assert [run.config.exp_name for run in planned.runs] == [f"lake-7-{run.name}" for run in planned.runs]
    assert [run.output_dir for run in planned.runs] == [tmp_path / "align" / run.name for run in planned.runs]
    assert [run.config.rollout_mock.effective_mode for run in planned.runs] == ["dump", "mock", "mock", "mock"]


def test_every_candidate_that_cannot_be_run_is_named_and_how_to_leave_it_out(tmp_path: Path) -> None:
    text = "  candidates: [{name: odd, overrides: [model.num_layers=3, parallel.pipeline_model_parallel_size=2]}]\n"
    text += "  matrix: {layouts: [tp2, pp3, pp8], exclude: [pp8]}\n"
    message = refusal(tmp_path, text)
    first, second = message.removeprefix("nothing was run:\n").split("candidate 'pp3': ")
    assert first.startswith("candidate 'odd': ")
    assert "model.num_layers 3 is not a multiple of pipeline_model_parallel_size 2" in first
    assert "model.num_layers 4 is not a multiple of pipeline_model_parallel_size 3" in second
    assert second.endswith("\nor leave it out: align.matrix.exclude: [pp3]")
    assert "exclude" not in first
    assert "tp2" not in message


def test_a_candidate_states_what_it_changes_and_whether_that_may_round(tmp_path: Path) -> None:
    text = f"""  candidates:
    - {{name: same}}
    - {{name: layout, overrides: [{TP2}]}}
    - {{name: lr, overrides: [training.lr=0.1]}}
    - {{name: fast, overrides: [training.lr=0.1], exact: true}}
    - {{name: loose, overrides: [{TP2}], exact: false}}
    - {{name: newer, python: /env/bin/python}}
    - {{name: kernel, entry: tests.alignment.plan.test_plan}}
"""
    runs = {run.name: run for run in plan(tmp_path, text).candidates}
    assert runs["layout"].changes == Changes(
        neutral=("exp_name", "output_dir", "rollout_mock.mode"),
        layout=("parallel.tensor_model_parallel_size",),
        other=(),
        has_other_calls=True,
    )
    assert not runs["same"].changes.has_other_calls
    assert runs["lr"].changes.other == ("training.lr",)
    assert {name: run.must_be_exact for name, run in runs.items()} == {
        "same": True,
        "layout": True,
        "lr": False,
        "fast": True,
        "loose": False,
        "newer": False,
        "kernel": False,
    }
    newer = runs["newer"]
    assert (newer.python, newer.env, newer.sources) == (OTHER.path, OTHER.env, OTHER.sources)
    assert newer.version_changes == ("python 3.12.1 instead of 3.11.2", "torch 2.14.1 instead of 2.13.0")
    assert (runs["same"].python, runs["same"].version_changes) == (sys.executable, ())


ENTRIES = """
    - {name: replay}
    - {name: layout, overrides: [parallel.tensor_model_parallel_size=2]}
    - {name: other, entry: tests.alignment.plan.test_interpreters}
    - {name: plain, entry: pipelines.agentic}
"""


def test_the_baselines_entry_is_every_candidates_that_has_no_other(tmp_path: Path) -> None:
    """Code of one's own on both sides repeats itself, but nobody knows in which order another layout adds in it."""
    planned = plan(tmp_path, f"  entry: tests.alignment.plan.test_plan\n  candidates:{ENTRIES}")
    assert {run.name: (run.entry, run.has_other_code, run.must_be_exact) for run in planned.runs} == {
        "baseline": ("tests.alignment.plan.test_plan", False, True),
        "replay": ("tests.alignment.plan.test_plan", False, True),
        "layout": ("tests.alignment.plan.test_plan", False, False),
        "other": ("tests.alignment.plan.test_interpreters", True, False),
        "plain": ("pipelines.agentic", True, False),
    }
    assert [run.own_module for run in planned.candidates if run.name == "plain"] == [""]
    # Every further run is made by the code of the run that it stands for.
    runs = {run.name: run for run in planned.runs}
    load = build_loader("lake", tmp_path)
    further = (
        plan_perturbed(planned.baseline, 0, load=load, root=tmp_path),
        plan_wide(runs["other"], load=load, root=tmp_path),
        plan_emulated(runs["layout"], planned.baseline, load=load, root=tmp_path),
        plan_emulated(runs["other"], planned.baseline, load=load, root=tmp_path),
    )
    assert [run.entry.rpartition(".")[2] for run in further] == ["test_plan", "test_interpreters"] + ["test_plan"] * 2


def test_another_precision_has_a_reference_in_it_with_the_baselines_code(tmp_path: Path) -> None:
    text = """  candidates:
    - {name: narrow, overrides: [precision=bfloat16]}
    - {name: narrow-tp2, overrides: [precision=bfloat16, parallel.tensor_model_parallel_size=2]}
    - {name: narrow-lr, overrides: [precision=bfloat16, training.lr=0.1]}
    - {name: narrow-own, overrides: [precision=bfloat16], entry: tests.alignment.plan.test_plan}
"""
    planned = plan(tmp_path, text)
    load, baseline = build_loader("lake", tmp_path), planned.baseline
    runs = {run.name: run for run in planned.candidates}
    assert {name: (run.must_be_exact, run.must_equal_reference) for name, run in runs.items()} == {
        "narrow": (False, True),
        "narrow-tp2": (False, True),
        "narrow-lr": (False, False),
        "narrow-own": (False, False),
    }
    # Equal bits in the baseline's order are no matter of the order alone.
    assert not any(is_same_order(baseline, run) for run in runs.values())
    reference = plan_emulated(runs["narrow-own"], baseline, load=load, root=tmp_path)
    assert (reference.config.precision, reference.entry) == ("bfloat16", "pipelines.agentic")
    narrow = plan_in_precision(baseline, "bfloat16", load=load, root=tmp_path)
    noise = plan_perturbed(narrow, 3, load=load, root=tmp_path)
    assert (noise.name, noise.config.precision) == ("in-bfloat16-noise-3", "bfloat16")
    assert plan_in_precision(baseline, "float32", load=load, root=tmp_path) is baseline
    # In float64 a candidate of another precision alone is the baseline itself, and acquits nobody.
    wide = {run.name: plan_wide(run, load=load, root=tmp_path) for run in (baseline, *runs.values())}
    assert [name for name, run in wide.items() if is_one_run(wide["baseline"], run)] == ["baseline", "narrow"]


def test_an_entry_of_the_baseline_must_be_a_module(tmp_path: Path) -> None:
    text = "  entry: no.such.module\n  candidates: [{name: a}]\n"
    assert "no.such.module" in refusal(tmp_path, text)


def test_a_python_that_cannot_be_used_is_refused_with_its_candidate(tmp_path: Path) -> None:
    text = "  candidates: [{name: newer, python: /nowhere/python}]\n"
    assert refusal(tmp_path, text) == ("nothing was run:\ncandidate 'newer': python: there is no file /nowhere/python")


def test_kinds_that_are_needed_are_traced_beside_those_that_are_configured(tmp_path: Path) -> None:
    text = "  candidates: [{name: same}]\ntrace: {kinds: [gradient, loss]}\n"
    runs = plan(tmp_path, text, kinds=("input", "loss", "collective")).runs
    assert [run.config.trace.kinds for run in runs] == [["input", "loss", "gradient", "collective"]] * 2
    assert {run.config.trace.level for run in runs} == {"full"}
    assert plan(tmp_path, text, kinds=("loss",)).baseline.config.trace.kinds == ["gradient", "loss"]


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (
            "",
            ["perturbation.seed=1"],
            "an alignment run sets perturbation.seed itself; remove it from the command line",
        ),
        (
            "perturbation: {seed: 1}\norder: {emulate: {data_parallel_size: 2}}\n",
            [],
            "an alignment sets order.emulate='tp1 pp1 dp2', perturbation.seed='1' itself; remove it from the "
            "configuration",
        ),
    ],
)
def test_what_proofs_set_is_not_the_users(tmp_path: Path, text: str, overrides: list[str], message: str) -> None:
    assert refusal(tmp_path, "  candidates: [{name: same}]\n" + text, *overrides) == message


def test_a_candidate_cannot_set_what_only_the_whole_alignment_has(tmp_path: Path) -> None:
    text = "  candidates: [{name: x, overrides: [align.tolerance.metric=1, graft.step=1]}]\n"
    assert refusal(tmp_path, text) == (
        "nothing was run:\ncandidate 'x': an alignment run sets graft.step, align.tolerance.metric itself; remove it "
        "from its overrides"
    )


@pytest.mark.parametrize("name", ["baseline", "recording", "proofs", "align.json", "align.html", "align.junit.xml"])
def test_names_that_the_alignment_needs_are_taken(tmp_path: Path, name: str) -> None:
    assert refusal(tmp_path, f"  candidates: [{{name: {name}}}]\n") == (
        f"align.candidates: the alignment itself uses '{name}'; give the candidate another name"
    )


def test_a_recording_that_is_there_is_replayed_by_the_baseline_too(tmp_path: Path) -> None:
    recording = tmp_path / "old"
    record(recording, [0, 1])
    planned = plan(tmp_path, "  candidates: [{name: same}]\n", recording=recording)
    assert (planned.is_recorded, planned.recording_dir) == (True, recording)
    assert {run.config.rollout_mock.effective_mode for run in planned.runs} == {"mock"}
    assert {run.config.rollout_mock.dump_dir for run in planned.runs} == {str(recording)}


def test_a_recording_that_is_too_short_or_none_is_refused(tmp_path: Path) -> None:
    recording = tmp_path / "old"
    record(recording, [0, 1])
    text = "  candidates: [{name: same}]\n"
    assert refusal(tmp_path, text, "max_steps=4", recording=recording) == (
        f"max_steps is 4, and the recording {recording} has train 0-1: step 2 is missing; set max_steps to at most 2, "
        "or record again"
    )
    missing = tmp_path / "none"
    assert refusal(tmp_path, text, recording=missing).startswith("the recording to replay cannot be used: ")


def test_all_that_keeps_an_alignment_from_being_planned_is_said_at_once(tmp_path: Path) -> None:
    """A name that was there twice hid every other problem, each of which then took one more start to be found."""
    text = (
        "  candidates:\n"
        "    - {name: tp2, overrides: [parallel.tensor_model_parallel_size=2]}\n"
        "    - {name: tp2, overrides: [rollout_mock.mode=dump]}\n"
        "    - {name: gone, entry: no_such_module}\n"
        "  matrix: {layouts: [xp2]}\n"
        "order: {emulate: {data_parallel_size: 2}}\n"
    )
    lines = refusal(tmp_path, text, "trace.level=off", "perturbation.seed=1", recording=tmp_path / "none").splitlines()
    assert lines[:3] == [
        "nothing was run:",
        "an alignment run sets trace.level, perturbation.seed itself; remove it from the command line",
        "an alignment sets order.emulate='tp1 pp1 dp2' itself; remove it from the configuration",
    ]
    rest = "\n".join(lines[3:])
    places = [
        rest.index(part)
        for part in (
            "align.matrix.layouts: 'xp2' ",
            "align.candidates: more than one candidate is named 'tp2'",
            "the recording to replay cannot be used: ",
            "candidate 'tp2': an alignment run sets rollout_mock.mode itself; remove it from its overrides",
            "candidate 'gone': entry: there is no Python module 'no_such_module' among ",
        )
    ]
    assert places == sorted(places)
