"""Runs that are forked from a process with the imports are what new processes would be."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mock_scheduler.launch.launcher import LaunchPlan, RunningProcesses, run_plan
from mock_scheduler.launch.ranks import Place, ranks_command
from mock_scheduler.launch.warm_start import WarmStarts
from tests.launch.process_tree import find_below

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="runs are forked on Linux alone")

#: What a rank says of itself: the same lines from a new process and from a fork.
ASKED = """
import json, os, sys
from pathlib import Path
told = {
    "argv": sys.argv[1:], "main": __name__, "rank": os.environ["RANK"], "size": os.environ["WORLD_SIZE"],
    "cwd": os.getcwd(), "chosen": os.environ["CHOSEN"], "safe_path": sys.flags.safe_path,
    "writes_through": sys.stdout.write_through, "leads": os.getpgid(0) == os.getppid(),
    "group_of_its_own": os.getsid(0) == os.getppid(), "path": sys.path,
    "open": sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in os.listdir("/proc/self/fd")
                   if os.path.exists(f"/proc/self/fd/{n}")),
}
Path(f"told-{os.environ['RANK']}.json").write_text(json.dumps(told))
# In one write: without buffers, the pieces of several ranks mix.
sys.stdout.write(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n")
sys.stderr.write("to the errors\\n")
Path(f"has-{os.environ['RANK']}").write_text(str("decimal" in sys.modules))
sys.exit(int(sys.argv[1]))
"""
PRELOAD = ("decimal",)
FIXED = {"CHOSEN": "1", "PYTHONHASHSEED": "0"}


def make_plan(folder: Path, *arguments: str, code: str = ASKED, num_ranks: int = 1) -> LaunchPlan:
    (folder / "asked.py").write_text(code, encoding="utf-8")
    place = Place(num_local=num_ranks)
    argv = ranks_command(sys.executable, ("-m", "asked", *arguments), told_to=folder, place=place)
    return LaunchPlan(
        argv=argv,
        env=dict(FIXED),
        num_processes=num_ranks,
        world_size=num_ranks,
        output_dir=folder,
        preload=PRELOAD,
    )


def told_by(folder: Path, rank: int) -> dict[str, object]:
    told: dict[str, object] = json.loads((folder / f"told-{rank}.json").read_text(encoding="utf-8"))
    return told


# Of several ranks none fails: the others would be ended before they have told.
@pytest.mark.parametrize(("num_ranks", "code"), [(1, 5), (3, 0)])
def test_a_fork_is_what_a_new_process_is(tmp_path: Path, num_ranks: int, code: int) -> None:
    warm = WarmStarts()
    plan = make_plan(tmp_path, str(code), num_ranks=num_ranks)
    found = []
    for way in (None, warm):
        log = tmp_path / "log"
        log.unlink(missing_ok=True)
        assert run_plan(plan, log_path=log, cwd=tmp_path, warm=way) == code
        found.append(([told_by(tmp_path, rank) for rank in range(num_ranks)], sorted(log.read_text().splitlines())))
        has_it = {(tmp_path / f"has-{rank}").read_text() for rank in range(num_ranks)}
        assert has_it == {str(way is warm)}
    assert found[0] == found[1]
    assert found[0][0][0]["argv"] == [str(code)]


def test_each_environment_has_a_process_of_its_own_and_each_run_its_own_memory(tmp_path: Path) -> None:
    code = (
        "import decimal, os, sys\nfrom pathlib import Path\n"
        "Path(sys.argv[1]).write_text(f\"{os.environ['CHOSEN']} {hasattr(decimal, 'changed')}\")\ndecimal.changed = 1\n"
    )
    before, warm = find_below(os.getpid()), WarmStarts()
    for name, chosen in (("a", "1"), ("b", "1"), ("c", "2")):
        plan = replace(make_plan(tmp_path, name, code=code), env=FIXED | {"CHOSEN": chosen})
        assert run_plan(plan, log_path=tmp_path / "log", cwd=tmp_path, warm=warm) == 0
    assert [(tmp_path / name).read_text() for name in "abc"] == ["1 False", "1 False", "2 False"]
    started = find_below(os.getpid()) - before
    assert len(started) == 2
    del warm
    wait_until_ended(started)


@pytest.mark.parametrize(
    ("preload", "hash_seed"),
    [(("no_such_module",), "0"), (("cuda_at_import",), "0"), ((), "0"), (PRELOAD, "random")],
)
def test_where_nothing_can_be_forked_from_the_run_is_a_new_process(
    tmp_path: Path, preload: tuple[str, ...], hash_seed: str
) -> None:
    """An import that fails; one that initialised CUDA, which no fork could use; none; no fixed order of sets."""
    folder = tmp_path / "packages"
    (folder / "torch").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("from . import cuda\n")
    (folder / "torch" / "cuda.py").write_text("def is_initialized(): return True\n")
    (folder / "cuda_at_import.py").write_text("import torch\n")
    plan = replace(make_plan(tmp_path, "5"), preload=preload)
    plan = replace(plan, env=FIXED | {"PYTHONPATH": str(folder), "PYTHONHASHSEED": hash_seed})
    for _ in range(2):
        assert run_plan(plan, log_path=tmp_path / "log", cwd=tmp_path, warm=WarmStarts()) == 5
        assert (tmp_path / "has-0").read_text() == "False"


def test_forks_draw_other_numbers_where_nothing_seeds_them(tmp_path: Path) -> None:
    """Two runs with one state of a generator would look as if they repeated themselves."""
    code = (
        "import os, random, sys\nfrom pathlib import Path\nimport numpy\n"
        "Path(f\"{sys.argv[1]}-{os.environ['RANK']}\").write_text(f'{random.random()} {numpy.random.random()}')\n"
    )
    warm = WarmStarts()
    for name in ("a", "b"):
        plan = replace(make_plan(tmp_path, name, code=code, num_ranks=2), preload=("numpy", "random"))
        assert run_plan(plan, log_path=tmp_path / "log", cwd=tmp_path, warm=warm) == 0
    drawn = [number for name in ("a-0", "a-1", "b-0", "b-1") for number in (tmp_path / name).read_text().split()]
    assert len(set(drawn)) == 8


def test_a_run_has_the_code_that_lies_on_the_disk_when_it_starts(tmp_path: Path) -> None:
    """Also while a run goes on that was forked before the change."""
    own, told = tmp_path / "packages" / "own.py", tmp_path / "told"
    own.parent.mkdir()
    first = (
        "import own, time\nfrom pathlib import Path\nPath('started').touch()\n"
        "while not Path('go').exists(): time.sleep(0.02)\nPath('told').write_text(own.VALUE)\n"
    )
    plan = make_plan(tmp_path, code=first)
    plan = replace(plan, preload=("own",), env=FIXED | {"PYTHONPATH": str(own.parent)})
    warm, codes = WarmStarts(), []
    own.write_text("VALUE = 'before'\n")
    before = find_below(os.getpid())

    def run() -> None:
        codes.append(run_plan(plan, log_path=tmp_path / "log", cwd=tmp_path, warm=warm))

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(tmp_path / "started")
    own.write_text("VALUE = 'changed'\n")
    then = "import own\nfrom pathlib import Path\nPath('then').write_text(own.VALUE)\n"
    (tmp_path / "asked.py").write_text(then)
    parents = []
    for _ in range(2):
        assert run_plan(plan, log_path=tmp_path / "log-then", cwd=tmp_path, warm=warm) == 0
        assert (tmp_path / "then").read_text() == "changed"
        parents.append({number for number in find_below(os.getpid()) - before if parent_of(number) == os.getpid()})
    assert len(parents[0]) == 2  # one with either code, and no more for a further run
    assert parents[0] == parents[1]
    (tmp_path / "go").touch()
    thread.join(timeout=60)
    assert codes == [0]
    assert told.read_text() == "before"


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGKILL])
def test_the_signal_that_ended_a_rank_is_told(tmp_path: Path, which: signal.Signals) -> None:
    code = f"import os, signal\nos.kill(os.getpid(), {int(which)})\n"
    plan = make_plan(tmp_path, code=code, num_ranks=2)
    assert run_plan(plan, log_path=tmp_path / "log", cwd=tmp_path, warm=WarmStarts()) == 128 + which
    stated = json.loads((tmp_path / "error.json").read_text(encoding="utf-8"))
    assert stated["exit_code"] == 128 + which


SLEEPS = "import time\nfrom pathlib import Path\nPath('started').touch()\ntime.sleep(600)\n"


def wait_for(path: Path) -> None:
    for _ in range(3000):
        if path.exists():
            return
        time.sleep(0.02)
    raise AssertionError(f"{path} did not come within a minute")


def test_running_forks_end_when_they_are_told_to(tmp_path: Path) -> None:
    running, codes = RunningProcesses(), []
    plan = make_plan(tmp_path, code=SLEEPS, num_ranks=2)

    def run() -> None:
        codes.append(run_plan(plan, log_path=tmp_path / "log", cwd=tmp_path, running=running, warm=WarmStarts()))

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(tmp_path / "started")
    running.end()
    thread.join(timeout=60)
    assert codes == [128 + signal.SIGTERM]


LAUNCHER = """
import sys
from pathlib import Path
from tests.launch.test_warm_start import SLEEPS, make_plan
from mock_scheduler.launch.launcher import run_plan
from mock_scheduler.launch.warm_start import WarmStarts
folder = Path(sys.argv[1])
run_plan(make_plan(folder, code=SLEEPS, num_ranks=2), log_path=folder / "log", cwd=folder, warm=WarmStarts())
"""


@pytest.mark.parametrize("which", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_all_end_with_the_launcher(tmp_path: Path, which: signal.Signals) -> None:
    """Also where it was killed, and can tell nobody."""
    root = Path(__file__).parents[2]
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], cwd=root)
    wait_for(tmp_path / "started")
    below = find_below(launcher.pid)
    assert len(below) >= 4  # the one with the imports, the supervisor, two ranks
    launcher.send_signal(which)
    launcher.wait(timeout=60)
    wait_until_ended(below)


@pytest.mark.parametrize("position", ["parent", "supervisor"])
def test_a_run_ends_with_what_it_was_forked_from_or_by(tmp_path: Path, position: str) -> None:
    root = Path(__file__).parents[2]
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path)], cwd=root)
    wait_for(tmp_path / "started")
    below = find_below(launcher.pid)
    (parent,) = [number for number in below if parent_of(number) == launcher.pid]
    (supervisor,) = [number for number in below if parent_of(number) == parent]
    os.kill(parent if position == "parent" else supervisor, signal.SIGKILL)
    assert launcher.wait(timeout=60) == 0  # its run's exit code is its own affair; it does not hang
    wait_until_ended(below)
    assert json.loads((tmp_path / "error.json").read_text(encoding="utf-8"))["exit_code"] == 137


def parent_of(process_id: int) -> int:
    return int(Path(f"/proc/{process_id}/stat").read_bytes().rpartition(b")")[2].split()[1])


def wait_until_ended(process_ids: set[int]) -> None:
    for _ in range(3000):
        if not any(Path(f"/proc/{number}").exists() for number in process_ids):
            return
        time.sleep(0.02)
    raise AssertionError(f"of {process_ids} some go on")
