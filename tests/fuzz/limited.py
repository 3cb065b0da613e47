"""Runs the examples of a fuzzer in a child process with little memory and time, so that none can take the machine."""

from __future__ import annotations

import os
import resource
import signal
import traceback
from collections.abc import Callable

_MEMORY_BYTES = 3 << 30
_EXAMPLE_S = 20


def run_limited(fuzz: Callable[[], None]) -> None:
    """Run a fuzzer in a forked child; fails with the child's traceback where it fails, hangs or dies."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))
            fuzz()
        except BaseException:  # noqa: BLE001 - the edge of the process
            os.write(writing, traceback.format_exc()[-20_000:].encode("utf-8", "backslashreplace"))
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"status {status}: {text}"


def start_clock() -> None:
    """Give the example that begins its seconds; SIGALRM ends the child beyond them."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_EXAMPLE_S)
