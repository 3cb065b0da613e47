"""The runs of an alignment as plain data, and the groups of them that may share processes.

Contract: nothing is loaded, started or written here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mock_scheduler.align.plan.changes import Changes
from mock_scheduler.config.align import ToleranceConfig
from mock_scheduler.program import Program, RunConfig
from mock_scheduler.support.run_files import LOG_FILE

#: Folder of the further runs that proofs need.
PROOFS_NAME = "proofs"

_NO_CHANGES = Changes(neutral=(), layout=(), other=())


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One run. ``own_overrides``: beside the baseline's; ``overrides``: all that it is started with.

    ``program``: whose run it is. ``entry``: the Python module that its processes run. ``python``: the interpreter that
    runs it, ``env`` the variables that it needs over the launcher's, ``versions`` its own and its packages',
    ``sources`` the folders of the project's packages that it imports. ``version_changes``: versions that are not the
    baseline's. ``changes``: the keys in which its configuration differs from the baseline's. ``exact``: as its
    candidate states.
    """

    name: str
    program: Program
    entry: str
    own_overrides: tuple[str, ...]
    overrides: tuple[str, ...]
    config: RunConfig
    output_dir: Path
    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[Path, ...] = ()
    version_changes: tuple[str, ...] = ()
    changes: Changes = _NO_CHANGES
    exact: bool | None = None

    @property
    def layout(self) -> str:
        """Its layout in one phrase."""
        return self.config.parallel.describe()

    @property
    def has_own_code(self) -> bool:
        """True where its processes run another module than the program's own."""
        return self.entry != self.program.entry

    @property
    def log_path(self) -> Path:
        """Where its terminal output goes."""
        return self.output_dir / LOG_FILE

    @property
    def must_be_exact(self) -> bool:
        """True where it must equal the baseline to the last bit, but for sums in its own order.

        As the candidate states; else where neither code nor versions nor any key but the layout's is another.
        """
        if self.exact is not None:
            return self.exact
        return not self.has_own_code and not self.version_changes and self.changes.kind != "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignPlan:
    """All runs of an alignment, in order, and where its results go.

    ``is_recorded``: whether the recording was there before, so that the baseline replays it too.
    """

    output_dir: Path
    recording_dir: Path
    tolerance: ToleranceConfig
    baseline: PlannedRun
    candidates: tuple[PlannedRun, ...]
    is_recorded: bool = False

    @property
    def proofs_dir(self) -> Path:
        """Where the further runs go that proofs need."""
        return self.output_dir / PROOFS_NAME

    @property
    def runs(self) -> tuple[PlannedRun, ...]:
        """The baseline and all candidates."""
        return (self.baseline, *self.candidates)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunGroup:
    """Runs that one set of processes carries out one after another, in this order; never empty."""

    runs: tuple[PlannedRun, ...]

    @property
    def world_size(self) -> int:
        """Processes of each of its runs."""
        return self.runs[0].config.parallel.world_size


def group_runs(runs: Sequence[PlannedRun], *, share: bool = True) -> list[RunGroup]:
    """Returns the runs in groups that may share processes; groups follow their first runs, runs their own order.

    Shared are interpreter and environment, which are read once, the number of processes, and whether all is computed in
    float64. A run with an entry module of its own, which may change anything in its process, stays alone, and with
    ``share`` false, or where the program makes no sessions, every run does.
    """
    groups: dict[tuple[object, ...], list[PlannedRun]] = {}
    for position, run in enumerate(runs):
        is_alone = not share or run.has_own_code or run.program.session_entry is None
        key: tuple[object, ...] = (position,) if is_alone else _process_key(run)
        groups.setdefault(key, []).append(run)
    return [RunGroup(runs=tuple(members)) for members in groups.values()]


def _process_key(run: PlannedRun) -> tuple[object, ...]:
    config = run.config
    return (
        config.parallel.world_size,
        tuple(sorted(config.system_envs.items())),
        run.python,
        tuple(sorted(run.env.items())),
        config.precision == "float64",
    )
