"""ROLL's own DataProto through its schedulers as Ray's actors, of training and of validation, in one recording.

``ROLL_SOURCE`` names a checkout of alibaba/ROLL (tried: 8eb27cc2); ROLL is no package that pip finds. Its pipeline and
engines are not there (``roll_run.py``).
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
    script, only = Path(__file__).with_name("roll_run.py"), folder / "sources"
    only.mkdir(exist_ok=True)
    if not (only / "roll").exists():  # its tests are a package, and would be found in place of ours
        (only / "roll").symlink_to(Path(os.environ["ROLL_SOURCE"]) / "roll")
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(sys.prefix) / "rl"), str(only)])
    command = [sys.executable, "-W", "ignore", str(script), str(folder), mode]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = torch.load(folder / f"{mode}.pt", weights_only=True)
    return found


@pytest.mark.skipif("ROLL_SOURCE" not in os.environ, reason="ROLL_SOURCE names no checkout of ROLL")
def test_both_actors_give_the_recorded_batches(tmp_path: Path) -> None:
    live, replay = run(tmp_path, "dump"), run(tmp_path, "mock")
    assert len(live["found"]) == 4
    assert bits(replay["found"]) == bits(live["found"])
    assert (tmp_path / "dump" / "train").is_dir()
    assert [live["counts"][mode]["recording"]["recorded_steps"] for mode in ("train", "val")] == [3, 1]
    assert [replay["counts"][mode]["answered"]["get_batch"] for mode in ("train", "val")] == [3, 1]
    assert replay["counts"]["train"]["called"] == {}
    assert replay["driver"]["suppressed"] == {"cluster actor_infer": 1, "model_update_pair": 1}
