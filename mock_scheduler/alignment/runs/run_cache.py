"""The finished runs of one alignment: each is found by its fingerprint, of code, machine, settings and all it read.

Contract: nothing is read, removed or written through a link below the alignment's folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.alignment.runs.cache import (
    Fingerprint,
    NotReusable,
    Reusable,
    compute_fingerprint,
    find_cached,
    save_fingerprint,
)
from mock_scheduler.alignment.runs.folder_digests import digest_checkpoint, digest_folder
from mock_scheduler.config.stored_code import FLAG
from mock_scheduler.determinism.environment import launch_environment
from mock_scheduler.determinism.settings import is_documented, is_per_node, recorded_names
from mock_scheduler.errors import ConfigError
from mock_scheduler.launch.entry import find_module
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.files import rename_away
from mock_scheduler.support.hardware import read_hardware
from mock_scheduler.support.loaded_code import compare_with_disk, load_loaded_code
from mock_scheduler.support.local_key import keyed_digest
from mock_scheduler.support.run_files import START_FOLDER
from mock_scheduler.support.sources import digest_sources
from mock_scheduler.support.versions import VERSION


@dataclass(slots=True)
class RunCache:
    """Holds the finished runs of one alignment.

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
    _sources: dict[str, str] = field(default_factory=dict)
    _loaded: dict[str, tuple[str, str]] = field(default_factory=dict)

    def find_changed_code(self, run: PlannedRun) -> list[str]:
        """Says which code of a run just made is not that of the runs before it, or is not what lies here now.

        Raises ``ValueError`` where its record of loaded code is damaged.
        """
        # A file that is new is none of these: trainings leave copies of their code beside it.
        found = [
            f"{name} has changed since the alignment began"
            for name, digest in _list_digests(self._read_code(run))
            if self._sources.setdefault(name, digest) != digest
        ]
        loaded = load_loaded_code(run.output_dir)
        if loaded is None:
            return found
        on_disk = compare_with_disk(loaded)
        for name, digest in loaded.files.items():
            first, earlier = self._loaded.setdefault(name, (digest, run.name))
            if first != digest:
                found.append(f"{name} is not as {earlier} loaded it")
            elif on_disk.get(name) == "has changed":
                found.append(f"{name} has changed since {run.name} loaded it")
        return found

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
        loaded = load_loaded_code(run.output_dir) if isinstance(found, Reusable) else None
        for name, digest in ({} if loaded is None else loaded.files).items():
            self._loaded.setdefault(name, (digest, run.name))
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

    def compute_key(self, run: PlannedRun) -> str:
        """Computes the digest of everything with an effect on the results of a run."""
        return self._fingerprint(run).digest

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
        key = (run.sources, run.entry, tuple(run.program.list_sources(run.config)))
        if key not in self._codes:
            self._codes[key] = self._read_code(run)
            for name, digest in _list_digests(self._codes[key]):
                self._sources.setdefault(name, digest)
        return self._codes[key]

    def _read_code(self, run: PlannedRun) -> dict[str, JSON]:
        further = tuple(run.program.list_sources(run.config))
        return {
            "mock-scheduler": VERSION,
            "sources": digest_sources(run.sources, further),
            "entry": _digest_entry(run),
        }


def read_machine() -> dict[str, str]:
    """Reads the facts of this machine with an effect on the last bits: processor, its instructions, GPUs and driver."""
    return {
        **read_hardware(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
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


def _list_digests(code: Mapping[str, JSON]) -> list[tuple[str, str]]:
    """Lists the files of a fingerprint's code with their digests."""
    folders = [value for value in code.values() if isinstance(value, dict)]
    return [(name, str(digest)) for folder in folders for name, digest in folder.items()]


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
