"""The runs of one alignment, each in its folder: made, or taken again where an equal run lies there.

Contract: an interrupted alignment and a cached baseline go on by one mechanism: every completed run has a fingerprint
(``cache``), and is taken again where the same run would be made. ``--overwrite`` starts from nothing. In a folder of
any other origin nothing is removed. The seconds are counted by purpose.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.text import Text

from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.alignment.runs.cache import (
    Fingerprint,
    NotReusable,
    Reusable,
    compute_fingerprint,
    digest_checkpoint,
    digest_folder,
    digest_sources,
    find_cached,
    save_fingerprint,
)
from mock_scheduler.alignment.runs.execution import LaunchRuns, execute_runs
from mock_scheduler.alignment.runs.progress import OnDone, Outcome
from mock_scheduler.config.stored_code import FLAG
from mock_scheduler.determinism.environment import launch_environment
from mock_scheduler.determinism.settings import is_documented, is_per_node, recorded_names
from mock_scheduler.errors import AlignmentError, ConfigError, ExitCode
from mock_scheduler.launch.entry import find_module
from mock_scheduler.run_folder.command_folder import ALIGN_MARKER, FolderMarker, prepare_folder
from mock_scheduler.run_folder.finished_run import RunFailure, RunSummary, load_summary
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.files import remove_leftovers, rename_away, save_text
from mock_scheduler.support.local_key import keyed_digest
from mock_scheduler.support.run_files import RUN_FILE, START_FOLDER
from mock_scheduler.support.versions import VERSION
from mock_scheduler.verdict.results import AlignmentTimes

_CPU_INFO = Path("/proc/cpuinfo")
_QUERY_S = 20.0


def open_folder(path: Path, *, fresh: bool, marker: FolderMarker = ALIGN_MARKER) -> bool:
    """Make ``path`` ready for an alignment; whether an earlier one lies in it, to be gone on with.

    ``fresh``: empty it first. Raises ``ConfigError`` where it holds anything of another origin.
    """
    is_own = path.is_dir() and not path.is_symlink() and marker.is_in(path)
    if is_own and not fresh:
        remove_leftovers(path)
        save_text(path / marker.name, marker.text)
        return True
    is_used = path.is_dir() and any(path.iterdir())
    if is_used and not is_own and not fresh:
        raise ConfigError(
            f"{path} exists, is not empty and was not made by {marker.command} (no {marker.name} or "
            f"{marker.result_name} in it); choose another folder (--output-dir)"
        )
    prepare_folder(path, marker=marker, overwrite=fresh)
    return False


@dataclass(slots=True)
class RunCache:
    """The finished runs of one alignment.

    ``recording_dir``: the recording of its runs, ``None`` without one. ``environ``: of the launcher; ``None``: this
    process's. ``takes_foreign``: runs that another user made are taken again too. For each run: ``find``, then either
    take it or ``clear``, run, ``keep``. A run that replays may be looked for only when the recording is there.

    Contract: nothing is read, removed or written through a link below ``root``, the alignment's folder.
    """

    root: Path
    recording_dir: Path | None
    environ: Mapping[str, str] | None = None
    takes_foreign: bool = False
    machine: Mapping[str, str] = field(default_factory=lambda: read_machine())
    _codes: dict[tuple[object, ...], dict[str, JSON]] = field(default_factory=dict)

    def find(self, run: PlannedRun) -> Reusable | NotReusable:
        """Says whether the run's folder holds the same run, finished and unchanged, or why not.

        Raises ``ConfigError`` where a link leads to its folder, and where another user made the same run.
        """
        recorded = self._recorded_by(run)
        for folder in (run.output_dir, recorded):
            self._check_no_link(folder)
        found = find_cached(
            run.output_dir, self._fingerprint(run), recording_dir=recorded, takes_foreign=self.takes_foreign
        )
        if isinstance(found, NotReusable) and found.is_foreign:
            raise ConfigError(
                f"{run.output_dir} is a finished run, but {found.reason}: a verdict would rest on files of theirs. If "
                f"you trust whoever wrote this folder, add {FLAG} (in Python: run_stored_code=True); else run "
                "everything anew (--overwrite), or choose another folder (--output-dir)"
            )
        return found

    def _check_no_link(self, folder: Path | None) -> None:
        """A run that is removed, or written, through a link would be so in a folder of somebody else's choice."""
        if folder is None or not folder.is_relative_to(self.root):
            return
        for path in (folder, *folder.parents):
            if path == self.root:
                return
            if path.is_symlink():
                raise ConfigError(
                    f"{path} is a link to {os.path.realpath(path)}: an alignment follows no links below its folder; "
                    "remove it, or choose another folder (--output-dir)"
                )

    def clear(self, run: PlannedRun) -> None:
        """Removes an earlier run from the run's folder, and its recording where the run records."""
        for folder in (run.output_dir, self._recorded_by(run)):
            self._check_no_link(folder)
            if folder is not None and folder.is_dir():
                # At once and as a whole: what an interrupt leaves is never taken for a run.
                shutil.rmtree(rename_away(folder))
        run.output_dir.mkdir(parents=True)

    def keep(self, run: PlannedRun, *, elapsed_s: float) -> None:
        """Say that the run has just completed, so it is found from now on. Raises ``OSError``."""
        save_fingerprint(
            run.output_dir, self._fingerprint(run), elapsed_s=elapsed_s, recording_dir=self._recorded_by(run)
        )

    def _recorded_by(self, run: PlannedRun) -> Path | None:
        mock = run.config.rollout_mock
        return self.recording_dir if mock is not None and mock.effective_mode == "dump" else None

    def _fingerprint(self, run: PlannedRun) -> Fingerprint:
        return compute_fingerprint(
            run,
            code=self._code(run),
            machine=self.machine,
            environ=read_settings(run, os.environ if self.environ is None else self.environ),
            read=self._read_by(run),
        )

    def _read_by(self, run: PlannedRun) -> dict[str, str]:
        checkpoint, grafted = run.config.resume_from_checkpoint, run.config.graft.trace_dir
        is_replayed = self.recording_dir is not None and self._recorded_by(run) is None
        read = {"recording": digest_folder(self.recording_dir)} if self.recording_dir and is_replayed else {}
        if run.begins_from is not None:
            read["initial_state"] = digest_folder(run.begins_from)
            read["start"] = digest_folder(run.begins_from.parent / START_FOLDER)
        if checkpoint is not None:
            read["checkpoint"] = digest_checkpoint(Path(checkpoint))
        if grafted is not None:
            read["graft"] = digest_folder(Path(grafted))
        return read

    def _code(self, run: PlannedRun) -> dict[str, JSON]:
        further = tuple(run.program.list_sources(run.config))
        key = (run.sources, run.entry, further)
        if key not in self._codes:
            self._codes[key] = {
                "mock-scheduler": VERSION,
                "sources": digest_sources(run.sources, further),
                "entry": _digest_entry(run),
            }
        return self._codes[key]


def read_machine() -> dict[str, str]:
    """Reads the facts of this machine with an effect on the last bits: processor, its instructions, GPUs and driver."""
    return {
        "architecture": platform.machine(),
        "processor": _read_processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpus": _read_gpus(),
    }


def read_settings(run: PlannedRun, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings of a run's processes at their start, and their threads, without unset ones.

    Of a variable outside the table only a digest is told, which shows a change and not the value.
    """
    # Later ones win, as when the processes are started.
    started = {**environ, **launch_environment(run.config.system_envs), **run.env}
    several = run.config.parallel.world_size > 1
    # The number of threads decides how a kernel splits a sum, and so the last bits.
    threads = started.get("OMP_NUM_THREADS", "1" if several else f"{os.cpu_count()} cores")
    names = [name for name in recorded_names(started) if name in started and not is_per_node(name)]
    kept = {name: started[name] if is_documented(name) else keyed_digest(started[name]) for name in names}
    return {**kept, "OMP_NUM_THREADS": threads}


def _digest_entry(run: PlannedRun) -> JSON:
    """Returns digests of the entry's file, or of its whole package where the project has none of that name.

    Its imports from elsewhere are not known.
    """
    path = find_module(run.entry)
    top = run.entry.partition(".")[0]
    if path is None or any(folder.name == top for folder in run.sources):
        return "of the project"
    depth = run.entry.count(".") + (path.name == "__main__.py")
    return digest_sources([path.parents[depth - 1]]) if depth else digest_sources([], [path])


def _read_processor() -> str:
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _read_gpus() -> str:
    """Names and driver, asked of the driver's own tool: torch would take memory of every GPU to tell."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "none"
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return "; ".join(done.stdout.split("\n")).strip("; ") or "none"


Purpose = Literal["baseline", "candidates", "comparison", "emulation", "noise", "referee", "localisation"]

_PURPOSES: tuple[Purpose, ...] = (
    "baseline",
    "candidates",
    "comparison",
    "emulation",
    "noise",
    "referee",
    "localisation",
)


@dataclass(kw_only=True)
class RunStore:
    """Runs by their folders.

    ``share``: whether several may share processes; ``at_once``: groups of processes that go at a time; ``console``
    shows them.
    """

    launch: LaunchRuns
    cache: RunCache
    console: Console
    share: bool
    at_once: int = 1
    _seconds: dict[Purpose, float] = field(default_factory=dict)
    _inside_s: list[float] = field(default_factory=list)
    _further: dict[tuple[str, ...], Path] = field(default_factory=dict)
    _started_s: float = field(default_factory=time.perf_counter)

    def execute(self, runs: Sequence[PlannedRun], on_done: OnDone = lambda run, outcome: None) -> dict[str, Outcome]:
        """Takes finished runs again and makes the others; returns outcomes by name. Seconds are the caller's to count.

        ``on_done`` is told of each as soon as it is known. Raises ``AlignmentError`` where an ``error.json`` cannot be
        read.
        """
        outcomes: dict[str, Outcome] = {}
        due: list[PlannedRun] = []
        for run in runs:
            found = self.cache.find(run)
            if isinstance(found, Reusable):
                outcomes[run.name] = found.elapsed_s
                self._say(run, "taken again from an earlier alignment")
                on_done(run, found.elapsed_s)
                continue
            if found.was_there:
                self._say(run, f"run anew: {found.reason}")
            self.cache.clear(run)
            due.append(run)

        def keep(run: PlannedRun, outcome: Outcome) -> None:
            if not isinstance(outcome, RunFailure):
                self.cache.keep(run, elapsed_s=outcome)
            on_done(run, outcome)

        return outcomes | execute_runs(
            due, launch=self.launch, console=self.console, share=self.share, at_once=self.at_once, on_done=keep
        )

    def summarise(self, run: PlannedRun, outcome: Outcome) -> RunSummary | RunFailure:
        """Returns the summary of a completed run, or how it failed."""
        if isinstance(outcome, RunFailure):
            return outcome
        if run.own_module and not (run.output_dir / RUN_FILE).exists():
            message = (
                f"the module {run.entry} ended without running the program (no {RUN_FILE}); "
                f"it must call {run.program.entry}.main, as docs/align.md says"
            )
            return RunFailure(exit_code=0, message=message)
        try:
            return load_summary(run.name, run.output_dir, elapsed_s=outcome)
        except AlignmentError as error:
            return RunFailure(exit_code=ExitCode.INCOMPARABLE, message=str(error))

    def execute_once(self, run: PlannedRun, key: tuple[str, ...]) -> Path:
        """Returns the folder of a run, made once for all who ask; raises ``AlignmentError`` where it fails.

        ``key``: equal for equal runs, whatever their names are.
        """
        if key not in self._further:
            outcome = self.execute([run])[run.name]
            if isinstance(outcome, RunFailure):
                raise AlignmentError(f"a further run failed: {outcome.message}\nits output is in {run.log_path}")
            self._further[key] = run.output_dir
        return self._further[key]

    @contextmanager
    def timed(self, purpose: Purpose) -> Iterator[None]:
        """Counts the seconds of the block, without a block inside of it: each block has its own purpose."""
        started_s = time.perf_counter()
        self._inside_s.append(0.0)
        try:
            yield
        finally:
            elapsed_s = time.perf_counter() - started_s
            self.count(purpose, elapsed_s - self._inside_s.pop())
            if self._inside_s:
                self._inside_s[-1] += elapsed_s

    def count(self, purpose: Purpose, seconds: float) -> None:
        """Add seconds to a purpose."""
        self._seconds[purpose] = self._seconds.get(purpose, 0.0) + seconds

    def times(self) -> AlignmentTimes:
        """Returns the seconds of every purpose so far."""
        seconds = {f"{purpose}_s": self._seconds.get(purpose, 0.0) for purpose in _PURPOSES}
        return AlignmentTimes(**seconds, total_s=time.perf_counter() - self._started_s)

    def _say(self, run: PlannedRun, what: str) -> None:
        self.console.print(Text.assemble((run.name, "bold"), f"  {run.layout}  {what}"))
