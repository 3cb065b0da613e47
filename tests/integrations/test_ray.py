"""Environments in actors of a real Ray cluster: the recording of a run without it, whatever becomes of the actors."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.scheduler import RolloutRequest
from tests.integrations.ray_head import ROOT, Head, start_head
from tests.launch.process_tree import MARK_VARIABLE, find_listeners, find_marked, wait_until_gone

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1800)]

NUM_STEPS = 3
NUM_KILLS = 20
SMALL = (
    *(f"max_steps={NUM_STEPS}", "eval_steps=2", "rollout_batch_size=32", "val_batch_size=32", "save_steps=3"),
    *("training.global_batch_size=16", "train_env_manager.num_env_groups=4", "val_env_manager.num_env_groups=4"),
    *("track_with=none", "rollout_mock.enable=true", "rollout_mock.mode=dump"),
)


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with start_head() as head:
        yield head


def arguments(folder: Path, *overrides: str) -> list[str]:
    return [f"output_dir={folder}", f"rollout_mock.dump_dir={folder}-recording", *SMALL, *overrides]


def workers(number: int) -> tuple[str, ...]:
    managers = ("train_env_manager", "val_env_manager")
    return ("++env_workers.type=ray", *(f"++{name}.num_env_workers={number}" for name in managers))


#: The pipeline, whose calls may have more actors die than three.
PATIENT = """\
import runpy
from pipelines.environments import ray_workers
ray_workers._MAX_DEATHS = 99
runpy.run_module("pipelines.agentic", run_name="__main__", alter_sys=True)
"""


def start(
    given: Sequence[str], environ: Mapping[str, str], program: Sequence[str] = ("-m", "pipelines.agentic")
) -> subprocess.Popen[str]:
    named = ("--config-path", "configs", "--config-name", "quickstart")
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *program, *named, *given],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], *, code: int = 0) -> str:
    output, _ = process.communicate(timeout=900)
    assert process.returncode == code, output
    return output


def recorded(folder: Path) -> dict[tuple[str, int], str]:
    """The digest of every recorded batch: rows, their order, tokens and rewards."""
    reader = RecordingReader(f"{folder}-recording")
    requests = [
        *(RolloutRequest(global_step=step, batch_size=32, mode="train") for step in range(NUM_STEPS)),
        *(RolloutRequest(global_step=step, batch_size=32, mode="val") for step in (0, 2)),
    ]
    return {(one.mode, one.global_step): reader.open_step(one).load().digest() for one in requests}


def policy(folder: Path) -> bytes:
    return (folder / "checkpoints" / "step_000003" / "policy" / "rank_00000.safetensors").read_bytes()


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run without Ray, and its seconds."""
    folder, started_s = tmp_path_factory.mktemp("ray") / "plain", time.monotonic()
    finish(start(arguments(folder), {}))
    assert len(set(recorded(folder).values())) == 5
    return folder, time.monotonic() - started_s


@pytest.fixture(scope="module")
def plain(plain_run: tuple[Path, float]) -> Path:
    return plain_run[0]


@pytest.mark.parametrize("number", [1, 2, 4])
def test_rows_and_training_are_those_of_a_run_without_ray(plain: Path, head: Head, tmp_path: Path, number: int) -> None:
    output = finish(start(arguments(tmp_path / "run", *workers(number)), head.environ))
    assert recorded(tmp_path / "run") == recorded(plain)
    assert policy(tmp_path / "run") == policy(plain)
    built = [json.loads((folder / "ledger.json").read_text())["built"] for folder in (plain, tmp_path / "run")]
    assert built[0] == built[1]
    assert output.count("[Rollout Mock] Dumped step") == 5
    assert head.actors() == []


def test_two_replicas_have_workers_of_their_own(plain: Path, head: Head, tmp_path: Path) -> None:
    options = (*SMALL, *workers(2), "parallel.data_parallel_size=2", "save_steps=0")
    command = [sys.executable, "-W", "ignore", "-m", "mock_scheduler.cli", "launch", "quickstart", *options]
    folder = tmp_path / "run"
    command += [f"output_dir={folder}", f"rollout_mock.dump_dir={folder}-recording"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **head.environ}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    keys = [("train", 0), ("val", 0)]  # later ones follow from weights that were summed in another order
    assert [recorded(folder)[key] for key in keys] == [recorded(plain)[key] for key in keys]


def test_actors_that_are_killed_at_random_change_no_row(
    plain_run: tuple[Path, float], head: Head, tmp_path: Path
) -> None:
    """Twenty times, while they play, wait for training, or start; how many one call meets is chance."""
    plain, plain_s = plain_run
    longest_s = max(0.3, plain_s / 25)
    longer = tmp_path / "run"
    process = start(arguments(longer, *workers(2)), head.environ, ("-c", PATIENT))
    killed: list[int] = []
    draw = random.Random(11)

    def kill() -> None:
        while len(killed) < NUM_KILLS and process.poll() is None:
            actors = [pid for pid in head.actors() if pid not in killed]
            if actors:
                time.sleep(draw.uniform(0.0, longest_s))
                victim = draw.choice(actors)
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    killed.append(victim)
            time.sleep(0.02)

    killer = threading.Thread(target=kill)
    killer.start()
    output = finish(process)
    killer.join()
    assert len(killed) == NUM_KILLS
    assert recorded(longer) == recorded(plain)
    assert policy(longer) == policy(plain)
    assert 1 <= output.count("; it is replaced") <= NUM_KILLS


LOUD = """\
import logging, os, sys
from pipelines.config.schema import PipelineConfig
from pipelines.environments import ray_actor, ray_cluster
from pipelines.environments.base import ResetRequest
from pipelines.environments.registry import build_tokenizer
from pipelines.environments.workers import EnvironmentPool

manager = {"num_env_workers": 2}
config = PipelineConfig(exp_name="x", env_workers={"type": "ray"}, train_env_manager=manager)

class EnvironmentActor(ray_actor.EnvironmentActor):
    def answer(self, call):
        logging.getLogger("pipelines.loud").info("[Rollout Mock] said of %s", [one.seed for one in call.requests])
        return super().answer(call)

ray_cluster.connect(config, os.environ)
from pipelines.environments import ray_workers
ray_workers.EnvironmentActor = EnvironmentActor
start = lambda *made: ray_workers.RayWorker(*made, settings=config.env_workers)
pool = EnvironmentPool(config.custom_envs, build_tokenizer(config), num_workers=2, start=start)
for seed in range(10):
    requests = [ResetRequest(slot=slot, tag="FrozenLake", seed=2 * seed + slot, split="all") for slot in range(2)]
    pool.reset_many(requests)
pool.close()
ray_cluster.disconnect()
"""


def run_program(code: str, environ: Mapping[str, str], cwd: Path) -> str:
    path = cwd / "program.py"
    path.write_text(code, encoding="utf-8")
    given = {**os.environ, **environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(path)], cwd=cwd, env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_every_line_of_an_actor_comes_to_the_terminal(head: Head, tmp_path: Path) -> None:
    """The last ones too; and nothing of the working directory is imported there."""
    cwd = tmp_path / "work"
    cwd.mkdir()
    for name in ("gymnasium.py", "pipelines.py", "colorsys.py"):
        (cwd / name).write_text("import pathlib; pathlib.Path(__file__ + '.ran').touch()", encoding="utf-8")
    program = f"import sys; sys.path[0] = {str(ROOT)!r}\n{LOUD}"
    output = run_program(program, head.environ, cwd)
    assert [f"[Rollout Mock] said of [{seed}]" in output for seed in range(20)] == [True] * 20, output
    assert list(cwd.glob("*.ran")) == []


def test_a_cluster_that_cannot_play_the_run_is_refused_before_a_model_is_built(head: Head, tmp_path: Path) -> None:
    full = finish(start(arguments(tmp_path / "full", *workers(5)), head.environ), code=5)
    assert "ConfigError: env_workers: 5 workers of 1 CPUs each (num_env_workers of 1 replicas) do not fit" in full
    assert "has room for 4 (CPUs of its nodes: 4)" in full
    gone = finish(start(arguments(tmp_path / "gone", *workers(1)), {"RAY_ADDRESS": "127.0.0.1:1"}), code=5)
    assert "no Ray cluster answers at 127.0.0.1:1" in gone
    older = tmp_path / "older"
    older.mkdir()
    (older / "sitecustomize.py").write_text("import ray; ray.__version__ = '2.59.0'", encoding="utf-8")
    path = {"PYTHONPATH": f"{older}{os.pathsep}{ROOT}"}
    wrong = finish(start(arguments(tmp_path / "wrong", *workers(1)), {**head.environ, **path}), code=5)
    assert "takes no run of Ray 2.59.0" in wrong
    assert "Ray: 2.60.0" in wrong
    assert not any((tmp_path / name).exists() for name in ("full-recording", "gone-recording", "wrong-recording"))


def start_script(output: Path, mark: str, *more: str, folder: Path | None = None) -> subprocess.Popen[str]:
    """``folder``: the run whose recording goes on; unset, its own."""
    venv = Path(sys.prefix).name
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [
            "bash",
            "launch/ray.sh",
            "quickstart",
            *arguments(folder or output, *workers(2), *more, f"output_dir={output}"),
        ],
        cwd=ROOT,
        env={**environ, "VENV": venv, "RAY_NUM_CPUS": "3", MARK_VARIABLE: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_script_starts_a_cluster_on_loopback_and_leaves_nothing(plain: Path, tmp_path: Path) -> None:
    process = start_script(tmp_path / "run", "ray-script")
    addresses: set[str] = set()
    commands: set[str] = set()
    while process.poll() is None:
        marked = find_marked("ray-script")
        addresses |= {str(address) for address, _ in find_listeners(marked)}
        commands |= set(marked.values())
        time.sleep(0.2)
    output = finish(process)
    assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}
    assert any("ray::EnvironmentActor" in command for command in commands)
    assert any("--disable-usage-stats" in command for command in commands)
    assert "a Ray cluster of 3 CPUs at 127.0.0.1:" in output
    assert recorded(tmp_path / "run") == recorded(plain)
    assert wait_until_gone("ray-script") == {}


def find_folders(mark: str) -> set[Path]:
    """The folders of the clusters that a script's processes are of."""
    return {Path(found) for one in find_marked(mark).values() for found in re.findall(r"--temp-dir=(\S+)", one)}


@pytest.mark.parametrize(
    ("end", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=["TERM", "INT", "KILL"]
)
def test_a_script_that_is_ended_leaves_nothing(tmp_path: Path, end: signal.Signals, code: int) -> None:
    """No process, and no folder where it can still remove it."""
    mark = f"ray-{end.name}"
    process = start_script(tmp_path / "run", mark)
    while not any("ray::EnvironmentActor" in command for command in find_marked(mark).values()):
        assert process.poll() is None, finish(process)
        time.sleep(0.1)
    (folder,) = find_folders(mark)
    process.send_signal(end)
    process.communicate(timeout=60)  # every process that it started has the other end of this pipe
    assert process.returncode == code
    assert wait_until_gone(mark, timeout_s=60) == {}
    assert folder.exists() == (end is signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def test_a_run_whose_head_dies_says_so_and_goes_on_with_another(plain: Path, tmp_path: Path) -> None:
    """It ends soon, with the place of the logs; no recorded step is lost, and the second start makes the recording."""
    folder, mark = tmp_path / "run", "ray-head"
    process = start_script(folder, mark, "save_steps=1")
    assert process.stdout is not None
    lines = []
    while not lines or "step 1/3" not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    (logs,) = find_folders(mark)
    for process_id, command in find_marked(mark).items():
        if "gcs_server" in command or "raylet/raylet" in command:
            os.kill(process_id, signal.SIGKILL)
    killed_s = time.monotonic()
    output = finish(process, code=5)
    assert time.monotonic() - killed_s < 60
    assert "SchedulerError: env_workers: the head of the Ray cluster at 127.0.0.1:" in output
    assert f"Why is in {logs}/session_" in output
    assert f"the Ray cluster of this run has ended by itself; its logs are kept in {logs}\n" in output
    assert list(logs.glob("session_*/logs/gcs_server.out"))
    assert wait_until_gone(mark, timeout_s=60) == {}
    shutil.rmtree(logs)
    before = {path: path.read_bytes() for path in Path(f"{folder}-recording").glob("*/*.safetensors")}
    assert "step_000000.safetensors" in {path.name for path in before}
    newest = max((folder / "checkpoints").glob("step_*"))
    process = start_script(tmp_path / "next", mark, f"resume_from_checkpoint={newest}", folder=folder)
    finish(process)
    assert recorded(folder) == recorded(plain)
    assert {path: path.read_bytes() for path in before} == before
    assert policy(tmp_path / "next") == policy(plain)
