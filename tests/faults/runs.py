"""Which trainings the catalogue needs, and their processes: one group for all of a world size, judged as they end.

Runs that must not be changed are made together: all faults that must be silent in one layout are put in at once, and
one by one only where that run is not equal to the clean one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from mock_scheduler.launch.ranks import Place, ranks_command
from tests.faults.cases import world_size
from tests.faults.fault import Fault, Run
from tests.faults.worker import DONE_FILE, Job, Outcome

_QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_POLL_S = 0.2


class WorkerError(RuntimeError):
    """The processes of one world size ended before their jobs; the message has the end of what they said."""


def without_allowance(run: Run) -> Run:
    """The run without permission for what is known to be wrong, which changes nothing where it is not."""
    kept = [name for name in run.option.split("+") if not name.startswith("allow-")]
    return replace(run, option="+".join(kept) or "plain")


def silent_groups(faults: Sequence[Fault]) -> dict[Run, list[Fault]]:
    """The faults by the run that they must not change."""
    groups: dict[Run, list[Fault]] = {}
    for fault in faults:
        groups.setdefault(fault.silent, []).append(fault)
    return groups


def run_jobs(jobs: Sequence[Job]) -> Iterator[tuple[Job, Outcome]]:
    """Train jobs of any world sizes, smallest first, and give each with its outcome as soon as it has ended.

    Raises ``WorkerError``.
    """
    by_size: dict[int, list[Job]] = {}
    for job in jobs:
        by_size.setdefault(world_size(job.run), []).append(job)
    for size, group in sorted(by_size.items()):
        yield from _run_group(size, group)


def _run_group(size: int, jobs: Sequence[Job]) -> Iterator[tuple[Job, Outcome]]:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        jobs_file, log = Path(folder) / "jobs.json", Path(folder) / "log.txt"
        jobs_file.write_text(json.dumps([asdict(job) for job in jobs]), encoding="utf-8")
        program = ["-m", "tests.faults.worker", str(jobs_file)]
        command = ranks_command(sys.executable, program, told_to=folder, place=Place(num_local=size))
        environ = {**os.environ, **_QUIET}
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(command, env=environ, stdout=output, stderr=output)
        try:
            for job in jobs:
                yield job, _wait(process, Path(job.folder) / DONE_FILE, log)
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def _wait(process: subprocess.Popen[bytes], done: Path, log: Path) -> Outcome:
    while not done.is_file():
        if process.poll() is not None and not done.is_file():
            raise WorkerError(f"{done.parent} was not trained:\n{log.read_text(encoding='utf-8')[-3000:]}")
        time.sleep(_POLL_S)
    return Outcome(**json.loads(done.read_text(encoding="utf-8")))
