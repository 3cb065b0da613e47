"""One verdict with all that it rests on, as values of strict JSON.

Contract: numbers are numbers, but NaN and infinities, which JSON does not have, are the texts ``"nan"``, ``"inf"`` and
``"-inf"``. Every list of details has at most ``MAX_LISTED`` items, in the order of computation, and beside it stands
``num_…`` with how many there are in all. An alignment is an object of

- ``verdict``, ``exit_code``, ``reason``, ``sentence`` (the first divergence in one sentence, or null), ``full_dump``
  (overrides of the full trace to take after a comparison of sketches);
- ``first_divergence``: null, or ``step``, ``update``, ``kind``, ``name``, ``value``, ``tolerance``, ``message``,
  ``is_selection`` and ``difference`` (null, or a tensor as below);
- ``suspicions`` (``test``, ``step``, ``update``, ``name``, ``value``, ``limit``, ``text``) and ``tests`` (``test``,
  ``num_looked_at``, ``smallest``, ``text``): what noise does not explain, and what was looked at for it;
- ``metrics``: null, or ``steps``, ``differences`` (by metric: ``name``, ``num_steps``, ``bit_equal``, ``max_abs``,
  ``max_abs_step``, ``max_relative``, ``max_relative_step``, ``times_bound``, ``nearest_step``, ``bound``,
  ``first_different_step``, ``first_exceeding_step``) and ``findings``;
- ``tensors``: null, or what follows.

``tensors`` is an object of ``level`` (``full``, or ``sketch``: figures are estimates), ``steps``, ``num_compared``,
``tiers`` (by kind: how many are ``identical``, ``ulp``, ``tolerance``, ``diverged``, ``missing``, ``unobserved``,
``unjudged``, ``undecided``), ``groups`` and ``per_step`` (by kind: ``num_compared``, ``num_bit_equal``, ``worst``,
``fraction_excluded``, ``num_unjudged``), ``exceeding`` (tensors beyond their bound), ``undecided``, ``nearest`` (the
``NUM_NEAREST`` tensors nearest to their bound, worst first), ``findings``, ``unusable``,
``baseline_replica_conflicts``, ``candidate_replica_conflicts``, ``not_compared``, ``flips``, ``ledgers`` and ``notes``.
A tensor has all fields of ``compare.tensors.TensorDifference``, and ``tier``, ``is_judged`` and ``margin``.
A finding is one of ``compare.findings.Finding``. ``bounds`` beside it are ``source`` (``noise``, ``theory``,
``stated``), ``description``, ``advice`` (how to have measured ones, or empty) and ``noise``: null, or ``baseline``
(digest), ``seeds``, ``unit_roundoffs`` and ``num_tensors`` of what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from mock_scheduler.compare.bounds.bounds import Bounds
from mock_scheduler.compare.findings import Finding, NotCompared
from mock_scheduler.compare.noise.suspicions import TestSummary
from mock_scheduler.compare.tensors import LedgerComparison, TensorComparison, TensorDifference, TensorGroup
from mock_scheduler.compare.walk.metrics import MetricComparison, MetricDifference
from mock_scheduler.display.json_values import dataclass_to_json, to_json
from mock_scheduler.report.comparison.view import count_tiers
from mock_scheduler.support.digests import JSON
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.verdict.verdict import Divergence, Verdict
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


def alignment_to_json(alignment: Verdict) -> dict[str, JSON]:
    """The object that the module's docstring describes."""
    return {
        "verdict": alignment.verdict.value,
        "exit_code": int(alignment.verdict.exit_code),
        "reason": alignment.reason,
        "sentence": alignment.sentence,
        "full_dump": list(alignment.full_dump),
        "first_divergence": _divergence(alignment.first_divergence),
        "suspicions": [{**dataclass_to_json(item), "text": describe_suspicion(item)} for item in alignment.suspicions],
        "tests": [_test(item) for item in alignment.tests],
        "metrics": None if alignment.metrics is None else _metrics(alignment.metrics),
        "tensors": None if alignment.tensors is None else _tensors(alignment.tensors),
    }


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
        "description": describe_bounds(bounds),
        "advice": describe_bounds_advice(bounds),
        "noise": measured,
    }


def conflict_to_json(conflict: ReplicaConflict) -> dict[str, JSON]:
    """A disagreement of replicas: its fields, the ``axes`` on which the two ranks stand apart, and it in words."""
    return {**dataclass_to_json(conflict), "axes": list(conflict.axes), "description": conflict.describe()}


def ledger_to_json(ledger: LedgerComparison) -> dict[str, JSON]:
    """A ledger's fields, and its first difference in words besides its facts."""
    difference = None if ledger.difference is None else describe_ledger(ledger)
    return {**dataclass_to_json(ledger), "difference": difference, "first_difference": to_json(ledger.difference)}


def bounded(name: str, items: Sequence[Item], convert: Callable[[Item], JSON] = to_json) -> dict[str, JSON]:
    """``{name: the first MAX_LISTED, num_name: how many there are}``; only what is listed is converted."""
    return {name: [convert(item) for item in items[:MAX_LISTED]], f"num_{name}": len(items)}


def _divergence(divergence: Divergence | None) -> JSON:
    if divergence is None:
        return None
    difference = divergence.difference
    return {**dataclass_to_json(divergence), "difference": None if difference is None else _tensor(difference)}


def _metrics(metrics: MetricComparison) -> JSON:
    return {
        **bounded("steps", metrics.steps),
        **bounded("differences", metrics.differences, _metric),
        **bounded("findings", metrics.findings, _finding),
    }


def _metric(difference: MetricDifference) -> JSON:
    """All but its changes, which the two logs have."""
    return {name: value for name, value in dataclass_to_json(difference).items() if name != "changes"}


def _tensors(tensors: TensorComparison) -> JSON:
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
        "nearest": [_tensor(item) for item in nearest[:NUM_NEAREST]],
        **bounded("exceeding", tensors.exceeding, _tensor),
        **bounded("undecided", tensors.undecided, _tensor),
        **bounded("findings", tensors.findings, _finding),
        **bounded("unusable", tensors.unusable, _finding),
        **bounded("baseline_replica_conflicts", tensors.baseline_conflicts, conflict_to_json),
        **bounded("candidate_replica_conflicts", tensors.candidate_conflicts, conflict_to_json),
        **bounded("not_compared", tensors.not_compared, _not_compared),
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
        "worst": _tensor(group.worst),
        "fraction_excluded": group.fraction_excluded,
        "num_unjudged": group.num_unjudged,
    }


def _test(summary: TestSummary) -> JSON:
    return {**dataclass_to_json(summary), "smallest": to_json(summary.smallest), "text": describe_test(summary)}


def _finding(finding: Finding) -> JSON:
    return {
        **dataclass_to_json(finding),
        "fact": {"type": type(finding.fact).__name__, **dataclass_to_json(finding.fact)},
        "message": describe_finding(finding),
        "is_selection": finding.is_selection,
        "lacks_tokens": finding.lacks_tokens,
    }


def _not_compared(item: NotCompared) -> JSON:
    return {**dataclass_to_json(item), "reason": describe_reasons(item)}


def _tensor(difference: TensorDifference) -> dict[str, JSON]:
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
