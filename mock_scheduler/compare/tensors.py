"""Gradients and parameters of two traces, compared in the order in which training computes them.

Within a step: update by update, its gradients, then the parameters after it; within each, from the embedding through
the layers to the output. Bits are compared first, and only where they differ is anything computed. One tensor of
each side is in memory at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mock_scheduler.compare.findings import Finding
from mock_scheduler.config.schema import ToleranceConfig
from mock_scheduler.trace.files import TRACE_KINDS, TraceKey, TraceKind, view_as_bits
from mock_scheduler.trace.reader import ReplicaConflict, TraceReader

_CHUNK_ELEMENTS = 1 << 22
_LAYER = re.compile(r"\blayers\.(\d+)\.(.*)")
#: Where a parameter outside the layers is used: before them, or after.
_BEFORE_LAYERS = ("embedding", "decoder.embedding")
_LAYERS, _AFTER_LAYERS = 1, 2
#: The parts of a transformer layer in the order of the forward pass.
_LAYER_PARTS = (
    "input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.linear_proj",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """One tensor that both runs have in the same shape and dtype.

    ``relative``: ||a - b||_F / ||a||_F in float64, where a is the baseline; 0/0 = 0, x/0 = inf.
    """

    key: TraceKey
    num_elements: int
    bit_equal: bool
    max_abs: float
    relative: float
    tolerance: float

    @property
    def exceeds(self) -> bool:
        """Whether it is beyond its tolerance; NaN is."""
        return not self.relative <= self.tolerance

    @property
    def margin(self) -> float:
        """How many times the difference would fit into the tolerance; inf where there is none, below 1 beyond it."""
        return math.inf if self.relative == 0 else self.tolerance / self.relative


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup:
    """All compared tensors of one kind, of one step or of all: how many, how many bit-equal, and the worst."""

    kind: TraceKind
    num_compared: int
    num_bit_equal: int
    worst: TensorDifference


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorComparison:
    """All tensors, in execution order; ``steps`` are those that both runs traced."""

    steps: tuple[int, ...]
    differences: tuple[TensorDifference, ...]
    findings: tuple[Finding, ...]
    baseline_conflicts: tuple[ReplicaConflict, ...]
    candidate_conflicts: tuple[ReplicaConflict, ...]

    @property
    def exceeding(self) -> tuple[TensorDifference, ...]:
        """Tensors beyond their tolerance, in execution order."""
        return tuple(difference for difference in self.differences if difference.exceeds)

    @property
    def new_conflicts(self) -> tuple[ReplicaConflict, ...]:
        """Conflicts between the candidate's replicas of tensors whose replicas agree in the baseline."""
        known = {conflict.key for conflict in self.baseline_conflicts}
        return tuple(conflict for conflict in self.candidate_conflicts if conflict.key not in known)

    def group(self, kind: TraceKind, *, step: int | None = None) -> TensorGroup | None:
        """The aggregate of one kind, of all steps or of ``step``; ``None`` where none was compared."""
        chosen = [
            difference
            for difference in self.differences
            if difference.key.kind == kind and step in (None, difference.key.step)
        ]
        if not chosen:
            return None
        return TensorGroup(
            kind=kind,
            num_compared=len(chosen),
            num_bit_equal=sum(difference.bit_equal for difference in chosen),
            worst=max(chosen, key=lambda difference: difference.relative),
        )


def execution_order(names: Iterable[str]) -> list[str]:
    """Canonical parameter names in the order of the forward pass; unknown names come after known ones beside them."""
    return sorted(names, key=_execution_position)


def order_keys(keys: Iterable[TraceKey]) -> list[TraceKey]:
    """Trace keys in the order in which training computes them."""
    return sorted(
        keys, key=lambda key: (key.step, key.update, TRACE_KINDS.index(key.kind), _execution_position(key.name))
    )


def compare_traces(baseline: TraceReader, candidate: TraceReader, *, tolerance: ToleranceConfig) -> TensorComparison:
    """Compare every tensor of every step; what is on one side only, or cannot be subtracted, is a finding."""
    steps = tuple(sorted(set(baseline.steps) & set(candidate.steps)))
    findings = _find_missing_steps(baseline.steps, candidate.steps)
    differences: list[TensorDifference] = []
    conflicts: tuple[list[ReplicaConflict], list[ReplicaConflict]] = ([], [])
    for step in steps:
        mine, other = baseline.keys(step), candidate.keys(step)
        for key in order_keys(mine | other):
            if key not in mine or key not in other:
                findings.append(_missing_tensor(key, in_baseline=key in mine))
                continue
            left, right = baseline.merge(key), candidate.merge(key)
            conflicts[0].extend(left.conflicts)
            conflicts[1].extend(right.conflicts)
            outcome = compare_tensors(key, left.tensor, right.tensor, tolerance=tolerance)
            if isinstance(outcome, Finding):
                findings.append(outcome)
            else:
                differences.append(outcome)
    return TensorComparison(
        steps=steps,
        differences=tuple(differences),
        findings=tuple(findings),
        baseline_conflicts=tuple(conflicts[0]),
        candidate_conflicts=tuple(conflicts[1]),
    )


def compare_tensors(
    key: TraceKey, baseline: torch.Tensor, candidate: torch.Tensor, *, tolerance: ToleranceConfig
) -> TensorDifference | Finding:
    """Compare one tensor: bits first, then figures.

    Another dtype or shape is a finding, and so is NaN or infinity on either side of tensors whose bits differ.
    """
    if baseline.dtype != candidate.dtype:
        return _finding(key, f"has dtype {baseline.dtype} in the baseline and {candidate.dtype} in the candidate")
    if baseline.shape != candidate.shape:
        return _finding(
            key, f"has shape {list(baseline.shape)} in the baseline and {list(candidate.shape)} in the candidate"
        )
    bound = tolerance.gradient if key.kind == "gradient" else tolerance.parameter
    if torch.equal(view_as_bits(baseline), view_as_bits(candidate)):
        return TensorDifference(
            key=key, num_elements=baseline.numel(), bit_equal=True, max_abs=0.0, relative=0.0, tolerance=bound
        )
    non_finite = _describe_non_finite(baseline), _describe_non_finite(candidate)
    if any(non_finite):
        sides = [
            f"{what} in the {side}" for what, side in zip(non_finite, ("baseline", "candidate"), strict=True) if what
        ]
        return _finding(key, f"has {' and '.join(sides)}")
    max_abs, relative = compute_difference(baseline, candidate)
    return TensorDifference(
        key=key, num_elements=baseline.numel(), bit_equal=False, max_abs=max_abs, relative=relative, tolerance=bound
    )


def compute_difference(baseline: torch.Tensor, candidate: torch.Tensor) -> tuple[float, float]:
    """Largest |a - b| and ||a - b||_F / ||a||_F of finite tensors of one shape, in float64 and by chunks.

    0/0 = 0, x/0 = inf.
    """
    left, right = baseline.reshape(-1), candidate.reshape(-1)
    max_abs = square_difference = square_baseline = 0.0
    for start in range(0, left.numel(), _CHUNK_ELEMENTS):
        wide = left[start : start + _CHUNK_ELEMENTS].double()
        delta = (wide - right[start : start + _CHUNK_ELEMENTS].double()).abs()
        max_abs = max(max_abs, float(delta.max()))
        square_difference += float(delta.square().sum())
        square_baseline += float(wide.square().sum())
    if square_difference == 0.0:
        return max_abs, 0.0
    return max_abs, math.sqrt(square_difference / square_baseline) if square_baseline else math.inf


def _execution_position(name: str) -> tuple[int, int, int, str]:
    layer = _LAYER.search(name)
    if layer is not None:
        part = next((index for index, part in enumerate(_LAYER_PARTS) if layer[2].startswith(part)), len(_LAYER_PARTS))
        return _LAYERS, int(layer[1]), part, name
    if name.startswith(_BEFORE_LAYERS):
        return 0, 0, 0, name
    return _AFTER_LAYERS, 0, int(name.startswith("output_layer")), name


def _describe_non_finite(tensor: torch.Tensor) -> str:
    """How many elements are NaN and infinite, in words; empty where all are finite."""
    counts = (("NaN", int(tensor.isnan().sum())), ("infinity", int(tensor.isinf().sum())))
    found = [f"{what} in {count} of {tensor.numel()} elements" for what, count in counts if count]
    return " and ".join(found)


def _find_missing_steps(baseline: tuple[int, ...], candidate: tuple[int, ...]) -> list[Finding]:
    rows = [(step, "baseline", "candidate") for step in set(baseline) - set(candidate)]
    rows += [(step, "candidate", "baseline") for step in set(candidate) - set(baseline)]
    return [
        Finding(
            kind="gradient",
            step=step,
            update=0,
            name=f"step {step}",
            message=f"step {step} was traced by the {present} but not by the {absent}",
        )
        for step, present, absent in sorted(rows)
    ]


def _missing_tensor(key: TraceKey, *, in_baseline: bool) -> Finding:
    present, absent = ("baseline", "candidate") if in_baseline else ("candidate", "baseline")
    return _finding(key, f"was traced by the {present} but not by the {absent}")


def _finding(key: TraceKey, message: str) -> Finding:
    return Finding(
        kind=key.kind, step=key.step, update=key.update, name=key.name, message=f"{key.describe()} {message}"
    )
