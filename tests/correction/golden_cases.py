"""The golden cases of rollout correction as this project's types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mock_scheduler.correction import CorrectionInputs

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "rollout_correction.json").read_text(encoding="utf-8")
)
FUNCTIONS = ("compute_rollout_correction_and_rejection_mask", "compute_rollout_importance_weights")
CASES: dict[str, Any] = {case["id"]: case for case in GOLDEN["cases"] if case["function"] in FUNCTIONS}
OTHERS: dict[str, Any] = {case["id"]: case for case in GOLDEN["other_systems"]}


def numbers(rows: list[list[float | str]]) -> list[list[float]]:
    """JSON has NaN and infinities as text."""
    return [[float(value) for value in row] for row in rows]


def tensor(rows: list[list[float | str]], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(numbers(rows), dtype=torch.float64).to(dtype)


def golden_inputs(case: dict[str, Any], **further: torch.Tensor) -> CorrectionInputs:
    """The case's inputs, in its dtypes where it says so, else in float32."""
    inputs = case["inputs"]
    dtype: torch.dtype = getattr(torch, inputs.get("log_prob_dtype", "float32"))
    train = inputs["old_log_prob"] if "old_log_prob" in inputs else inputs["log_prob"]
    return CorrectionInputs(
        train_logprobs=tensor(train, dtype),
        rollout_logprobs=tensor(inputs["rollout_log_prob"], dtype),
        response_mask=tensor(inputs["response_mask"], getattr(torch, inputs.get("mask_dtype", "float32"))),
        **further,
    )
