"""Several runs go one after another in one process group, as ``python -m pipelines.session PLAN.json``.

Imports and the rendezvous cost more than the steps of a short run; here they are paid once. Each run is as whole as
under ``pipelines.agentic``: it leaves the same files with the same bits, its error is its own, and its terminal output
is in its ``log_path``. A status in its ``output_dir`` says when it started and how it ended
(``mock_scheduler.launch.sessions``).

Contract: all runs have the same number of processes and equal ``system_envs``; others are refused before anything
starts. After a run that ended with the same exit code on every rank the next one follows; otherwise the session ends
with the run's exit code, and the rest is for another session. Exit code 0 means that every run was made, and says
nothing of its success.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.determinism.environment import check_unchanged
from mock_scheduler.errors import ConfigError, ExitCode, LayoutError
from mock_scheduler.launch.sessions import RunStatus, SessionRun, check_session, read_plan, write_status
from mock_scheduler.support.processes import end_with_parent
from mock_scheduler.support.run_output import report_failure
from mock_scheduler.support.terminal_streams import guarded_terminal
from pipelines.agentic import apply_environment, attempt_run, check_replay_is_deterministic
from pipelines.config.loading import load_source
from pipelines.config.schema import PipelineConfig

_TERMINAL = (1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Planned:
    """A run with its configuration, or with the error of loading it, to be reported as the run's own failure."""

    run: SessionRun
    config: PipelineConfig | ConfigError

    def load(self) -> PipelineConfig:
        if isinstance(self.config, ConfigError):
            raise self.config
        return self.config


def main(arguments: Sequence[str] | None = None, *, prepare: Callable[[], None] = lambda: None) -> int:
    """Makes the runs of a plan in this process, one of the plan's; returns its exit code.

    ``prepare`` is called once, after the environment was applied and before the pipeline is imported. An error that
    keeps the session from starting is reported as the first run's failure.
    """
    with guarded_terminal():
        return _run(arguments, prepare)


def _run(arguments: Sequence[str] | None, prepare: Callable[[], None]) -> int:
    end_with_parent(os.environ)
    started_s = time.time()
    first_dir: Path | None = None
    try:
        runs = read_plan(_plan_path(sys.argv[1:] if arguments is None else arguments))
        first_dir = runs[0].output_dir
        planned = [_load(run) for run in runs]
        _start(planned, prepare)
        first_dir = None  # from here on an error is a run's, or the session's own
        return _make_runs(planned)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - the edge of the process, as in ``pipelines.agentic``
        return report_failure(error, first_dir, global_rank=_global_rank(), started_s=started_s)


def _plan_path(arguments: Sequence[str]) -> Path:
    if len(arguments) != 1:
        raise ConfigError(
            f"python -m pipelines.session takes one argument, the file of a plan, found {len(arguments)}: "
            f"{' '.join(arguments) or 'none'}"
        )
    return Path(arguments[0])


def _global_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _load(run: SessionRun) -> _Planned:
    try:
        return _Planned(run=run, config=load_source(run.source))
    except ConfigError as error:
        return _Planned(run=run, config=error)


def _start(planned: Sequence[_Planned], prepare: Callable[[], None]) -> None:
    """Refuses runs that cannot share processes, applies the environment, imports the pipeline and joins the group."""
    configs = [item.config if isinstance(item.config, PipelineConfig) else None for item in planned]
    check_session([item.run for item in planned], configs)
    first = next((config for config in configs if config is not None), None)
    if first is None:
        return
    _check_processes(first)
    apply_environment(first.system_envs)
    prepare()
    # Imported here, since torch and Megatron read the environment when they are imported.
    from pipelines.megatron.process_of_rank import join_group

    join_group()


def _check_processes(config: PipelineConfig) -> None:
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if config.parallel.world_size != started:
        raise LayoutError(
            f"the session's runs need {config.parallel.world_size} processes each, but {started} were started; start "
            "it as mock_scheduler.launch.launcher.plan_session plans it"
        )


def _make_runs(planned: Sequence[_Planned]) -> int:
    settings = _read_settings()
    for number, item in enumerate(planned):
        exit_code, may_go_on = _make_run(number, item)
        if not may_go_on:
            return exit_code or int(ExitCode.INTERNAL)
        # What could not be given back would be in the next run's results.
        check_unchanged(settings, _read_settings())
    _stop()
    return 0


def _read_settings() -> dict[str, str]:
    """Reads the settings in effect in this process; nothing before torch was imported."""
    if "torch" not in sys.modules:
        return {}
    from mock_scheduler.determinism.guard import read_back

    return read_back(os.environ)


def _make_run(number: int, item: _Planned) -> tuple[int, bool]:
    """One run; returns its exit code and whether another may follow in this process group."""
    started_s, started = time.time(), time.perf_counter()
    output_dir, is_writer = item.run.output_dir, _global_rank() == 0
    if is_writer:
        write_status(output_dir, RunStatus(started_s=started_s))
    with terminal_to(item.run.log_path):
        exit_code, is_alike, may_go_on = _attempt(number, item)
    if is_writer and is_alike:
        elapsed_s = time.perf_counter() - started
        write_status(output_dir, RunStatus(started_s=started_s, elapsed_s=elapsed_s, exit_code=exit_code))
    return exit_code, may_go_on


def _attempt(number: int, item: _Planned) -> tuple[int, bool, bool]:
    """One run; returns its exit code, whether it is that of all ranks, and whether another may follow."""
    if isinstance(item.config, ConfigError):  # on every rank, and before anything communicated
        return attempt_run(item.load, check=check_replay_is_deterministic, run=_run_pipeline), True, True
    # Imported here as in ``_start``.
    from pipelines.megatron.process_of_rank import has_ended_alike, is_group_whole, process_as_found

    with process_as_found():
        exit_code = attempt_run(item.load, check=check_replay_is_deterministic, run=_run_pipeline)
    is_alike = has_ended_alike(number, exit_code)
    return exit_code, is_alike, is_alike and (exit_code == 0 or is_group_whole())


def _run_pipeline(config: PipelineConfig) -> None:
    from pipelines.run import run_pipeline

    run_pipeline(config, in_group=True)


def _stop() -> None:
    """Leave the process group, where it was joined."""
    if "torch" in sys.modules:
        from pipelines.megatron.process_of_rank import stop_runtime

        stop_runtime()


@contextmanager
def terminal_to(path: Path) -> Iterator[None]:
    """Appends the output of this process, its libraries and its children to a file, and gives the terminal back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _flush()
    kept = [os.dup(descriptor) for descriptor in _TERMINAL]
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for descriptor in _TERMINAL:
        os.dup2(log, descriptor)
    os.close(log)
    try:
        yield
    finally:
        _flush()
        for descriptor, terminal in zip(_TERMINAL, kept, strict=True):
            os.dup2(terminal, descriptor)
            os.close(terminal)


def _flush() -> None:
    """Writes out the text that Python and C still hold, to where it was printed to."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)


if __name__ == "__main__":
    sys.exit(main())
