"""Puts the reason of one comparison into words, whole or beside its first divergence."""

from __future__ import annotations

import re
import shlex

from mock_scheduler.comparison.findings import Finding, RowsOnlyIn
from mock_scheduler.comparison.tensors import TensorDifference
from mock_scheduler.support.text import count_of
from mock_scheduler.verdict.coverage import find_causes
from mock_scheduler.verdict.divergences import Divergence
from mock_scheduler.verdict.reasons import (
    BaselineConflict,
    BeyondBounds,
    BitEqual,
    BothBroken,
    EqualRecordings,
    KindsMissing,
    NoCommonStep,
    NotDeterministic,
    NotExplainedByNoise,
    NotFound,
    NothingCompared,
    NothingJudged,
    NothingTrained,
    NotReadable,
    NotRepeated,
    OtherBatches,
    OtherData,
    OtherDraws,
    OtherRecordings,
    OtherRollouts,
    Reason,
    RoundingOfPrecision,
    RunFailed,
    StaysInFloat64,
    StillOpen,
    TracedOtherThings,
    Uncalibrated,
    Undecided,
    UnknownRollouts,
    WithinBounds,
)
from mock_scheduler.verdict.verdict import Verdict
from mock_scheduler.verdict.wording.bounds import (
    describe_bounds_advice,
    describe_bounds_level,
    describe_suspicion,
    describe_test,
)
from mock_scheduler.verdict.wording.coverage import (
    describe_coverage,
    describe_limits,
    describe_nearest,
    describe_smallest,
    describe_turned,
    describe_unexercised,
)
from mock_scheduler.verdict.wording.divergences import describe_divergence, describe_evidence
from mock_scheduler.verdict.wording.findings import (
    describe_finding,
    describe_ledger,
    describe_selection,
    describe_unmatched,
)
from mock_scheduler.verdict.wording.tensors import describe_metric, describe_tensor, name_kind

_NUM_LISTED = 3
#: The reason of a difference that no noise was measured for.
NOT_MEASURED = "the noise was not measured, so nothing shows that the difference is rounding"
#: A row's copy in one step of one rank.
_REPEATED = re.compile(r"~\d+$")
_WITHOUT_REWARD = (
    "nothing was trained: every gradient of the baseline is 0, so any change would look equal; align on rollouts whose "
    "rewards differ within a group, or with an entropy or KL term"
)
_WITHOUT_LOSS = (
    "nothing was trained: every gradient of the baseline is 0, so any change would look equal; align on rows with a "
    "loss: tokens that the loss mask keeps"
)
_STILL = "nothing was trained: no update of the baseline changed a parameter, so any change would look equal"


def describe_comparison(verdict: Verdict, *, said: Divergence | None = None) -> str:
    """The whole reason; where its first divergence is ``said`` above, it only points there."""
    return _join([*_list_clauses(verdict, verdict.why, _name_first(verdict, said)), *_list_next(verdict)])


def describe_rest(verdict: Verdict) -> str:
    """The reason without the first divergence and the advice; a report says both by themselves."""
    return _join(_list_clauses(verdict, verdict.why, ""))


def _join(clauses: list[str]) -> str:
    return "; ".join(dict.fromkeys(filter(None, clauses)))


def _name_first(verdict: Verdict, said: Divergence | None) -> str:
    if verdict.first is None:
        return ""
    return "as said above" if verdict.first == said else describe_divergence(verdict.first)


def _list_next(verdict: Verdict) -> list[str]:
    if not verdict.full_dump:
        return []
    return [f"to see where, trace both runs again with {' '.join(map(shlex.quote, verdict.full_dump))}"]


def _list_clauses(verdict: Verdict, why: Reason, first: str) -> list[str]:
    """The clauses of a reason; ``first``: the first divergence in words, or empty where it shall not be said."""
    match why:
        case BeyondBounds():
            return _list_beyond(verdict, why, first)
        case BitEqual() | WithinBounds() | Uncalibrated() | NotExplainedByNoise() | Undecided():
            return _list_within(verdict, why)
        case NotDeterministic():
            clauses = _list_clauses(verdict, why.otherwise, first)
            return [f"without DETERMINISTIC_MODE=1 two equal runs may differ as much: {_join(clauses)}"]
        case NotRepeated(first=apart):
            return [describe_not_repeated(apart), *_list_clauses(verdict, why.otherwise, first)]
        case EqualRecordings():
            return [f"bit-equal: {count_of(why.num_steps, 'step')}", "one changed bit would be found"]
        case OtherRecordings():
            said = [f"first divergence: {first}"] if first else []
            return [*said, f"{count_of(why.num_equal_steps, 'step')} bit-equal"]
        case StaysInFloat64() | RoundingOfPrecision():
            return _list_clauses(verdict, why.otherwise, first)
        case _:
            return _list_incomparable(verdict, why)


def describe_not_repeated(apart: TensorDifference) -> str:
    """Says where two runs of the candidate differ first, and what names the operation."""
    return (
        f"the candidate does not repeat itself: two runs of it differ first in the {apart.key.describe()} "
        f"({apart.relative:.2g} of it), so a difference from the baseline may be chance; mock-scheduler doctor with "
        "its overrides and its --entry names the operation"
    )


def _list_incomparable(verdict: Verdict, why: Reason) -> list[str]:
    match why:
        case BothBroken():
            return [f"both runs are broken, so neither is a reference: {describe_finding(why.finding)}"]
        case TracedOtherThings():
            listed = "; ".join(describe_finding(finding) for finding in why.findings[:_NUM_LISTED])
            coverage = describe_coverage(verdict.metrics, verdict.tensors) or "nothing"
            return [
                f"the two runs did not trace the same: {listed}. Compare what both have with kinds and patterns "
                f"(--kinds, --patterns), or trace both alike; of the rest nothing is beyond its bound: {coverage}"
            ]
        case NothingCompared():
            return [_describe_nothing(verdict, why)]
        case KindsMissing():
            names = [kind if kind == "metric" or kind == "finite metric" else name_kind(kind) for kind in why.kinds]
            return [f"no {' and no '.join(names)} was compared: the rest proves nothing"]
        case NotFound():
            return [describe_unmatched(why.unmatched)]
        case NothingTrained():
            return [_describe_still(why, is_by_content=_is_by_content(verdict))]
        case NothingJudged():
            return _list_unjudged(verdict, why)
        case BaselineConflict():
            return [f"replicas disagree in the baseline, so it is no reference: {why.conflict.describe()}"]
        case OtherDraws():
            return [_describe_draws(why)]
        case NoCommonStep():
            return ["nothing was compared: no step is in both recordings"]
        case _:
            return [_describe_failure(why)]


def _is_by_content(verdict: Verdict) -> bool:
    """Whether the training has data of its own, so that there is no recording to speak of."""
    return verdict.tensors is not None and verdict.tensors.is_by_content


def _advise_bounds(verdict: Verdict) -> str:
    if verdict.bounds is None:
        return ""
    return describe_bounds_advice(verdict.bounds, is_by_content=_is_by_content(verdict))


def _describe_still(why: NothingTrained, *, is_by_content: bool) -> str:
    if why.still == "parameter":
        return _STILL
    return _WITHOUT_LOSS if is_by_content else _WITHOUT_REWARD


def _describe_failure(why: Reason) -> str:
    match why:
        case OtherData():
            return (
                f"the two runs trained on other data: {describe_finding(why.finding)}; give both the same rows in "
                f"every step, whatever the layout{_describe_repeated(why.finding)}"
            )
        case OtherBatches():
            return (
                f"the two runs trained on other rows from step {why.first_step} on ({why.num_steps} of "
                f"{why.num_shared} steps; batches in run.json), so nothing in their training can be compared; trace "
                "these steps to see the rows"
            )
        case OtherRollouts():
            return (
                f"the two runs trained on other rollouts from step {why.first_step} on ({why.num_steps} of "
                f"{why.num_shared} steps), so nothing in their training can be compared; replay the baseline's "
                "recording in the candidate: rollout_mock.mode=mock and its rollout_mock.dump_dir"
            )
        case UnknownRollouts():
            return (
                "the two runs state the rollouts of no common step (batches in run.json), so nothing shows that they "
                "trained on the same"
            )
        case RunFailed():
            text = f"the run failed (exit code {why.exit_code}): {why.error}" if why.exit_code else why.error
            broken = "" if why.collectives is None else describe_ledger(why.collectives)
            return f"its ranks did not issue the same collectives: {broken}; {text}" if broken else text
        case NotReadable():
            return why.error
        case StillOpen():
            missing = "run" if why.missing == "run" else "judged"
            return f"not {missing} yet: the alignment is still going, or was interrupted"
        case _:
            raise TypeError(f"{type(why).__name__} is no reason of one comparison")


def _describe_repeated(found: Finding) -> str:
    """Advises ids where one side alone counts a row's copies, as ranks cannot tell them apart by their content."""
    fact = found.fact
    if not isinstance(fact, RowsOnlyIn) or not any(_REPEATED.search(name) for name in fact.first):
        return ""
    return "; rows of equal content, ~2 and so on, need ids: run.step(number, rows=...)"


def _describe_draws(why: OtherDraws) -> str:
    is_one = len(why.draws) == 1
    what = f"{' and '.join(why.draws)} {'draws' if is_one else 'draw'}"
    if why.layouts is None:
        drew = f"{what} random numbers, and the two runs drew others (their ledgers of draws differ)"
    else:
        drew = f"{what} other random numbers under another layout ({why.layouts[0]} and {why.layouts[1]})"
    return f"{drew}, so the two trained under other masks; set {'it' if is_one else 'them'} to 0 to compare them"


def _describe_nothing(verdict: Verdict, why: NothingCompared) -> str:
    if why.chosen is not None:
        has_metrics = verdict.metrics is not None and verdict.metrics.differences
        what = "no tensor was compared" if has_metrics else "nothing was compared"
        text = f"{what}: neither side has anything of the chosen {describe_selection(why.chosen)}"
        return "; ".join([text, *([describe_unmatched(why.unmatched)] if why.unmatched else [])])
    return f"nothing was compared{'' if verdict.first is None else f': {describe_evidence(verdict.first)}'}"


def _list_unjudged(verdict: Verdict, why: NothingJudged) -> list[str]:
    cause = _describe_no_bound(verdict, why)
    if why.kind is not None:
        return [f"no {why.kind} was judged: {cause}"]
    return [f"nothing was judged: {cause}", f"compared: {describe_coverage(verdict.metrics, verdict.tensors)}"]


def _describe_no_bound(verdict: Verdict, why: NothingJudged) -> str:
    """Why nothing is judged, and how it would be."""
    if why.because == "storage":
        key = "the learning rate" if _is_by_content(verdict) else "training.lr"
        return f"every update changes less than parameters can be stored with; raise {key}"
    if why.because == "noise":
        return "the noise is as large as they are; compare fewer steps, or in float32 or float64"
    advice = _advise_bounds(verdict)
    return f"nothing bounds them; state bounds as tolerance (--tolerance){f', or {advice}' if advice else ''}"


def _list_within(
    verdict: Verdict, why: BitEqual | WithinBounds | Uncalibrated | NotExplainedByNoise | Undecided
) -> list[str]:
    """Returns the clauses of a verdict with nothing beyond its bound."""
    tensors = verdict.tensors
    coverage = describe_coverage(verdict.metrics, tensors)
    if isinstance(why, Undecided):
        first = describe_tensor(tensors.undecided[0]) if tensors is not None else ""
        return [
            f"sketches cannot tell for {count_of(why.num_tensors, 'tensor')} on which side of its bound it is, first: "
            f"{first}",
            f"compared: {coverage}",
        ]
    if isinstance(why, BitEqual):
        how = " by the fingerprints of sketches" if why.by_fingerprints else ""
        # Whoever writes a sketch may write any fingerprint: no tensor is there to make it from again.
        found = "one changed bit would have been found"
        if why.by_fingerprints:
            found = "one changed bit would have changed a fingerprint; fingerprints are taken as the runs recorded them"
        unexercised = describe_unexercised(verdict.metrics)
        return [f"bit-equal{how}: {coverage}", *describe_limits(tensors), *unexercised, found]
    level = "its bounds" if verdict.bounds is None else describe_bounds_level(verdict.bounds)
    estimated = ", as estimated from sketches" if why.is_estimated else ""
    limits = [*describe_limits(tensors), *describe_unexercised(verdict.metrics)]
    within = [f"within {level}{estimated}: {coverage}", describe_nearest(tensors), *limits]
    if isinstance(why, NotExplainedByNoise):
        listed = [describe_suspicion(item) for item in verdict.suspicions[:_NUM_LISTED]]
        rest = len(verdict.suspicions) - _NUM_LISTED
        more = [f"and {rest} more"] if rest > 0 else []
        return [f"noise does not explain this: {'; '.join(listed)}", *more, *within]
    advice = _advise_bounds(verdict)
    tests = [describe_test(test) for test in verdict.tests]
    smallest = describe_smallest(verdict.metrics, tensors)
    unknown = NOT_MEASURED if isinstance(why, Uncalibrated) else ""
    return [unknown, *within, smallest, *tests, f"to {advice}" if advice else ""]


def _list_beyond(verdict: Verdict, why: BeyondBounds, first: str) -> list[str]:
    """The first divergence, the first metric, counts, causes, and how the bounds would be known better."""
    divergence, metrics, tensors, bounds = verdict.first, verdict.metrics, verdict.tensors, verdict.bounds
    said = f"first divergence: {first}" if first else ""
    if why.is_estimated:
        said = "beyond an estimated bound only" + (f": {said}" if said else "")
    parts, counts, num_findings = [said], [], 0
    if metrics is not None:
        if metrics.exceeding and (divergence is None or divergence.kind != "metric"):
            parts.append(f"first metric: {describe_metric(metrics.exceeding[0])}")
        counts.append(f"{len(metrics.exceeding)} of {count_of(len(metrics.differences), 'metric')}")
        num_findings += len(metrics.findings)
    if tensors is not None:
        counts.append(f"{len(tensors.exceeding)} of {count_of(len(tensors.differences), 'tensor')}")
        num_findings += len(tensors.findings)
    level = "their bounds" if bounds is None else describe_bounds_level(bounds)
    parts.append(f"beyond {level}: {', '.join(counts)}")
    parts += [f"{num_findings} could not be compared"] if num_findings else []
    if tensors is not None and divergence is not None:
        parts += _list_causes(verdict, divergence)
    advice = _advise_bounds(verdict)
    if advice and divergence is not None and divergence.value is not None and divergence.bound != 0.0:
        parts.append(f"whether this is more than this model's own noise was not measured; to {advice}")
    return parts


def _list_causes(verdict: Verdict, first: Divergence) -> list[str]:
    """Returns possible causes of the first divergence, and reasons to think less of it."""
    assert verdict.tensors is not None
    causes = find_causes(first, verdict.tensors)
    parts = []
    if causes.conflict is not None:
        parts.append(f"replicas disagree: {causes.conflict.describe()}")
    if causes.has_grown:
        parts.append(
            "it grew over the updates before, as rounding does that training amplifies; to tell it from a fault, align "
            "fewer steps"
        )
    if causes.turned is not None:
        parts.append(
            f"{describe_turned(causes.turned)} before: what follows goes on from other values, of which no bound was "
            "measured"
        )
    if causes.flips:
        num_flipped = sum(item.num_flipped for item in causes.flips)
        parts.append(
            f"rounding chose other experts for {count_of(num_flipped, 'token')} before, first in "
            f"{causes.flips[0].key.name}: what these compute afterwards differs at its full size"
        )
    return parts
