"""Material that costs process launches, made once for all workers of one test run."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def make_once(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], dict[str, object]]
) -> tuple[Path, dict[str, Any]]:
    """The folder ``name`` of this test run and what ``make`` told of it: made by the first worker that asks.

    Raises:
        RuntimeError: where another worker could not make it; its test shows why.

    """
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker's own folder lies in that of the run
        root = root.parent
    folder, told = root / name, root / f"{name}.json"
    with open(f"{folder}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released where the file is closed
        if not folder.exists():
            folder.mkdir()
            told.write_text(json.dumps(make(folder)), encoding="utf-8")
        if not told.exists():
            raise RuntimeError(f"{folder} could not be made: see the first test that asked for it")
    return folder, json.loads(told.read_text(encoding="utf-8"))
