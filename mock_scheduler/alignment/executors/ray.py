"""Runs as jobs of a Ray cluster, by the interface of its dashboard.

Contract: Ray is imported where such a cluster is made, and nowhere else; this process joins no cluster. A job is placed
on any node with the resources that it asks for, and runs there alone. Ray keeps a job's log on the node that it ran on.
"""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mock_scheduler.alignment.executors.protocol import ClusterError, JobState, Submission
from mock_scheduler.config.executor import RayExecutorConfig
from mock_scheduler.errors import AlignmentError, ConfigError

T = TypeVar("T")

_KEY = "align.executor"
_ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
_UNKNOWN = "status code 404"
_WAITED_TOO_LONG = "failed to start within"


def build_ray(config: RayExecutorConfig) -> RayCluster:
    """Builds the cluster; raises ``ConfigError`` where Ray is missing or the dashboard does not answer."""
    try:
        jobs = importlib.import_module("ray.job_submission")
        errors = importlib.import_module("ray.exceptions")
    except ImportError as error:
        raise ConfigError(
            f"{_KEY}.kind is ray, which needs Ray: install the extra, pip install 'mock-scheduler[ray]' ({error})"
        ) from error
    address = config.address or os.environ.get(_ADDRESS_VARIABLE)
    if not address:
        raise ConfigError(
            f"{_KEY}.address is not set, nor is {_ADDRESS_VARIABLE}; name the dashboard, http://HOST:8265"
        )
    try:
        client = jobs.JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError, errors.RayError) as error:
        raise ConfigError(f"{_KEY}.address: no Ray dashboard answers there: {error}") from error
    missing = [name for name in config.env if name not in os.environ]
    if missing:
        raise ConfigError(f"{_KEY}.env names {', '.join(missing)}, which this process does not have")
    return RayCluster(config=config, client=client, address=address)


@dataclass(frozen=True, kw_only=True, slots=True)
class RayCluster:
    """Jobs of a Ray cluster: a ``Cluster``. ``client``: Ray's ``JobSubmissionClient``."""

    config: RayExecutorConfig
    client: Any
    address: str
    name: str = "ray"

    def submit(self, job: Submission) -> str:
        """Submits it under a name made of its token, as ``Cluster`` says."""
        job_id = _name_job(job.token)
        if self.find(job.token, job.log_dir) is not None:
            return job_id  # it arrived, and only the answer did not
        try:
            _ask(
                lambda: self.client.submit_job(
                    entrypoint=shlex.join(job.command),
                    submission_id=job_id,
                    runtime_env=self._build_environment(job),
                    metadata={"run": job.name},
                    entrypoint_num_cpus=self.config.cpus_per_process * job.num_processes,
                    entrypoint_num_gpus=self.config.gpus_per_process * job.num_processes or None,
                    entrypoint_resources=dict(self.config.resources) or None,
                )
            )
        except RuntimeError as error:
            raise AlignmentError(f"ray refused the job of {job.name}: {error}") from error
        return job_id

    def find(self, token: str, log_dir: Path) -> str | None:
        """Finds a job by its name."""
        return _name_job(token) if self._read(_name_job(token)) is not None else None

    def read_state(self, job_id: str) -> JobState:
        """Reads the state that the dashboard tells."""
        info = self._read(job_id)
        if info is None:
            return JobState(phase="lost", detail="ray does not know it")
        status, message = str(info.status.value), (info.message or "").strip()
        if status in ("PENDING", "RUNNING"):
            return JobState(phase="running" if status == "RUNNING" else "waiting", detail=status)
        detail = f"{status}: {message.splitlines()[0]}" if message else status
        if status == "STOPPED":
            return JobState(phase="ended", detail=detail)
        # Ray fails a job that nobody had room for; that is no fault of a node.
        return JobState(phase="unplaced" if _WAITED_TOO_LONG in message else "lost", detail=detail)

    def cancel(self, job_id: str) -> None:
        """Stops a job."""
        if self._read(job_id) is not None:
            _ask(lambda: self.client.stop_job(job_id))

    def find_log(self, job_id: str, log_dir: Path) -> tuple[str, str]:
        """Asks for a job's log; it is gone with the node."""
        try:
            text = str(_ask(lambda: self.client.get_job_logs(job_id)))
        except (ClusterError, RuntimeError) as error:
            text = f"(ray does not give it: {error})"
        return f"what `ray job logs --address {self.address} {job_id}` prints", text

    def _build_environment(self, job: Submission) -> dict[str, Any]:
        given = dict(self.config.runtime_env)
        path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
        own = {"PYTHONPATH": path, **{name: os.environ[name] for name in self.config.env}}
        return {**given, "env_vars": {**own, **given.get("env_vars", {})}}

    def _read(self, job_id: str) -> Any:  # noqa: ANN401 - Ray's JobDetails
        try:
            return _ask(lambda: self.client.get_job_info(job_id))
        except RuntimeError as error:
            if _UNKNOWN in str(error):
                return None
            raise ClusterError(str(error)) from error


def _name_job(token: str) -> str:
    return f"mock-scheduler-{token}"


def _ask(question: Callable[[], T]) -> T:
    """Asks the dashboard; raises ``RuntimeError`` where it refuses, ``ClusterError`` where it does not answer."""
    try:
        return question()
    except OSError as error:  # requests' errors of connections are such
        raise ClusterError(str(error)) from error
