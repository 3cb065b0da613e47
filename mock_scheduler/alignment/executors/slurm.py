"""Runs as jobs of Slurm, through submitit; or, to try a configuration, as processes that submitit starts here.

Contract: submitit is imported where such a cluster is made, and nowhere else. The state of a job is Slurm's own
(``squeue``), which a cluster without an accounting database has too; a job's comment is its token.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from mock_scheduler.alignment.executors.protocol import ClusterError, JobState, Submission
from mock_scheduler.config.executor import SlurmExecutorConfig
from mock_scheduler.errors import AlignmentError, ConfigError
from mock_scheduler.launch.job import run_text
from mock_scheduler.support.foreign_files import read_bytes, read_tail
from mock_scheduler.support.processes import is_alive

_KEY = "align.executor"
_TOOLS = ("sbatch", "srun", "squeue", "scancel")
_ASK_S = 60.0
_NUM_LOG_LINES = 200
# Of the layout or of this section; submitit would take them too.
_OWN_PARAMETERS = frozenset(
    {"name", "nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node", "timeout_min", "slurm_comment", "slurm_time"}
)
_RUNNING = frozenset({"RUNNING", "COMPLETING", "STAGE_OUT", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"})
_LOST = frozenset({"BOOT_FAIL", "COMPLETED", "FAILED", "NODE_FAIL", "PREEMPTED", "REVOKED"})
# Another attempt would meet the same.
_ENDED = frozenset({"CANCELLED", "DEADLINE", "OUT_OF_MEMORY", "TIMEOUT"})


def build_slurm(config: SlurmExecutorConfig) -> SlurmCluster | SubmititProcesses:
    """Builds the cluster; raises ``ConfigError`` for a configuration by which nothing could be submitted."""
    try:
        submitit = importlib.import_module("submitit")
    except ImportError as error:
        raise ConfigError(
            f"{_KEY}.kind is slurm, which needs submitit: install the extra, pip install 'mock-scheduler[slurm]'"
        ) from error
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if config.cluster == "slurm" and missing:
        raise ConfigError(f"{_KEY}.kind is slurm, and {', '.join(missing)} is not on this machine's path")
    own = _OWN_PARAMETERS & config.parameters.keys()
    if own:
        raise ConfigError(
            f"{_KEY}.parameters has {', '.join(sorted(own))}: what a job asks for follows from its layout, by "
            f"{_KEY}.cpus_per_process, {_KEY}.gpus_per_process and {_KEY}.timeout_min"
        )
    try:
        with tempfile.TemporaryDirectory(prefix="mock-scheduler-") as folder:
            _build_executor(submitit, config, Path(folder), num_processes=1)
    except (AssertionError, NameError, TypeError, ValueError) as error:
        raise ConfigError(f"{_KEY}.parameters: submitit refuses them: {error}") from error
    if config.cluster == "local":
        return SubmititProcesses(config=config, submitit=submitit)
    return SlurmCluster(config=config, submitit=submitit)


def _build_executor(submitit: ModuleType, config: SlurmExecutorConfig, folder: Path, *, num_processes: int) -> Any:  # noqa: ANN401 - submitit's
    executor = submitit.AutoExecutor(folder=folder, cluster=config.cluster)
    gpus = {"gpus_per_node": config.gpus_per_process * num_processes} if config.gpus_per_process else {}
    executor.update_parameters(
        nodes=1,
        tasks_per_node=1,
        cpus_per_task=config.cpus_per_process * num_processes,
        timeout_min=config.timeout_min,
        **gpus,
        **config.parameters,
    )
    return executor


@dataclass(kw_only=True, slots=True)
class SlurmCluster:
    """Jobs of Slurm: a ``Cluster``. Slurm itself starts a job again whose node is lost."""

    config: SlurmExecutorConfig
    submitit: ModuleType
    name: str = "slurm"
    _jobs: dict[str, list[str]] = field(default_factory=dict)
    _read_s: float = float("-inf")
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def submit(self, job: Submission) -> str:
        """Submits it with ``sbatch``, as ``Cluster`` says."""
        folder = _attempt_folder(job.log_dir, job.token)
        executor = _build_executor(self.submitit, self.config, folder, num_processes=job.num_processes)
        further = {"requeue": True, **self.config.parameters.get("slurm_additional_parameters", {})}
        executor.update_parameters(name=job.name, slurm_comment=job.token, slurm_additional_parameters=further)
        try:
            submitted = executor.submit(run_text, job.text)
        except (self.submitit.core.utils.FailedJobError, self.submitit.core.utils.FailedSubmissionError) as error:
            raise AlignmentError(f"slurm refused the job of {job.name}: {error}") from error
        with self._lock:
            self._read_s = float("-inf")
        return str(submitted.job_id)

    def find(self, token: str, log_dir: Path) -> str | None:
        """Finds a job by its comment."""
        return next((job_id for job_id, row in self._list_jobs().items() if row[-1] == token), None)

    def read_state(self, job_id: str) -> JobState:
        """Reads the state that ``squeue`` tells, of all jobs at once."""
        row = self._list_jobs().get(job_id)
        if row is None:
            return JobState(phase="lost", detail="slurm does not know it any more")
        state, reason = row[0], row[1]
        detail = f"{state} ({reason})" if reason not in ("", "None") else state
        if state in _LOST:
            return JobState(phase="lost", detail=detail)
        if state in _ENDED:
            return JobState(phase="ended", detail=detail)
        return JobState(phase="running" if state in _RUNNING else "waiting", detail=detail)

    def cancel(self, job_id: str) -> None:
        """Cancels a job with ``scancel``."""
        _call(["scancel", job_id])

    def find_log(self, job_id: str, log_dir: Path) -> tuple[str, str]:
        """Finds the file with the job's output."""
        return _find_log(job_id, log_dir)

    def _list_jobs(self) -> dict[str, list[str]]:
        """Lists all jobs of this user by their numbers: state, reason, comment."""
        with self._lock:
            if time.monotonic() - self._read_s > self.config.poll_s / 2:
                text = _call(["squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r|%k"])
                rows = (line.strip().split("|") for line in text.splitlines() if line.count("|") == 3)
                self._jobs = {row[0]: row[1:] for row in rows}
                self._read_s = time.monotonic()
            return self._jobs


@dataclass(kw_only=True, slots=True)
class SubmititProcesses:
    """Processes of this machine that submitit starts in Slurm's place: a ``Cluster``. A job's number is a process."""

    config: SlurmExecutorConfig
    submitit: ModuleType
    name: str = "submitit"
    _processes: dict[str, Any] = field(default_factory=dict)

    def submit(self, job: Submission) -> str:
        """Starts it, as ``Cluster`` says."""
        folder = _attempt_folder(job.log_dir, job.token)
        executor = _build_executor(self.submitit, self.config, folder, num_processes=job.num_processes)
        submitted = executor.submit(run_text, job.text)
        self._processes[str(submitted.job_id)] = submitted
        return str(submitted.job_id)

    def find(self, token: str, log_dir: Path) -> str | None:
        """Finds a job by the file that submitit wrote for it."""
        found = _attempt_folder(log_dir, token).glob("*_submitted.pkl")
        return next((path.name.partition("_")[0] for path in found), None)

    def read_state(self, job_id: str) -> JobState:
        """Reads whether the process runs."""
        own = self._processes.get(job_id)
        is_running = own.state == "RUNNING" if own is not None else _is_controller(job_id)
        return (
            JobState(phase="running", detail="running") if is_running else JobState(phase="lost", detail="it is gone")
        )

    def cancel(self, job_id: str) -> None:
        """Interrupts the process, as submitit does."""
        if not self.read_state(job_id).is_over:
            with suppress(ProcessLookupError):
                os.kill(int(job_id), signal.SIGINT)

    def find_log(self, job_id: str, log_dir: Path) -> tuple[str, str]:
        """Finds the file with the job's output."""
        return _find_log(job_id, log_dir)


def _is_controller(job_id: str) -> bool:
    if not job_id.isdecimal() or not is_alive(int(job_id)):
        return False
    with suppress(OSError):
        return b"submitit.local._local" in read_bytes(f"/proc/{job_id}/cmdline")
    return False


def _attempt_folder(log_dir: Path, token: str) -> Path:
    return log_dir / token[:12]


def _find_log(job_id: str, log_dir: Path) -> tuple[str, str]:
    found = [path for path in sorted(log_dir.glob(f"*/{job_id}_*_log.*")) if path.is_file()]
    texts = [read_tail(path, _NUM_LOG_LINES, inside=log_dir) for path in found]
    return ", ".join(map(str, found)) or str(log_dir), "\n".join(text for text in texts if text)


def _call(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise ClusterError(f"{command[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
