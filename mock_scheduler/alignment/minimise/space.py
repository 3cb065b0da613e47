"""Lists the reducible parts of a failing candidate, and writes each reduction as overrides.

Dimensions are of three kinds: the workload, shared by baseline and candidate, with parts listed by the program; the
candidate's layout, axis by axis; and its other changes (its overrides one by one, its entry, its interpreter). With
another workload the rollouts are others, and the baseline records anew.

Contract: pure; loading finds an impossible reduction, not this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mock_scheduler.alignment.minimise.minimise import Levels
from mock_scheduler.alignment.plan.overrides import format_override, override_keys
from mock_scheduler.config.align import CandidateConfig
from mock_scheduler.config.layout import LAYOUT_AXES, ParallelConfig
from mock_scheduler.errors import ConfigError
from mock_scheduler.program import Dimension, Plain, Program, Reductions, RunConfig, halvings

_SEQUENCE_PARALLEL = "sequence_parallel"
_LAYOUT_KEYS = (*LAYOUT_AXES.values(), _SEQUENCE_PARALLEL)
# What a change is named by beside its overrides.
_ENTRY, _PYTHON = "entry", "python"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """A reduced case. ``shared``: overrides of baseline and candidate; ``candidate``: with its own overrides.

    ``layout``: the candidate's, in one phrase. ``steps``: the reductions, in words.
    """

    shared: tuple[str, ...]
    candidate: CandidateConfig
    layout: str
    steps: tuple[str, ...]

    @property
    def is_baseline(self) -> bool:
        """True where no difference from the baseline is left."""
        changed = self.candidate
        return not changed.overrides and changed.entry is None and changed.python is None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReductionSpace:
    """All reductions of one candidate, whose ``entry`` is ``None`` where it is the baseline's.

    ``baseline``, ``planned``: both configurations as given. ``reductions``: how the program makes workloads smaller.
    """

    reductions: Reductions
    baseline: RunConfig
    planned: RunConfig
    candidate: CandidateConfig
    dimensions: tuple[Dimension, ...]

    @property
    def highest(self) -> Levels:
        """Returns the last level of every dimension."""
        return tuple(len(dimension.values) for dimension in self.dimensions)

    def build(self, levels: Levels) -> Reduction:
        """Returns the case at these levels."""
        raised = [(item, level) for item, level in zip(self.dimensions, levels, strict=True) if level]
        chosen = {item.key: item.values[level - 1] for item, level in raised}
        ours, theirs = self._layouts({item.key: chosen[item.key] for item, _ in raised if item.kind == "layout"})
        workload = {item.key: chosen[item.key] for item, _ in raised if item.kind == "workload"}
        changed = {item.key for item, _ in raised if item.kind == "change"}
        kept = [text for text in _changes(self.candidate.overrides) if text not in changed]
        num_parts = max(map(_num_parts, (ours, theirs)))
        reduced = self.reductions.reduce_workload(self.baseline, workload, num_parts=num_parts)
        in_effect = [(item, level) for item, level in raised if item.key not in reduced.idle]
        return Reduction(
            shared=(
                *_format(reduced.values),
                *_format(_differing(_degrees(self.baseline.parallel), theirs)),
            ),
            candidate=CandidateConfig(
                name=self.candidate.name,
                overrides=[*_format(_differing(theirs, ours)), *kept],
                entry=None if _ENTRY in changed else self.candidate.entry,
                python=None if _PYTHON in changed else self.candidate.python,
                exact=self.candidate.exact,
            ),
            layout=ParallelConfig.model_validate(ours).describe(),
            steps=tuple(item.describe(level, reduced.values.get(item.key)) for item, level in in_effect),
        )

    def _layouts(self, reduced: Mapping[str, Plain]) -> tuple[dict[str, Plain], dict[str, Plain]]:
        """Returns the candidate's degrees and the baseline's; the baseline follows where it would be the larger one."""
        ours = {**_degrees(self.planned.parallel), **reduced}
        theirs = _degrees(self.baseline.parallel)
        for key, value in reduced.items():
            if _size(theirs[key]) > _size(value):
                theirs[key] = value
        return _without_idle(ours), _without_idle(theirs)


def build_space(
    program: Program, baseline: RunConfig, planned: RunConfig, candidate: CandidateConfig
) -> ReductionSpace:
    """Collects all dimensions of a candidate: first the workload, then its layout, then its changes.

    ``planned``: the candidate's own configuration. Raises ``ConfigError`` where the program does not say
    how its runs become smaller.
    """
    if program.reductions is None:
        raise ConfigError(f"runs of {program.entry} cannot be reduced: it does not say how")
    if candidate.entry == (baseline.align.entry or program.entry):
        candidate = candidate.model_copy(update={"entry": None})
    dimensions = (
        *program.reductions.list_dimensions(baseline),
        *_layout_dimensions(planned.parallel),
        *_change_dimensions(candidate),
    )
    return ReductionSpace(
        reductions=program.reductions,
        baseline=baseline,
        planned=planned,
        candidate=candidate,
        dimensions=dimensions,
    )


def _layout_dimensions(parallel: ParallelConfig) -> Iterator[Dimension]:
    degrees = _degrees(parallel)
    if degrees[_SEQUENCE_PARALLEL]:
        yield Dimension(kind="layout", name="sp", key=_SEQUENCE_PARALLEL, original=True, values=(False,))
    # Expert axes first, since they must divide the others.
    for axis in ("ep", "etp", "cp", "vpp", "pp", "tp", "dp"):
        key = LAYOUT_AXES[axis]
        size = _size(degrees[key])
        values: tuple[Plain, ...] = tuple(halvings(size, 1))
        if axis == "vpp":
            values = tuple(None if value == 1 else value for value in values)
        if values:
            yield Dimension(kind="layout", name=axis, key=key, original=size, values=values)


def _change_dimensions(candidate: CandidateConfig) -> Iterator[Dimension]:
    def left_out(key: str, name: str) -> Dimension:
        return Dimension(kind="change", name=name, key=key, original=key, values=(None,))

    for text in _changes(candidate.overrides):
        yield left_out(text, text)
    if candidate.entry is not None:
        yield left_out(_ENTRY, f"entry {candidate.entry}")
    if candidate.python is not None:
        yield left_out(_PYTHON, f"python {candidate.python}")


def _num_parts(degrees: Mapping[str, Plain]) -> int:
    """Counts the micro-batches of an update: one for each rank of dp, and each stage where stages have chunks."""
    stages = _size(degrees[LAYOUT_AXES["pp"]]) if _size(degrees[LAYOUT_AXES["vpp"]]) > 1 else 1
    return _size(degrees[LAYOUT_AXES["dp"]]) * stages


def _changes(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides beside the degrees of the layout."""
    degrees = {f"parallel.{key}" for key in _LAYOUT_KEYS}
    return [text for text, key in zip(overrides, override_keys(overrides), strict=True) if key not in degrees]


def _degrees(parallel: ParallelConfig) -> dict[str, Plain]:
    values = parallel.model_dump()
    return {key: values[key] for key in _LAYOUT_KEYS}


def _without_idle(degrees: Mapping[str, Plain]) -> dict[str, Plain]:
    """Takes sequence parallelism out beside tp 1, and virtual stages beside pp 1: neither has an effect alone."""
    idle: dict[str, Plain] = {}
    if degrees[LAYOUT_AXES["tp"]] == 1:
        idle[_SEQUENCE_PARALLEL] = False
    if degrees[LAYOUT_AXES["pp"]] == 1:
        idle[LAYOUT_AXES["vpp"]] = None
    return {**degrees, **idle}


def _differing(before: Mapping[str, Plain], after: Mapping[str, Plain]) -> dict[str, Plain]:
    return {f"parallel.{key}": value for key, value in after.items() if before[key] != value}


def _format(keys: Mapping[str, Plain]) -> list[str]:
    return [format_override(key, value) for key, value in keys.items()]


def _size(value: Plain) -> int:
    return int(value) if value is not None else 1
