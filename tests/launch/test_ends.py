"""No process and no temporary folder outlives a run: ended, failed, asked to end, or killed, its helpers included."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.process_tree import MARK_VARIABLE, find_below, find_marked, wait_until_gone
from tests.launch.runs import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to the supervisor")

# Each rank has helpers of three kinds, with helpers of their own: forked, as Megatron's checkpoint writers were; in a
# session of its own; and deaf to SIGTERM. Then it ends as told, or waits.
ENTRY = """\
import os, pathlib, signal, subprocess, sys, tempfile, time

def helper(*, own_session, is_deaf):
    if os.fork() == 0:
        if own_session:
            os.setsid()
        if is_deaf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.fork()
        time.sleep(600)
        os._exit(0)

helper(own_session=False, is_deaf=False)
helper(own_session=True, is_deaf=False)
if "deaf" in sys.argv:
    helper(own_session=True, is_deaf=True)
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
time.sleep(0.1)
print("ready", flush=True)
if "end" in sys.argv:
    sys.exit(0)
if "fail" in sys.argv and os.environ["RANK"] == "0":
    sys.exit(3)
time.sleep(600)
"""

# The launcher as a user's own process has it.
LAUNCHER = """\
import sys
from pathlib import Path
from mock_scheduler.launch.launcher import LaunchPlan, run_plan
from mock_scheduler.launch.ranks import Place, ranks_command
num, arguments = int(sys.argv[1]), ("-m", "ending_entry", *sys.argv[2:])
command = ranks_command(sys.executable, arguments, told_to="out", place=Place(num_local=num))
sys.exit(run_plan(LaunchPlan(argv=command, env={}, num_processes=num, world_size=num), log_path=Path("log")))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A launcher with a marked environment and a folder for temporary files."""

    process: subprocess.Popen[bytes]
    mark: str
    folder: Path

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    @property
    def temporary(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "tmp").iterdir())

    def supervisors(self) -> set[int]:
        """The process below the launcher that forks the ranks, once it is there."""
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        except OSError:
            return set()
        return {int(child) for child in children.split()}

    def below_supervisor(self) -> list[int]:
        """Ranks and their helpers."""
        return sorted(find_below(self.process.pid) - {self.process.pid} - self.supervisors())

    def wait_until_ready(self, count: int) -> None:
        while self.log.count("ready") < count:
            assert self.process.poll() is None, self.log
            time.sleep(0.01)


def start(folder: Path, *arguments: str, num: int = 2) -> Started:
    (folder / "tmp").mkdir(parents=True)
    (folder / "ending_entry.py").write_text(ENTRY, encoding="utf-8")
    mark = uuid.uuid4().hex
    environ = {**os.environ, MARK_VARIABLE: mark, "TMPDIR": str(folder / "tmp")}
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(num), *arguments],
        cwd=folder,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return Started(process=process, mark=mark, folder=folder)


def test_helpers_of_a_run_are_found(tmp_path: Path) -> None:
    """The planted fault: a helper that nobody ends must be seen by what the tests below look with."""
    mark = uuid.uuid4().hex
    code = "import os, sys, time; pid = os.fork(); (os.setsid(), time.sleep(600)) if pid == 0 else print(pid)"
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", code], env={**os.environ, MARK_VARIABLE: mark}, stdout=out, check=True)
    helper = int((tmp_path / "out").read_text())
    assert sorted(wait_until_gone(mark, timeout_s=0.2)) == [helper]
    os.kill(helper, signal.SIGKILL)
    assert wait_until_gone(mark) == {}


@pytest.mark.parametrize(("num", "argument", "code"), [(1, "end", 0), (2, "fail", 3)])
def test_nothing_is_left_where_a_run_ends(tmp_path: Path, num: int, argument: str, code: int) -> None:
    run = start(tmp_path / "run", argument, num=num)
    assert run.process.wait(timeout=60) == code
    assert find_marked(run.mark) == {}  # before the launcher's own end, not some time after it
    assert run.temporary == []
    assert ("the run left " in run.log) is (argument == "end")


def test_nothing_is_left_where_a_run_is_asked_to_end(tmp_path: Path) -> None:
    run = start(tmp_path / "run")
    run.wait_until_ready(2)
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(timeout=60) == -signal.SIGINT  # KeyboardInterrupt
    assert find_marked(run.mark) == {}
    assert run.temporary == []


@pytest.mark.parametrize(("num", "argument"), [(1, "wait"), (2, "deaf")])
def test_nothing_is_left_where_the_launcher_is_killed(tmp_path: Path, num: int, argument: str) -> None:
    """Megatron's forked checkpoint writers stayed for ever: a fork is not told of its parent's end."""
    run = start(tmp_path / "run", argument, num=num)
    run.wait_until_ready(num)
    assert len(find_marked(run.mark)) > 2 * num + 2
    run.process.kill()
    run.process.wait()
    assert wait_until_gone(run.mark) == {}
    assert run.temporary == []


def test_nothing_of_the_group_is_left_where_the_supervisor_is_killed(tmp_path: Path) -> None:
    """Its helpers with sessions of their own are what no one is left to know of."""
    run = start(tmp_path / "run", num=1)
    run.wait_until_ready(1)
    (supervisor,) = run.supervisors()
    others = [number for number in find_marked(run.mark) if os.getsid(number) not in {supervisor, os.getsid(0)}]
    os.kill(supervisor, signal.SIGKILL)
    assert run.process.wait(timeout=60) == 137
    assert set(find_marked(run.mark)) <= set(others)
    for number in others:
        os.kill(number, signal.SIGKILL)
    assert wait_until_gone(run.mark) == {}
    assert "the process that started this machine's ranks was ended by SIGKILL (signal 9)" in run.log


@pytest.mark.all
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_left_at_whatever_moment_a_launcher_is_killed(tmp_path: Path, seed: int) -> None:
    """Fifty kills of launchers and ranks for each seed, from before the first process to after the last one."""
    random_moments = random.Random(seed)
    for number in range(50):
        run = start(tmp_path / str(number), random_moments.choice(["wait", "fail", "end"]), num=1 + number % 2)
        time.sleep(random_moments.uniform(0.0, 0.7))
        victims = [run.process.pid]
        if random_moments.random() < 0.5:
            ranks = run.below_supervisor()
            victims = [random_moments.choice(ranks), *victims] if ranks else victims
        for victim in victims:
            kill(victim)
        run.process.wait()
        assert wait_until_gone(run.mark) == {}, (seed, number)
        assert run.temporary == []


def kill(process_id: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGKILL)


@pytest.mark.all
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [(), ("parallel.tensor_model_parallel_size=2",)])
def test_nothing_is_left_of_a_real_run_that_is_killed_as_it_saves(tmp_path: Path, layout: Sequence[str]) -> None:
    """Three of fourteen kills in a save left processes that lived on, with the run's files open."""
    for number in range(5):
        folder = tmp_path / str(number)
        (folder / "tmp").mkdir(parents=True)
        mark = uuid.uuid4().hex
        options = ["max_steps=3", "save_steps=1", "eval_steps=0", "track_with=none", f"output_dir={folder / 'out'}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "mock_scheduler.cli", "launch", "quickstart", *options, *layout],
            cwd=ROOT,
            env={**os.environ, MARK_VARIABLE: mark, "TMPDIR": str(folder / "tmp")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not list((folder / "out" / "checkpoints").glob("step_*")):
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(0.03 * number)
        process.kill()
        process.wait()
        assert wait_until_gone(mark) == {}, number
        # torch keeps compiled kernels there for later runs, of this user alone.
        left = [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor_")]
        assert left == []
