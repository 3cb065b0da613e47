"""Compared tensors, metrics and their bounds as values of strict JSON; ``verdict_json`` has the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from mock_scheduler.comparison.bounds.bounds import Bounds
from mock_scheduler.comparison.findings import Finding, NotCompared
from mock_scheduler.comparison.noise.suspicions import Suspicion, TestSummary
from mock_scheduler.comparison.tensors import LedgerComparison, TensorComparison, TensorDifference, TensorGroup
from mock_scheduler.comparison.walk.metrics import MetricComparison, MetricDifference
from mock_scheduler.report.comparison.view import count_tiers
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.documents import dataclass_to_json, to_json
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.verdict.wording.bounds import (
    describe_bounds,
    describe_bounds_advice,
    describe_suspicion,
    describe_test,
)
from mock_scheduler.verdict.wording.findings import describe_finding, describe_ledger, describe_note, describe_reasons
from mock_scheduler.verdict.wording.residuals import describe_locality, describe_residual

Item = TypeVar("Item")

MAX_LISTED = 1000
NUM_NEAREST = 20


def bounds_to_json(bounds: Bounds, *, is_by_content: bool = False) -> dict[str, JSON]:
    """Returns the bounds of a comparison: their source, words, advice and measured noise.

    ``is_by_content``: as in ``describe_bounds_advice``.
    """
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
        "description": describe_bounds(bounds),
        "advice": describe_bounds_advice(bounds, is_by_content=is_by_content),
        "noise": measured,
    }


def conflict_to_json(conflict: ReplicaConflict) -> dict[str, JSON]:
    """A disagreement of replicas: its fields, the ``axes`` on which the two ranks stand apart, and it in words."""
    return {**dataclass_to_json(conflict), "axes": list(conflict.axes), "description": conflict.describe()}


def ledger_to_json(ledger: LedgerComparison) -> dict[str, JSON]:
    """Returns a ledger's fields, and its first difference in words besides its facts."""
    difference = None if ledger.difference is None else describe_ledger(ledger)
    return {**dataclass_to_json(ledger), "difference": difference, "first_difference": to_json(ledger.difference)}


def bounded(name: str, items: Sequence[Item], convert: Callable[[Item], JSON] = to_json) -> dict[str, JSON]:
    """``{name: the first MAX_LISTED, num_name: how many there are}``; only listed items are converted."""
    return {name: [convert(item) for item in items[:MAX_LISTED]], f"num_{name}": len(items)}


def metrics_to_json(metrics: MetricComparison) -> JSON:
    """Returns compared metrics, bounded."""
    return {
        **bounded("steps", metrics.steps),
        **bounded("differences", metrics.differences, metric_to_json),
        **bounded("findings", metrics.findings, finding_to_json),
    }


def metric_to_json(difference: MetricDifference) -> JSON:
    """All but its changes: the two logs have them."""
    return {name: value for name, value in dataclass_to_json(difference).items() if name != "changes"}


def tensors_to_json(tensors: TensorComparison) -> JSON:
    """Returns compared tensors, bounded."""
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
        **bounded("findings", tensors.findings, finding_to_json),
        **bounded("unusable", tensors.unusable, finding_to_json),
        **bounded("baseline_replica_conflicts", tensors.baseline_conflicts, conflict_to_json),
        **bounded("candidate_replica_conflicts", tensors.candidate_conflicts, conflict_to_json),
        **bounded("not_compared", tensors.not_compared, _not_compared_to_json),
        **bounded("flips", tensors.flips),
        **bounded("ledgers", tensors.ledgers, ledger_to_json),
        **bounded("notes", tensors.notes, describe_note),
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


def finding_to_json(finding: Finding) -> JSON:
    """Returns a finding's fields, its fact with its type, and it in words."""
    return {
        **dataclass_to_json(finding),
        "fact": {"type": type(finding.fact).__name__, **dataclass_to_json(finding.fact)},
        "message": describe_finding(finding),
        "is_selection": finding.is_selection,
        "lacks_tokens": finding.lacks_tokens,
    }


def suspicion_to_json(suspicion: Suspicion) -> JSON:
    """Returns a suspicion's fields, and it in words."""
    return {**dataclass_to_json(suspicion), "text": describe_suspicion(suspicion)}


def test_to_json(summary: TestSummary) -> JSON:
    """A test's fields, the smallest error that it would have found, and it in words."""
    return {**dataclass_to_json(summary), "smallest": to_json(summary.smallest), "text": describe_test(summary)}


def _not_compared_to_json(item: NotCompared) -> JSON:
    return {**dataclass_to_json(item), "reason": describe_reasons(item)}


def tensor_to_json(difference: TensorDifference) -> dict[str, JSON]:
    """All fields of a tensor's difference, its tier, whether it is judged, and its margin."""
    residual = difference.residual
    return {
        **dataclass_to_json(difference),
        "residual": None if residual is None else {**dataclass_to_json(residual), "text": describe_residual(residual)},
        "localities": [
            {**dataclass_to_json(item), "fraction": item.fraction, "text": describe_locality(item)}
            for item in difference.localities
        ],
        "tier": difference.tier,
        "is_judged": difference.is_judged,
        "margin": to_json(difference.margin),
    }
