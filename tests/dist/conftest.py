"""Two launches of real gloo processes, one of a single rank and one of four, shared by all distributed tests."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mock_scheduler.launch.launcher import LaunchPlan, run_plan
from mock_scheduler.launch.ranks import Place, ranks_command
from mock_scheduler.launch.warm_start import WarmStarts
from pipelines.program import PROGRAM
from tests.launch.process_tree import find_below, find_listeners, find_open
from tests.programs import run_program
from tests.sharing import make_once

ROOT = Path(__file__).parents[2]
LAYOUTS = ("tp2-pp2", "pp2-dp2", "tp2-dp2-sp")
FIXED = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

#: Forks the ranks of all launches of this process.
WARM = WarmStarts()


def launch(
    num_ranks: int,
    folder: Path,
    tasks: tuple[str, ...],
    *,
    module: str = "tests.dist.worker",
) -> None:
    """Run a worker; where any rank fails, the launcher ends the others and the test shows the log."""
    if num_ranks == 1:
        done = run_program(module, (str(folder), *tasks), environ={"LOCAL_RANK": "0"})
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return
    arguments = ("-m", module, str(folder), *tasks)
    argv = ranks_command(sys.executable, arguments, told_to=folder, place=Place(num_local=num_ranks))
    plan = LaunchPlan(
        argv=argv, env=dict(FIXED), num_processes=num_ranks, world_size=num_ranks, preload=PROGRAM.preload
    )
    log_path = folder / f"{num_ranks}.log"
    # One process to fork from has one environment, and pytest has another for each test.
    test = os.environ.pop("PYTEST_CURRENT_TEST", None)
    try:
        exit_code = run_plan(plan, log_path=log_path, cwd=ROOT, warm=WARM)
    finally:
        if test is not None:
            os.environ["PYTEST_CURRENT_TEST"] = test
    assert exit_code == 0, log_path.read_text(encoding="utf-8")[-6000:]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which every layout has written; ``tp1`` is the reference of one process."""
    return make_once(tmp_path_factory, "dist", _run_layouts)[0]


@pytest.fixture(scope="session")
def listeners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The addresses on which processes of the run of four listened, looked up about once a second."""
    return make_once(tmp_path_factory, "dist", _run_layouts)[1]


def _run_layouts(folder: Path) -> dict[str, object]:
    launch(1, folder, ("tp1",))
    before = find_below(os.getpid())
    found: dict[str, set[str]] = {"all": set(), "open": set()}

    def watch() -> None:
        while not is_over.wait(1.0):
            run = find_below(os.getpid()) - before
            found["all"].update(str(address) for address, _ in find_listeners(run))
            found["open"].update(address for address, _ in find_open(run))

    is_over = threading.Event()
    with ThreadPoolExecutor() as pool:
        watching = pool.submit(watch)
        try:
            launch(4, folder, LAYOUTS)
        finally:
            is_over.set()
        watching.result()
    return {name: sorted(addresses) for name, addresses in found.items()}
