"""From the differences of two runs to one verdict with its reason.

``identical``: everything compared is bit-equal, and so are all replicas. ``identical (emulated)``: so it is to a
reference that adds in the candidate's order, which alignment decides. ``rounding``: nothing is beyond its bound.
``suspect``: nothing is, but a test for what hides within the noise found a slope, a place or a drift that noise does
not make; or all that is beyond its bound is so of an estimated one; or sketches cannot tell on which side of its bound
something is. ``diverged``: something is beyond its bound, or missing on one side, or replicas disagree.
``incomparable``: what had to be compared was not, the two were told to trace different things, or neither is a
reference. ``unverified``: the run could not show that it is deterministic.

The first divergence is the earliest in the order of computation, as ``divergences`` says.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from mock_scheduler.compare.bounds.bounds import Bounds
from mock_scheduler.compare.noise.judging import first_hidden_step, judge_noise
from mock_scheduler.compare.noise.suspicions import NoiseVerdict, Suspicion, TestSummary
from mock_scheduler.compare.pairing.selection import EVERYTHING, Selection
from mock_scheduler.compare.tensors import JUDGED_KINDS, TensorComparison
from mock_scheduler.compare.walk.metrics import MetricComparison
from mock_scheduler.errors import ExitCode
from mock_scheduler.support.text import count_of
from mock_scheduler.trace.kinds import TRACE_KINDS, TraceKind
from mock_scheduler.verdict.divergences import Divergence, describe_divergence, find_divergences, from_metric
from mock_scheduler.verdict.reasons import describe_causes, describe_idle, describe_turned, no_bound
from mock_scheduler.verdict.sentence import (
    describe_coverage,
    describe_smallest,
    describe_tensor,
    describe_worst,
    name_kind,
)
from mock_scheduler.verdict.wording.bounds import (
    describe_bounds_advice,
    describe_bounds_level,
    describe_suspicion,
    describe_test,
)
from mock_scheduler.verdict.wording.findings import describe_finding, describe_note, describe_selection

__all__ = [
    "Verdict",
    "Divergence",
    "VerdictKind",
    "decide",
    "describe_divergence",
    "failed_run",
    "find_divergences",
    "full_dump_overrides",
    "worst_exit_code",
]


class VerdictKind(StrEnum):
    """What a candidate is to its baseline."""

    IDENTICAL = "identical"
    EMULATED = "identical (emulated)"
    ROUNDING = "rounding"
    SUSPECT = "suspect"
    DIVERGED = "diverged"
    INCOMPARABLE = "incomparable"
    UNVERIFIED = "unverified"

    @property
    def exit_code(self) -> ExitCode:
        """What a command that ends with this verdict exits with."""
        return _EXIT_CODES[self]


_EXIT_CODES = {
    VerdictKind.IDENTICAL: ExitCode.ALIGNED,
    VerdictKind.EMULATED: ExitCode.ALIGNED,
    VerdictKind.ROUNDING: ExitCode.ALIGNED,
    VerdictKind.SUSPECT: ExitCode.SUSPECT,
    VerdictKind.DIVERGED: ExitCode.DIVERGED,
    VerdictKind.INCOMPARABLE: ExitCode.INCOMPARABLE,
    VerdictKind.UNVERIFIED: ExitCode.UNVERIFIED,
}
_NUM_DUMPED = 8
_NUM_SELECTIONS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verdict on one candidate; the comparisons are ``None`` where its run failed or they were not asked for.

    ``reason``: the verdict in words; of one that passes: its level, what was compared, the worst tensor with its margin
    and the smallest error that would have been found.
    ``sentence``: the first divergence in one sentence: when, what, by how much, where, what it looks like and what
    before it is equal; ``None`` where nothing diverged.
    ``suspicions``: what the noise does not explain though nothing is beyond its bound, in the order of computation.
    ``tests``: for these, what each looked at; empty where no noise was measured.
    ``full_dump``: of two sketches, the overrides of the full trace to take next; empty where none is needed.
    """

    verdict: VerdictKind
    reason: str
    first_divergence: Divergence | None
    metrics: MetricComparison | None
    tensors: TensorComparison | None
    sentence: str | None = None
    full_dump: tuple[str, ...] = ()
    suspicions: tuple[Suspicion, ...] = ()
    tests: tuple[TestSummary, ...] = ()


def decide(
    metrics: MetricComparison | None,
    tensors: TensorComparison | None,
    *,
    bounds: Bounds,
    required: Collection[TraceKind] = JUDGED_KINDS,
    selection: Selection = EVERYTHING,
) -> Verdict:
    """The verdict on what was compared.

    ``metrics``, ``tensors``: ``None`` where they were not asked for. ``required``: kinds of which a tensor must have
    been compared, or the rest proves nothing. ``selection``: what was chosen to be compared, for the reason.
    """
    divergences = find_divergences(metrics, tensors)
    noise = bounds.noise
    tested = None if noise is None else judge_noise(metrics, tensors, noise)
    first = next((item for item in divergences if not item.is_selection), None)
    sentence = None if first is None else describe_divergence(first, tensors)
    evidence = _Evidence(
        metrics=metrics,
        tensors=tensors,
        bounds=bounds,
        tested=tested,
        required=tuple(required),
        selection=selection,
    )
    verdict, reason = evidence.judge(first, sentence, divergences)
    full_dump: tuple[str, ...] = ()
    if tensors is not None and tensors.level == "sketch" and verdict in (VerdictKind.DIVERGED, VerdictKind.SUSPECT):
        full_dump = full_dump_overrides(tensors)
        reason += (
            f"; to see where, trace both runs again with {' '.join(map(shlex.quote, full_dump))}" if full_dump else ""
        )
    return Verdict(
        verdict=verdict,
        reason=reason,
        first_divergence=first,
        metrics=metrics,
        tensors=tensors,
        sentence=sentence,
        full_dump=full_dump,
        suspicions=() if tested is None else tested.suspicions,
        tests=() if tested is None else tested.tests,
    )


def failed_run(verdict: VerdictKind, reason: str) -> Verdict:
    """The verdict on a candidate whose run, or whose files, left nothing to compare."""
    return Verdict(verdict=verdict, reason=reason, first_divergence=None, metrics=None, tensors=None)


def worst_exit_code(verdicts: list[VerdictKind]) -> ExitCode:
    """The gravest exit code: diverged, then suspect, then incomparable, then unverified, then aligned."""
    gravest_first = (VerdictKind.DIVERGED, VerdictKind.SUSPECT, VerdictKind.INCOMPARABLE, VerdictKind.UNVERIFIED)
    return next((verdict.exit_code for verdict in gravest_first if verdict in verdicts), ExitCode.ALIGNED)


def full_dump_overrides(tensors: TensorComparison) -> tuple[str, ...]:
    """What a full trace of the first differences of two sketched runs is taken with; empty where there is none."""
    suspects = [item.key for item in tensors.differences if item.exceeds or item.is_undecided]
    if not suspects:
        return ()
    step = min(key.step for key in suspects)
    first = [key for key in suspects if key.step == step][:_NUM_DUMPED]
    kinds = {key.kind for key in first}
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
    """A name as an element of a list in Hydra's grammar."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass(frozen=True, kw_only=True, slots=True)
class _Evidence:
    """All that a verdict rests on."""

    metrics: MetricComparison | None
    tensors: TensorComparison | None
    bounds: Bounds
    tested: NoiseVerdict | None
    required: tuple[TraceKind, ...]
    selection: Selection

    def judge(
        self, first: Divergence | None, sentence: str | None, divergences: Sequence[Divergence]
    ) -> tuple[VerdictKind, str]:
        """The verdict and its reason; ``first``: of those divergences that are not due to what was selected."""
        unusable = self.tensors.unusable[0] if self.tensors is not None and self.tensors.unusable else None
        if unusable and (first is None or (first.step, first.update or 0) >= (unusable.step, unusable.update or 0)):
            return (
                VerdictKind.INCOMPARABLE,
                f"both runs are broken, so neither is a reference: {describe_finding(unusable)}",
            )
        missing = self._not_compared()
        if first is None and divergences:
            return VerdictKind.INCOMPARABLE, self._describe_selection(divergences)
        chosen = describe_selection(self.selection)
        if first is None and chosen and self._is_empty():
            return VerdictKind.INCOMPARABLE, f"nothing was compared: neither side has anything of the chosen {chosen}"
        if first is None and missing:
            return VerdictKind.INCOMPARABLE, f"no {' and no '.join(missing)} was compared: the rest proves nothing"
        if self._is_empty():
            return (
                VerdictKind.INCOMPARABLE,
                f"nothing was compared: {first.message}" if first else "nothing was compared",
            )
        if first is not None:
            reason = self._describe_divergences(first, sentence or first.message)
            if all(item.is_estimate for item in divergences if not item.is_selection):
                return VerdictKind.SUSPECT, f"beyond an estimated bound only: {reason}"
            return VerdictKind.DIVERGED, reason
        return self._judge_equal()

    def _judge_equal(self) -> tuple[VerdictKind, str]:
        tensors = self.tensors
        coverage = describe_coverage(self.metrics, tensors)
        if tensors is not None:
            idle = describe_idle(tensors, self.bounds)
            if idle:
                return VerdictKind.INCOMPARABLE, idle
            if tensors.baseline_conflicts:
                conflict = tensors.baseline_conflicts[0].describe()
                return VerdictKind.INCOMPARABLE, f"replicas disagree in the baseline, so it is no reference: {conflict}"
            if tensors.undecided:
                return VerdictKind.SUSPECT, (
                    f"sketches cannot tell for {count_of(len(tensors.undecided), 'tensor')} on which side of its bound "
                    f"it is, first: {describe_tensor(tensors.undecided[0])}; compared: {coverage}"
                )
        metrics = self.metrics.differences if self.metrics is not None else ()
        differences = tensors.differences if tensors is not None else ()
        if self.bounds.source != "stated" and not any(item.is_judged for item in differences or metrics):
            return VerdictKind.INCOMPARABLE, f"nothing was judged: {no_bound(self.bounds)}; compared: {coverage}"
        notes = self._describe_limits()
        if all(item.bit_equal for item in metrics) and all(item.bit_equal for item in differences):
            how = "" if tensors is None or tensors.level == "full" else " by the fingerprints of sketches"
            return VerdictKind.IDENTICAL, f"bit-equal{how}: {coverage}{notes}; one changed bit would have been found"
        level = "" if tensors is None or tensors.level == "full" else ", as estimated from sketches"
        smallest = describe_smallest(self.metrics, tensors)
        worst = describe_worst(tensors)
        nearest = f"; {worst}" if worst else ""
        within = f"within {describe_bounds_level(self.bounds)}{level}: {coverage}{nearest}{notes}"
        if self.tested is not None and self.tested.suspicions:
            listed = "; ".join(describe_suspicion(item) for item in self.tested.suspicions[:_NUM_SELECTIONS])
            count = len(self.tested.suspicions)
            more = f"; and {count - _NUM_SELECTIONS} more" if count > _NUM_SELECTIONS else ""
            return VerdictKind.SUSPECT, f"noise does not explain this: {listed}{more}; {within}"
        tests = "" if self.tested is None else "".join(f"; {describe_test(test)}" for test in self.tested.tests)
        advice = describe_bounds_advice(self.bounds)
        return VerdictKind.ROUNDING, f"{within}; {smallest}{tests}{f'; to {advice}' if advice else ''}"

    def _describe_limits(self) -> str:
        """How many tensors were not compared, and all else that limits a verdict that passes."""
        if self.tensors is None:
            return "; metrics alone do not prove that gradients are equal"
        missing = self.tensors.not_compared
        parts = [f"{count_of(len(missing), 'tensor')} not compared, not being shown by both runs"] if missing else []
        flips = sum(item.num_flipped for item in self.tensors.flips)
        parts += [f"rounding chose other experts for {count_of(flips, 'token')}"] if flips else []
        turned = self.tensors.flipped_decisions
        parts += [describe_turned(turned)] if turned else []
        hidden = first_hidden_step(self.tensors)
        if hidden is not None:
            parts.append(f"from step {hidden} on nothing can be judged: differences there are noise, whatever they are")
        return "".join(f"; {part}" for part in (*parts, *map(describe_note, self.tensors.notes)))

    def _not_compared(self) -> list[str]:
        missing = ["metric"] if self.metrics is not None and not self.metrics.differences else []
        if self.tensors is None:
            return missing
        return missing + [name_kind(kind) for kind in self.required if self.tensors.group(kind) is None]

    def _is_empty(self) -> bool:
        has_metrics = self.metrics is not None and bool(self.metrics.differences)
        return not has_metrics and not (self.tensors is not None and self.tensors.differences)

    def _describe_selection(self, divergences: Sequence[Divergence]) -> str:
        listed = "; ".join(item.message for item in divergences[:_NUM_SELECTIONS])
        coverage = describe_coverage(self.metrics, self.tensors)
        return (
            f"the two runs did not trace the same: {listed}. Compare what both have with --kinds and --patterns, or "
            f"trace both alike; of the rest nothing is beyond its bound: {coverage or 'nothing'}"
        )

    def _describe_divergences(self, first: Divergence, sentence: str) -> str:
        parts = [f"first divergence: {sentence}"]
        counts, num_findings = [], 0
        if self.metrics is not None:
            if self.metrics.exceeding and first.kind != "metric":
                parts.append(f"first metric: {from_metric(self.metrics.exceeding[0]).message}")
            counts.append(f"{len(self.metrics.exceeding)} of {count_of(len(self.metrics.differences), 'metric')}")
            num_findings += len(self.metrics.findings)
        if self.tensors is not None:
            counts.append(f"{len(self.tensors.exceeding)} of {count_of(len(self.tensors.differences), 'tensor')}")
            num_findings += len(self.tensors.findings)
        parts.append(f"beyond {describe_bounds_level(self.bounds)}: {', '.join(counts)}")
        if num_findings:
            parts.append(f"{num_findings} could not be compared")
        if self.tensors is not None:
            parts += describe_causes(first, self.tensors)
        advice = describe_bounds_advice(self.bounds)
        if advice and first.value is not None and first.tolerance != 0.0:
            parts.append(f"whether this is more than this model's own noise was not measured; to {advice}")
        return "; ".join(dict.fromkeys(parts))
