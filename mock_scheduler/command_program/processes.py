"""Runs a command's processes to their end, and ends them where this process is asked to end.

The processes form a group of their own. A signal to this process goes on to the group once; orphans of the command are
ended by the supervisor of this process (``launch.ranks``). A job that a launcher submitted elsewhere is ended by the
command's ``cancel``.

Contract: imports no torch. The command's processes are no ranks of ours: they get none of our variables of a rank.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from mock_scheduler.command_program.command import Command
from mock_scheduler.config.variables import RANK_VARIABLES
from mock_scheduler.errors import AlignmentError, ConfigError
from mock_scheduler.support.processes import PARENT_VARIABLE
from mock_scheduler.support.terminal_streams import print_message

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# The supervisor kills this process 30 s after it asked it to end.
_GRACE_S = 15.0
_CANCEL_S = 10.0


def run_to_end(command: Command, timeout_s: float | None) -> int:
    """Starts a command and waits; returns its exit code, minus a signal's number.

    Raises:
        ConfigError: it cannot be started.
        AlignmentError: it had not ended after ``timeout_s`` seconds, and was ended.
    """
    print_message(f"{command.working_dir}$ {command.shown}")
    running = _Running(command=command, process=_start(command))
    with running.passing_signals_on():
        code = running.wait(timeout_s)
    if running.was_asked_to_end:
        running.cancel()
    return code


def _start(command: Command) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command.words,
            cwd=command.working_dir,
            env=_child_environment(command, os.environ),
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
    except OSError as error:
        raise ConfigError(f"command: {command.words[0]!r} cannot be started: {error.strerror}") from error


def _child_environment(command: Command, environ: Mapping[str, str]) -> dict[str, str]:
    own = {*RANK_VARIABLES, PARENT_VARIABLE}
    return {**{name: text for name, text in environ.items() if name not in own}, **command.env}


@dataclass(kw_only=True, slots=True)
class _Running:
    """A command that has been started."""

    command: Command
    process: subprocess.Popen[bytes]
    was_asked_to_end: bool = False

    @contextmanager
    def passing_signals_on(self) -> Iterator[None]:
        """Passes signals to this process on to the command's group; an ignored signal stays ignored."""

        def pass_on(number: int, _frame: FrameType | None) -> None:
            self.was_asked_to_end = True
            self._send(signal.Signals(number))

        handled = [which for which in _SIGNALS if signal.getsignal(which) != signal.SIG_IGN]
        previous = {which: signal.signal(which, pass_on) for which in handled}
        try:
            yield
        finally:
            for which, handler in previous.items():
                signal.signal(which, handler)

    def wait(self, timeout_s: float | None) -> int:
        """Waits for the end, for so many seconds at most."""
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._end()
            raise AlignmentError(
                f"the command had not ended after {timeout_s:g} s (timeout_s), so it was ended; a rank may wait for "
                "another one that has failed, or the steps take longer"
            ) from None

    def cancel(self) -> None:
        """Ends a job elsewhere, as the configuration says."""
        if not self.command.cancel:
            return
        try:
            subprocess.run(self.command.cancel, stdin=subprocess.DEVNULL, timeout=_CANCEL_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            print_message(f"cancel failed: {reason}")

    def _end(self) -> None:
        self._send(signal.SIGTERM)
        try:
            self.process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            self._send(signal.SIGKILL)
            self.process.wait()
        self.cancel()

    def _send(self, which: signal.Signals) -> None:
        """Sends a signal to the whole group, as long as its leader has not been waited for."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, which)
