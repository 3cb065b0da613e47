"""Holds the runs of an alignment as plain data, with their changes from the baseline.

Contract: two checked configurations are compared by the effects of their keys, as ``config.base`` has them. Nothing
is loaded, started or written here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mock_scheduler.alignment.plan.overrides import quote_override
from mock_scheduler.config.align import ToleranceConfig
from mock_scheduler.config.base import Decides
from mock_scheduler.program import Program, RunConfig
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.run_files import LOG_FILE

ChangeKind = Literal["nothing", "layout", "other"]
"""``nothing``: no bit may move. ``layout``: only the order of sums may. ``other``: anything may round."""

# A key that decides any of these may change a value and not only the order in which equal values are added.
_MAY_ROUND = Decides.ROLLOUTS | Decides.TRAINING | Decides.BITS | Decides.OUTSIDE
# Where one of these is another, so may be the collectives: of recomputed layers, packed rows, sharded optimizers.
_MAY_CALL_OTHERWISE = _MAY_ROUND | Decides.ORDER | Decides.EXECUTION


#: Of every program: what a reference in another order has of its own, and not of its candidate.
_LAYOUT_SECTIONS = ("parallel.", "order.")

#: Every program's key of the precision that a run computes in.
PRECISION_KEY = "precision"


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Holds the dotted keys with different values in two configurations, each in one of three classes.

    has_other_calls: one of them may change which collectives are issued, or their sizes.
    has_other_execution: one that is no layout may change how training is computed or executed.
    """

    neutral: tuple[str, ...]
    layout: tuple[str, ...]
    other: tuple[str, ...]
    has_other_calls: bool = False
    has_other_execution: bool = False

    @property
    def beside_precision(self) -> tuple[str, ...]:
        """The keys that may round and are not the precision: with these alone nobody knows what equal bits would be."""
        return tuple(key for key in self.other if key != PRECISION_KEY)

    @property
    def kind(self) -> ChangeKind:
        """Returns the gravest class with a key in it."""
        if self.other:
            return "other"
        return "layout" if self.layout else "nothing"


def find_changes(
    baseline: Mapping[str, JSON], candidate: Mapping[str, JSON], effect_of: Callable[[str], Decides]
) -> Changes:
    """Finds the keys with different values; both sides are by dotted key, and a missing key counts as null.

    ``effect_of``: looks up the effect of a key.
    """
    differing = [key for key in dict.fromkeys([*baseline, *candidate]) if baseline.get(key) != candidate.get(key)]
    kinds = {key: change_kind(effect_of(key)) for key in differing}
    neutral, layout, other = (
        tuple(key for key in differing if kinds[key] == kind) for kind in ("nothing", "layout", "other")
    )
    calling = [key for key in differing if effect_of(key) & _MAY_CALL_OTHERWISE]
    return Changes(
        neutral=neutral,
        layout=layout,
        other=other,
        has_other_calls=bool(calling),
        has_other_execution=not all(key.startswith(_LAYOUT_SECTIONS) for key in calling),
    )


def change_kind(facts: Decides) -> ChangeKind:
    """Judges the change of one key by its effect."""
    if facts & Decides.VALIDATION:
        return "nothing"  # no bit of training follows from validation, whatever is played there
    if facts & _MAY_ROUND:
        return "other"
    return "layout" if facts & Decides.ORDER else "nothing"


#: Folder of the further runs for proofs.
PROOFS_NAME = "proofs"

_NO_CHANGES = Changes(neutral=(), layout=(), other=())


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """Holds one run. ``own_overrides``: beside the baseline's; ``overrides``: all of them.

    ``program``: the owner of the run. ``entry``: the Python module of its processes. ``python``: its interpreter,
    ``env`` the variables over the launcher's, ``versions`` of Python and of the packages with an effect on bits,
    ``packages`` of all that are installed, ``sources`` the folders of the project's packages under it.
    ``has_other_code``: its entry is not the baseline's. ``version_changes``: versions other than the baseline's.
    ``changes``: keys with values other than the baseline's. ``exact``: as its candidate states. ``begins_from``: the
    trace whose initial state it begins with; ``None``: it begins by itself.
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
    packages: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[Path, ...] = ()
    has_other_code: bool = False
    version_changes: tuple[str, ...] = ()
    changes: Changes = _NO_CHANGES
    exact: bool | None = None
    begins_from: Path | None = None

    @property
    def layout(self) -> str:
        """Returns its layout in one phrase."""
        return self.config.parallel.describe()

    @property
    def own_module(self) -> str:
        """Returns the module that its processes run in the program's place; empty where they run the program's own."""
        return self.entry if self.entry != self.program.entry else ""

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
        return self._is_alike and self.changes.kind != "other"

    @property
    def must_equal_reference(self) -> bool:
        """True where it must equal, to the last bit, the baseline's code that adds in its order and in its precision.

        Unlike the baseline, such a reference rounds as it does.
        """
        return self.must_be_exact or (self.exact is None and self._is_alike and not self.changes.beside_precision)

    @property
    def _is_alike(self) -> bool:
        """Whether neither code nor versions are another, and the order of its sums is known."""
        if self.has_other_code or self.version_changes:
            return False
        # The order in which code of the user's own adds is nobody's to follow; without another one it repeats itself.
        return not self.own_module or not (self.changes.layout or self.changes.other)


def initial_state_overrides(program: Program, trace: Path | None) -> tuple[str, ...]:
    """Writes the override to begin with the initial state in a trace; none for ``None``."""
    key = program.initial_state_key
    return () if key is None or trace is None else (quote_override(key, str(trace)),)


@dataclass(frozen=True, kw_only=True, slots=True)
class AlignPlan:
    """Holds all runs of an alignment, in order, and where its results go.

    ``recording_dir``: ``None`` for a program without rollouts. ``is_recorded``: the recording was there before, and the
    baseline replays it too.
    """

    output_dir: Path
    recording_dir: Path | None
    tolerance: ToleranceConfig
    baseline: PlannedRun
    candidates: tuple[PlannedRun, ...]
    is_recorded: bool = False

    @property
    def proofs_dir(self) -> Path:
        """Returns the folder of the further runs for proofs."""
        return self.output_dir / PROOFS_NAME

    @property
    def runs(self) -> tuple[PlannedRun, ...]:
        """Returns the baseline and all candidates."""
        return (self.baseline, *self.candidates)
