"""Makes the direct verdict with its reason out of the differences of two runs, all of it facts.

The first divergence is the earliest in the order of computation, as ``divergences`` says. Only an alignment has proofs
beside the direct comparison; ``final_verdict`` promotes or demotes the direct verdict by them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mock_scheduler.comparison.bounds.bounds import Bounds, is_calibrated
from mock_scheduler.comparison.findings import Finding
from mock_scheduler.comparison.noise.judging import judge_noise
from mock_scheduler.comparison.noise.suspicions import NoiseVerdict
from mock_scheduler.comparison.pairing.selection import EVERYTHING, Selection
from mock_scheduler.comparison.tensors import JUDGED_KINDS, TensorComparison
from mock_scheduler.comparison.walk.metrics import MetricComparison
from mock_scheduler.config.instruments import TRACE_KINDS, TraceKind
from mock_scheduler.verdict.divergences import Divergence, count_before, find_divergences
from mock_scheduler.verdict.reasons import (
    BaselineConflict,
    BeyondBounds,
    BitEqual,
    BothBroken,
    KindsMissing,
    NotExplainedByNoise,
    NotFound,
    NothingCompared,
    NothingJudged,
    NothingTrained,
    OtherData,
    Reason,
    TracedOtherThings,
    Uncalibrated,
    Undecided,
    WithinBounds,
)
from mock_scheduler.verdict.verdict import Verdict, VerdictKind

_NUM_DUMPED = 8


def decide(
    metrics: MetricComparison | None,
    tensors: TensorComparison | None,
    *,
    bounds: Bounds,
    required: Collection[TraceKind] = JUDGED_KINDS,
    selection: Selection = EVERYTHING,
) -> Verdict:
    """Returns the verdict on two compared runs.

    Args:
        metrics: ``None`` where they were not asked for.
        tensors: ``None`` likewise.
        bounds: The bounds of both comparisons.
        required: Kinds that must have a compared tensor each, or the rest proves nothing.
        selection: The compared choice.
    """
    divergences = find_divergences(metrics, tensors)
    noise = bounds.noise
    tested = None if noise is None else _leave_unmeasured(judge_noise(metrics, tensors, noise), tensors)
    first = next((item for item in divergences if not item.is_selection), None)
    evidence = _Evidence(
        metrics=metrics,
        tensors=tensors,
        bounds=bounds,
        tested=tested,
        required=tuple(required),
        selection=selection,
    )
    kind, why = evidence.judge(first, divergences)
    is_sketched = tensors is not None and tensors.level == "sketch"
    wants_dump = is_sketched and kind in (VerdictKind.DIVERGED, VerdictKind.SUSPECT)
    return Verdict(
        kind=kind,
        why=why,
        # On other data nothing that follows is a divergence of the computation.
        first=None if first is None or isinstance(why, OtherData) else count_before(first, tensors),
        metrics=metrics,
        tensors=tensors,
        bounds=bounds,
        suspicions=() if tested is None else tested.suspicions,
        tests=() if tested is None else tested.tests,
        full_dump=full_dump_overrides(tensors) if wants_dump and tensors is not None else (),
    )


def _leave_unmeasured(tested: NoiseVerdict, tensors: TensorComparison | None) -> NoiseVerdict:
    """Leaves out the suspicions behind the first update of two precisions: the noise of one says nothing of them."""
    if tensors is None or not tensors.has_two_precisions or tensors.last_measured is None:
        return tested
    step, update = tensors.last_measured
    kept = (item for item in tested.suspicions if (item.step, item.update) in ((step, update), (step, None)))
    return replace(tested, suspicions=tuple(kept))


def full_dump_overrides(tensors: TensorComparison) -> tuple[str, ...]:
    """The overrides of a full trace of the first differences of two sketched runs; empty where nothing differs."""
    suspects = [item.key for item in tensors.differences if item.exceeds or item.is_undecided]
    if not suspects:
        return ()
    step = min(key.step for key in suspects)
    first = [key for key in suspects if key.step == step][:_NUM_DUMPED]
    kinds = {key.kind for key in first}
    # An update is judged by its change: the parameter before it and its gradient are needed, too.
    if "parameter" in kinds:
        kinds |= {"initial", "gradient"}
    names = dict.fromkeys(key.name for key in first)
    return (
        "trace.level=full",
        f"trace.steps={step}",
        f"trace.patterns=[{','.join(quote_text(name) for name in names)}]",
        f"trace.kinds=[{','.join(kind for kind in TRACE_KINDS if kind in kinds)}]",
    )


def quote_text(text: str) -> str:
    """Returns a name as an element of a list in Hydra's grammar."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass(frozen=True, kw_only=True, slots=True)
class _Evidence:
    """Holds the input of a verdict."""

    metrics: MetricComparison | None
    tensors: TensorComparison | None
    bounds: Bounds
    tested: NoiseVerdict | None
    required: tuple[TraceKind, ...]
    selection: Selection

    def judge(self, first: Divergence | None, divergences: Sequence[Divergence]) -> tuple[VerdictKind, Reason]:
        """Returns the verdict and its reason; ``first``: the first divergence beside mere choices of the traces."""
        other_data = self._find_other_data(divergences)
        if other_data is not None:
            return VerdictKind.INCOMPARABLE, OtherData(finding=other_data)
        unusable = self.tensors.unusable[0] if self.tensors is not None and self.tensors.unusable else None
        # A tensor that is broken in both runs hides whatever comes with it or behind it.
        if unusable and (first is None or (first.step, first.update or 0) >= (unusable.step, unusable.update or 0)):
            return VerdictKind.INCOMPARABLE, BothBroken(finding=unusable)
        if first is None and divergences:
            findings = tuple(item.evidence for item in divergences if isinstance(item.evidence, Finding))
            return VerdictKind.INCOMPARABLE, TracedOtherThings(findings=findings)
        unmatched = self.tensors.unmatched if self.tensors is not None else ()
        if first is None and self._lacks_tensors() and self.selection != EVERYTHING:
            return VerdictKind.INCOMPARABLE, NothingCompared(chosen=self.selection, unmatched=unmatched)
        if first is None and unmatched:
            return VerdictKind.INCOMPARABLE, NotFound(unmatched=unmatched)
        missing = self._find_missing()
        # A divergence counts whatever else is missing; equality proves something only with gradients and parameters.
        if first is None and missing:
            return VerdictKind.INCOMPARABLE, KindsMissing(kinds=missing)
        if self._lacks_tensors() if first is None else self._is_empty():
            return VerdictKind.INCOMPARABLE, NothingCompared()
        if first is not None:
            # One exceeded bound that was measured is enough; extrapolated bounds alone make no divergence.
            is_estimated = all(item.is_estimate for item in divergences if not item.is_selection)
            kind = VerdictKind.SUSPECT if is_estimated else VerdictKind.DIVERGED
            return kind, BeyondBounds(is_estimated=is_estimated)
        return self._judge_equal()

    def _find_other_data(self, divergences: Sequence[Divergence]) -> Finding | None:
        """Returns the first row that only one of two runs with data of their own trained on, or whose inputs differ."""
        if self.tensors is None or not self.tensors.is_by_content:
            return None
        findings = (item.evidence for item in divergences)
        return next((item for item in findings if isinstance(item, Finding) and item.is_other_data), None)

    def _judge_equal(self) -> tuple[VerdictKind, Reason]:
        tensors = self.tensors
        if tensors is not None:
            idle = self._find_idle(tensors)
            if idle is not None:
                return VerdictKind.INCOMPARABLE, idle
            if tensors.baseline_conflicts:
                return VerdictKind.INCOMPARABLE, BaselineConflict(conflict=tensors.baseline_conflicts[0])
            if tensors.undecided:
                return VerdictKind.SUSPECT, Undecided(num_tensors=len(tensors.undecided))
        metrics = self.metrics.differences if self.metrics is not None else ()
        differences = tensors.differences if tensors is not None else ()
        compared = differences or metrics
        if self.bounds.source != "stated" and compared and not any(item.is_judged for item in compared):
            return VerdictKind.INCOMPARABLE, NothingJudged(kind=None, because=self._without_bound)
        is_sketched = tensors is not None and tensors.level == "sketch"
        if all(item.bit_equal for item in metrics) and all(item.bit_equal for item in differences):
            return VerdictKind.IDENTICAL, BitEqual(by_fingerprints=is_sketched)
        if self.tested is not None and self.tested.suspicions:
            return VerdictKind.SUSPECT, NotExplainedByNoise(is_estimated=is_sketched)
        kinds = {item.key.kind for item in differences if not item.bit_equal}
        unequal = [*kinds, *([None] if any(not item.bit_equal for item in metrics) else [])]
        if not all(is_calibrated(self.bounds, kind) for kind in unequal):
            return VerdictKind.SUSPECT, Uncalibrated(is_estimated=is_sketched)
        return VerdictKind.ROUNDING, WithinBounds(is_estimated=is_sketched)

    def _find_idle(self, tensors: TensorComparison) -> NothingTrained | NothingJudged | None:
        """Why nothing comparable was trained; ``None`` where it was, or neither kind was compared."""
        gradients, changes = (
            [item for item in tensors.differences if item.key.kind == kind] for kind in ("gradient", "parameter")
        )
        # Runs without training are equal under every change, so equality would prove nothing.
        if gradients and all(item.is_zero for item in gradients):
            return NothingTrained(still="gradient")
        names = {item.key.name for item in gradients}
        # A parameter without gradient, such as a router's bias, moves by a rule of its own in idle runs too.
        changes = [item for item in changes if not names or item.key.name in names]
        if changes and all(item.is_zero for item in changes):
            return NothingTrained(still="parameter")
        is_stated = self.bounds.source == "stated"
        if not is_stated and gradients and not any(item.is_judged for item in gradients):
            return NothingJudged(kind="gradient", because=self._without_bound)
        if changes and not any(item.is_judged for item in changes):
            return NothingJudged(kind="parameter", because="storage" if is_stated else self._without_bound)
        return None

    @property
    def _without_bound(self) -> Literal["noise", "no bound"]:
        return "no bound" if self.bounds.noise is None else "noise"

    def _find_missing(self) -> tuple[TraceKind | Literal["metric", "finite metric"], ...]:
        metric: tuple[Literal["metric", "finite metric"], ...] = ()
        if self.metrics is not None and not self.metrics.has_numbers:
            metric = ("finite metric",) if self.metrics.differences else ("metric",)
        tensors = self.tensors
        if tensors is None:
            return metric
        return (*metric, *(kind for kind in self.required if not tensors.has_elements(kind)))

    def _lacks_tensors(self) -> bool:
        """Whether equality would rest on metrics alone though there are traces, or on nothing at all."""
        if self.tensors is None:
            return self._is_empty()
        # Equal starts prove nothing of the training, unless they are the question.
        is_asked = self.selection.kinds is not None and bool(self.tensors.num_exact)
        return self.tensors.is_empty and not is_asked

    def _is_empty(self) -> bool:
        has_metrics = self.metrics is not None and bool(self.metrics.differences)
        return not has_metrics and not (self.tensors is not None and self.tensors.differences)
