"""The result of an alignment run as strict JSON.

Contract: one object, ``format_version`` 1. NaN and infinities, which JSON does not have, are the strings ``"nan"``,
``"inf"`` and ``"-inf"``. Of the tensors, the file lists those beyond tolerance and the worst of each kind per step.
"""

from __future__ import annotations

import math
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mock_scheduler.compare.metrics import MetricComparison
from mock_scheduler.compare.results import AlignmentResult, CandidateResult, RunSummary
from mock_scheduler.compare.tensors import JUDGED_KINDS, TensorComparison, TensorDifference, TensorGroup
from mock_scheduler.compare.verdict import worst_exit_code
from mock_scheduler.digests import JSON
from mock_scheduler.errors import AlignmentError
from mock_scheduler.files import save_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FORMAT_VERSION = 1


def save_result(result: AlignmentResult, path: Path) -> None:
    """Write ``result`` to ``path``, whole or not at all; raises ``AlignmentError`` where it cannot."""
    try:
        save_json(path, result_to_json(result), sort_keys=False)
    except OSError as error:
        raise AlignmentError(f"{path} cannot be written: {error.strerror}") from error


def result_to_json(result: AlignmentResult) -> dict[str, JSON]:
    """The whole result as JSON values."""
    verdicts = [candidate.alignment.verdict for candidate in result.candidates]
    return {
        "format_version": FORMAT_VERSION,
        "config_name": result.config_name,
        "output_dir": str(result.output_dir),
        "recording_dir": to_json(result.recording_dir),
        "exit_code": int(worst_exit_code(verdicts)),
        "tolerance": to_json(result.tolerance.model_dump()),
        "baseline": _run(result.baseline),
        "candidates": [_candidate(candidate) for candidate in result.candidates],
    }


def dataclass_to_json(value: DataclassInstance) -> dict[str, JSON]:
    """A dataclass as a JSON object: its fields, in order, as ``to_json`` gives them."""
    return {name: to_json(item) for name, item in asdict(value).items()}


def to_json(value: object) -> JSON:
    """Plain data (dataclasses, mappings, sequences, paths, numbers, text) as JSON values."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return dataclass_to_json(value)
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _run(run: RunSummary | None) -> JSON:
    return to_json(run)


def _candidate(candidate: CandidateResult) -> JSON:
    alignment = candidate.alignment
    return {
        "name": candidate.name,
        "overrides": list(candidate.overrides),
        "layout": candidate.layout,
        "log_path": to_json(candidate.log_path),
        "verdict": alignment.verdict.value,
        "reason": alignment.reason,
        "first_divergence": to_json(alignment.first_divergence),
        "run": _run(candidate.run),
        "metrics": None if alignment.metrics is None else _metrics(alignment.metrics),
        "tensors": None if alignment.tensors is None else _tensors(alignment.tensors),
    }


def _metrics(metrics: MetricComparison) -> JSON:
    return {
        "steps": list(metrics.steps),
        "differences": to_json(metrics.differences),
        "findings": to_json(metrics.findings),
    }


def _tensors(tensors: TensorComparison) -> JSON:
    return {
        "steps": list(tensors.steps),
        "groups": {kind: _group(tensors.group(kind)) for kind in JUDGED_KINDS},
        "per_step": [
            {"step": step, **{kind: _group(tensors.group(kind, step=step)) for kind in JUDGED_KINDS}}
            for step in tensors.steps
        ],
        "exceeding": [_tensor(difference) for difference in tensors.exceeding],
        "findings": to_json(tensors.findings),
        "unusable": to_json(tensors.unusable),
        "baseline_replica_conflicts": to_json(tensors.baseline_conflicts),
        "candidate_replica_conflicts": to_json(tensors.candidate_conflicts),
    }


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


def _tensor(difference: TensorDifference) -> JSON:
    fields = to_json(difference)
    assert isinstance(fields, dict)
    return {**fields, "margin": to_json(difference.margin)}
