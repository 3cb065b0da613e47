"""A training service that is ended in whatever way leaves no process, and no file that passes for a running one's.

Each case starts the real service on two ranks, kills one of its processes, and looks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mock_scheduler.errors import ServiceError
from mock_scheduler.remote.client import TrainingClient
from mock_scheduler.remote.service_file import ServiceAccess
from tests.pipelines.service.test_training_service import wait_for_file
from tests.pipelines.tiny_runs import ROOT, write_tiny_config

pytestmark = [pytest.mark.all, pytest.mark.timeout(600)]

_ENDS_S = 120.0


@pytest.mark.parametrize("which", ["launcher", "rank 0", "rank 1"])
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_no_process_and_no_running_service_is_left(tmp_path: Path, which: str, ending: signal.Signals) -> None:
    process, access = _start(tmp_path)
    ranks = [psutil.Process(access.process_id), *_other_ranks(access)]
    everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    victim = {"launcher": everyone[0], "rank 0": ranks[0], "rank 1": ranks[1]}[which]
    victim.send_signal(ending)
    process.wait(timeout=_ENDS_S)
    assert process.returncode not in (0, 1)
    _, alive = psutil.wait_procs(everyone, timeout=_ENDS_S)
    assert alive == []
    path = tmp_path / "run" / "service.json"
    is_launcher_there = which != "launcher" or ending == signal.SIGTERM
    assert not (is_launcher_there and path.exists())
    began_s = time.monotonic()
    with pytest.raises(ServiceError, match=f"process {access.process_id} of .*service.json, has ended"):
        TrainingClient(access, timeout_s=60.0).service()
    assert time.monotonic() - began_s < 30.0


def _start(folder: Path) -> tuple[subprocess.Popen[bytes], ServiceAccess]:
    configs = write_tiny_config(folder)
    arguments = ["-m", "mock_scheduler.cli", "launch", "--config-path", str(configs), "tiny"]
    options = ["--entry", "pipelines.service.server", f"output_dir={folder / 'run'}"]
    options.append("parallel.tensor_model_parallel_size=2")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments, *options], cwd=ROOT, stdout=log, stderr=log, env=dict(os.environ)
        )
    return process, wait_for_file(folder / "run" / "service.json", process)


def _other_ranks(access: ServiceAccess) -> list[psutil.Process]:
    first = psutil.Process(access.process_id)
    parent = first.parent()
    assert parent is not None
    return [child for child in parent.children() if child.pid != first.pid and child.cmdline() == first.cmdline()]
