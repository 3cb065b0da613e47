"""A supervisor waits for the ranks that it forked, and ends everything of the run before it ends itself.

When a rank fails, the others are asked to end (SIGTERM) after a moment in which they may fail with reasons of their
own, and are killed after a grace. A signal to the supervisor ends all ranks the same way. On Linux the supervisor is
the parent of every orphan below it, so helper processes of the ranks end too, in whatever session they are. A run that
a signal ended is told of it: on stderr, and in the ``error.json`` of its folder.

Contract: signals are blocked from ``block_signals`` on, and taken here one by one; standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mock_scheduler.support.processes import (
    RankExit,
    describe_signal,
    find_culprit,
    meant_exit_code,
    read_stated_error,
    write_signal_error,
)
from mock_scheduler.support.terminal_streams import print_message

#: From asking to killing, for ranks.
GRACE_S = 30.0
# Ranks that fail together shall all have said why.
_SETTLE_S = 0.1
# Helpers of ranks that have ended: so long they may end by themselves, and so long after they were asked.
_HELPERS_PATIENCE_S = 2.0
_HELPERS_GRACE_S = 2.0
_POLL_S = 0.02

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def block_signals() -> set[signal.Signals | int]:
    """Keeps signals for ``supervise``; returns the mask to give back to ranks. An ignored signal stays so (nohup)."""
    return signal.pthread_sigmask(signal.SIG_BLOCK, _awaited())


def _awaited() -> set[signal.Signals]:
    ending = {which for which in _ENDING if signal.getsignal(which) != signal.SIG_IGN}
    return {signal.SIGCHLD, *ending}


@dataclass(slots=True)
class Supervision:
    """Waits for ranks. ``running``: their global ranks by process id.

    After ``wait``: ``failures`` in the order of notice, and ``ended_by``, the signal that asked for the end.
    ``started_s``: when it began, in seconds since the epoch.
    """

    running: dict[int, int]
    started_s: float = field(default_factory=time.time)
    failures: list[RankExit] = field(default_factory=list)
    ended_by: signal.Signals | None = None
    _ask_at_s: float | None = None
    _kill_at_s: float | None = None

    def wait(self) -> None:
        """Returns when every rank has ended, and all processes below them."""
        awaited = _awaited()
        while self.running:
            self._take(_wait_for_signal(awaited, self._next_s()))
            for process_id, code in _reap():
                self._note(process_id, code)
            self._act()
        end_helpers(patience_s=0.0 if self.failures or self.ended_by else _HELPERS_PATIENCE_S)

    def _take(self, received: int | None) -> None:
        if received in _ENDING and self.ended_by is None:
            self.ended_by = signal.Signals(received)
            self._ask_at_s = time.monotonic()

    def _note(self, process_id: int, code: int) -> None:
        """Notes a rank's end; a process that is no rank was an orphan's."""
        global_rank = self.running.pop(process_id, None)
        if global_rank is None or code == 0:
            return
        self.failures.append(RankExit(global_rank=global_rank, code=code, noticed_s=int(time.time())))
        if self._ask_at_s is None:
            self._ask_at_s = time.monotonic() + _SETTLE_S

    def _act(self) -> None:
        """Asks the running ranks to end, or kills them, when it is time."""
        now_s = time.monotonic()
        if self._kill_at_s is None:
            if self._ask_at_s is not None and now_s >= self._ask_at_s:
                _send(self.running, signal.SIGTERM)
                self._kill_at_s = now_s + GRACE_S
        elif now_s >= self._kill_at_s:
            _send(self.running, signal.SIGKILL)
            self._kill_at_s = now_s + GRACE_S

    def _next_s(self) -> float | None:
        """Returns the time to the next act, ``None`` for none."""
        at_s = self._kill_at_s or self._ask_at_s
        return None if at_s is None else max(0.0, at_s - time.monotonic())


def end_helpers(*, patience_s: float) -> None:
    """Ends all processes that are still below this one: waited for, then asked, then killed.

    Only Linux gives their list. Whatever is killed may leave children; these come here too, until there are none.
    """
    ask_at_s = time.monotonic() + patience_s
    kill_at_s = ask_at_s + _HELPERS_GRACE_S
    asked: set[int] = set()
    while _has_children():
        now_s = time.monotonic()
        if now_s >= ask_at_s:
            children = _list_children()
            if not children:
                return  # not Linux, where only own children are known, and these have been waited for
            if not asked and patience_s:
                print_message(f"the run left {len(children)} of its processes, which end now")
            if now_s >= kill_at_s:
                _send(children, signal.SIGKILL)
            else:
                _send(children - asked, signal.SIGTERM)
            asked |= children
        time.sleep(_POLL_S)


def _wait_for_signal(awaited: set[signal.Signals], timeout_s: float | None) -> int | None:
    if timeout_s is None:
        return signal.sigwait(awaited)
    if sys.platform == "linux":
        received = signal.sigtimedwait(awaited, timeout_s)
        return None if received is None else received.si_signo
    time.sleep(min(timeout_s, _POLL_S))
    return next(iter(signal.sigpending() & awaited), None)


def _reap() -> Iterator[tuple[int, int]]:
    """Yields the children that have ended, with their exit codes as ``subprocess`` has them."""
    while True:
        try:
            process_id, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if process_id == 0:
            return
        yield process_id, os.waitstatus_to_exitcode(status)


def _has_children() -> bool:
    for _ in _reap():
        pass
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _list_children() -> set[int]:
    """Lists this process's children; source: proc(5), /proc/pid/stat, whose second field may hold blanks."""
    own, children = os.getpid(), set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == own:
            children.add(int(folder.name))
    return children


def _send(process_ids: Mapping[int, int] | set[int], which: signal.Signals) -> None:
    for process_id in process_ids:
        # Not yet waited for, so the number is still this child's, though it may have ended.
        os.kill(process_id, which)


def report_failed_ranks(failures: Sequence[RankExit], told_to: Path, *, started_s: float) -> int:
    """Names a rank ended by a signal, where it is the cause; returns the exit code of the cause.

    ``started_s``: of the run, in seconds since the epoch; an older ``error.json`` is another run's.
    """
    stated = read_stated_error(told_to, since_s=started_s)
    # A rank that had said why may be asked to end before it has: a peer that lost it can be the faster one.
    failures = [stated if stated and stated.global_rank == failure.global_rank else failure for failure in failures]
    culprit = find_culprit(failures)
    if culprit.code < 0:
        message = f"rank {culprit.global_rank} was ended by {describe_signal(culprit.code)}"
        print_message(message)
        for problem in write_error(told_to, message, code=culprit.code, global_rank=culprit.global_rank):
            print_message(problem)
    return meant_exit_code(culprit.code)


def write_error(
    told_to: Path, message: str, *, code: int, global_rank: int | None, cwd: Path | None = None
) -> list[str]:
    """Writes a signal's end to the folder of the run; returns lines to say."""
    problem = write_signal_error((cwd or Path()) / told_to, message, code=code, global_rank=global_rank)
    return [] if problem is None else [problem]
