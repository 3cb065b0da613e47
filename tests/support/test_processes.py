"""How a process ends that does not take its modules apart: nothing that Python promises at its end is lost."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mock_scheduler.support.processes import meant_exit_code

PROGRAM = """
import atexit, sys, threading, time
from mock_scheduler.support.processes import end_process

def work():
    time.sleep(0.1)
    sys.stdout.write("thread ")

class Last:
    def __del__(self):
        print("module taken apart")

last = Last()
last.itself = last
atexit.register(lambda: sys.stdout.write("atexit "))
threading.Thread(target=work).start()
sys.stdout.write("main ")  # stays in the buffer
end_process(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_threads_and_exit_functions_come_first_and_buffers_are_written(code: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(code)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("main thread atexit ", "", code)


@pytest.mark.parametrize(("code", "meant"), [(0, 0), (1, 70), (2, 2), (-9, 137), (-15, 143)])
def test_an_end_has_a_meaning_to_a_caller(code: int, meant: int) -> None:
    assert meant_exit_code(code) == meant
