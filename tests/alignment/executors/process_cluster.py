"""A cluster whose jobs are plain processes of this machine, for alignments that a driver in another process makes.

``python -m tests.alignment.executors.process_cluster FOLDER OPTIONS`` is such a driver of one run, ``quick_run``: it
prints what it says, and the exit code of the run. The run writes a line to ``started``, waits for the file ``go`` and
ends with the number in it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mock_scheduler.alignment.executors.jobs import ClusterLaunch
from mock_scheduler.alignment.executors.protocol import JobState, Submission
from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.config.executor import RayExecutorConfig
from pipelines.program import PROGRAM

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
QUICK_RUN = """
import pathlib, time
folder = pathlib.Path({folder!r})
with (folder / "started").open("a") as file:
    file.write("started\\n")
while not (folder / "go").exists():
    time.sleep(0.02)
raise SystemExit(int((folder / "go").read_text()))
"""


@dataclass(kw_only=True)
class ProcessCluster:
    """Its jobs outlive whoever submits them. submitted: numbers of jobs, in order."""

    name: str = "processes"
    submitted: list[str] = field(default_factory=list)

    def submit(self, job: Submission) -> str:
        """Starts a process in a session of its own."""
        with (job.log_dir / f"{job.token}.log").open("wb") as log:
            process = subprocess.Popen(job.command, stdout=log, stderr=log, start_new_session=True)
        (job.log_dir / f"{job.token}.pid").write_text(str(process.pid))
        self.submitted.append(str(process.pid))
        return str(process.pid)

    def find(self, token: str, log_dir: Path) -> str | None:
        """Finds a job by the file that it left."""
        path = log_dir / f"{token}.pid"
        return path.read_text() if path.is_file() else None

    def read_state(self, job_id: str) -> JobState:
        """A process that is gone was lost, unless the run's end is there."""
        with suppress(ChildProcessError):
            os.waitpid(int(job_id), os.WNOHANG)
        try:
            os.kill(int(job_id), 0)
        except ProcessLookupError:
            return JobState(phase="lost", detail="its process is gone")
        return JobState(phase="running", detail="running")

    def cancel(self, job_id: str) -> None:
        """Asks the process to end."""
        with suppress(ProcessLookupError):
            os.kill(int(job_id), signal.SIGTERM)

    def find_log(self, job_id: str, log_dir: Path) -> tuple[str, str]:
        """All logs of the run."""
        return str(log_dir), "".join(path.read_text() for path in sorted(log_dir.glob("*.log")))


def plan_run(folder: Path) -> PlannedRun:
    """Plans a run of the module ``quick_run``, which is written there."""
    (folder / "quick_run.py").write_text(QUICK_RUN.format(folder=str(folder)))
    overrides = (f"output_dir={folder / 'run'}",)
    return PlannedRun(
        program=PROGRAM,
        name="run",
        entry="quick_run",
        own_overrides=(),
        overrides=overrides,
        config=PROGRAM.build_loader("quickstart", CONFIGS)(overrides),
        output_dir=folder / "run",
        env={"PYTHONPATH": os.pathsep.join((str(ROOT), str(folder)))},
    )


def build_launch(cluster: Any, said: list[str], **options: Any) -> ClusterLaunch:
    """Builds what carries runs out on a cluster; ``options``: of the configuration."""

    def say(name: str, what: str) -> None:
        said.append(what)
        print(what, flush=True)

    return ClusterLaunch(
        cluster=cluster,
        config=RayExecutorConfig(kind="ray", **{"poll_s": 0.05, **options}),
        config_name="quickstart",
        config_path=CONFIGS,
        recording_dir=None,
        environ={"OMP_NUM_THREADS": "1"},
        say=say,
        visible_s=0.5,
    )


if __name__ == "__main__":
    planned = plan_run(Path(sys.argv[1]))
    driver = build_launch(ProcessCluster(), [], **dict(text.split("=") for text in sys.argv[2:]))
    driver.take_up(planned, "key")
    planned.output_dir.mkdir(exist_ok=True)
    print("exit code", driver(planned), flush=True)
