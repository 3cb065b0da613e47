"""Details of a candidate as lines and rows of a label and a text: findings, localisation, consequence and seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mock_scheduler.compare.walk.metrics import MetricComparison, MetricDifference
from mock_scheduler.report.alignment.folders import RunFacts
from mock_scheduler.report.alignment.heat import describe_times
from mock_scheduler.report.comparison.view import describe_ledgers, describe_not_compared, metrics_to_show, unmatched
from mock_scheduler.support.text import count_of, list_some
from mock_scheduler.verdict.consequence.text import describe_length
from mock_scheduler.verdict.results import AlignmentTimes, CandidateResult
from mock_scheduler.verdict.wording.bounds import describe_suspicion, describe_test
from mock_scheduler.verdict.wording.findings import describe_finding

#: Of a list of lines, how many are shown.
MAX_LISTED = 20

_NUM_AMPLIFIERS = 5
_NUM_UPDATES = 6
_SIDES = ("baseline:", "candidate:")
_TIME_LABELS = ("baseline", "candidates", "comparison", "emulation", "noise", "referee", "localisation")


def list_findings(candidate: CandidateResult) -> tuple[tuple[str, tuple[str, ...], int], ...]:
    """Findings by heading: the first few, and how many there are."""
    alignment, tensors = candidate.alignment, candidate.alignment.tensors
    lists = [("Without a number", [describe_finding(item) for item in unmatched(alignment.metrics, tensors)])]
    lists.append(("What noise does not explain", [describe_suspicion(item) for item in alignment.suspicions]))
    lists.append(("Tests for what hides within the noise", [describe_test(test) for test in alignment.tests]))
    if tensors is not None:
        replicas = [f"in the candidate: {item.describe()}" for item in tensors.candidate_conflicts]
        replicas += [f"in the baseline: {item.describe()}" for item in tensors.baseline_conflicts]
        lists += [
            ("Replicas that disagree", replicas),
            ("Calls", describe_ledgers(tensors.ledgers)),
            ("Not compared", describe_not_compared(tensors)),
        ]
    if alignment.full_dump:
        lists.append(("Next", [f"trace both runs again with {' '.join(alignment.full_dump)}"]))
    return tuple((title, tuple(lines[:MAX_LISTED]), len(lines)) for title, lines in lists if lines)


def describe_metrics(metrics: MetricComparison) -> tuple[str, ...]:
    """A line for each metric that differs, those beyond their bound first: by how much, and from which step on."""
    return tuple(_describe_metric(item) for item in metrics_to_show(metrics)[:MAX_LISTED])


def _describe_metric(metric: MetricDifference) -> str:
    ratio = "" if math.isinf(metric.bound) else f", {describe_times(metric.times_bound)}"
    beyond = metric.first_exceeding_step
    since = "" if beyond is None else f", beyond it from step {beyond} on"
    first = f"first differs at step {metric.first_different_step}"
    return f"{metric.name}: |a-b| at most {metric.max_abs:.3g} at step {metric.max_abs_step}{ratio}{since}; {first}"


def describe_built(built: Mapping[str, int]) -> str:
    """What a run built, out of its ledger: ``engines built 0, environments built 0``."""
    return ", ".join(f"{what}s built {count}" for what, count in built.items()) or "nothing counted in its ledger"


def localisation_rows(candidate: CandidateResult) -> tuple[tuple[str, str], ...]:
    """Where a divergence begins, what causes it, what only passes it on, and the traces that show it."""
    found = candidate.localisation
    if found is None:
        return ()
    rows = [("where", f"step {found.step}, update {found.update}, {found.phase}: {found.name}")]
    rows += [("cause", f"{module.name} ({module.kind.replace('_', ' ')}): {module.text}") for module in found.causes]
    rows += [
        ("passes it on", f"{module.name} ({module.kind.replace('_', ' ')}): {module.text}")
        for module in found.amplifiers[:_NUM_AMPLIFIERS]
    ]
    rest = len(found.amplifiers) - _NUM_AMPLIFIERS
    rows += [("", f"and {rest:,} more, in the JSON result")] if rest > 0 else []
    rows.append(("traces", " and ".join(map(str, found.trace_dirs))))
    return tuple(rows)


def consequence_rows(candidate: CandidateResult) -> tuple[tuple[str, str], ...]:
    """What a difference does to training: clipping, KL, advantages and the update."""
    found = candidate.consequence
    if found is None:
        return ()
    rows: list[tuple[str, str]] = []
    if found.num_tokens is not None and found.num_clip_flips is not None:
        share = found.num_clip_flips / max(found.num_tokens, 1)
        clipped = "" if found.num_clipped is None else f"; {found.num_clipped:,} are clipped in the baseline"
        tokens = count_of(found.num_tokens, "response token")
        rows.append(("clipping", f"{found.num_clip_flips:,} of {tokens} ({share:.2%}) change their state{clipped}"))
    rows += [
        ("", f"{count_of(flip.num_tokens, 'token')}: {flip.baseline} in the baseline, {flip.candidate} here")
        for flip in found.clip_flips[:MAX_LISTED]
    ]
    if found.kl_name is not None and found.kl_baseline is not None and found.kl_candidate is not None:
        rows.append((found.kl_name, f"{found.kl_baseline:.6g} in the baseline, {found.kl_candidate:.6g} here"))
    if found.max_advantage_change is not None and found.max_advantage is not None:
        rows.append(
            (
                "advantages",
                f"move by {found.max_advantage_change:.3g} at most; the largest is {found.max_advantage:.3g}",
            )
        )
    if found.gaps is not None:
        gaps = (f"median {gap.median:.2e}, 99 % below {gap.p99:.2e}, largest {gap.largest:.2e}" for gap in found.gaps)
        rows.append(("|train - rollout| log-probability", "; ".join(map(" ".join, zip(_SIDES, gaps, strict=True)))))
    if found.update_cosine:
        places = found.updates or tuple((step, 0) for step in range(len(found.update_cosine)))
        ratios = found.update_ratio or (None,) * len(found.update_cosine)
        listed = [
            f"{cosine:.9g} at step {step}, update {update}"
            + ("" if ratio is None else f" ({describe_length(ratio, digits=6)})")
            for (step, update), cosine, ratio in zip(places, found.update_cosine, ratios, strict=True)
        ]
        rows.append(("cosine of the update", list_some(listed, _NUM_UPDATES, "; ")))
    return tuple(rows)


def candidate_seconds(candidate: CandidateResult, facts: RunFacts) -> tuple[tuple[str, float], ...]:
    """Seconds of a candidate's run, of its proofs and of localising it."""
    run = candidate.run
    rows = [] if run is None else list(run_seconds(run.elapsed_s, run.rollout_s, facts))
    rows += [(f"proof: {proof.name}", proof.seconds) for proof in candidate.proofs if proof.seconds]
    if candidate.localisation is not None:
        rows.append(("localisation", candidate.localisation.seconds))
    return tuple(rows)


def run_seconds(elapsed_s: float, rollout_s: float, facts: RunFacts) -> tuple[tuple[str, float], ...]:
    """Seconds of a run, as seen from outside and as it says itself."""
    rows = [("with the start of its processes", elapsed_s)]
    rows += [("the run itself", facts.seconds["wall_s"])] if "wall_s" in facts.seconds else []
    rows.append(("rollout", rollout_s))
    rows += [("training", facts.seconds["train_s"])] if "train_s" in facts.seconds else []
    return tuple(rows)


def all_seconds(times: AlignmentTimes | None) -> tuple[tuple[str, float], ...]:
    """Where the seconds went, and what is left of the whole."""
    if times is None:
        return ()
    values = (
        times.baseline_s, times.candidates_s, times.comparison_s, times.emulation_s, times.noise_s, times.referee_s,
        times.localisation_s,
    )  # fmt: skip
    rows = list(zip(_TIME_LABELS, values, strict=True))
    rest = times.total_s - sum(values)
    return (*rows, ("all else", rest)) if rest > 0 else tuple(rows)
