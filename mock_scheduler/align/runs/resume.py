"""An alignment goes on in its folder, where runs that would be made again as they were are taken again.

Contract: one mechanism for an alignment that was interrupted and for a cached baseline: every completed run has a
fingerprint (``cache``), and is taken again where the same run would be made. ``--overwrite`` starts from nothing. In a
folder that no alignment made nothing is removed.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mock_scheduler.align.plan.overrides import find_module
from mock_scheduler.align.plan.planned_run import PlannedRun
from mock_scheduler.align.runs.cache import (
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
from mock_scheduler.determinism.environment import launch_environment
from mock_scheduler.determinism.settings import find_setting, recorded_names
from mock_scheduler.errors import ConfigError
from mock_scheduler.run_folder.command_folder import ALIGN_MARKER, FolderMarker, prepare_folder
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.files import remove_leftovers, rename_away
from mock_scheduler.support.version import VERSION

_CPU_INFO = Path("/proc/cpuinfo")
_QUERY_S = 20.0


def open_folder(path: Path, *, fresh: bool, marker: FolderMarker = ALIGN_MARKER) -> bool:
    """Make ``path`` ready for an alignment; whether an earlier one lies in it, to be gone on with.

    ``fresh``: empty it first. Raises ``ConfigError`` where it holds anything that no alignment made.
    """
    is_own = path.is_dir() and not path.is_symlink() and marker.is_in(path)
    if is_own and not fresh:
        remove_leftovers(path)
        (path / marker.name).write_text(marker.text)
        return True
    is_used = path.is_dir() and any(path.iterdir())
    if is_used and not is_own and not fresh:
        raise ConfigError(
            f"{path} exists, is not empty and was not made by {marker.command} (no {marker.name} or "
            f"{marker.result_name} in it); choose another --output-dir"
        )
    prepare_folder(path, marker=marker, overwrite=fresh)
    return False


@dataclass(slots=True)
class RunCache:
    """The finished runs of one alignment.

    ``recording_dir``: the recording that its runs write or replay. ``environ``: of the launcher; ``None``: this
    process's. For each run: ``find``, then either take it or ``clear``, run, ``keep``. A run that replays may be looked
    for only when the recording is there.
    """

    recording_dir: Path
    environ: Mapping[str, str] | None = None
    machine: Mapping[str, str] = field(default_factory=lambda: read_machine())
    _codes: dict[tuple[object, ...], dict[str, JSON]] = field(default_factory=dict)

    def find(self, run: PlannedRun) -> Reusable | NotReusable:
        """Says whether the run's folder holds the same run, finished and unchanged, or why not."""
        return find_cached(run.output_dir, self._fingerprint(run), recording_dir=self._recorded_by(run))

    def clear(self, run: PlannedRun) -> None:
        """Removes an earlier run from the run's folder, and its recording where the run records."""
        for folder in (run.output_dir, self._recorded_by(run)):
            if folder is not None and folder.is_dir():
                # At once and as a whole: what an interrupt leaves is never taken for a run.
                shutil.rmtree(rename_away(folder))
        run.output_dir.mkdir(parents=True)

    def keep(self, run: PlannedRun, *, elapsed_s: float) -> None:
        """Say that the run has just completed, so that it is found from now on. Raises ``OSError``."""
        save_fingerprint(
            run.output_dir, self._fingerprint(run), elapsed_s=elapsed_s, recording_dir=self._recorded_by(run)
        )

    def _recorded_by(self, run: PlannedRun) -> Path | None:
        return self.recording_dir if run.config.rollout_mock.effective_mode == "dump" else None

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
        read = {} if self._recorded_by(run) is not None else {"recording": digest_folder(self.recording_dir)}
        if checkpoint is not None:
            read["checkpoint"] = digest_checkpoint(Path(checkpoint))
        if grafted is not None:
            read["graft"] = digest_folder(Path(grafted))
        return read

    def _code(self, run: PlannedRun) -> dict[str, JSON]:
        key = (run.sources, run.entry)
        if key not in self._codes:
            self._codes[key] = {
                "mock-scheduler": VERSION,
                "sources": digest_sources(run.sources),
                "entry": _digest_entry(run),
            }
        return self._codes[key]


def read_machine() -> dict[str, str]:
    """Reads the parts of this machine that decide the last bits: processor, its instructions, GPUs and driver."""
    return {
        "architecture": platform.machine(),
        "processor": _read_processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpus": _read_gpus(),
    }


def read_settings(run: PlannedRun, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the settings that a run's processes start with and share, and their threads, without unset ones."""
    started = {**environ, **launch_environment(run.config.system_envs), **run.env}
    several = run.config.parallel.world_size > 1
    threads = started.get("OMP_NUM_THREADS", "1" if several else f"{os.cpu_count()} cores")
    names = [name for name in recorded_names(started) if name in started and not _is_per_node(name)]
    return {**{name: started[name] for name in names}, "OMP_NUM_THREADS": threads}


def _is_per_node(name: str) -> bool:
    setting = find_setting(name)
    return setting is not None and setting.per_node


def _digest_entry(run: PlannedRun) -> JSON:
    """Returns digests of the entry's file, or of its whole package where the project has none of that name.

    Modules that it imports from elsewhere are not known.
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
