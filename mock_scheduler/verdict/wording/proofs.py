"""Puts the finding of each proof into words."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mock_scheduler.comparison.findings import Finding
from mock_scheduler.comparison.noise.one_kernel import KernelTest
from mock_scheduler.support.text import count_of, list_some
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.verdict.divergences import Divergence
from mock_scheduler.verdict.reasons import NotTried, NotTriedCause
from mock_scheduler.verdict.verdict import (
    EmulationFacts,
    EqualInputsFacts,
    EqualityFacts,
    OwnChanges,
    Proof,
    RefereeFacts,
    Verdict,
    VerdictKind,
)
from mock_scheduler.verdict.wording.coverage import describe_coverage
from mock_scheduler.verdict.wording.divergences import describe_divergence
from mock_scheduler.verdict.wording.findings import describe_finding
from mock_scheduler.verdict.wording.reasons import describe_comparison
from mock_scheduler.verdict.wording.residuals import describe_narrowing, describe_residual
from mock_scheduler.verdict.wording.tensors import join_and

#: How many times less a difference must be in float64 for that to be said.
_NOTED_RATIO = 2.0
_SAID = "as said above"
_NUM_NAMED = 2
_NOT_TRIED: Mapping[NotTriedCause, str] = {
    NotTriedCause.ONE_PROCESS: "one process holds no copies",
    NotTriedCause.NOT_NEEDED: "not needed, or not asked for",
    NotTriedCause.BIT_EQUAL: "the candidate is bit-equal to the baseline",
    NotTriedCause.STRONGER_PROOF: "a stronger proof decides",
    NotTriedCause.SAME_ORDER: "it adds in the baseline's order",
    NotTriedCause.FLOAT64_ALREADY: "it is float64 already",
    NotTriedCause.ONE_RUN: "in float64 it would be the baseline's own run, since they differ in precision alone",
    NotTriedCause.NOTHING_MAY_ROUND: "no noise excuses a difference where nothing may round",
    NotTriedCause.NOTHING_COMPARED: "nothing could be compared",
    NotTriedCause.NOT_DETERMINISTIC: "the runs are not shown to be deterministic",
}


def describe_proof(proof: Proof, *, said: Divergence | None = None) -> str:
    """Returns the finding of a proof; ``said``: a divergence above it, to point to."""
    match proof.facts:
        case NotTried():
            return _describe_not_tried(proof, proof.facts)
        case ReplicaConflict():
            return f"replicas disagree: {proof.facts.describe()}"
        case Finding():
            return describe_finding(proof.facts)
        case EqualityFacts():
            return _describe_equality(proof, proof.facts)
        case EmulationFacts():
            return _describe_emulation(proof, proof.facts, said)
        case EqualInputsFacts():
            return _describe_equal_inputs(proof.facts)
        case RefereeFacts():
            return _describe_referee(proof, proof.facts, said)
        case None:
            if proof.compared is not None:
                return describe_comparison(proof.compared, said=said)
            return "all that several ranks hold is equal to the last bit" if proof.name == "replicas" else ""


def describe_order(layout: str, *, has_own_precision: bool = False) -> str:
    """The reference of a candidate's layout; ``has_own_precision``: it computes in the candidate's precision too."""
    whose = "of the baseline's code in the candidate's precision, " if has_own_precision else ""
    return f"a reference {whose}in one process that adds in the order of {layout}"


def describe_changes(changes: OwnChanges) -> str:
    """Returns all changes with a chance to move a bit, in one phrase."""
    code = (f"its module {changes.entry}",) if changes.entry else ()
    return ", ".join((*changes.keys, *code, *changes.versions)) or "nothing"


def _describe_not_tried(proof: Proof, why: NotTried) -> str:
    match why.cause:
        case NotTriedCause.TURNED_OFF:
            return f"{why.keys[0]} is {'never' if proof.name == 'referee' else 'false'}"
        case NotTriedCause.CHANGES_MORE:
            return f"it changes more than its layout ({', '.join(why.keys)}), which may round"
        case NotTriedCause.ORDER_UNKNOWN:
            return f"its order of sums cannot be followed: {why.error}"
        case NotTriedCause.CANNOT_RUN:
            return f"it cannot be run in float64: {why.error}"
        case NotTriedCause.RUN_FAILED:
            which = {"referee": "a run in float64", "equal inputs": "a run for it"}.get(
                proof.name, "the run in its order of sums"
            )
            return f"{which} failed: {why.error}"
        case _:
            return _NOT_TRIED[why.cause]


def _describe_equality(proof: Proof, facts: EqualityFacts) -> str:
    if proof.outcome == "proved":
        return f"bit-equal to the baseline: {_cover(proof.compared)}"
    verb = "is" if proof.num_compared == 1 else "are"
    found = f"{proof.num_equal:,} of {count_of(proof.num_compared, 'tensor')} {verb} equal to the last bit"
    changes = describe_changes(facts.changes)
    if proof.outcome == "refuted":
        return f"nothing that it changes may move a bit ({changes}), and {found}"
    why = "what it changes may round" if facts.may_round else "its sums are in another order"
    return f"{found}; {why} ({changes})"


def _describe_emulation(proof: Proof, facts: EmulationFacts, said: Divergence | None) -> str:
    order = describe_order(facts.layout, has_own_precision=bool(facts.precision))
    if facts.not_followed:
        order += f", but for {join_and(list(facts.not_followed))}"
    compared = proof.compared
    if compared is None or proof.outcome == "proved":
        return f"equal to the last bit to {order}: {_cover(compared)}"
    if compared.kind in (VerdictKind.INCOMPARABLE, VerdictKind.UNVERIFIED):
        return f"not comparable with {order}: {describe_comparison(compared, said=said)}"
    found = f"not equal to {order}: {proof.num_equal:,} of {count_of(proof.num_compared, 'tensor')} are"
    if proof.outcome == "refuted":
        return found
    if facts.assumed:
        return f"{found}, but it assumes {join_and(list(facts.assumed))}, which may be otherwise there"
    is_rounding = compared.kind is VerdictKind.ROUNDING
    left = "what is left is rounding" if is_rounding else describe_comparison(compared, said=said)
    return f"{found}, but what it changes may round; {left}"


_EXCESS: Mapping[KernelTest, str] = {
    "size": "it differs by {value:.1e} of its size, and one kernel's rounding by {limit:.1e} at most",
    "element": "an element differs by {value:.1e} of its size, and one kernel's rounding by {limit:.1e} at most",
    "scale": "its scale differs by {value:.1e}, and by rounding it does by {limit:.1e} at most",
    "rows": "{value:.0%} of its tokens are equal while others are not, and by rounding {limit:.1e} would be",
    "piece": "{value:.0%} of the ranks' pieces of every token are equal while others are not, which no rounding makes",
    "choice": "equal scores and biases chose other experts",
    "copy": "it differs by {value:.1e} of its size, where values are copied and nothing rounds",
    "update": "its change by the update differs by {value:.1e} of its size, and by rounding it does by {limit:.1e} at "
    "most",
}


def _describe_equal_inputs(facts: EqualInputsFacts) -> str:
    if facts.error:
        return f"nothing could be judged: {facts.error}"
    if facts.broken is not None:
        return describe_finding(facts.broken)
    if facts.excess is not None:
        difference, excess = facts.excess
        look = "" if difference.residual is None else f" ({describe_residual(difference.residual)})"
        found = _EXCESS[excess.test].format(value=excess.value, limit=excess.limit)
        if excess.input_bits is not None:
            found += f", as it is where factors are {describe_narrowing(excess.input_bits)}"
        return f"all inputs of the {difference.key.describe()} are equal to the last bit, and {found}{look}"
    if not facts.judged:
        return "no tensor has inputs that are known to be equal"
    names = list_some([key.describe() for key in facts.judged], _NUM_NAMED, ", ")
    rest = "every other difference of the pass follows from it" if facts.is_complete else "what follows is not judged"
    return f"by no more than one kernel rounds, of equal inputs: {names}; {rest}"


def _describe_worst(facts: RefereeFacts) -> str:
    """Says both largest differences; relative to a tensor of zeros there is no number."""
    largest = "the largest difference is"
    match math.isinf(facts.worst), math.isinf(facts.worst_here):
        case True, True:
            return "in float64 as here, a tensor is 0 on one side alone"
        case True, False:
            return f"a tensor is 0 on one side alone in float64, and {largest} {facts.worst_here:.1e} here"
        case False, True:
            return f"{largest} {facts.worst:.1e} in float64, and a tensor is 0 on one side alone here"
        case _:
            return f"{largest} {facts.worst:.1e} in float64 and {facts.worst_here:.1e} here"


def _describe_referee(proof: Proof, facts: RefereeFacts, said: Divergence | None) -> str:
    compared = proof.compared
    if compared is not None and proof.outcome == "open":
        return f"in float64 nothing can be told: {describe_comparison(compared, said=said)}"
    ratio = _describe_worst(facts)
    if 0 < facts.worst < facts.worst_here / _NOTED_RATIO and not math.isinf(facts.worst_here):
        times = f"{facts.worst_here / facts.worst:.1e} times less"
        ratio += f", {times} (rounding becomes {facts.shrinking:.1e} times less)"
    if proof.outcome == "proved":
        return f"in float64 both compute the same: {ratio}"
    text = f"in float64 it does not shrink as rounding does: {ratio}"
    if facts.worst == facts.worst_here == 0.0:
        text = "in float64 it is there as well, and no size that could shrink"
    if facts.is_same_place:
        return f"{text}; it begins at the same place"
    if compared is None:
        return text
    if compared.first is None:
        return f"{text}; {describe_comparison(compared)}"
    return f"{text}; first divergence: {_SAID if compared.first == said else describe_divergence(compared.first)}"


def _cover(compared: Verdict | None) -> str:
    return "" if compared is None else describe_coverage(compared.metrics, compared.tensors)
