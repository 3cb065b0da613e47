"""Gradients and parameters of two traces, compared in the order in which training computes them.

Within a step: update by update, its gradients, then the parameters after it; within each, from the embedding through
the layers to the output. Equal bits are counted as such; all figures are computed in float64.

- A *gradient* is judged by ||a - b|| / ||a||.
- A *parameter* is judged by what the update did to it: with d the change from before to after the update,
  ||d_a - d_b|| / ||d_a||. A norm relative to the parameter itself would hide a frozen or reversed optimizer at the
  learning rates of reinforcement learning. Elements whose gradients differ by more than 1 % are left out and counted:
  where a gradient is nothing but rounding (a key bias, to which softmax is blind), Adam makes its sign a full step.
- Both bounds grow by the *rounding* that such a tensor cannot be without: of a gradient, 16 units of the root mean
  square of all gradients of the update (a tensor whose true gradient is 0 was measured at 0.3 to 0.9 of them); of a
  change, the spacing of the floating-point numbers that the parameter is stored in. Where rounding makes the bound
  larger than 0.5, the tensor is *not judged*, which is counted and said; beyond the bound it still exceeds it.
- An *initial* parameter of the first step must be bit-equal: both runs start from the same weights.
- A *weight* (what a model in less than float32 computes with) must be the rounded parameter, bit for bit, in each run.

One name is walked at a time: in memory are six tensors of it and what their comparison computes from them. Before
that, a step's baseline gradients are read once more, for their root mean square.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from mock_scheduler.compare.findings import Finding
from mock_scheduler.config.schema import ToleranceConfig
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.files import view_as_bits
from mock_scheduler.trace.kinds import TRACE_KINDS, TraceKind
from mock_scheduler.trace.reader import ReplicaConflict, TraceReader

#: The kinds that a verdict must have compared.
JUDGED_KINDS: tuple[TraceKind, ...] = ("gradient", "parameter")

_CHUNK_ELEMENTS = 1 << 22
#: Elements whose gradients differ by more than this fraction have no say in how the update is judged.
_SIGNIFICANT = 1e-2
#: Units in the last place of the root mean square of all gradients below which a gradient is rounding.
_GRADIENT_ROUNDING = 16 * torch.finfo(torch.float32).eps
#: A tensor whose bound is larger than this is not judged.
_LARGEST_BOUND = 0.5
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

    ``relative``: what the tolerance bounds, as the module's docstring says, in float64; a is the baseline; 0/0 = 0,
    x/0 = inf. ``tolerance``: the stated one and the tensor's own rounding. ``max_abs``: the largest |a - b|.
    ``num_excluded``: elements of a parameter that had no say. ``is_zero``: the baseline's gradient or change is 0.
    """

    key: TraceKey
    num_elements: int
    bit_equal: bool
    max_abs: float
    relative: float
    tolerance: float
    num_excluded: int = 0
    is_zero: bool = False

    @property
    def is_judged(self) -> bool:
        """Whether the tensor is large enough against its rounding to be judged; equal bits always are."""
        return self.bit_equal or self.tolerance <= _LARGEST_BOUND

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
    """All compared tensors of one kind, of one step or of all: how many, how many bit-equal, and the worst judged."""

    kind: TraceKind
    num_compared: int
    num_bit_equal: int
    worst: TensorDifference
    fraction_excluded: float
    num_unjudged: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorComparison:
    """All tensors, in execution order; ``steps`` are those that both runs traced.

    ``unusable``: tensors that are not finite in either run, so that there is nothing to compare.
    """

    steps: tuple[int, ...]
    differences: tuple[TensorDifference, ...]
    findings: tuple[Finding, ...]
    baseline_conflicts: tuple[ReplicaConflict, ...]
    candidate_conflicts: tuple[ReplicaConflict, ...]
    unusable: tuple[Finding, ...] = ()

    @property
    def exceeding(self) -> tuple[TensorDifference, ...]:
        """Tensors beyond their tolerance, in execution order."""
        return tuple(difference for difference in self.differences if difference.exceeds)

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
            worst=min([item for item in chosen if item.is_judged] or chosen, key=lambda item: item.margin),
            num_unjudged=sum(not item.is_judged for item in chosen),
            fraction_excluded=sum(item.num_excluded for item in chosen) / sum(item.num_elements for item in chosen),
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
    unusable: list[Finding] = []
    conflicts: tuple[list[ReplicaConflict], list[ReplicaConflict]] = ([], [])
    for step in steps:
        by_name: dict[str, list[TraceKey]] = {}
        mine = baseline.keys(step)
        for key in order_keys(mine | candidate.keys(step)):
            by_name.setdefault(key.name, []).append(key)
        sizes = _gradient_sizes(baseline, mine)
        for name in execution_order(by_name):
            walk = _NameWalk(baseline, candidate, tolerance=tolerance, sizes=sizes, is_first_step=step == steps[0])
            for key in by_name[name]:
                outcome = walk.compare(key)
                if isinstance(outcome, Finding):
                    findings.append(outcome)
                elif outcome is not None:
                    differences.append(outcome)
            conflicts[0].extend(walk.conflicts[0])
            conflicts[1].extend(walk.conflicts[1])
            unusable.extend(walk.unusable)
    position = {key: index for index, key in enumerate(order_keys(item.key for item in differences))}
    differences.sort(key=lambda item: position[item.key])
    return TensorComparison(
        steps=steps,
        differences=tuple(differences),
        findings=tuple(findings),
        baseline_conflicts=tuple(conflicts[0]),
        candidate_conflicts=tuple(conflicts[1]),
        unusable=tuple(sorted(unusable, key=lambda item: (item.step, item.update or 0))),
    )


def _gradient_sizes(reader: TraceReader, keys: Iterable[TraceKey]) -> dict[int, float]:
    """Root mean square of all gradients of a step, by update; not finite where one of them is not."""
    squares: dict[int, float] = {}
    counts: dict[int, int] = {}
    for key in order_keys(keys):  # a sum in the order of a set would differ from process to process
        if key.kind == "gradient":
            tensor = reader.merge(key).tensor
            squares[key.update] = squares.get(key.update, 0.0) + float(tensor.double().square().sum())
            counts[key.update] = counts.get(key.update, 0) + tensor.numel()
    return {update: math.sqrt(total / max(counts[update], 1)) for update, total in squares.items()}


_Pair = tuple[torch.Tensor, torch.Tensor]


class _NameWalk:
    """Compares the tensors of one name within one step, in the order of computation."""

    def __init__(
        self,
        baseline: TraceReader,
        candidate: TraceReader,
        *,
        tolerance: ToleranceConfig,
        sizes: Mapping[int, float],
        is_first_step: bool,
    ) -> None:
        self._readers = (baseline, candidate)
        self._tolerance = tolerance
        self._sizes = sizes
        self._is_first_step = is_first_step
        self._gradients: _Pair | None = None
        self._parameters: _Pair | None = None
        self.conflicts: tuple[list[ReplicaConflict], list[ReplicaConflict]] = ([], [])
        self.unusable: list[Finding] = []

    def compare(self, key: TraceKey) -> TensorDifference | Finding | None:
        """The outcome for the next tensor; ``None`` where it is only needed to judge others."""
        present = [reader.has(key) for reader in self._readers]
        if not all(present):
            return _missing_tensor(key, in_baseline=present[0])
        merged = [reader.merge(key) for reader in self._readers]
        for conflicts, side in zip(self.conflicts, merged, strict=True):
            conflicts.extend(side.conflicts)
        left, right = merged[0].tensor, merged[1].tensor
        problem = find_problem(key, left, right)
        if problem is not None:
            return problem
        if not bool(left.isfinite().all()):
            self.unusable.append(_finding(key, f"has {_describe_non_finite(left)} in both runs"))
            return None
        return self._judge(key, (left, right))

    def _judge(self, key: TraceKey, pair: _Pair) -> TensorDifference | Finding | None:
        if key.kind == "gradient":
            self._gradients = pair
            return compare_gradients(
                key, *pair, tolerance=self._tolerance.gradient, size=self._sizes.get(key.update, 0.0)
            )
        if key.kind == "weight":
            return self._check_weights(key, pair)
        before, self._parameters = self._parameters, pair
        if key.kind == "initial":
            if self._is_first_step and not _is_bit_equal(*pair):
                return _finding(key, "differs: both runs must start from the same weights, to the last bit")
            return None
        if before is None:
            return _finding(key, "was traced without the parameter before it, so its update cannot be judged")
        return compare_updates(
            key, before=before, after=pair, gradients=self._gradients, tolerance=self._tolerance.update
        )

    def _check_weights(self, key: TraceKey, weights: _Pair) -> Finding | None:
        if self._parameters is None:
            return _finding(key, "was traced without the parameter that it is rounded from")
        for side, weight, parameter in zip(("baseline", "candidate"), weights, self._parameters, strict=True):
            if not _is_bit_equal(weight, parameter.to(weight.dtype)):
                return _finding(
                    key, f"is not the rounded parameter in the {side}: the model computes with other weights"
                )
        return None


def _is_bit_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(view_as_bits(left), view_as_bits(right))


def find_problem(key: TraceKey, baseline: torch.Tensor, candidate: torch.Tensor) -> Finding | None:
    """What makes two tensors impossible to compare: another dtype or shape; NaN or infinity on one side only."""
    if baseline.dtype != candidate.dtype:
        return _finding(key, f"has dtype {baseline.dtype} in the baseline and {candidate.dtype} in the candidate")
    if baseline.shape != candidate.shape:
        return _finding(
            key, f"has shape {list(baseline.shape)} in the baseline and {list(candidate.shape)} in the candidate"
        )
    mine, other = _describe_non_finite(baseline), _describe_non_finite(candidate)
    if bool(mine) != bool(other):
        side = "baseline" if mine else "candidate"
        return _finding(key, f"has {mine or other} in the {side}")
    return None


def compare_gradients(
    key: TraceKey, baseline: torch.Tensor, candidate: torch.Tensor, *, tolerance: float, size: float
) -> TensorDifference:
    """||a - b|| / ||a|| of two finite tensors of one shape; ``size``: the root mean square of all gradients."""
    bit_equal = _is_bit_equal(baseline, candidate)
    max_abs, difference, norm = compute_difference(baseline, candidate)
    rounding = _GRADIENT_ROUNDING * size * math.sqrt(baseline.numel())
    relative, bound = _relate(difference, norm, rounding=rounding, tolerance=tolerance)
    return TensorDifference(
        key=key,
        num_elements=baseline.numel(),
        bit_equal=bit_equal,
        max_abs=max_abs,
        relative=relative,
        tolerance=bound,
        is_zero=norm == 0.0,
    )


def compare_updates(
    key: TraceKey, *, before: _Pair, after: _Pair, gradients: _Pair | None, tolerance: float
) -> TensorDifference:
    """What one update did to a parameter in both runs, as the module's docstring says.

    Each pair is (baseline, candidate), all finite and of one shape; ``gradients`` are what the update was made from.
    """
    counts = torch.ones_like(after[0], dtype=torch.bool)
    if gradients is not None:
        left, right = gradients[0].double(), gradients[1].double()
        counts = (left - right).abs() <= _SIGNIFICANT * left.abs()
    mine, other = (new.double() - old.double() for old, new in zip(before, after, strict=True))
    difference, rounding, size = (_norm(values, counts) for values in (mine - other, _spacing(after[0]), mine))
    relative, bound = _relate(difference, size, rounding=rounding, tolerance=tolerance)
    return TensorDifference(
        key=key,
        num_elements=after[0].numel(),
        bit_equal=_is_bit_equal(*after) and _is_bit_equal(*before),
        max_abs=_norm_inf(after[0].double() - after[1].double()),
        relative=relative,
        tolerance=bound,
        num_excluded=int((~counts).sum()),
        is_zero=_is_bit_equal(before[0], after[0]),
    )


def _relate(difference: float, size: float, *, rounding: float, tolerance: float) -> tuple[float, float]:
    """A difference relative to ``size``, and its bound with the rounding; where the size is 0, 0 or infinite."""
    if size:
        return difference / size, tolerance + rounding / size
    return (0.0, math.inf) if difference <= rounding else (math.inf, tolerance)


def _spacing(values: torch.Tensor) -> torch.Tensor:
    """float64: the distance to the next number that the dtype of ``values`` can hold, at each of them."""
    exponent = torch.frexp(values).exponent.double() - 1.0
    return torch.where(values == 0, 0.0, torch.exp2(exponent) * torch.finfo(values.dtype).eps)


def _norm_inf(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _norm(values: torch.Tensor, counts: torch.Tensor) -> float:
    return float(values[counts].square().sum().sqrt())


def compute_difference(baseline: torch.Tensor, candidate: torch.Tensor) -> tuple[float, float, float]:
    """Largest |a - b|, ||a - b|| and ||a|| of finite tensors of one shape, in float64 and by chunks."""
    left, right = baseline.reshape(-1), candidate.reshape(-1)
    max_abs = square_difference = square_baseline = 0.0
    for start in range(0, left.numel(), _CHUNK_ELEMENTS):
        wide = left[start : start + _CHUNK_ELEMENTS].double()
        delta = (wide - right[start : start + _CHUNK_ELEMENTS].double()).abs()
        max_abs = max(max_abs, float(delta.max()))
        square_difference += float(delta.square().sum())
        square_baseline += float(wide.square().sum())
    return max_abs, math.sqrt(square_difference), math.sqrt(square_baseline)


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
