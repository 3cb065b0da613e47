"""What all tests share: property tests without a time limit per example, and the order of the files."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("steady", deadline=None, max_examples=50)
settings.register_profile("short", deadline=None, max_examples=25)

ROOT = Path(__file__).parents[1]

# Files that take longest come first, so that no worker is left with one of them while the others have ended. The first
# makes the alignment that the last four look at: in between, the other workers do not wait for it.
LONGEST_FIRST = (
    "tests/pipelines/test_end_to_end.py",
    "tests/megatron/test_module_probe.py",
    "tests/dist/test_layouts.py",
    "tests/dist/test_ordered_collectives.py",
    "tests/pipelines/environments/test_workers.py",
    "tests/alignment/extract/test_extract_runs.py",
    "tests/pipelines/test_modes.py",
    "tests/faults/test_injected.py",
    "tests/recording/test_crashes.py",
    "tests/pipelines/rollout/test_engine.py",
    "tests/pipelines/service/test_training_service.py",
    "tests/pipelines/test_doctor.py",
    "tests/pipelines/test_bad_input.py",
    "tests/pipelines/test_resume.py",
)


#: Objects that are made before the first search for garbage, in place of 700: each search is of no use to most tests.
GARBAGE_THRESHOLD = 50_000


def pytest_configure(config: pytest.Config) -> None:
    """Tries half as many examples in the gate as beside the long proofs."""
    settings.load_profile("short" if "not all" in config.getoption("markexpr") else "steady")
    gc.disable()


def pytest_collection_finish() -> None:
    """Lets no search for garbage look at what was imported and collected, which stays to the end."""
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests, and the runs that they start, keep what is theirs apart from the user's, and end when interrupted."""
    # What a shell starts in its background ignores these, and so does all that it starts.
    for which, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(which) is signal.SIG_IGN:
            signal.signal(which, handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("MOCK_SCHEDULER_NODE_CACHE", str(tmp_path_factory.mktemp("node_cache")))
        # No test ends with the power of its machine, and waiting for the disk is a third of some.
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first; all others stay as they are."""
    missing = [name for name in LONGEST_FIRST if not (ROOT / name).is_file()]
    if missing:
        raise pytest.UsageError(f"LONGEST_FIRST in {__file__} names files that are not there: {', '.join(missing)}")
    places = {ROOT / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
