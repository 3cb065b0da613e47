"""Makes the environment of the checks' processes, waits for them and ends them; imports the standard library alone."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event

#: The folder of the checkout, from which children are started.
ROOT = Path(__file__).parents[2]
#: What every deterministic run exports (``configs/base.yaml``).
DETERMINISTIC: Mapping[str, str] = {
    "DETERMINISTIC_MODE": "1",
    "PYTHONHASHSEED": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_ALGO": "Ring",
    "NCCL_NVLS_ENABLE": "0",
}


def child_environment(device: str, **more: str) -> dict[str, str]:
    """Makes the environment of a check's processes; on the CPU no GPU is visible to them."""
    environment = {**os.environ, **DETERMINISTIC, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **more}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def wait_for(process: subprocess.Popen[bytes], ended: Event, *, end_s: float) -> int | None:
    """Returns the exit code of a check, or ``None`` where its time or the script ended before."""
    while not ended.is_set() and (left_s := end_s - time.monotonic()) > 0:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=min(left_s, 0.5))
    return None


def end_all(process: subprocess.Popen[bytes], work: Path) -> None:
    """Ends what is left of a check: its session, and processes of other sessions, known by their ``TMPDIR``."""
    import psutil  # it may come with the carried wheels

    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    left = []
    for other in psutil.process_iter():
        with suppress(psutil.Error):
            if other.environ().get("TMPDIR") == str(work):
                other.kill()
                left.append(other)
    psutil.wait_procs(left, timeout=5.0)
