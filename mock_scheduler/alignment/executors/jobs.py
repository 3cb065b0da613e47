"""Runs are jobs of a cluster: submitted, awaited, submitted again where they were lost, and found by the next driver.

Contract: what is known of a job lies in the run's folder (``launch.job``) and is marked as this user's own, so nobody
else's record leads to a job. It is written before a job is submitted, and names its token, by which the cluster knows
it; so a driver that is killed at any time leaves a job that the next one finds, and no run is started while one of its
jobs waits or runs, or again when it has ended. One driver at a time works in an alignment's folder.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from mock_scheduler.alignment.executors.protocol import Cluster, ClusterError, JobState, Submission
from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.config.executor import ClusterExecutorConfig
from mock_scheduler.determinism.settings import is_documented, is_per_node, recorded_names
from mock_scheduler.errors import AlignmentError, ConfigError, ExitCode
from mock_scheduler.launch.job import RECORD_FILE, Job, JobEnd, JobRecord, load_end, load_record
from mock_scheduler.support.digests import compute_json_digest
from mock_scheduler.support.files import save_json, save_text
from mock_scheduler.support.foreign_files import read_tail
from mock_scheduler.support.local_key import is_own, mark_own
from mock_scheduler.support.processes import ending_signals_as_interrupt
from mock_scheduler.support.run_files import ERROR_FILE, JOB_FOLDER
from mock_scheduler.support.sources import digest_sources
from mock_scheduler.support.text import count_of

Answer = TypeVar("Answer")
#: Says something about a run, by its name, to whoever watches.
Say = Callable[[str, str], None]

_THREADS = "OMP_NUM_THREADS"
_NUM_LOG_LINES = 15
# Files of another machine appear late on a network's file system.
_VISIBLE_S = 20.0
# How long a cluster may not answer, and a cancelled job may take to end.
_PATIENCE_S = 300.0
_CANCEL_S = 60.0
_INTERRUPTED = 130


@dataclass(kw_only=True, slots=True)
class ClusterLaunch:
    """Carries runs of one configuration out as jobs, from any thread: a ``LaunchRun`` that ``OutlivesDriver``.

    Args:
        environ: Of the runs, as ``choose_environment`` gives it.
        visible_s: How long the files of a job that is over may take to appear here.
    """

    cluster: Cluster
    config: ClusterExecutorConfig
    config_name: str
    config_path: Path
    recording_dir: Path | None
    environ: Mapping[str, str]
    say: Say
    visible_s: float = _VISIBLE_S
    _keys: dict[Path, str] = field(default_factory=dict)
    _ends: dict[Path, JobEnd] = field(default_factory=dict)
    _is_interrupted: threading.Event = field(default_factory=threading.Event)
    _hardware: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __call__(self, run: PlannedRun) -> int:
        """Waits for the job of a run, which is submitted where none goes on; as a ``LaunchRun``."""
        is_main = threading.current_thread() is threading.main_thread()
        with ending_signals_as_interrupt() if is_main else nullcontext():
            try:
                return self._carry_out(run)
            except KeyboardInterrupt:
                record = self._find(run.output_dir)
                if record is not None:
                    self._leave(run, record)
                raise

    def _carry_out(self, run: PlannedRun) -> int:
        record = self._find(run.output_dir) or self._submit(run, lost=())
        while True:
            end = self._wait(run, record)
            if isinstance(end, JobEnd):
                return self._take(run, end)
            if self._is_interrupted.is_set():
                self._leave(run, record)
                return _INTERRUPTED
            if end.phase == "unplaced":
                record = self._submit(run, lost=record.lost)
                continue
            lost = (*record.lost, end.detail)
            if end.phase == "ended" or len(lost) > self.config.retries:
                return self._give_up(run, record, end, lost)
            self.say(run.name, f"{self._name(record)} was lost ({end.detail}); attempt {len(lost) + 1}")
            record = self._submit(run, lost=lost)

    def take_up(self, run: PlannedRun, key: str) -> str:
        """Finds a job of this very run, as ``OutlivesDriver`` says."""
        self._keys[run.output_dir] = key
        record = self._find(run.output_dir)
        if record is None:
            return ""
        end = load_end(run.output_dir, record.token)
        if record.key != key:
            if end is None:
                self._cancel(run.output_dir, run.name, record)
            return ""
        return f"{self._name(record)} {'goes on' if end is None else 'has ended meanwhile'}"

    def end_earlier(self, root: Path) -> None:
        """Cancels all jobs of runs below a folder, as ``OutlivesDriver`` says."""
        for path in sorted(root.glob(f"**/{JOB_FOLDER}/{RECORD_FILE}")):
            output_dir = path.parents[1]
            record = self._find(output_dir)
            if record is not None and load_end(output_dir, record.token) is None:
                self._cancel(output_dir, output_dir.name, record)

    def settle(self, run: PlannedRun) -> None:
        """Notes that an alignment has taken a run's end: it is found by its fingerprint now, or made anew."""
        record = load_record(run.output_dir)
        if record is not None:
            _save(run.output_dir, record.model_copy(update={"is_taken": True}))

    def elapsed_s(self, run: PlannedRun) -> float:
        """Gives the seconds of a run that has ended."""
        return self._ends[run.output_dir].elapsed_s if run.output_dir in self._ends else 0.0

    def end_running(self) -> None:
        """Cancels the jobs of all threads, or leaves them, as the configuration says."""
        self._is_interrupted.set()

    def _name(self, record: JobRecord) -> str:
        return f"its job {record.job_id or record.token} of {self.cluster.name}"

    def _find(self, output_dir: Path) -> JobRecord | None:
        """Finds the record of a job whose end no alignment has taken, with the cluster's name for it."""
        record = load_record(output_dir)
        if record is None or record.executor != self.cluster.name or record.is_taken:
            return None
        if not is_own(output_dir / JOB_FOLDER / RECORD_FILE):
            return None
        if record.job_id is not None or load_end(output_dir, record.token) is not None:
            return record
        # A driver was killed as it submitted it.
        job_id = self._ask(lambda: self.cluster.find(record.token, output_dir / JOB_FOLDER))
        return None if job_id is None else _save(output_dir, record.model_copy(update={"job_id": job_id}))

    def _submit(self, run: PlannedRun, *, lost: tuple[str, ...]) -> JobRecord:
        record = JobRecord(
            executor=self.cluster.name,
            key=self._keys.get(run.output_dir, ""),
            token=secrets.token_hex(16),
            attempt=len(lost) + 1,
            lost=lost,
        )
        _save(run.output_dir, record)
        job_id = self._ask(lambda: self.cluster.submit(self._plan(run, record)))
        return _save(run.output_dir, record.model_copy(update={"job_id": job_id}))

    def _plan(self, run: PlannedRun, record: JobRecord) -> Submission:
        output_dir = run.output_dir.absolute()
        mock = run.config.rollout_mock
        records = self.recording_dir is not None and mock is not None and mock.effective_mode == "dump"
        job = Job(
            token=record.token,
            config_name=self.config_name,
            config_path=str(self.config_path.absolute()),
            overrides=tuple(run.overrides),
            entry=run.entry,
            python=run.python,
            env=dict(run.env),
            settings={name: self.environ.get(name) for name in _list_settings(self.environ)},
            output_dir=str(output_dir),
            clears=(str(self.recording_dir.absolute()),) if records and self.recording_dir is not None else (),
            working_dir=os.getcwd(),
            sources=tuple(str(folder.absolute()) for folder in run.sources),
            code=compute_json_digest(digest_sources(run.sources)),
        )
        return Submission(
            name=run.name,
            token=record.token,
            text=job.model_dump_json(),
            num_processes=run.config.parallel.world_size,
            log_dir=output_dir / JOB_FOLDER,
        )

    def _wait(self, run: PlannedRun, record: JobRecord) -> JobEnd | JobState:
        """Waits for a job; returns the run's end, or the job's state where that is over without one."""
        phase = "waiting"
        while True:
            end = load_end(run.output_dir, record.token)
            if end is not None:
                return end
            state = self._ask(lambda: self.cluster.read_state(record.job_id or ""))
            if state.is_over:
                return self._await_end(run, record) or state
            if state.phase != phase:
                phase = state.phase
                self.say(run.name, f"{self._name(record)} is {state.detail}")
            if self._is_interrupted.wait(self.config.poll_s):
                return state

    def _await_end(self, run: PlannedRun, record: JobRecord) -> JobEnd | None:
        ends_s = time.monotonic() + self.visible_s
        while True:
            end = load_end(run.output_dir, record.token)
            if end is not None or time.monotonic() > ends_s:
                return end
            time.sleep(min(self.config.poll_s, 0.5))

    def _take(self, run: PlannedRun, end: JobEnd) -> int:
        """Notes a run's end; says where it ran, if that is other hardware than an earlier run's."""
        self._ends[run.output_dir] = end
        for what, value in end.hardware.items():
            first, name = self._hardware.setdefault(what, (value, run.name))
            if first != value:
                self.say(
                    run.name,
                    f"ran on other hardware than {name}: {what} {value!r}, not {first!r}; last bits may differ",
                )
        return end.exit_code

    def _give_up(self, run: PlannedRun, record: JobRecord, state: JobState, lost: tuple[str, ...]) -> int:
        """Writes down why a run has no end; returns its exit code."""
        place, text = self._ask(lambda: self.cluster.find_log(record.job_id or "", run.output_dir / JOB_FOLDER))
        tail = "\n".join(text.splitlines()[-_NUM_LOG_LINES:]) or _read_log(run) or "(it wrote nothing)"
        if state.phase == "ended":
            what = f"was ended before its run had: {state.detail}"
        else:
            tries = f"{count_of(len(lost), 'attempt')} (align.executor.retries is {self.config.retries})"
            what = f"was lost before its run had ended, at the last of {tries}: {'; '.join(lost)}"
        message = f"{self._name(record)} {what}\nits log is {place}; the last lines:\n{tail}"
        content = {"type": "JobLost", "message": message, "exit_code": int(ExitCode.INTERNAL)}
        save_json(run.output_dir / ERROR_FILE, content)
        return int(ExitCode.INTERNAL)

    def _leave(self, run: PlannedRun, record: JobRecord) -> None:
        """Cancels the job of an interrupted command, or says that it goes on; one that has ended is found later."""
        if load_end(run.output_dir, record.token) is not None:
            return
        if self.config.on_interrupt == "leave":
            self.say(run.name, f"{self._name(record)} goes on; the same command finds it")
        else:
            self._cancel(run.output_dir, run.name, record)

    def _cancel(self, output_dir: Path, name: str, record: JobRecord) -> None:
        """Cancels a job and waits until it is over."""
        self.say(name, f"{self._name(record)} is cancelled")
        self._ask(lambda: self.cluster.cancel(record.job_id or ""))
        ends_s = time.monotonic() + _CANCEL_S
        while time.monotonic() < ends_s:
            if self._ask(lambda: self.cluster.read_state(record.job_id or "")).is_over:
                break
            time.sleep(min(self.config.poll_s, 0.5))
        _save(output_dir, record.model_copy(update={"is_taken": True}))

    def _ask(self, question: Callable[[], Answer]) -> Answer:
        """Asks the cluster again while it does not answer; raises ``AlignmentError`` when that lasts too long."""
        ends_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return question()
            except ClusterError as error:
                if time.monotonic() > ends_s or self._is_interrupted.is_set():
                    raise AlignmentError(
                        f"{self.cluster.name} does not answer: {error}\n"
                        "Its jobs may go on; the same command finds them when it answers again"
                    ) from error
            time.sleep(self.config.poll_s)


def check_no_other_job(root: Path, executor: str) -> None:
    """Raises ``ConfigError`` where a job that another executor started may still write below a folder.

    ``executor``: the present cluster in a word; empty without one.
    """
    for path in sorted(root.glob(f"**/{JOB_FOLDER}/{RECORD_FILE}")):
        record = load_record(path.parents[1])
        if record is None or record.is_taken or record.executor == executor or not is_own(path):
            continue
        if load_end(path.parents[1], record.token) is None:
            raise ConfigError(
                f"{path.parents[1]}: job {record.job_id or record.token} of {record.executor} may still write there. "
                f"Give the command with the executor that started it, or cancel the job and remove {path.parent}"
            )


def choose_environment(config: ClusterExecutorConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of runs on a cluster: this one, with a number of threads that no node chooses."""
    return {_THREADS: str(config.cpus_per_process), **environ}


def _list_settings(environ: Mapping[str, str]) -> list[str]:
    """Lists the variables that decide bits and go with every job: no secrets, and none that are a node's own."""
    return [name for name in recorded_names(environ) if is_documented(name) and not is_per_node(name)]


def _save(output_dir: Path, record: JobRecord) -> JobRecord:
    path = output_dir / JOB_FOLDER / RECORD_FILE
    save_text(path, record.model_dump_json())
    mark_own(path)
    return record


def _read_log(run: PlannedRun) -> str:
    return read_tail(run.log_path, _NUM_LOG_LINES) if run.log_path.is_file() else ""
