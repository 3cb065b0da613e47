"""The result of an alignment run as strict JSON.

Contract: one object, ``format_version`` 1. NaN and infinities, which JSON does not have, are the strings ``"nan"``,
``"inf"`` and ``"-inf"``. Of the tensors, the file lists those beyond tolerance and the worst of each kind per step.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TypeAlias

from mock_scheduler.compare.metrics import MetricComparison
from mock_scheduler.compare.results import AlignmentResult, CandidateResult, RunSummary
from mock_scheduler.compare.tensors import JUDGED_KINDS, TensorComparison, TensorDifference, TensorGroup
from mock_scheduler.compare.verdict import worst_exit_code
from mock_scheduler.errors import AlignmentError

FORMAT_VERSION = 1

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


def save_result(result: AlignmentResult, path: Path) -> None:
    """Write ``result`` to ``path`` aside and rename it into place; raises ``AlignmentError`` where it cannot."""
    text = json.dumps(result_to_json(result), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    aside = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        raise AlignmentError(f"{path} cannot be written: {error.strerror}") from error


def result_to_json(result: AlignmentResult) -> dict[str, Json]:
    """The whole result as JSON values."""
    verdicts = [candidate.alignment.verdict for candidate in result.candidates]
    return {
        "format_version": FORMAT_VERSION,
        "config_name": result.config_name,
        "output_dir": str(result.output_dir),
        "recording_dir": str(result.recording_dir),
        "exit_code": int(worst_exit_code(verdicts)),
        "tolerance": to_json(result.tolerance.model_dump()),
        "baseline": _run(result.baseline),
        "candidates": [_candidate(candidate) for candidate in result.candidates],
    }


def to_json(value: object) -> Json:
    """Plain data (dataclasses, mappings, sequences, paths, numbers, text) as JSON values."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(asdict(value))
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _run(run: RunSummary | None) -> Json:
    return to_json(run)


def _candidate(candidate: CandidateResult) -> Json:
    alignment = candidate.alignment
    return {
        "name": candidate.name,
        "overrides": list(candidate.overrides),
        "layout": candidate.layout,
        "log_path": str(candidate.log_path),
        "verdict": alignment.verdict.value,
        "reason": alignment.reason,
        "first_divergence": to_json(alignment.first_divergence),
        "run": _run(candidate.run),
        "metrics": None if alignment.metrics is None else _metrics(alignment.metrics),
        "tensors": None if alignment.tensors is None else _tensors(alignment.tensors),
    }


def _metrics(metrics: MetricComparison) -> Json:
    return {
        "steps": list(metrics.steps),
        "differences": to_json(metrics.differences),
        "findings": to_json(metrics.findings),
    }


def _tensors(tensors: TensorComparison) -> Json:
    return {
        "steps": list(tensors.steps),
        "groups": {kind: _group(tensors.group(kind)) for kind in JUDGED_KINDS},
        "per_step": [
            {"step": step, **{kind: _group(tensors.group(kind, step=step)) for kind in JUDGED_KINDS}}
            for step in tensors.steps
        ],
        "exceeding": [_tensor(difference) for difference in tensors.exceeding],
        "findings": to_json(tensors.findings),
        "baseline_replica_conflicts": to_json(tensors.baseline_conflicts),
        "candidate_replica_conflicts": to_json(tensors.candidate_conflicts),
    }


def _group(group: TensorGroup | None) -> Json:
    if group is None:
        return None
    return {
        "num_compared": group.num_compared,
        "num_bit_equal": group.num_bit_equal,
        "worst": _tensor(group.worst),
        "fraction_excluded": group.fraction_excluded,
    }


def _tensor(difference: TensorDifference) -> Json:
    fields = to_json(difference)
    assert isinstance(fields, dict)
    return {**fields, "margin": to_json(difference.margin)}
