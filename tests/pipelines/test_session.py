"""Several whole runs in one process group: each leaves the files and bits that it leaves alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mock_scheduler.errors import ConfigError
from mock_scheduler.launch.launcher import LaunchPlan, plan_launch, plan_session, run_plan
from mock_scheduler.launch.sessions import (
    STATUS_FILE,
    RunStatus,
    SessionRun,
    load_status,
    read_plan,
    write_plan,
    write_status,
)
from pipelines.config.loading import load_source
from pipelines.program import PROGRAM
from tests.pipelines.tiny_runs import ROOT, read_json, write_tiny_config
from tests.programs import run_program

pytestmark = pytest.mark.timeout(600)  # the first test pays for four starts

#: Files with times or a run's own number in them, which are compared in parts.
TIMED = ("run.log", "run.json", "metrics.jsonl", "config.yaml", "ledger.json")
#: Endings of metrics that are times.
TIMES = ("seconds", "tokens_per_second")


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Where the runs of a session are, where the same are that ran alone, and how each of these ended."""

    session: Path
    alone: Path
    codes: dict[str, int]
    session_code: int


def overrides_of(root: Path, name: str, kind: Sequence[str]) -> tuple[str, ...]:
    return (f"output_dir={root / name}", "trace.level=full", *kind)


def kinds(root: Path, *, layout: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """What is run, in this order: a float64 run, which changes Megatron; a recording; a refused replay; a replay."""
    mock = ("rollout_mock.enable=true", f"rollout_mock.dump_dir={root / 'recording'}")
    return {
        "wide": (*layout, "precision=float64", "seed=3"),
        "dump": (*layout, *mock, "rollout_mock.mode=dump", "track_with=tensorboard"),
        "refused": (*layout, *mock, "rollout_mock.mode=mock", "sequence_length=96"),
        "replay": (*layout, *mock, "rollout_mock.mode=mock", "track_with=tensorboard"),
    }


def session_run(configs: Path, root: Path, name: str, kind: Sequence[str]) -> SessionRun:
    return SessionRun(
        config_name="tiny",
        config_path=str(configs),
        overrides=overrides_of(root, name, kind),
        output_dir=root / name,
        log_path=root / name / "run.log",
    )


def alone(run: SessionRun) -> LaunchPlan:
    return plan_launch(load_source(run.source), PROGRAM.arguments("pipelines.agentic", run.source))


def run_alone(run: SessionRun) -> int:
    """The exit code of a run in processes of its own."""
    plan = alone(run)
    if plan.num_processes > 1:
        return run_plan(plan, log_path=run.log_path, cwd=ROOT)
    _, module, *arguments = PROGRAM.arguments("pipelines.agentic", run.source)
    done = run_program(module, arguments, environ=plan.env)
    run.log_path.parent.mkdir(parents=True, exist_ok=True)
    run.log_path.write_text(done.stdout + done.stderr, encoding="utf-8")
    return done.returncode


def make_runs(root: Path, names: Sequence[str], *, layout: Sequence[str] = ()) -> Runs:
    """``names`` alone, one after another, and all kinds in one session."""
    configs = write_tiny_config(root)
    session, single = root / "session", root / "single"
    codes = {}
    for name in names:
        run = session_run(configs, single, name, kinds(single, layout=layout)[name])
        codes[name] = run_alone(run)
    runs = [session_run(configs, session, name, kind) for name, kind in kinds(session, layout=layout).items()]
    code = run_plan(plan_session(runs, program=PROGRAM), log_path=root / "session.log", cwd=ROOT)
    return Runs(session=session, alone=single, codes=codes, session_code=code)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One process each."""
    return make_runs(tmp_path_factory.mktemp("session"), ("dump", "refused", "replay"))


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file with its bytes, but those of the terminal, TensorBoard, the session and its place, and with times."""
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name: b"" if path.name in TIMED or "tensorboard" in name or ".own." in name else path.read_bytes()
        for name, path in paths.items()
        # A process that made other runs before has loaded more files.
        if path.name != STATUS_FILE and path.parent.name != "code"
    }


def names_of(folder: Path) -> set[str]:
    """Names of all files; TensorBoard's have time, host and process in them."""
    return {name.split("events.out")[0] for name in files_of(folder)}


def content_of(folder: Path) -> dict[str, bytes]:
    """All bytes that a run decides, with the folder's own place left out."""
    return {
        name: data.replace(str(folder.parent).encode(), b"ROOT")
        for name, data in files_of(folder).items()
        if "tensorboard" not in name
    }


def is_time(metric: str) -> bool:
    return metric.startswith("time/") or metric.endswith(TIMES)


def ledger_of(folder: Path) -> dict[str, Any]:
    """What was built and called; the size of a recording depends on the digits of its times."""
    ledger = read_json(folder / "ledger.json")
    return ledger | {"recording": {name: value for name, value in ledger["recording"].items() if "bytes" not in name}}


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [
        {name: value for name, value in row["metrics"].items() if not is_time(name)} | {"step": row["step"]}
        for row in rows
    ]


def summary_of(folder: Path) -> dict[str, Any]:
    return {name: value for name, value in read_json(folder / "run.json").items() if not name.endswith("_s")}


def check_equal(runs: Runs, name: str) -> None:
    """The same files, and in them the same bits, metrics, digests of batches and configuration."""
    found, expected = runs.session / name, runs.alone / name
    assert names_of(found) == names_of(expected)
    assert content_of(found) == content_of(expected)
    assert metrics_of(found) == metrics_of(expected)
    assert summary_of(found) == summary_of(expected)
    assert ledger_of(found) == ledger_of(expected)
    configs = [(folder / "config.yaml").read_text(encoding="utf-8") for folder in (found, expected)]
    assert configs[0].replace(str(runs.session), "ROOT") == configs[1].replace(str(runs.alone), "ROOT")


def check_recordings(runs: Runs) -> None:
    """The same tensors, contract and settings; the manifest's digest covers the run's own number too."""
    folders = [runs.session / "recording", runs.alone / "recording"]
    for step in ("step_000000", "step_000001"):
        found, expected = (load_file(folder / "train" / f"{step}.safetensors") for folder in folders)
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    manifests = [read_json(folder / "recording.json") for folder in folders]
    assert manifests[0]["contract"] == manifests[1]["contract"]
    # The revision of the code is in it too, which may change between two launches.
    for part in ("settings", "facts", "vocabulary"):
        assert manifests[0]["provenance"][part] == manifests[1]["provenance"][part]


@pytest.mark.parametrize("name", ["dump", "replay"])
def test_a_run_after_others_has_the_files_and_bits_that_it_has_alone(runs: Runs, name: str) -> None:
    """After one in float64, for which Megatron is patched, and after one that failed."""
    assert (runs.codes[name], runs.session_code) == (0, 0)
    assert any(name.startswith("trace/step_000001/") for name in content_of(runs.session / name))
    check_equal(runs, name)


def test_what_a_run_after_others_records_is_what_it_records_alone(runs: Runs) -> None:
    check_recordings(runs)


def test_a_run_that_fails_leaves_its_own_error_and_the_next_one_is_made(runs: Runs) -> None:
    found, expected = (read_json(folder / "refused" / "error.json") for folder in (runs.session, runs.alone))
    assert runs.codes["refused"] == found["exit_code"] == 3
    found["message"] = found["message"].replace(str(runs.session), "ROOT")
    expected["message"] = expected["message"].replace(str(runs.alone), "ROOT")
    assert found == expected
    assert not (runs.session / "refused" / "run.json").exists()
    assert (runs.session / "replay" / "run.json").is_file()


def test_each_run_has_its_own_terminal_output(runs: Runs) -> None:
    """The log of a run alone has the same lines but for times, and no other run's."""
    logs = {name: (runs.session / name / "run.log").read_text(encoding="utf-8") for name in kinds(runs.session)}
    assert [text.count("step 2/2") for text in logs.values()] == [1, 1, 0, 1]
    assert "ContractError" in logs["refused"]
    single = (runs.alone / "replay" / "run.log").read_text(encoding="utf-8")
    assert len(logs["replay"].splitlines()) == len(single.splitlines())
    assert (runs.session.parent / "session.log").read_text(encoding="utf-8") == ""


def test_a_status_says_how_each_run_ended(runs: Runs) -> None:
    statuses = [load_status(runs.session / name) for name in kinds(runs.session)]
    ended = [status for status in statuses if status is not None]
    assert [status.exit_code for status in ended] == [0, 0, 3, 0]
    for status, following in pairwise(ended):
        assert status.elapsed_s is not None
        assert 0.0 < status.elapsed_s <= following.started_s - status.started_s + 0.1


def test_runs_of_other_processes_or_environments_are_refused(tmp_path: Path) -> None:
    configs = write_tiny_config(tmp_path)
    other = {
        "one": (),
        "two": ("parallel.tensor_model_parallel_size=2",),
        "ring": ("system_envs.NCCL_ALGO=Tree", "system_envs.CUDA_VISIBLE_DEVICES=''"),
    }
    runs = [session_run(configs, tmp_path, name, kind) for name, kind in other.items()]
    with pytest.raises(ConfigError) as caught:
        plan_session([*runs, runs[0]], program=PROGRAM)
    assert str(caught.value) == (
        "these runs cannot share processes:\n"
        f"  - {tmp_path}/one is the output_dir of 2 runs\n"
        f"  - {tmp_path}/two (tp2 pp1 dp1) needs 2 processes, and {tmp_path}/one (tp1 pp1 dp1) 1\n"
        f"  - system_envs.CUDA_VISIBLE_DEVICES is  in {tmp_path}/ring and not set in {tmp_path}/one\n"
        f"  - system_envs.NCCL_ALGO is Tree in {tmp_path}/ring and Ring in {tmp_path}/one\n"
        "Start them apart."
    )
    assert not (tmp_path / "session.json").exists()


def test_a_plan_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    configs = write_tiny_config(tmp_path)
    run = session_run(configs, tmp_path, "one", ("exp_name='a b'",))
    write_status(run.output_dir, RunStatus(started_s=1.0, elapsed_s=2.5, exit_code=0))
    assert load_status(run.output_dir) == RunStatus(started_s=1.0, elapsed_s=2.5, exit_code=0)
    plan = plan_session([run], program=PROGRAM, python="python")
    path = tmp_path / "session.json"
    assert read_plan(path) == (run,)
    assert load_status(run.output_dir) is None  # of an earlier session
    ranks = ("-P", "-m", "mock_scheduler.launch.ranks", str(path), "1", "1", "0", "-")
    assert plan.argv == ("python", *ranks, "-m", "pipelines.session", str(path))
    assert (plan.env["DETERMINISTIC_MODE"], plan.world_size, plan.output_dir) == ("1", 1, path)


def test_several_processes_of_a_session_are_started_together(tmp_path: Path) -> None:
    configs = write_tiny_config(tmp_path)
    run = session_run(configs, tmp_path, "one", ("parallel.data_parallel_size=2",))
    plan = plan_session([run], program=PROGRAM, plan_path=tmp_path / "other" / "plan.json", python="python")
    path = str(tmp_path / "other" / "plan.json")
    assert plan.argv[:-3] == ("python", "-P", "-u", "-m", "mock_scheduler.launch.ranks", path, "2", "1", "0", "-")
    assert plan.argv[-3:] == ("-m", "pipelines.session", path)


def test_a_signal_is_written_down_for_the_run_that_it_ended(tmp_path: Path) -> None:
    """The first run had ended, the second one was going, the third had not begun."""
    configs = write_tiny_config(tmp_path)
    runs = [session_run(configs, tmp_path, name, ()) for name in ("one", "two", "three")]
    plan = plan_session(runs, program=PROGRAM)
    write_status(runs[0].output_dir, RunStatus(started_s=1.0, elapsed_s=1.0, exit_code=0))
    write_status(runs[1].output_dir, RunStatus(started_s=2.0))
    killed = LaunchPlan(
        argv=("bash", "-c", "kill -KILL $$"), env={}, num_processes=1, world_size=1, output_dir=plan.output_dir
    )
    assert run_plan(killed, log_path=tmp_path / "log") == 137
    assert [(run.output_dir / "error.json").is_file() for run in runs] == [False, True, False]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "cannot be read"),
        ("[]", "must be a list of at least one run"),
        ('[{"config_name": "x"}]', "run 0 must have exactly the keys"),
        (
            '[{"config_name": 1, "config_path": "c", "overrides": [], "output_dir": "o", "log_path": "l"}]',
            "run 0: overrides must be a list of texts, and every other key a text",
        ),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "plan.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=problem):
        read_plan(tmp_path / "plan.json")


def test_a_session_in_too_few_processes_starts_nothing(tmp_path: Path) -> None:
    configs = write_tiny_config(tmp_path)
    run = session_run(configs, tmp_path, "one", ("parallel.data_parallel_size=2",))
    write_plan(tmp_path / "plan.json", [run])
    argv = (sys.executable, "-m", "pipelines.session", str(tmp_path / "plan.json"))
    env = {"RANK": "0", "WORLD_SIZE": "1"}
    plan = LaunchPlan(argv=argv, env=env, num_processes=1, world_size=1)
    assert run_plan(plan, log_path=tmp_path / "log", cwd=ROOT) == 5
    assert (tmp_path / "log").read_text(encoding="utf-8") == (
        "[rank 0] LayoutError: the session's runs need 2 processes each, but 1 were started; start it as "
        "mock_scheduler.launch.launcher.plan_session plans it\n"
    )
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["error.json"]


@pytest.mark.all
def test_runs_of_two_processes_are_those_alone_too(tmp_path: Path) -> None:
    found = make_runs(tmp_path, ("dump", "refused", "replay"), layout=("parallel.tensor_model_parallel_size=2",))
    assert (found.codes, found.session_code) == ({"dump": 0, "refused": 3, "replay": 0}, 0)
    check_equal(found, "dump")
    check_equal(found, "replay")
    check_recordings(found)
    assert read_json(found.session / "refused" / "error.json")["exit_code"] == 3


@pytest.mark.all
def test_a_rank_that_fails_alone_ends_the_session(tmp_path: Path) -> None:
    """Its peer waits for it in a collective; the run's error is that rank's, and the next run is not begun."""
    configs = write_tiny_config(tmp_path)
    layout = ("parallel.data_parallel_size=2",)
    runs = [session_run(configs, tmp_path, name, layout) for name in ("one", "two")]
    plan = plan_session(runs, program=PROGRAM, entry="tests.pipelines.lone_failure")
    assert run_plan(plan, log_path=tmp_path / "session.log", cwd=ROOT) == 70
    error = read_json(tmp_path / "one" / "error.json")
    assert (error["message"], error["global_rank"], error["exit_code"]) == ("only rank 1 fails", 1, 70)
    status = load_status(tmp_path / "one")
    assert status is not None
    assert (status.elapsed_s, status.exit_code) == (None, None)
    assert load_status(tmp_path / "two") is None


@pytest.mark.all
def test_ordered_reductions_end_with_their_run(tmp_path: Path) -> None:
    """Gradients of four ranks are added in another order where that is asked for, and not in the run after it."""
    configs = write_tiny_config(tmp_path)
    layout = ("parallel.data_parallel_size=4", "training.micro_batch_size=2", "max_steps=1")
    kinds = {"own": (), "ordered": ("order.ordered_reductions=true",), "again": ()}
    runs = [session_run(configs, tmp_path, name, (*layout, *kind)) for name, kind in kinds.items()]
    assert run_plan(plan_session(runs, program=PROGRAM), log_path=tmp_path / "session.log", cwd=ROOT) == 0
    own, ordered, again = (content_of(tmp_path / name) for name in kinds)
    first = "trace/step_000000/rank_00000.part_000.safetensors"
    assert own == again
    assert own.keys() == ordered.keys()
    assert own[first] != ordered[first]
