"""Two launches of real gloo processes, one of a single rank and one of four, shared by all distributed tests."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launch.process_tree import find_below, find_listeners, find_open
from tests.programs import run_program, run_ranks
from tests.sharing import make_once

LAYOUTS = ("tp2-pp2", "pp2-dp2", "tp2-dp2-sp")


def launch(
    num_ranks: int,
    folder: Path,
    tasks: tuple[str, ...],
    *,
    module: str = "tests.dist.workers.worker",
) -> None:
    """Run a worker; where any rank fails, the others are ended and the test shows what they said."""
    if num_ranks == 1:
        done = run_program(module, (str(folder), *tasks), environ={"LOCAL_RANK": "0"})
    else:
        done = run_ranks(num_ranks, module, (str(folder), *tasks), told_to=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


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
