"""The proofs of the detection matrix: each is a function from the traces of a fault to whether it is found, and where.

None knows which fault it looks at. What they read is compared once: the candidate with the plain reference, within the
noise that perturbed references measured, and with the reference that adds in the candidate's order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from mock_scheduler.comparison.bounds.bounds import EXACT, UNBOUNDED
from mock_scheduler.comparison.bounds.measured import NoiseBounds
from mock_scheduler.comparison.noise.judging import judge_noise
from mock_scheduler.comparison.tensors import TensorComparison, TensorDifference
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.verdict.divergences import Divergence, find_divergences
from mock_scheduler.verdict.wording.bounds import describe_suspicion
from mock_scheduler.verdict.wording.findings import describe_finding
from tests.faults.fault import Precision

Outcome = Literal["found", "silent", "not available"]

#: Relative error of a gradient that tools of a fixed tolerance let pass.
FIXED_NORM: Mapping[Precision, float] = {"float32": 1e-5, "bfloat16": 1e-2}
#: Of 1 - 2xy / (x² + y²), the default of sglang's comparator (0.5.23, ``--diff-threshold``).
FIXED_ANGLE = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one proof says. text: where and what, in words; why it is not available."""

    outcome: Outcome
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The traces of one candidate and what it is held against.

    reference: of one process. noise: of its perturbed runs; ``None`` where none was made. emulated: of one process that
    adds in the candidate's order; ``None`` where there is none. losses: the step's loss of reference and candidate, as
    a run logs it.
    """

    precision: Precision
    reference: Path
    candidate: Path
    noise: NoiseBounds | None
    emulated: Path | None
    losses: tuple[float, float]

    @cached_property
    def plain(self) -> TensorComparison:
        """With the reference, within its noise."""
        return compare_trace_folders(self.reference, self.candidate, bounds=self.noise or UNBOUNDED)

    @cached_property
    def exact(self) -> TensorComparison | None:
        """With the emulated reference, to the last bit."""
        return None if self.emulated is None else compare_trace_folders(self.emulated, self.candidate, bounds=EXACT)

    @property
    def strongest(self) -> TensorComparison:
        """With the strongest reference that there is."""
        return self.plain if self.exact is None else self.exact

    @cached_property
    def divergences(self) -> list[Divergence]:
        """Everything beyond its bound there, in the order of computation."""
        return [item for item in find_divergences(None, self.strongest) if not item.is_selection]


def by_loss(evidence: Evidence) -> Finding:
    """The step's loss, to four printed digits."""
    ours, theirs = (f"{value:.3e}" for value in evidence.losses)
    return Finding(outcome="silent" if ours == theirs else "found", text=f"{ours} and {theirs}")


def by_fixed_norm(evidence: Evidence) -> Finding:
    """||a - b|| / ||a|| of each main gradient of the first update against one number."""
    limit = FIXED_NORM[evidence.precision]
    return _largest(_first_gradients(evidence), lambda item: item.relative, limit)


def by_fixed_angle(evidence: Evidence) -> Finding:
    """1 - 2<a, b> / (||a||² + ||b||²) of each main gradient of the first update against 0.001."""
    return _largest(_first_gradients(evidence), _angle, FIXED_ANGLE)


def by_replicas(evidence: Evidence) -> Finding:
    """Copies within the candidate alone."""
    conflicts = evidence.plain.candidate_conflicts
    return Finding(outcome="found", text=conflicts[0].describe()) if conflicts else Finding(outcome="silent")


def by_noise(evidence: Evidence) -> Finding:
    """Each tensor against its own measured noise, and what one side lacks."""
    if evidence.noise is None:
        return Finding(outcome="not available", text="no perturbed run was made")
    found = [*map(describe_finding, evidence.plain.findings), *(_name(item) for item in evidence.plain.exceeding)]
    return Finding(outcome="found", text=found[0]) if found else Finding(outcome="silent")


def by_slope(evidence: Evidence) -> Finding:
    """What is within its noise and still has another scale, or a place that stands out."""
    if evidence.noise is None:
        return Finding(outcome="not available", text="no perturbed run was made")
    suspicions = judge_noise(None, evidence.plain, evidence.noise).suspicions
    return Finding(outcome="found", text=describe_suspicion(suspicions[0])) if suspicions else Finding(outcome="silent")


def by_emulation(evidence: Evidence) -> Finding:
    """Equality to the last bit with a reference that adds in the candidate's order."""
    exact = evidence.exact
    if exact is None:
        return Finding(outcome="not available", text="this layout's order is not emulated")
    differing = [item for item in exact.differences if not item.bit_equal]
    if differing or exact.findings:
        text = f"{len(exact.differences) - len(differing)} of {len(exact.differences)} tensors are equal"
        return Finding(outcome="found", text=text)
    return Finding(outcome="silent", text=f"all {len(exact.differences)} tensors are equal")


PROOFS: Mapping[str, Callable[[Evidence], Finding]] = {
    "loss": by_loss,
    "norm": by_fixed_norm,
    "sglang": by_fixed_angle,
    "replicas": by_replicas,
    "noise": by_noise,
    "slope": by_slope,
    "emulation": by_emulation,
}
"""By the name of their column: what others have, then what a verdict rests on."""

#: The columns that a verdict rests on.
OWN_PROOFS = ("replicas", "noise", "slope", "emulation")


def _first_gradients(evidence: Evidence) -> list[TensorDifference]:
    return [item for item in evidence.plain.differences if (item.key.kind, item.key.update) == ("gradient", 0)]


def _largest(items: list[TensorDifference], measure: Callable[[TensorDifference], float], limit: float) -> Finding:
    if not items:
        return Finding(outcome="not available", text="no gradient was compared")
    worst = max(items, key=measure)
    text = f"{worst.key.name}: {measure(worst):.2e}"
    return Finding(outcome="found" if measure(worst) > limit else "silent", text=text)


def _angle(item: TensorDifference) -> float:
    """By slope s = <a, b> / ||a||² and cosine c: ||b|| / ||a|| = s / c."""
    figures = item.figures
    if figures is None:
        return 0.0
    if not figures.cosine or not math.isfinite(figures.slope):
        return 1.0
    return 1.0 - 2.0 * figures.slope / (1.0 + (figures.slope / figures.cosine) ** 2)


def _name(item: TensorDifference) -> str:
    return f"{item.key.describe()}: {item.relative:.2e} (bound {item.tolerance:.2e})"
