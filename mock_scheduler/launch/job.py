"""One job of a cluster carries out one run: ``python -P -m mock_scheduler.launch.job JOB``, with a ``Job`` as JSON.

Whoever submits a job keeps a ``JobRecord`` in the run's folder. The job starts only where that record still names it,
so of two submissions of one run the earlier one does nothing. When the run has ended, well or not, the job leaves a
``JobEnd``: a job that a cluster calls over and that left none was lost, with its node or by a signal. A job that the
cluster starts again (Slurm's requeue) removes what its first start left, and does not repeat a run that has ended.

Contract: imports no torch. An attempt holds a lock as long as any of its processes that start ranks lives, and the next
attempt waits for it. No secret is in a ``Job``: the run's configuration is loaded on the node.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from mock_scheduler.config.base import ConfigSection, Decides
from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.determinism.settings import is_documented, is_per_node, recorded_names
from mock_scheduler.errors import ExitCode, MockSchedulerError
from mock_scheduler.launch.launcher import plan_launch, run_plan
from mock_scheduler.program import find_program
from mock_scheduler.support.digests import compute_json_digest
from mock_scheduler.support.files import rename_away, save_json, save_text
from mock_scheduler.support.foreign_files import read_text
from mock_scheduler.support.hardware import read_hardware
from mock_scheduler.support.run_files import ERROR_FILE, JOB_FOLDER, LOG_FILE
from mock_scheduler.support.sources import digest_sources
from mock_scheduler.support.terminal_streams import print_message

MODULE = "mock_scheduler.launch.job"
RECORD_FILE = "job.json"

_LOCK_FILE = "lock"
# The processes of a lost node end with it, and its locks some time later; one that only seems lost may go on.
_PATIENCE_S = 300.0
_LOOK_S = 0.2
_REPLACED_S = 3.0


class Job(ConfigSection):
    """Holds one job. ``token``: of this attempt. ``output_dir``: of the run; all paths are absolute.

    ``entry``, ``python``, ``env``: as a planned run has them. ``settings``: variables that decide bits, as whoever
    submitted it has them, so that no node has values of its own; ``None``: not set. ``clears``: further folders that
    the run writes anew. ``working_dir``: of whoever submitted it. ``sources``: folders of the project's packages, and
    ``code`` the digest of what lay there: a queue may take hours, and a run of other code would be another run.
    """

    decides: ClassVar = Decides.LABEL

    token: str
    config_name: str
    config_path: str
    overrides: tuple[str, ...]
    entry: str
    python: str
    env: dict[str, str]
    settings: dict[str, str | None]
    output_dir: str
    clears: tuple[str, ...]
    working_dir: str
    sources: tuple[str, ...]
    code: str

    @property
    def folder(self) -> Path:
        """Returns the folder of the job's own files."""
        return Path(self.output_dir) / JOB_FOLDER


class JobRecord(ConfigSection):
    """Holds what is known of a run's job, in ``RECORD_FILE``.

    ``executor``: its cluster, in a word. ``key``: the digest of everything that decides the run. ``job_id``: of the
    cluster, ``None`` while it is submitted. ``attempt``: from 1. ``lost``: why each earlier attempt was lost.
    ``is_taken``: an alignment knows its end.
    """

    decides: ClassVar = Decides.LABEL

    executor: str
    key: str
    token: str
    job_id: str | None = None
    attempt: int = 1
    lost: tuple[str, ...] = ()
    is_taken: bool = False


class JobEnd(ConfigSection):
    """Holds how a run ended as a job: exit code, seconds without those in the queue, the node and its hardware."""

    decides: ClassVar = Decides.LABEL

    exit_code: int
    elapsed_s: float
    node: str
    hardware: dict[str, str]


def load_record(output_dir: Path) -> JobRecord | None:
    """Reads the record of a run's job; ``None`` where there is none that can be read."""
    try:
        path = output_dir / JOB_FOLDER / RECORD_FILE
        return JobRecord.model_validate_json(read_text(path, inside=output_dir, what="a job's record"))
    except (OSError, ValueError):
        return None


def load_end(output_dir: Path, token: str) -> JobEnd | None:
    """Reads how an attempt ended; ``None`` while it has not."""
    folder = output_dir / JOB_FOLDER
    with suppress(OSError):
        os.listdir(folder)  # or a network's file system goes on with what it knew of the folder
    try:
        return JobEnd.model_validate_json(
            read_text(folder / f"end-{token}.json", inside=output_dir, what="a job's end")
        )
    except (OSError, ValueError):
        return None


def run_job(job: Job) -> int:
    """Carries the run out, and says how it ended; returns its exit code.

    On SIGTERM, SIGINT or SIGHUP the run's processes are ended, no ``JobEnd`` is left, and the code is 130.
    """
    os.chdir(job.working_dir)
    for name in recorded_names(os.environ):
        if is_documented(name) and not is_per_node(name):
            os.environ.pop(name, None)
    for name, value in job.settings.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    output_dir = Path(job.output_dir)
    with _holding_lock(job) as descriptor:
        if descriptor is None:
            print_message(f"after {_PATIENCE_S:g} s an earlier attempt of this run still has processes that write")
            return int(ExitCode.INTERNAL)
        record = load_record(output_dir)
        if record is None or record.token != job.token:
            print_message("another attempt of this run has taken the place of this job, so it does nothing")
            return 0
        if (end := load_end(output_dir, job.token)) is not None:
            print_message("the run of this job has ended before; it is not repeated")
            return end.exit_code
        _clear(job)
        started_s = time.monotonic()
        is_over = threading.Event()
        threading.Thread(target=_end_if_replaced, args=(job, is_over), daemon=True).start()
        try:
            code = _run(job, descriptor)
        except KeyboardInterrupt:
            return 130
        finally:
            is_over.set()
        end = JobEnd(
            exit_code=code, elapsed_s=time.monotonic() - started_s, node=os.uname().nodename, hardware=read_hardware()
        )
        save_text(job.folder / f"end-{job.token}.json", end.model_dump_json())
    return code


def _end_if_replaced(job: Job, is_over: threading.Event) -> None:
    """Ends this process where another attempt has taken its place, or its folder was emptied."""
    num_absent = 0  # once may be the file system's fault
    while not is_over.wait(_REPLACED_S):
        record = load_record(Path(job.output_dir))
        num_absent = num_absent + 1 if record is None else 0
        if num_absent > 1 or (record is not None and record.token != job.token):
            os.kill(os.getpid(), signal.SIGTERM)
            num_absent = 0


def run_text(text: str) -> int:
    """Carries out a job that is given as JSON, as ``run_job``; for a cluster that calls functions.

    submitit would end the job shortly before its limit, and passes over SIGTERM. Slurm itself says that time was out.
    """
    for which in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(which, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return run_job(Job.model_validate_json(text))


def _run(job: Job, descriptor: int) -> int:
    if compute_json_digest(digest_sources(map(Path, job.sources))) != job.code:
        message = (
            f"the code in {', '.join(job.sources)} is another than when the job was submitted. Give the same command "
            "again: it makes the run with the code that lies there"
        )
        print_message(message)
        content = {"type": "CodeChanged", "message": message, "exit_code": int(ExitCode.INCOMPARABLE)}
        save_json(Path(job.output_dir) / ERROR_FILE, content)
        return int(ExitCode.INCOMPARABLE)
    source = ConfigSource(config_name=job.config_name, config_path=job.config_path, overrides=job.overrides)
    try:
        program = find_program(job.config_name, job.config_path)
        config = program.build_loader(job.config_name, job.config_path)(job.overrides)
        num_processes = program.num_processes(config)
        plan = plan_launch(config, program.arguments(job.entry, source), num_processes=num_processes, python=job.python)
    except MockSchedulerError as error:
        print_message(f"{type(error).__name__}: {error}")
        content = {"type": type(error).__name__, "message": str(error), "exit_code": int(error.exit_code)}
        save_json(Path(job.output_dir) / ERROR_FILE, content)
        return int(error.exit_code)
    plan = replace(plan, env={**plan.env, **job.env})
    return run_plan(plan, log_path=Path(job.output_dir) / LOG_FILE, inherited=(descriptor,))


@contextmanager
def _holding_lock(job: Job) -> Iterator[int | None]:
    """Waits until no earlier attempt writes; yields the descriptor by which a process goes on holding the lock.

    ``None``: one still does.
    """
    descriptor = os.open(job.folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        yield descriptor if _wait_for_lock(descriptor) else None
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int) -> bool:
    ends_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > ends_s:
                return False
            time.sleep(_LOOK_S)
        except OSError:
            return True  # no locks on this file system


def _clear(job: Job) -> None:
    """Removes what an earlier start of the run left, but for the job's own files and the log."""
    output_dir = Path(job.output_dir)
    kept = (JOB_FOLDER, LOG_FILE)
    found = [path for path in output_dir.iterdir() if path.name not in kept]
    for path in (*found, *map(Path, job.clears)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(rename_away(path))
        else:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(run_text(sys.argv[1]))
