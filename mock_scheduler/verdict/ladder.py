"""From what the runs of a candidate show to one verdict, and the proofs that it rests on, strongest first.

Contract: pure; the comparisons are there already.

- *replicas*: copies within the candidate's own run that are not equal refute it, whatever else holds.
- *bit-equality* with the baseline proves it. Where its order of sums is the baseline's and nothing else may round, a
  difference refutes it: no measure of noise excuses it.
- *emulation*: bit-equality with a reference that adds in the candidate's order proves it, if the reference itself is
  within the noise of the baseline, or in float64 computes the same. Where only the layout is another, a difference
  refutes it. Where something else may round, the difference is judged by noise: without the layout's own rounding it
  shows more, and the graver of the two verdicts counts.
- *noise* judges all else.
- *referee*: what is beyond its bound, and in float64 is not, is called suspect and not diverged: the two compute the
  same function, and either this precision alone is wrong or the noise was larger than measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mock_scheduler.compare.tensors import TensorComparison
from mock_scheduler.support.text import count_of
from mock_scheduler.verdict.proofs import Outcome, Proof, ProofName
from mock_scheduler.verdict.verdict import Verdict, VerdictKind
from mock_scheduler.verdict.wording.divergences import describe_coverage

#: How many times less a difference must be in float64 for that to be said.
_NOTED_RATIO = 2.0
_UNDECIDED = frozenset({VerdictKind.INCOMPARABLE, VerdictKind.UNVERIFIED})


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What is known of a candidate whose run completed.

    direct: compared with the baseline, by noise or what bounds there are. num_processes: of its run. changes: what may
    move a bit, in words. is_same_order: its order of sums is the baseline's. must_be_exact: nothing but the order of
    its sums may be another. emulated: compared, to the last bit, with the reference that adds in its order; ``None``
    where there is none, and ``emulation_note`` says why. layout: that is emulated. wide: both sides in float64, by what
    rounding would be there; ``None`` where they were not run, and ``wide_note`` says why. shrinking: how many times
    smaller rounding is in float64.
    """

    direct: Verdict
    num_processes: int
    changes: str
    is_same_order: bool
    must_be_exact: bool
    emulated: Verdict | None = None
    emulation_note: str = "the candidate is bit-equal to the baseline"
    layout: str = ""
    wide: Verdict | None = None
    wide_note: str = "a stronger proof decides"
    shrinking: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """The verdict, with all that was compared, and the proofs in their order."""

    alignment: Verdict
    proofs: tuple[Proof, ...]


def judge(evidence: Evidence) -> Judgement:
    """The verdict on a candidate."""
    direct = evidence.direct
    if direct.verdict in _UNDECIDED:
        return Judgement(alignment=direct, proofs=())
    replicas, equality = _judge_replicas(evidence), _judge_equality(evidence)
    emulation, noise, referee = _judge_emulation(evidence), _judge_noise(evidence), _judge_wide(evidence)
    proofs = (replicas, equality, emulation, noise, referee)
    return Judgement(alignment=_decide(evidence, proofs), proofs=proofs)


def is_settled(direct: Verdict) -> bool:
    """Whether the comparison with the baseline needs no further run to be judged."""
    return direct.verdict in _UNDECIDED or direct.verdict is VerdictKind.IDENTICAL


def _decide(evidence: Evidence, proofs: Sequence[Proof]) -> Verdict:
    direct, emulated = evidence.direct, evidence.emulated
    replicas, equality, emulation, noise, referee = proofs
    if equality.outcome == "proved" and replicas.outcome != "refuted":
        return direct
    if replicas.outcome == "refuted":
        return _diverged(direct, direct, direct.reason)
    if equality.outcome == "refuted":
        return _diverged(direct, direct, f"{equality.text}; {direct.reason}")
    if emulation.outcome == "proved":
        if "proved" in (noise.outcome, referee.outcome):
            why = noise.text if noise.outcome == "proved" else f"{referee.text}; against the baseline: {noise.text}"
            return replace(
                direct,
                verdict=VerdictKind.EMULATED,
                reason=f"{emulation.text}; {why}",
                first_divergence=None,
                sentence=None,
            )
        reason = f"{emulation.text}, but that reference is itself not within the noise of the baseline: {noise.text}"
        return replace(direct, verdict=VerdictKind.SUSPECT, reason=reason)
    if emulation.outcome == "refuted" and emulated is not None:
        found = f"first divergence: {_sentence(emulated)}"
        return _diverged(direct, emulated, f"{emulation.text}; against the baseline: {noise.text}; {found}")
    sharper = _graver(evidence)
    if referee.outcome == "refuted" and evidence.wide is not None:
        if direct.verdict in (VerdictKind.DIVERGED, VerdictKind.SUSPECT) or sharper is not None:
            if _is_same_place(direct, evidence.wide):
                return _diverged(direct, direct, f"{direct.reason}; {referee.text}")
            # There is next to no noise in float64, so that what comes first there is the place.
            return _diverged(direct, evidence.wide, f"{referee.text}; against the baseline: {noise.text}")
        return replace(direct, reason=f"{direct.reason}; {referee.text}")
    if sharper is not None:
        order = f"against a reference in one process that adds in the order of {evidence.layout}"
        if sharper.verdict is VerdictKind.DIVERGED and referee.outcome != "proved":
            return _diverged(direct, sharper, f"{order}, first divergence: {_sentence(sharper)}")
        reason = f"{order}: {sharper.reason}; {direct.reason}"
        return replace(direct, verdict=VerdictKind.SUSPECT, reason=reason, suspicions=sharper.suspicions)
    if direct.verdict is VerdictKind.DIVERGED and referee.outcome == "proved":
        return replace(direct, verdict=VerdictKind.SUSPECT, reason=f"{referee.text}; {direct.reason}")
    return direct


def _graver(evidence: Evidence) -> Verdict | None:
    """The comparison with the reference in the candidate's order, where it shows what the direct one does not."""
    direct, emulated = evidence.direct, evidence.emulated
    if emulated is None or evidence.must_be_exact or direct.verdict not in (VerdictKind.ROUNDING, VerdictKind.SUSPECT):
        return None
    is_graver = emulated.verdict is VerdictKind.DIVERGED or (
        emulated.verdict is VerdictKind.SUSPECT and direct.verdict is VerdictKind.ROUNDING
    )
    return emulated if is_graver else None


def _diverged(direct: Verdict, shown_by: Verdict, reason: str) -> Verdict:
    """Diverged, with the first divergence of the comparison that shows it."""
    return replace(
        direct,
        verdict=VerdictKind.DIVERGED,
        reason=reason,
        first_divergence=shown_by.first_divergence or direct.first_divergence,
        sentence=_sentence(shown_by) or direct.sentence,
    )


def _sentence(alignment: Verdict) -> str | None:
    """Of the first divergence, where there is one."""
    return alignment.sentence or (alignment.first_divergence.message if alignment.first_divergence else None)


def _is_same_place(direct: Verdict, wide: Verdict) -> bool:
    """Whether both first differ in the same tensor, or metric."""
    here, there = direct.first_divergence, wide.first_divergence
    return here is not None and there is not None and here.place == there.place


def _judge_replicas(evidence: Evidence) -> Proof:
    tensors = evidence.direct.tensors
    if evidence.num_processes == 1:
        return Proof(name="replicas", outcome="not tried", text="one process holds no copies")
    conflicts = () if tensors is None else tensors.candidate_conflicts
    if conflicts:
        return Proof(name="replicas", outcome="refuted", text=f"replicas disagree: {conflicts[0].describe()}")
    return Proof(name="replicas", outcome="proved", text="all that several ranks hold is equal to the last bit")


def _judge_equality(evidence: Evidence) -> Proof:
    tensors, metrics = evidence.direct.tensors, evidence.direct.metrics
    num_compared, num_equal = _count(tensors)
    if evidence.direct.verdict is VerdictKind.IDENTICAL:
        coverage = describe_coverage(metrics, tensors)
        return _proof("bit-equality", "proved", f"bit-equal to the baseline: {coverage}", num_compared, num_equal)
    found = f"{num_equal:,} of {count_of(num_compared, 'tensor')} are equal to the last bit"
    if evidence.is_same_order and evidence.must_be_exact:
        text = f"nothing that it changes may move a bit ({evidence.changes}), and {found}"
        return _proof("bit-equality", "refuted", text, num_compared, num_equal)
    why = "its sums are in another order" if evidence.must_be_exact else "what it changes may round"
    return _proof("bit-equality", "open", f"{found}; {why} ({evidence.changes})", num_compared, num_equal)


def _judge_emulation(evidence: Evidence) -> Proof:
    emulated = evidence.emulated
    if emulated is None:
        return Proof(name="emulation", outcome="not tried", text=evidence.emulation_note)
    num_compared, num_equal = _count(emulated.tensors)
    order = f"a reference in one process that adds in the order of {evidence.layout}"
    if emulated.verdict is VerdictKind.IDENTICAL:
        coverage = describe_coverage(emulated.metrics, emulated.tensors)
        text = f"equal to the last bit to {order}: {coverage}"
        return _proof("emulation", "proved", text, num_compared, num_equal)
    if emulated.verdict in _UNDECIDED:
        return _proof("emulation", "open", f"not comparable with {order}: {emulated.reason}", num_compared, num_equal)
    found = f"not equal to {order}: {num_equal:,} of {count_of(num_compared, 'tensor')} are"
    if evidence.must_be_exact:
        return _proof("emulation", "refuted", found, num_compared, num_equal)
    what = "what is left is rounding" if emulated.verdict is VerdictKind.ROUNDING else emulated.reason
    return _proof("emulation", "open", f"{found}, but what it changes may round; {what}", num_compared, num_equal)


def _judge_noise(evidence: Evidence) -> Proof:
    direct = evidence.direct
    if evidence.is_same_order and evidence.must_be_exact and direct.verdict is not VerdictKind.IDENTICAL:
        return Proof(name="noise", outcome="not tried", text="no noise excuses a difference where nothing may round")
    num_compared, num_equal = _count(direct.tensors)
    outcomes: dict[VerdictKind, Outcome] = {
        VerdictKind.IDENTICAL: "proved",
        VerdictKind.ROUNDING: "proved",
        VerdictKind.SUSPECT: "open",
        VerdictKind.DIVERGED: "refuted",
    }
    return _proof("noise", outcomes[direct.verdict], direct.reason, num_compared, num_equal)


def _judge_wide(evidence: Evidence) -> Proof:
    wide = evidence.wide
    if wide is None:
        return Proof(name="referee", outcome="not tried", text=evidence.wide_note)
    num_compared, num_equal = _count(wide.tensors)
    if wide.verdict in _UNDECIDED:
        return _proof("referee", "open", f"in float64 nothing can be told: {wide.reason}", num_compared, num_equal)
    low, high = _worst(evidence.direct.tensors), _worst(wide.tensors)
    ratio = f"the largest difference is {high:.1e} in float64 and {low:.1e} here"
    if 0 < high < low / _NOTED_RATIO:
        ratio += f", {low / high:.1e} times less (rounding becomes {evidence.shrinking:.1e} times less)"
    if wide.verdict in (VerdictKind.IDENTICAL, VerdictKind.ROUNDING):
        return _proof("referee", "proved", f"in float64 both compute the same: {ratio}", num_compared, num_equal)
    where = _sentence(wide)
    begins = f"first divergence: {where}" if where else wide.reason
    if _is_same_place(evidence.direct, wide):
        begins = "it begins at the same place"
    text = f"in float64 it does not shrink as rounding does: {ratio}; {begins}"
    return _proof("referee", "refuted", text, num_compared, num_equal)


def _proof(name: ProofName, outcome: Outcome, text: str, num_compared: int, num_equal: int) -> Proof:
    return Proof(name=name, outcome=outcome, text=text, num_compared=num_compared, num_equal=num_equal)


def _count(tensors: TensorComparison | None) -> tuple[int, int]:
    differences = () if tensors is None else tensors.differences
    return len(differences), sum(item.bit_equal for item in differences)


def _worst(tensors: TensorComparison | None) -> float:
    """The largest relative difference of what is judged."""
    differences = () if tensors is None else tensors.differences
    return max((item.relative for item in differences if item.is_judged), default=0.0)
