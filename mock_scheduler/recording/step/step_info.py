"""Holds a step file's description of itself, apart from its rows.

Contract: plain JSON, bit for bit the same after a write and a read; any other value is refused at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from mock_scheduler.batch.columns import copy_json
from mock_scheduler.errors import RecordingError
from mock_scheduler.scheduler import Mode
from mock_scheduler.support.digests import JSON, canonical_json, check_json

#: Name of a random generator -> the digest of its state before a rollout, and its state after it, in base64.
GeneratorStates: TypeAlias = "Mapping[str, tuple[str, str]]"


_GENERATOR_FIELDS = ("random_states", "late_random_states")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInfo:
    """Identifies a step and tells how it was played.

    ``metrics``: measurements of the real scheduler for this batch, for example seconds and tokens.
    ``scheduler_state``: its ``state_dict`` after the batch, so a replay can make a truthful checkpoint.
    ``data_cursor``: where the pipeline's data stood; None where it did not say. ``shard``: (index, count) where several
    writers each hold some rows of the step; None for a single file. ``group_size``: trajectories of every group of the
    whole step, for a shard that may cut groups; None where it is not known, or is that of the rows. ``random_states``:
    of the writer's random generators after the rollout, and ``late_random_states`` after the trainer computed the late
    values; None where none was recorded, and not in the file then. Raises
    ``RecordingError`` listing every value a file could not give back as it is: another type (a NumPy number
    too), NaN, an infinity, a tuple, a key that is no text.
    """

    step: int
    mode: Mode
    scheduler_id: str
    run_id: str
    policy_version: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    scheduler_state: Mapping[str, JSON] = field(default_factory=dict)
    data_cursor: JSON = None
    shard: tuple[int, int] | None = None
    group_size: int | None = None
    random_states: GeneratorStates | None = None
    late_random_states: GeneratorStates | None = None

    def __post_init__(self) -> None:
        problems = [*_number_problems(self), *_metric_problems(self.metrics)]
        for name in _GENERATOR_FIELDS:
            problems += _generator_problems(name, getattr(self, name))
        state: object = dict(self.scheduler_state) if isinstance(self.scheduler_state, Mapping) else None
        if state is None:
            problems.append(f"scheduler_state is of type {type(self.scheduler_state).__name__}; expected a dict")
        # Refused when it is made, not when it is written: the batch would be lost by then.
        for name, value in (("scheduler_state", state), ("data_cursor", self.data_cursor)):
            try:
                check_json(value, name)
            except ValueError as error:
                problems.append(str(error))
        if problems:
            raise RecordingError(f"info of step {self.step} has what a file cannot keep: {'; '.join(problems)}")

    def as_json(self) -> dict[str, JSON]:
        """The fields as JSON; ``from_json`` is the inverse."""
        return {
            "step": self.step,
            "mode": self.mode,
            "scheduler_id": self.scheduler_id,
            "run_id": self.run_id,
            "policy_version": self.policy_version,
            "metrics": dict(self.metrics),
            "scheduler_state": dict(self.scheduler_state),
            "data_cursor": self.data_cursor,
            "shard": self.shard,
            "group_size": self.group_size,
            # Left out where there are none, as in the files of before there were any.
            **{name: dict(states) for name in _GENERATOR_FIELDS if (states := getattr(self, name)) is not None},
        }

    def copy(self) -> StepInfo:
        """Gives an equal info whose JSON nothing else refers to, so it can be written while training goes on."""
        return replace(
            self,
            # Only mutable values are copied: training waits for it.
            metrics=dict(self.metrics),
            scheduler_state={name: copy_json(value) for name, value in self.scheduler_state.items()},
            data_cursor=copy_json(self.data_cursor),
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StepInfo:
        """The info from ``as_json``; raises ``TypeError`` or ``ValueError`` where it is none."""
        try:
            found = {name: value[name] for name in _GENERATOR_FIELDS if name in value and value[name] is not None}
            states = {name: {key: tuple(pair) for key, pair in dict(pairs).items()} for name, pairs in found.items()}
            return cls(**{**value, "shard": value["shard"] and tuple(value["shard"]), **states})
        except RecordingError as error:
            raise ValueError(str(error)) from error


def info_differences(recorded: StepInfo, played: StepInfo) -> list[str]:
    """Lists the values that say from where a step was played and differ; metrics may hold times, and do not count."""
    values: tuple[tuple[str, JSON, JSON], ...] = (
        ("policy_version", recorded.policy_version, played.policy_version),
        ("data_cursor", recorded.data_cursor, played.data_cursor),
        ("scheduler_state", dict(recorded.scheduler_state), dict(played.scheduler_state)),
        ("group_size", recorded.group_size, played.group_size),
    )
    # As text, since 1 is not 1.0 and not true in a recording.
    texts = [(name, canonical_json(a), canonical_json(b)) for name, a, b in values]
    lines = [f"{name}: recorded {a}, played {b}" for name, a, b in texts if a != b]
    return (
        lines
        + [
            f"random_states: from the same state, the rollout left the random generator {name!r} elsewhere than the "
            "recorded one did: what is drawn next differs"
            for name in moved_elsewhere(recorded.random_states, played.random_states)
        ]
        + [
            f"late_random_states: from the same state, what computed the late values left the random generator "
            f"{name!r} elsewhere than the recorded run did: what is drawn next differs"
            for name in moved_elsewhere(recorded.late_random_states, played.late_random_states)
        ]
    )


def moved_elsewhere(a: GeneratorStates | None, b: GeneratorStates | None) -> list[str]:
    """Lists the random generators that two rollouts found in one state and left in two.

    A generator that stood elsewhere before, as one that nobody seeds, says nothing about the rollout.
    """
    before = set(a or {}) & set(b or {})
    return [name for name in sorted(before) if a and b and a[name][0] == b[name][0] and a[name][1] != b[name][1]]


def _number_problems(info: StepInfo) -> list[str]:
    """Lists fields of another type than theirs: a type checker may not have been asked."""
    kinds = {
        "step": (info.step, int),
        "mode": (info.mode, str),
        "scheduler_id": (info.scheduler_id, str),
        "run_id": (info.run_id, str),
        "policy_version": (info.policy_version, int),
    }
    if info.group_size is not None:
        kinds["group_size"] = (info.group_size, int)
    problems = [
        f"{name} is {value!r}; expected {kind.__name__}"
        for name, (value, kind) in kinds.items()
        if type(value) is not kind
    ]
    if info.mode not in ("train", "val"):
        problems.append(f"mode is {info.mode!r}; expected 'train' or 'val'")
    shard = info.shard
    if shard is not None and (type(shard) is not tuple or [type(number) for number in shard] != [int, int]):
        problems.append(f"shard is {shard!r}; expected (index, count)")
    return problems


def _generator_problems(field: str, states: GeneratorStates | None) -> list[str]:
    if states is None:
        return []
    if not isinstance(states, Mapping):
        return [f"{field} is of type {type(states).__name__}; expected a dict"]
    return [
        f"{field}.{name} is {pair!r}; expected (digest, state) as text"
        for name, pair in states.items()
        if type(name) is not str or type(pair) is not tuple or [type(text) for text in pair] != [str, str]
    ]


def _metric_problems(metrics: Mapping[str, float]) -> list[str]:
    if not isinstance(metrics, Mapping):
        return [f"metrics is of type {type(metrics).__name__}; expected a dict"]
    return [
        f"metrics: key {name!r} is {type(name).__name__}; JSON has text keys only"
        for name in metrics
        if type(name) is not str
    ] + [
        f"metrics.{name} is {value!r}; expected a finite float or int"
        for name, value in metrics.items()
        if type(value) not in (float, int) or not math.isfinite(value)
    ]
