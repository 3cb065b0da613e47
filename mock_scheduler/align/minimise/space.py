"""What of a failing candidate can be reduced, and what a reduction is in overrides.

Dimensions are of three kinds: the workload, which baseline and candidate share (steps, groups, layers, micro-batches);
the candidate's layout, axis by axis; and what else it changes (its overrides one by one, its entry, its interpreter).
Rows are left out and never cut, since the length of a row is the environment's; with the model or the rows the rollouts
are others, so that the baseline records anew.

Contract: pure; a reduction that cannot be run is found by loading it, not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mock_scheduler.align.minimise.minimise import Levels
from mock_scheduler.align.plan.overrides import format_override, override_keys
from mock_scheduler.config.align import CandidateConfig
from mock_scheduler.config.layout import LAYOUT_AXES, ParallelConfig
from mock_scheduler.launch.launcher import DEFAULT_ENTRY
from pipelines.config.schema import PipelineConfig

Value: TypeAlias = "int | bool | str | None"
DimensionKind = Literal["workload", "layout", "change"]

_SEQUENCE_PARALLEL = "sequence_parallel"
_LAYOUT_KEYS = (*LAYOUT_AXES.values(), _SEQUENCE_PARALLEL)
# What a change is named by beside its overrides.
_ENTRY, _PYTHON = "entry", "python"
_GROUPS, _GROUP_SIZE = "train_env_manager.num_env_groups", "train_env_manager.group_size"
_MICRO_BATCH = "training.micro_batch_size"
_UPDATES = "updates of an epoch"  # no key: with the rows it decides training.global_batch_size
_LEAST_GROUP = 2  # of one trajectory alone no advantage is left


@dataclass(frozen=True, kw_only=True, slots=True)
class Dimension:
    """``values``: what ``key`` is at levels 1, 2, ..., each more reduced; ``original``: at level 0. ``name``: in words.

    Of a change, ``key`` is the override, or ``entry`` or ``python``, and its only value ``None``: left out.
    """

    kind: DimensionKind
    name: str
    key: str
    original: Value
    values: tuple[Value, ...]

    def describe(self, level: int, in_effect: Value = None) -> str:
        """``tp 4 → 1``, or ``without a.b=c``; ``in_effect``: what became of the level's value, where that is known."""
        if self.kind == "change":
            return f"without {self.name}"
        value = self.values[level - 1] if in_effect is None else in_effect
        return f"{self.name} {_show(self.original)} → {_show(value)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """A reduced case. ``shared``: overrides of baseline and candidate; ``candidate``: with its own overrides.

    ``layout``: the candidate's, in one phrase. ``steps``: what was reduced, in words.
    """

    shared: tuple[str, ...]
    candidate: CandidateConfig
    layout: str
    steps: tuple[str, ...]

    @property
    def is_baseline(self) -> bool:
        """Whether nothing is left that differs from the baseline."""
        changed = self.candidate
        return not changed.overrides and changed.entry == DEFAULT_ENTRY and changed.python is None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReductionSpace:
    """All reductions of one candidate: ``baseline`` and ``planned`` are both configurations as given."""

    baseline: PipelineConfig
    planned: PipelineConfig
    candidate: CandidateConfig
    dimensions: tuple[Dimension, ...]

    @property
    def highest(self) -> Levels:
        """The last level of every dimension."""
        return tuple(len(dimension.values) for dimension in self.dimensions)

    def build(self, levels: Levels) -> Reduction:
        """The case at these levels."""
        raised = [(item, level) for item, level in zip(self.dimensions, levels, strict=True) if level]
        chosen = {item.key: item.values[level - 1] for item, level in raised}
        ours, theirs = self._layouts({item.key: chosen[item.key] for item, _ in raised if item.kind == "layout"})
        workload = {item.key: chosen[item.key] for item, _ in raised if item.kind == "workload"}
        changed = {item.key for item, _ in raised if item.kind == "change"}
        kept = [text for text in _changes(self.candidate.overrides) if text not in changed]
        shared = _workload(self.baseline, workload, num_parts=max(map(_num_parts, (ours, theirs))))
        # Rows of a micro-batch are no more than there are, so that its level may have no effect.
        of_micro_batch = _size(shared.get(_MICRO_BATCH, 1))
        in_effect = [
            (item, level) for item, level in raised if item.key != _MICRO_BATCH or of_micro_batch > _size(item.original)
        ]
        return Reduction(
            shared=(
                *_format(shared),
                *_format(_differing(_degrees(self.baseline.parallel), theirs)),
            ),
            candidate=CandidateConfig(
                name=self.candidate.name,
                overrides=[*_format(_differing(theirs, ours)), *kept],
                entry=DEFAULT_ENTRY if _ENTRY in changed else self.candidate.entry,
                python=None if _PYTHON in changed else self.candidate.python,
                exact=self.candidate.exact,
            ),
            layout=ParallelConfig.model_validate(ours).describe(),
            steps=tuple(item.describe(level, shared.get(item.key)) for item, level in in_effect),
        )

    def _layouts(self, reduced: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
        """The candidate's degrees and the baseline's, which follows where it would be the larger one."""
        ours = {**_degrees(self.planned.parallel), **reduced}
        theirs = _degrees(self.baseline.parallel)
        for key, value in reduced.items():
            if _size(theirs[key]) > _size(value):
                theirs[key] = value
        return _without_idle(ours), _without_idle(theirs)


def build_space(baseline: PipelineConfig, planned: PipelineConfig, candidate: CandidateConfig) -> ReductionSpace:
    """Everything of a candidate that can be reduced: first what makes runs shorter, then its layout, then its changes.

    ``planned``: the configuration that the candidate runs with.
    """
    dimensions = (
        *_workload_dimensions(baseline),
        *_layout_dimensions(planned.parallel),
        *_change_dimensions(candidate),
    )
    return ReductionSpace(baseline=baseline, planned=planned, candidate=candidate, dimensions=dimensions)


def _workload_dimensions(config: PipelineConfig) -> Iterator[Dimension]:
    def shrinking(name: str, key: str, value: int, least: int = 1) -> Iterator[Dimension]:
        values = tuple(_halvings(value, least))
        if values:
            yield Dimension(kind="workload", name=name, key=key, original=value, values=values)

    envs, training = config.train_env_manager, config.training
    yield from shrinking("steps", "max_steps", config.max_steps)
    if config.eval_steps:
        yield Dimension(
            kind="workload", name="validation every", key="eval_steps", original=config.eval_steps, values=(0,)
        )
    yield from shrinking("groups", _GROUPS, envs.num_env_groups)
    yield from shrinking("trajectories of a group", _GROUP_SIZE, envs.group_size, _LEAST_GROUP)
    yield from shrinking("epochs", "ppo_epochs", config.ppo_epochs)
    yield from shrinking(_UPDATES, _UPDATES, config.rollout_batch_size // training.global_batch_size)
    yield from shrinking("layers", "model.num_layers", config.model.num_layers)
    if training.batching == "fixed":
        size, largest = training.micro_batch_size, training.global_batch_size
        larger = tuple(size << power for power in range(1, 32) if size << power <= largest)
        if larger:
            yield Dimension(
                kind="workload",
                name="rows of a micro-batch",
                key=_MICRO_BATCH,
                original=size,
                values=larger,
            )


def _layout_dimensions(parallel: ParallelConfig) -> Iterator[Dimension]:
    degrees = _degrees(parallel)
    if degrees[_SEQUENCE_PARALLEL]:
        yield Dimension(kind="layout", name="sp", key=_SEQUENCE_PARALLEL, original=True, values=(False,))
    # Expert axes first, since they must divide the others.
    for axis in ("ep", "etp", "cp", "vpp", "pp", "tp", "dp"):
        key = LAYOUT_AXES[axis]
        size = _size(degrees[key])
        values: tuple[Value, ...] = tuple(_halvings(size, 1))
        if axis == "vpp":
            values = tuple(None if value == 1 else value for value in values)
        if values:
            yield Dimension(kind="layout", name=axis, key=key, original=size, values=values)


def _change_dimensions(candidate: CandidateConfig) -> Iterator[Dimension]:
    def left_out(key: str, name: str) -> Dimension:
        return Dimension(kind="change", name=name, key=key, original=key, values=(None,))

    for text in _changes(candidate.overrides):
        yield left_out(text, text)
    if candidate.entry != DEFAULT_ENTRY:
        yield left_out(_ENTRY, f"entry {candidate.entry}")
    if candidate.python is not None:
        yield left_out(_PYTHON, f"python {candidate.python}")


def _workload(config: PipelineConfig, chosen: Mapping[str, Value], *, num_parts: int) -> dict[str, Value]:
    """The keys of a reduced workload; rows of a step, an update and a micro-batch follow from groups and updates.

    ``num_parts``: micro-batches that an update must have at least.
    """
    envs, training = config.train_env_manager, config.training
    rows = config.rollout_batch_size // (envs.num_env_groups * envs.group_size)
    rows *= _size(chosen.get(_GROUPS, envs.num_env_groups)) * _size(chosen.get(_GROUP_SIZE, envs.group_size))
    updates = _size(chosen.get(_UPDATES, config.rollout_batch_size // training.global_batch_size))
    of_update = max(rows // updates, 1)
    of_micro_batch = _size(chosen.get(_MICRO_BATCH, training.micro_batch_size))
    if training.batching == "fixed":
        of_micro_batch = min(of_micro_batch, max(of_update // num_parts, 1))
    derived: dict[str, tuple[int, int]] = {
        "rollout_batch_size": (config.rollout_batch_size, rows),
        "training.global_batch_size": (training.global_batch_size, of_update),
        _MICRO_BATCH: (training.micro_batch_size, of_micro_batch),
    }
    kept = {key: value for key, value in chosen.items() if key not in (_UPDATES, _MICRO_BATCH)}
    return {**kept, **{key: now for key, (before, now) in derived.items() if now != before}}


def _num_parts(degrees: Mapping[str, Value]) -> int:
    """Micro-batches that an update needs: one for each data-parallel rank, and stage where these have chunks."""
    stages = _size(degrees[LAYOUT_AXES["pp"]]) if _size(degrees[LAYOUT_AXES["vpp"]]) > 1 else 1
    return _size(degrees[LAYOUT_AXES["dp"]]) * stages


def _changes(overrides: Sequence[str]) -> list[str]:
    """The overrides that are no degree of the layout."""
    degrees = {f"parallel.{key}" for key in _LAYOUT_KEYS}
    return [text for text, key in zip(overrides, override_keys(overrides), strict=True) if key not in degrees]


def _degrees(parallel: ParallelConfig) -> dict[str, Value]:
    values = parallel.model_dump()
    return {key: values[key] for key in _LAYOUT_KEYS}


def _without_idle(degrees: Mapping[str, Value]) -> dict[str, Value]:
    """Without what needs another axis that is 1."""
    idle: dict[str, Value] = {}
    if degrees[LAYOUT_AXES["tp"]] == 1:
        idle[_SEQUENCE_PARALLEL] = False
    if degrees[LAYOUT_AXES["pp"]] == 1:
        idle[LAYOUT_AXES["vpp"]] = None
    return {**degrees, **idle}


def _differing(before: Mapping[str, Value], after: Mapping[str, Value]) -> dict[str, Value]:
    return {f"parallel.{key}": value for key, value in after.items() if before[key] != value}


def _format(keys: Mapping[str, Value]) -> list[str]:
    return [format_override(key, value) for key, value in keys.items()]


def _halvings(value: int, least: int) -> Iterator[int]:
    while value // 2 >= least:
        value //= 2
        yield value


def _size(value: Value) -> int:
    return int(value) if value is not None else 1


def _show(value: Value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "1" if value is None else str(value)
