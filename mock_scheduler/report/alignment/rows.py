"""Writes details of a candidate as lines and rows of a label and a text: findings, metrics and seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mock_scheduler.comparison.bounds.bounds import Bounds
from mock_scheduler.comparison.tensors import TensorDifference
from mock_scheduler.comparison.walk.metrics import MetricComparison, MetricDifference
from mock_scheduler.report.alignment.environment import RunFacts
from mock_scheduler.report.alignment.view import StartView, TensorLine
from mock_scheduler.report.comparison.view import metrics_to_show, unmatched
from mock_scheduler.support.text import count_of, in_words
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.start_report import START_KINDS, StartDifference, StartReport
from mock_scheduler.verdict.results import AlignmentTimes, CandidateResult
from mock_scheduler.verdict.wording.bounds import describe_suspicion, describe_test
from mock_scheduler.verdict.wording.findings import describe_finding
from mock_scheduler.verdict.wording.tensors import (
    describe_details,
    describe_ledgers,
    describe_not_compared,
    describe_ratio,
    describe_times,
    format_bound,
    format_relative,
)

#: Of a list of lines, how many are shown.
MAX_LISTED = 20

_NOT_SET = (
    "schedules, counters in parameter groups and random states, which nothing compares: load one checkpoint in both "
    "runs where they matter"
)
_TIME_LABELS = ("baseline", "candidates", "comparison", "emulation", "noise", "referee", "localisation")


def list_findings(candidate: CandidateResult) -> tuple[tuple[str, tuple[str, ...], int], ...]:
    """Findings by heading: the first few, and how many there are."""
    verdict, tensors = candidate.verdict, candidate.verdict.tensors
    lists = [("Without a number", [describe_finding(item) for item in unmatched(verdict.metrics, tensors)])]
    lists.append(("What noise does not explain", [describe_suspicion(item) for item in verdict.suspicions]))
    lists.append(("Tests for what hides within the noise", [describe_test(test) for test in verdict.tests]))
    if tensors is not None:
        replicas = [f"in the candidate: {item.describe()}" for item in tensors.candidate_conflicts]
        replicas += [f"in the baseline: {item.describe()}" for item in tensors.baseline_conflicts]
        lists += [
            ("Replicas that disagree", replicas),
            ("Calls", describe_ledgers(tensors.ledgers)),
            ("Not compared", describe_not_compared(tensors)),
        ]
    if verdict.full_dump:
        lists.append(("Next", [f"trace both runs again with {' '.join(verdict.full_dump)}"]))
    return tuple((title, tuple(lines[:MAX_LISTED]), len(lines)) for title, lines in lists if lines)


def view_start(start: StartReport | None) -> StartView:
    """Lay out what a run started from: what was equal, what was set, and what is left to the training itself."""
    if start is None:
        return StartView(text="", rows=())
    rows = []
    for name, kind in start.kinds.items():
        rows.append((START_KINDS[name], f"{kind.num_equal:,} equal already, {kind.num_set:,} set"))
        first = [f"{item.name} ({_describe_distance(item)})" for item in kind.first]
        if first:
            rest = kind.num_set - len(first)
            rows.append(("set first", ", ".join([*first, *([f"and {rest:,} more"] if rest > 0 else [])])))
    if start.source is not None:
        rows += [("from", start.source), ("not set", _NOT_SET)]
    return StartView(text=start.describe(), rows=tuple(rows))


def _describe_distance(item: StartDifference) -> str:
    return "the baseline's is 0" if item.relative is None else f"{item.relative:.1e} apart"


def describe_metrics(metrics: MetricComparison) -> tuple[str, ...]:
    """Write a line for each metric with a difference, beyond its bound first: by how much, and from where on."""
    return tuple(_describe_metric(item) for item in metrics_to_show(metrics)[:MAX_LISTED])


def _describe_metric(metric: MetricDifference) -> str:
    ratio = "" if math.isinf(metric.bound) else f", {describe_times(metric.times_bound)}"
    beyond = metric.first_exceeding_step
    since = "" if beyond is None else f", beyond it from step {beyond} on"
    first = f"first differs at step {metric.first_different_step}"
    return f"{metric.name}: |a-b| at most {metric.max_abs:.3g} at step {metric.max_abs_step}{ratio}{since}; {first}"


def describe_built(built: Mapping[str, int]) -> str:
    """Describe a run's engines and environments, out of its ledger: ``engines built 0, environments built 0``."""
    return ", ".join(f"{what}s built {count}" for what, count in built.items())


def candidate_seconds(candidate: CandidateResult, facts: RunFacts) -> tuple[tuple[str, float], ...]:
    """Returns seconds of a candidate's run, of its proofs and of localising it."""
    run = candidate.run
    rows = [] if run is None else list(run_seconds(run.elapsed_s, run.rollout_s, facts))
    rows += [(f"proof: {proof.name}", proof.seconds) for proof in candidate.verdict.proofs if proof.seconds]
    if candidate.localisation is not None:
        rows.append(("localisation", candidate.localisation.seconds))
    return tuple(rows)


def total_seconds(candidate: CandidateResult) -> float:
    """Sums the seconds of its run from outside and of its own proofs and localisation; 0 where it has not run."""
    own = sum(proof.seconds for proof in candidate.verdict.proofs)
    closer = 0.0 if candidate.localisation is None else candidate.localisation.seconds
    return (0.0 if candidate.run is None else candidate.run.elapsed_s) + own + closer


def run_seconds(elapsed_s: float, rollout_s: float, facts: RunFacts) -> tuple[tuple[str, float], ...]:
    """Seconds of a run, as seen from outside and as it says itself."""
    rows = [("with the start of its processes", elapsed_s)]
    rows += [("the run itself", facts.seconds["wall_s"])] if "wall_s" in facts.seconds else []
    rows += [("rollout", rollout_s)] if rollout_s else []
    rows += [("training", facts.seconds["train_s"])] if facts.seconds.get("train_s") else []
    return tuple(rows)


def all_seconds(times: AlignmentTimes | None) -> tuple[tuple[str, float], ...]:
    """List how the seconds were spent, and the rest of the whole."""
    if times is None:
        return ()
    values = (
        times.baseline_s, times.candidates_s, times.comparison_s, times.emulation_s, times.noise_s, times.referee_s,
        times.localisation_s,
    )  # fmt: skip
    rows = list(zip(_TIME_LABELS, values, strict=True))
    rest = times.total_s - sum(values)
    return (*rows, ("all else", rest)) if rest > 0 else tuple(rows)


def tensor_line(difference: TensorDifference, bounds: Bounds) -> TensorLine:
    """Lay out one differing tensor, with its noise where it was measured."""
    key = difference.key
    return TensorLine(
        step=key.step,
        update=key.update,
        kind=in_words(key.kind),
        name=key.name,
        relative=format_relative(difference),
        bound=format_bound(difference),
        ratio=describe_ratio(difference),
        exceeds=difference.exceeds,
        details=(*describe_details(difference), *_describe_noise(key, bounds)),
    )


def _describe_noise(key: TraceKey, bounds: Bounds) -> list[tuple[str, str]]:
    """Describe the measured noise of this tensor; empty where there is none."""
    measured = None if bounds.noise is None else bounds.noise.tensors.get(key)
    if measured is None:
        return []
    runs = count_of(len(measured.relative), "perturbed run")
    return [("noise", f"{measured.usual:.1e} in the middle and {measured.largest:.1e} at most, over {runs}")]


def describe_emulated(candidate: CandidateResult) -> str:
    """Count the tensors equal to the reference in the candidate's order; empty where there was none."""
    tensors = None if candidate.emulated is None else candidate.emulated.tensors
    if tensors is None:
        return ""
    num_equal = sum(item.bit_equal for item in tensors.differences)
    return (
        f"{num_equal:,} of {count_of(len(tensors.differences), 'tensor')} equal to the last bit to the reference that "
        "adds in its order"
    )
