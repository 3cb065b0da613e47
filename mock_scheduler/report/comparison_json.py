"""Compared tensors, metrics and their bounds as values of strict JSON; ``verdict_json`` has the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from mock_scheduler.compare.bounds.bounds import Bounds
from mock_scheduler.compare.tensors import TensorComparison, TensorDifference, TensorGroup
from mock_scheduler.compare.walk.metrics import MetricComparison, MetricDifference
from mock_scheduler.display.json_values import dataclass_to_json, to_json
from mock_scheduler.report.comparison.view import count_tiers
from mock_scheduler.support.digests import JSON
from mock_scheduler.trace.full.reader import ReplicaConflict

Item = TypeVar("Item")

MAX_LISTED = 1000
NUM_NEAREST = 20


def bounds_to_json(bounds: Bounds) -> dict[str, JSON]:
    """What a comparison's bounds are and where they are from."""
    noise = bounds.noise
    measured: JSON = None
    if noise is not None:
        measured = {
            "baseline": noise.baseline,
            "seeds": list(noise.seeds),
            "unit_roundoffs": noise.unit_roundoffs,
            "num_tensors": len(noise.tensors),
        }
    return {
        "source": bounds.source,
        "description": bounds.describe(),
        "advice": bounds.advice(),
        "noise": measured,
    }


def conflict_to_json(conflict: ReplicaConflict) -> dict[str, JSON]:
    """A disagreement of replicas: its fields, the ``axes`` on which the two ranks stand apart, and it in words."""
    return {**dataclass_to_json(conflict), "axes": list(conflict.axes), "description": conflict.describe()}


def bounded(name: str, items: Sequence[Item], convert: Callable[[Item], JSON] = to_json) -> dict[str, JSON]:
    """``{name: the first MAX_LISTED, num_name: how many there are}``; only what is listed is converted."""
    return {name: [convert(item) for item in items[:MAX_LISTED]], f"num_{name}": len(items)}


def metrics_to_json(metrics: MetricComparison) -> JSON:
    """Compared metrics, bounded."""
    return {
        **bounded("steps", metrics.steps),
        **bounded("differences", metrics.differences, metric_to_json),
        **bounded("findings", metrics.findings),
    }


def metric_to_json(difference: MetricDifference) -> JSON:
    """All but its changes, which the two logs have."""
    return {name: value for name, value in dataclass_to_json(difference).items() if name != "changes"}


def tensors_to_json(tensors: TensorComparison) -> JSON:
    """Compared tensors, bounded."""
    nearest = sorted((item for item in tensors.differences if not item.bit_equal), key=lambda item: item.margin)
    return {
        "level": tensors.level,
        **bounded("steps", tensors.steps),
        "num_compared": len(tensors.differences),
        "tiers": {
            counts.kind: {name: value for name, value in dataclass_to_json(counts).items() if name != "kind"}
            for counts in count_tiers(tensors)
        },
        "groups": {kind: _group(tensors.group(kind)) for kind in tensors.kinds},
        "per_step": _per_step(tensors),
        "nearest": [tensor_to_json(item) for item in nearest[:NUM_NEAREST]],
        **bounded("exceeding", tensors.exceeding, tensor_to_json),
        **bounded("undecided", tensors.undecided, tensor_to_json),
        **bounded("findings", tensors.findings),
        **bounded("unusable", tensors.unusable),
        **bounded("baseline_replica_conflicts", tensors.baseline_conflicts, conflict_to_json),
        **bounded("candidate_replica_conflicts", tensors.candidate_conflicts, conflict_to_json),
        **bounded("not_compared", tensors.not_compared),
        **bounded("flips", tensors.flips),
        **bounded("ledgers", tensors.ledgers),
        **bounded("notes", tensors.notes),
    }


def _per_step(tensors: TensorComparison) -> JSON:
    by_step: dict[int, list[TensorDifference]] = {step: [] for step in tensors.steps[:MAX_LISTED]}
    for difference in tensors.differences:
        if difference.key.step in by_step:
            by_step[difference.key.step].append(difference)
    rows: list[JSON] = []
    for step, differences in by_step.items():
        own = replace(tensors, differences=tuple(differences))
        rows.append({"step": step, **{kind: _group(own.group(kind)) for kind in tensors.kinds}})
    return rows


def _group(group: TensorGroup | None) -> JSON:
    if group is None:
        return None
    return {
        "num_compared": group.num_compared,
        "num_bit_equal": group.num_bit_equal,
        "worst": tensor_to_json(group.worst),
        "fraction_excluded": group.fraction_excluded,
        "num_unjudged": group.num_unjudged,
    }


def tensor_to_json(difference: TensorDifference) -> dict[str, JSON]:
    """All fields of a tensor's difference, its tier, whether it is judged, and its margin."""
    return {
        **dataclass_to_json(difference),
        "tier": difference.tier,
        "is_judged": difference.is_judged,
        "margin": to_json(difference.margin),
    }
