"""Runs an engine's server for a run, and ends it with the run: ``python keeper.py PARENT FOLDER COMMAND...``.

The server has a process group of its own, since vLLM starts further processes. All of them end when this process is
told to end, and when PARENT, the process that started it, is gone, however that ended; then FOLDER, which has the
server's socket, is removed. The exit code is the server's.

Contract: standard library only, so no package that the run was started with can keep it from ending the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time

_GRACE_S = 10.0
_PAUSE_S = 0.1
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _die_with_keeper() -> None:
    """Has Linux end the server where this process is killed; it has one thread, so this is safe before exec."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _signal_group(group: int, which: signal.Signals) -> bool:
    """Signals all processes of the group; returns whether there was any."""
    try:
        os.killpg(group, which)
    except ProcessLookupError:
        return False
    return True


def _end(server: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + _GRACE_S
    _signal_group(server.pid, signal.SIGTERM)
    while server.poll() is None and time.monotonic() < until_s:
        time.sleep(_PAUSE_S)


def main(arguments: list[str]) -> int:
    """Runs the server until it ends or has to."""
    parent, folder, command = int(arguments[0]), arguments[1], arguments[2:]
    told: list[int] = []
    for which in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(which, lambda number, _frame: told.append(number))
    server = subprocess.Popen(command, start_new_session=True, preexec_fn=_die_with_keeper)
    try:
        while server.poll() is None:
            if told or os.getppid() != parent:
                _end(server)
                break
            time.sleep(_PAUSE_S)
    finally:
        _signal_group(server.pid, signal.SIGKILL)  # whatever the server has left of its own processes
        server.wait()
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
