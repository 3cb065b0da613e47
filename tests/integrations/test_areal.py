"""AReaL's own handles of tensors, joining of samples and data loader on recorded rollouts.

Live, its handles go on unchanged, and what was fetched for the recording is dropped again. A replay trains on equal
bits and leaves the data loader where the live run did. Its trainer and workers are not there (``areal_run.py``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapters.bits import bits

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(600)]


def run(folder: Path, mode: str) -> dict[str, Any]:
    script = Path(__file__).with_name("areal_run.py")
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(sys.prefix) / "rl")])
    command = [sys.executable, "-W", "ignore", str(script), str(folder), mode]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = torch.load(folder / f"{mode}.pt", weights_only=True)
    return found


def test_a_replay_trains_on_the_tensors_behind_the_handles(tmp_path: Path) -> None:
    live, replay = run(tmp_path, "dump"), run(tmp_path, "mock")
    assert live["were_handles"] == [True] * 5
    assert live["num_buffered"] == [0] * 5
    assert replay["fetched"] == 0
    assert bits(replay["trained"]) == bits(live["trained"])
    assert replay["ahead"] == live["ahead"]
    assert replay["counts"]["called"] == {}
