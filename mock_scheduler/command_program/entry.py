"""Runs one command with its run file: ``python -m mock_scheduler.command_program.entry --config-name NAME ...``.

Contract: a command that ends well must have written ``run.json`` by ``megatron.attach``, of the layout and the last
step that were asked for; else ``error.json`` says what is missing. Exit codes of a foreign program mean nothing here,
since 1 to 5 are ours: without an ``error.json`` every one becomes 70. Imports no torch.

The command's processes form a group of their own. A signal to this process goes on to the group once; orphans of the
command are ended by the supervisor of this process (``launch.ranks``). A job that a launcher submitted elsewhere is
ended by the command's ``cancel``. The processes are no ranks of ours: they get none of our variables of a rank.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mock_scheduler.command_program.command import Command, build_command
from mock_scheduler.command_program.config import CommandConfig
from mock_scheduler.command_program.loading import build_loader
from mock_scheduler.config.instruments import RUN_FILE_VARIABLE
from mock_scheduler.config.loading import dump_config, parse_config_arguments
from mock_scheduler.config.variables import RANK_VARIABLES
from mock_scheduler.errors import AlignmentError, ConfigError, ExitCode, LayoutError, MockSchedulerError
from mock_scheduler.run_folder.finished_run import RunSummary, load_failure, load_summary
from mock_scheduler.support.files import save_json, save_text
from mock_scheduler.support.loaded_code import STARTED_IN_VARIABLE
from mock_scheduler.support.local_key import mark_own
from mock_scheduler.support.processes import PARENT_VARIABLE, describe_signal, handling_signals, write_signal_error
from mock_scheduler.support.run_files import COMMAND_FILE, ERROR_FILE, RUN_FILE
from mock_scheduler.support.terminal_streams import guarded_terminal, print_message

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
    kept = {name: text for name, text in environ.items() if name not in own}
    return {**kept, STARTED_IN_VARIABLE: os.getcwd(), **command.env}


@dataclass(kw_only=True, slots=True)
class _Running:
    """A command that has been started."""

    command: Command
    process: subprocess.Popen[bytes]
    was_asked_to_end: bool = False

    def passing_signals_on(self) -> AbstractContextManager[None]:
        """Passes signals to this process on to the command's group; an ignored signal stays ignored."""

        def pass_on(number: int, _frame: FrameType | None) -> None:
            self.was_asked_to_end = True
            self._send(signal.Signals(number))

        return handling_signals(_SIGNALS, pass_on)

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


#: Runs a command to its end, within so many seconds; returns its exit code, minus a signal's number.
Start = Callable[[Command, float | None], int]

_NAME = "mock_scheduler.command_program.entry"
_TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command of a configuration; returns the exit code of the run."""
    with guarded_terminal():
        source = parse_config_arguments(sys.argv[1:] if arguments is None else arguments, prog=_NAME)
        config = build_loader(source.config_name, source.config_path)(source.overrides)
        return run_command(config, folder=Path(source.config_path).absolute())


def run_command(config: CommandConfig, *, folder: Path, start: Start | None = None) -> int:
    """Writes the run file, runs the command to its end, and checks its files.

    ``start`` runs it to its end within so many seconds; ``None``: as processes.
    """
    command = build_command(config, folder=folder, python=sys.executable)
    if config.nodes == 1 and opens_a_port(config.command):
        print_message(
            "warning: torchrun listens on every address of this machine while the run lasts, and runs the code that "
            "anybody sends there; start ranks by {ranks} as the first word of command, in place of torchrun and its "
            "options: command: ['{ranks}', train.py]"
        )
    output_dir = command.run_file.parent
    try:
        _prepare(_place(config, command, folder), command, output_dir)
        code = (start or run_to_end)(command, config.timeout_s)
        if code != 0:
            return _report_failure(command, output_dir, code)
        check_finished(config, output_dir)
    except MockSchedulerError as error:
        return _fail(output_dir, error)
    return 0


def opens_a_port(words: Sequence[str]) -> bool:
    """Says whether a command starts its ranks by torchrun, under any of its names."""
    return any(Path(word).name == "torchrun" or word in _TORCHRUN_MODULES for word in words)


def check_finished(config: CommandConfig, output_dir: Path) -> None:
    """Checks the files of a command that has ended well.

    Raises:
        AlignmentError: nothing was attached, or the run ended before its last step.
        LayoutError: the run had another layout.
    """
    if not (output_dir / RUN_FILE).is_file():
        raise AlignmentError(
            f"the command ended with exit code 0 and wrote no {RUN_FILE} to {output_dir}, so nothing was attached to "
            "it. Call run = megatron.attach(model_chunks, optimizer) (from mock_scheduler import megatron) once the "
            f"training has built both. Where it is called, {RUN_FILE_VARIABLE} did not reach the processes: a launcher "
            "for other machines must pass it on, as in [ray, job, submit, --, env, '{env}', '{command}']"
        )
    summary = load_summary(config.exp_name, output_dir, elapsed_s=None)
    asked = config.parallel.describe()
    if summary.layout != asked:
        raise LayoutError(
            f"the command trained with the layout {summary.layout}, and {asked} was asked for; check that arguments "
            "passes each axis, and that the command passes them on"
        )
    _check_steps(config, summary)


def _check_steps(config: CommandConfig, summary: RunSummary) -> None:
    last = config.max_steps - 1
    steps = sorted(map(int, summary.batches))
    if steps and steps[-1] < last:
        raise AlignmentError(
            f"the command ended after step {steps[-1]}, and max_steps={config.max_steps} asks for steps "
            f"{config.first_step} to {last}; let it train for longer, or set max_steps={steps[-1] + 1}"
        )


def _place(config: CommandConfig, command: Command, folder: Path) -> CommandConfig:
    """Writes places in full: the stored file lies in another folder than the one it was loaded from."""
    places = {
        "output_dir": str(command.run_file.parent),
        "working_dir": str(command.working_dir),
        "sources": [str(folder / name) for name in config.sources],
    }
    return config.model_copy(update=places)


def _prepare(config: CommandConfig, command: Command, output_dir: Path) -> None:
    if not command.working_dir.is_dir():
        raise ConfigError(f"working_dir: there is no folder {command.working_dir}")
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        # Left by an earlier run, they would speak for this one.
        for name in (RUN_FILE, ERROR_FILE):
            (output_dir / name).unlink(missing_ok=True)
        save_json(command.run_file, command.run.model_dump(mode="json"), sort_keys=False)
        save_text(output_dir / COMMAND_FILE, dump_config(config))
        mark_own(output_dir / COMMAND_FILE)
    except OSError as error:
        raise ConfigError(f"output_dir {output_dir} cannot be written: {error.strerror}; set another one") from error


def _report_failure(command: Command, output_dir: Path, code: int) -> int:
    """Says how the command failed, in the last line of the output; returns the exit code of the run."""
    words = command.shown_inner
    if code < 0:
        message = f"the command was ended by {describe_signal(code)}: {words}"
        print_message(message)
        write_signal_error(output_dir, message, code=code, global_rank=None)
        return 128 - code
    print_message(f"the command ended with exit code {code}: {words}")
    stated = load_failure(output_dir)
    code = 0 if stated is None else stated.exit_code
    return code if 0 < code < 256 else int(ExitCode.INTERNAL)


def _fail(output_dir: Path, error: MockSchedulerError) -> int:
    print_message(f"{type(error).__name__}: {error}")
    content = {"type": type(error).__name__, "message": str(error), "exit_code": int(error.exit_code)}
    try:
        save_json(output_dir / ERROR_FILE, {**content, "global_rank": None})
    except OSError as problem:
        print_message(f"{output_dir / ERROR_FILE} cannot be written: {problem.strerror}")
    return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
