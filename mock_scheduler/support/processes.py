"""Ends a run's processes: with the one that started them, on signals, and with an exit code.

Contract: standard library only, so every process of a run can import it first.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mock_scheduler.errors import ExitCode
from mock_scheduler.support.files import load_json_object, save_json
from mock_scheduler.support.run_files import ERROR_FILE, SERVICE_FILE
from mock_scheduler.support.terminal_streams import print_message

PARENT_VARIABLE = "MOCK_SCHEDULER_PARENT_PID"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36

# A failure this much later than the first is the supervisor's own doing: it kills after a grace
# (``launch/supervision.py``).
_KILLED_BY_SUPERVISOR_S = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExit:
    """One failed rank. ``code`` as ``subprocess`` has it: minus the number of the signal that ended the process.

    ``noticed_s``: when the supervisor of the ranks noticed, in seconds since the epoch.
    """

    global_rank: int
    code: int
    noticed_s: int


def end_with_parent(environ: Mapping[str, str]) -> None:
    """Have Linux send this process SIGTERM when its parent ends, in whatever way.

    The launcher names itself in ``environ``; without it, or on another system, nothing happens. A child calls this
    itself when it starts: between fork and exec, Python code is not safe where the parent has threads.
    """
    parent = environ.get(PARENT_VARIABLE)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    # The parent may have ended before that call; a wrapper between the two is a living parent of another number.
    if os.getppid() != int(parent) and not is_alive(int(parent)):
        print_message(f"the launcher (process {parent}) has ended, so this process ends")
        os.kill(os.getpid(), signal.SIGTERM)


def adopt_orphans() -> None:
    """Have Linux make this process the parent of every process below it whose own parent ends; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_alive(process_id: int) -> bool:
    """Whether a process of this machine runs, whoever owns it."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def ending_signals_as_interrupt() -> AbstractContextManager[None]:
    """Have SIGTERM (Slurm, timeouts) and SIGHUP (a closed terminal) raise KeyboardInterrupt with the number."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)  # of no class of ours: for another, Python would exit with 1

    return handling_signals((signal.SIGTERM, signal.SIGHUP), interrupt)


@contextmanager
def handling_signals(
    signals: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Have a handler get these signals in the block. In the main thread only.

    An ignored signal stays so: ``nohup`` asks for that.
    """
    handled = [which for which in signals if signal.getsignal(which) != signal.SIG_IGN]
    previous = {which: signal.signal(which, handler) for which in handled}
    try:
        yield
    finally:
        for which, before in previous.items():
            signal.signal(which, before)


def end_process(exit_code: int) -> NoReturn:
    """End this process as Python does, but do not take its modules apart.

    Threads are waited for, functions of ``atexit`` are called, and the standard streams are written out. To take the
    modules apart takes half a second where torch was imported, and in a fork it copies their memory. For code of ours,
    which closes its files: what others left open in a buffer would not be written.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as Python's own end does first
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is none, or nobody reads it any more
            stream.flush()
    os._exit(exit_code & 0xFF)


def meant_exit_code(code: int) -> int:
    """The meaning of a process's end to a caller: 128 + its number for a signal, as in shells; 70 for Python's own 1.

    No run exits with 1 on purpose, and to a caller 1 means ``diverged``.
    """
    if code < 0:
        return 128 - code
    return int(ExitCode.INTERNAL) if code == 1 else code


def find_culprit(failures: Sequence[RankExit]) -> RankExit:
    """The rank whose end explains the others; ``failures`` in the order of notice.

    An error of ours (2 to 5) first. Then a signal: the supervisor ends the others by signals too, but those come after
    another failure (SIGTERM) or long after it (SIGKILL); and an abort may be a library's answer to a lost peer.
    Else the first that chose a code: Python exits with 1 also where a peer broke the connection.
    """
    first_s = min(failure.noticed_s for failure in failures)
    ours = [failure for failure in failures if ExitCode.DIVERGED < failure.code <= ExitCode.USAGE]
    struck = [
        failure
        for position, failure in enumerate(failures)
        if failure.code < 0
        and failure.noticed_s <= first_s + _KILLED_BY_SUPERVISOR_S
        and (position == 0 or failure.code != -signal.SIGTERM)
    ]
    struck.sort(key=lambda failure: failure.code == -signal.SIGABRT)  # stable: else in order
    chosen = [failure for failure in failures if failure.code > 1]
    return (ours or struck or chosen or list(failures))[0]


def describe_signal(code: int) -> str:
    """``SIGKILL (signal 9)`` for -9, with the usual cause where there is one."""
    number = -code
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "a signal"
    cause = ", which the kernel sends where memory runs out" if number == signal.SIGKILL else ""
    return f"{name} (signal {number}){cause}"


def write_signal_error(output_dir: Path, message: str, *, code: int, global_rank: int | None) -> str | None:
    """State in ``error.json`` that a signal ended the run, in place of a surviving peer's explanation.

    ``global_rank``: ``None`` for the process that started the ranks. Returns why it could not be written, or ``None``.
    """
    content = {
        "type": "EndedBySignal",
        "message": message,
        "exit_code": meant_exit_code(code),
        "global_rank": global_rank,
    }
    try:
        save_json(output_dir / ERROR_FILE, content)
    except OSError as error:
        return f"{output_dir / ERROR_FILE} cannot be written: {error.strerror}"
    return None


def read_stated_error(output_dir: Path, *, since_s: float) -> RankExit | None:
    """Read which rank said why the run failed, with its code; ``None`` where none has since ``since_s``."""
    path = output_dir / ERROR_FILE
    try:
        written_s = path.stat().st_mtime
        content = load_json_object(path)
    except (OSError, ValueError):  # nobody has said anything, or ``output_dir`` is the plan of a session
        return None
    global_rank, code = content.get("global_rank"), content.get("exit_code")
    if written_s < since_s or type(global_rank) is not int or type(code) is not int or not 0 < code < 256:
        return None
    return RankExit(global_rank=global_rank, code=code, noticed_s=int(written_s))


def remove_left_service_file(output_dir: Path) -> None:
    """Remove the file of a training service whose process ended without doing so; that of a running one stays."""
    path = output_dir / SERVICE_FILE
    if not path.is_file() or path.is_symlink():
        return
    try:
        process_id = load_json_object(path).get("process_id")
        if type(process_id) is int and 0 < process_id < 2**31 and not is_alive(process_id):
            path.unlink(missing_ok=True)
    except (OSError, ValueError):  # absent, or no such file: nothing is lost by leaving it
        return
