"""Which verdict follows from what the runs of a candidate showed, and which proof decided it."""

from dataclasses import replace

import pytest

from mock_scheduler.comparison.findings import (
    Fact,
    FewerBits,
    Finding,
    NarrowedState,
    OnlyIn,
    OtherClip,
    OtherNorm,
    OtherRecomputation,
    OtherShape,
    OtherStart,
    OtherWeight,
    RoundedOtherwise,
)
from mock_scheduler.comparison.noise.one_kernel import KernelExcess
from mock_scheduler.comparison.tensors import TensorComparison, TensorDifference
from mock_scheduler.comparison.walk.metrics import MetricComparison
from mock_scheduler.trace.entries import RankPlace, TraceKey
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.verdict.direct_verdict import decide
from mock_scheduler.verdict.divergences import Divergence, from_conflict, from_finding, from_tensor
from mock_scheduler.verdict.final_verdict import breaks_law, is_vouched_for, judge, withdraw
from mock_scheduler.verdict.ladder import Evidence, complete_ladder
from mock_scheduler.verdict.reasons import (
    PROOF_NAMES,
    ApartFromReference,
    BeyondBounds,
    BitEqual,
    EqualToReference,
    NotDeterministic,
    NotExplainedByNoise,
    NotRepeated,
    Reason,
    RefutedBy,
    RoundingOfPrecision,
    RunFailed,
    StaysInFloat64,
    Uncalibrated,
    WithinBounds,
)
from mock_scheduler.verdict.verdict import EqualInputsFacts, OwnChanges, Verdict, VerdictKind
from mock_scheduler.verdict.wording.proofs import describe_proof
from mock_scheduler.verdict.wording.verdicts import (
    describe_proved_by,
    describe_reason,
    describe_sentence,
    describe_smallest_error,
    write_headline,
)
from tests.comparison.stated import stated

KEY = TraceKey(step=0, update=0, kind="gradient", name="decoder.final_layernorm.weight")
HERE, ELSEWHERE = OtherShape(baseline=(2,), candidate=(3,)), OnlyIn(side="baseline")
SENTENCE = f"{KEY.describe()} has shape [2] in the baseline and [3] in the candidate"


WHYS: dict[VerdictKind, Reason] = {
    VerdictKind.IDENTICAL: BitEqual(),
    VerdictKind.ROUNDING: WithinBounds(),
    VerdictKind.SUSPECT: NotExplainedByNoise(),
    VerdictKind.DIVERGED: BeyondBounds(),
}


def first_at(value: float, *, name: str = KEY.name, fact: Fact = HERE) -> Divergence:
    """A first divergence of this size."""
    finding = Finding(kind="gradient", step=0, update=0, name=name, fact=fact)
    return Divergence(step=0, update=0, kind="gradient", name=name, evidence=finding, value=value, bound=1e-6)


def first_with(fact: Fact) -> Verdict:
    """Diverged, first by a finding."""
    return replace(DIVERGED, first=first_at(1.0, fact=fact))


def compared(kind: VerdictKind, *, relative: float = 0.0, conflicts: tuple[ReplicaConflict, ...] = ()) -> Verdict:
    """The comparison of one tensor, whose difference is ``relative``."""
    difference = TensorDifference(
        key=KEY, num_elements=4, bit_equal=relative == 0.0, max_abs=relative, relative=relative, tolerance=1e-6
    )
    tensors = TensorComparison(
        steps=(0,), differences=(difference,), findings=(), baseline_conflicts=(), candidate_conflicts=conflicts
    )
    metrics = MetricComparison(steps=(0,), differences=(), findings=())
    return Verdict(
        kind=kind,
        why=WHYS[kind],
        first=first_at(relative) if kind is VerdictKind.DIVERGED else None,
        metrics=metrics,
        tensors=tensors,
    )


IDENTICAL = compared(VerdictKind.IDENTICAL)
ROUNDING = compared(VerdictKind.ROUNDING, relative=1e-7)
SUSPECT = compared(VerdictKind.SUSPECT, relative=9e-7)
DIVERGED = compared(VerdictKind.DIVERGED, relative=1e-2)

LAYOUT = Evidence(
    direct=ROUNDING,
    num_processes=2,
    changes=OwnChanges(keys=("parallel.tensor_model_parallel_size",)),
    is_same_order=False,
    must_be_exact=True,
    layout="tp2 pp1 dp1",
    shrinking=2.0**29,
)
OTHER = replace(LAYOUT, changes=OwnChanges(keys=("training.sequence_packing",)), must_be_exact=False)


def outcomes(evidence: Evidence) -> tuple[VerdictKind, dict[str, str]]:
    verdict = judge(evidence)
    return verdict.kind, {proof.name: proof.outcome for proof in verdict.proofs}


def test_equal_bits_need_no_other_proof() -> None:
    verdict, found = outcomes(replace(LAYOUT, direct=IDENTICAL))
    assert verdict is VerdictKind.IDENTICAL
    assert found == {
        "replicas": "proved",
        "bit-equality": "proved",
        "emulation": "not tried",
        "equal inputs": "not tried",
        "noise": "proved",
        "referee": "not tried",
    }


def apart(relative: float) -> TensorDifference:
    """A tensor that differs by so much, within a bound of noise."""
    return TensorDifference(
        key=KEY, num_elements=64, bit_equal=False, max_abs=relative, relative=relative, tolerance=0.1, size=1.0
    )


@pytest.mark.parametrize("direct", [ROUNDING, SUSPECT, DIVERGED])
def test_more_than_a_kernel_rounds_behind_equal_inputs_is_diverged_whatever_the_noise(direct: Verdict) -> None:
    excess = (apart(0.05), KernelExcess(test="size", value=0.05, limit=0.015))
    facts = EqualInputsFacts(judged=(KEY,), excess=excess)
    evidence = replace(OTHER, direct=direct, emulated=ROUNDING, equal_inputs=facts, wide=IDENTICAL)
    kind, found = outcomes(evidence)
    assert (kind, found["equal inputs"]) == (VerdictKind.DIVERGED, "refuted")
    verdict = judge(evidence)
    assert verdict.first is not None
    # Beyond its noise at the same place, it keeps the figures of the direct comparison.
    figures = (0.01, 1e-6) if direct is DIVERGED else (0.05, 0.015)
    assert (verdict.first.name, verdict.first.value, verdict.first.bound) == (KEY.name, *figures)
    assert describe_reason(verdict).startswith(
        f"all inputs of the {KEY.describe()} are equal to the last bit, and it differs by 5.0e-02 of its size, and one "
        "kernel's rounding by 1.5e-02 at most"
    )
    assert describe_proved_by(verdict).startswith("refuted by equal inputs")


def test_what_a_kernel_rounds_behind_equal_inputs_leaves_the_verdict_to_noise() -> None:
    whole = EqualInputsFacts(judged=(KEY,), is_complete=True)
    kind, found = outcomes(replace(OTHER, emulated=ROUNDING, equal_inputs=whole))
    assert (kind, found["equal inputs"]) == (VerdictKind.ROUNDING, "proved")
    for open_facts in (replace(whole, is_complete=False), EqualInputsFacts(error="a run failed")):
        assert outcomes(replace(OTHER, emulated=ROUNDING, equal_inputs=open_facts))[1]["equal inputs"] == "open"


def test_a_layout_that_equals_the_reference_in_its_own_order_is_identical_emulated() -> None:
    verdict, found = outcomes(replace(LAYOUT, emulated=IDENTICAL))
    assert (verdict, found["bit-equality"], found["emulation"], found["noise"]) == (
        VerdictKind.EMULATED,
        "open",
        "proved",
        "proved",
    )
    assert describe_reason(judge(replace(LAYOUT, emulated=IDENTICAL))).startswith(
        "equal to the last bit to a reference in one process that adds in the order of tp2 pp1 dp1"
    )


def test_a_layout_within_the_noise_that_is_not_equal_in_its_own_order_is_diverged() -> None:
    """A scale error of 0.05 % in bfloat16 is hidden in the noise, and only this proof sees it."""
    verdict, found = outcomes(replace(LAYOUT, emulated=DIVERGED))
    assert (verdict, found["emulation"], found["noise"]) == (VerdictKind.DIVERGED, "refuted", "proved")
    assert judge(replace(LAYOUT, emulated=DIVERGED)).first == DIVERGED.first


def test_a_reference_that_assumes_how_the_training_adds_refutes_nothing_where_it_adds_otherwise() -> None:
    assumed = replace(LAYOUT, emulated=DIVERGED, assumed=("keys gathered in order",))
    verdict, found = outcomes(assumed)
    assert (verdict, found["emulation"], found["noise"]) == (VerdictKind.ROUNDING, "open", "proved")
    proof = next(proof for proof in judge(assumed).proofs if proof.name == "emulation")
    assert describe_proof(proof).endswith(", but it assumes keys gathered in order, which may be otherwise there")
    assert outcomes(replace(assumed, emulated=IDENTICAL))[0] is VerdictKind.EMULATED
    assert outcomes(replace(assumed, direct=DIVERGED))[0] is VerdictKind.DIVERGED


def test_a_reference_outside_the_noise_proves_nothing() -> None:
    verdict, found = outcomes(replace(LAYOUT, direct=DIVERGED, emulated=IDENTICAL))
    assert (verdict, found["emulation"], found["noise"]) == (VerdictKind.SUSPECT, "proved", "refuted")


def test_float64_vouches_for_a_reference_outside_the_noise() -> None:
    """A mean that cancels to nearly 0 is 3 % beyond the largest of few perturbed runs, and equal in its own order."""
    shrunk = compared(VerdictKind.ROUNDING, relative=1e-13)
    verdict = judge(replace(LAYOUT, direct=DIVERGED, emulated=IDENTICAL, wide=shrunk))
    assert (verdict.kind, verdict.first) == (VerdictKind.EMULATED, None)
    assert verdict.why == EqualToReference(vouched_by="referee")


UNCALIBRATED = replace(compared(VerdictKind.SUSPECT, relative=1e-7), why=Uncalibrated())


def test_theory_vouches_for_a_reference_so_that_no_noise_has_to_be_measured() -> None:
    assert is_vouched_for(UNCALIBRATED, IDENTICAL)
    evidence = replace(LAYOUT, direct=UNCALIBRATED, emulated=IDENTICAL, may_be_vouched_for=True)
    verdict, found = outcomes(evidence)
    assert (verdict, found["emulation"], found["noise"]) == (VerdictKind.EMULATED, "proved", "not tried")
    assert judge(evidence).why == EqualToReference(vouched_by="theory")


def test_theory_vouches_for_nothing_where_noise_was_asked_for_and_failed() -> None:
    verdict = judge(replace(LAYOUT, direct=UNCALIBRATED, emulated=IDENTICAL))
    assert (verdict.kind, verdict.why) == (VerdictKind.SUSPECT, EqualToReference(vouched_by=None))


def test_theory_does_not_overrule_float64() -> None:
    evidence = replace(LAYOUT, direct=UNCALIBRATED, emulated=IDENTICAL, may_be_vouched_for=True)
    verdict = judge(replace(evidence, wide=compared(VerdictKind.DIVERGED, relative=1e-7)))
    assert (verdict.kind, verdict.why) == (VerdictKind.SUSPECT, EqualToReference(vouched_by=None))


@pytest.mark.parametrize(
    ("direct", "emulated"),
    [
        (DIVERGED, IDENTICAL),  # candidate and reference share a fault
        (replace(UNCALIBRATED, why=BeyondBounds(is_estimated=True)), IDENTICAL),  # or may share one
        (UNCALIBRATED, DIVERGED),  # the candidate alone has one
        (UNCALIBRATED, SUSPECT),
        (UNCALIBRATED, None),
        (None, IDENTICAL),
    ],
)
def test_theory_vouches_for_nothing_else(direct: Verdict | None, emulated: Verdict | None) -> None:
    assert not is_vouched_for(direct, emulated)


def test_another_kernel_may_round_so_that_noise_decides() -> None:
    assert outcomes(replace(OTHER, emulated=ROUNDING))[0] is VerdictKind.ROUNDING


def test_the_same_order_of_sums_excuses_no_difference() -> None:
    same = replace(LAYOUT, is_same_order=True, changes=OwnChanges())
    verdict, found = outcomes(same)
    assert (verdict, found["bit-equality"]) == (VerdictKind.DIVERGED, "refuted")


@pytest.mark.parametrize("direct", [IDENTICAL, ROUNDING])
def test_replicas_that_disagree_refute_whatever_else_holds(direct: Verdict) -> None:
    conflict = ReplicaConflict(
        key=KEY,
        first=RankPlace(global_rank=0, coordinates={"tp": 0}),
        second=RankPlace(global_rank=1, coordinates={"tp": 1}),
        num_elements=4,
        max_abs=0.5,
    )
    tensors = direct.tensors
    assert tensors is not None
    broken = replace(direct, kind=VerdictKind.DIVERGED, tensors=replace(tensors, candidate_conflicts=(conflict,)))
    verdict, found = outcomes(replace(LAYOUT, direct=broken, emulated=IDENTICAL))
    assert (verdict, found["replicas"]) == (VerdictKind.DIVERGED, "refuted")


def test_a_closer_look_at_copies_that_disagree_gives_the_place() -> None:
    """Of a forward pass, where the run's own trace has gradients alone."""
    place = replace(KEY, kind="activation", name="decoder.layers.1.self_attention.linear_proj")
    conflict = ReplicaConflict(
        key=place,
        first=RankPlace(global_rank=0, coordinates={"tp": 0}),
        second=RankPlace(global_rank=1, coordinates={"tp": 1}),
        num_elements=4,
        max_abs=0.5,
    )
    verdict = judge(replace(OTHER, direct=DIVERGED, emulated=IDENTICAL, law=from_conflict(conflict)))
    assert describe_sentence(verdict) == (
        "step 0, update 0, forward: copies within the candidate differ: decoder.layers.1.self_attention.linear_proj: "
        "ranks tp0 and tp1 hold different activations at step 0 (4 elements, by up to 0.5)"
    )
    # A divergence before it stays the first.
    assert DIVERGED.first is not None
    late = replace(conflict, key=replace(place, step=1))
    assert judge(replace(OTHER, direct=DIVERGED, law=from_conflict(late))).first == DIVERGED.first


def test_a_recomputation_unlike_its_first_pass_is_diverged_within_the_noise() -> None:
    found = Finding(
        kind="recomputed",
        step=0,
        update=0,
        name="decoder.layers.1.input_layernorm",
        fact=OtherRecomputation(
            num_different=3, num_elements=8, relative=0.25, sample="train/0/a", position=2, micro_batch=1
        ),
    )
    evidence = replace(OTHER, num_processes=1, law=from_finding(found))
    kind, proofs = outcomes(evidence)
    assert (kind, proofs["replicas"]) == (VerdictKind.DIVERGED, "refuted")
    said = (
        "recomputation of decoder.layers.1.input_layernorm at step 0, update 0 differs from its first pass in the "
        "candidate: the backward pass computed it again and got other values (3 of 8 elements, by 0.25 of their size, "
        "first in micro-batch 1, sample train/0/a, token 2)"
    )
    assert describe_sentence(judge(evidence)) == said
    assert describe_reason(judge(evidence)).startswith(said)
    # A trace of its own that shows it needs no closer look, and float64 acquits nobody.
    tensors = DIVERGED.tensors
    assert tensors is not None
    direct = replace(DIVERGED, first=from_finding(found), tensors=replace(tensors, findings=(found,)))
    assert outcomes(replace(OTHER, num_processes=1, direct=direct, wide=IDENTICAL))[0] is VerdictKind.DIVERGED
    assert breaks_law(direct)


def test_a_clip_that_is_not_that_of_the_norm_is_diverged_within_the_noise() -> None:
    found = Finding(kind="gradient_norm", step=0, update=0, name="clip", fact=OtherClip(factor=1.02))
    facts = EqualInputsFacts(broken=found)
    evidence = replace(OTHER, emulated=ROUNDING, equal_inputs=facts, law=from_finding(found))
    kind, proofs = outcomes(evidence)
    assert (kind, proofs["replicas"], proofs["equal inputs"]) == (VerdictKind.DIVERGED, "proved", "refuted")
    verdict = judge(evidence)
    assert verdict.first == from_finding(found)
    assert describe_reason(verdict).startswith(
        "clip of the gradients at step 0, update 0 is not that of their norm in the candidate: by the moments, the "
        "coefficient is 1.02 times what the baseline's clip makes of such a norm"
    )
    assert describe_proved_by(verdict) == "refuted by equal inputs"


def test_the_referee_makes_what_vanishes_in_float64_suspect() -> None:
    shrunk = compared(VerdictKind.ROUNDING, relative=1e-13)
    verdict, found = outcomes(replace(OTHER, direct=DIVERGED, wide=shrunk))
    assert (verdict, found["referee"]) == (VerdictKind.SUSPECT, "proved")
    reason = describe_reason(judge(replace(OTHER, direct=DIVERGED, wide=shrunk)))
    assert "1.0e-13 in float64 and 1.0e-02 here, 1.0e+11 times less (rounding becomes 5.4e+08 times less)" in reason


def test_float64_does_not_acquit_other_weights_than_the_rounded_parameters() -> None:
    """An optimizer wrote what it updated into its neighbour's shard; in float64 no weight is a copy."""
    fact = OtherWeight(side="candidate")
    assert judge(replace(OTHER, direct=first_with(fact), wide=IDENTICAL)).kind is VerdictKind.DIVERGED
    in_baseline = first_with(replace(fact, side="baseline"))
    assert judge(replace(OTHER, direct=in_baseline, wide=IDENTICAL)).kind is VerdictKind.SUSPECT


@pytest.mark.parametrize(
    "fact", [OtherNorm(stated=2.0, made=1.0), NarrowedState(num_bits=7, baseline_bits=23, num_tensors=1)]
)
def test_laws_of_the_candidates_own_run_decide_before_float64_and_the_reference(fact: Fact) -> None:
    direct = first_with(fact)
    verdict = judge(replace(OTHER, direct=direct, wide=IDENTICAL, emulated=DIVERGED))
    assert (verdict.kind, verdict.first) == (VerdictKind.DIVERGED, direct.first)
    # No run in float64 is made for it.
    assert breaks_law(verdict)
    assert not breaks_law(DIVERGED)


def test_gradients_of_coarser_numbers_than_the_references_are_suspect() -> None:
    """A buffer was rounded to bfloat16 before its reduction, which the noise of bfloat16 hides."""
    note = FewerBits(step=0, update=0, divisor=39, num_bits=7.0, baseline_bits=9.0)
    assert ROUNDING.tensors is not None
    emulated = replace(ROUNDING, tensors=replace(ROUNDING.tensors, notes=(note,)))
    verdict = judge(replace(OTHER, direct=ROUNDING, emulated=emulated))
    assert verdict.kind is VerdictKind.SUSPECT
    assert describe_reason(verdict) == (
        "within the bounds, but gradients of step 0, update 0, times 39, have a mantissa of 7.0 bits in the mean, "
        "in the baseline 9.0: they are sums of coarser numbers, as where a buffer is rounded to a narrower type "
        "before its reduction, or of fewer"
    )
    # A type that is too narrow stays in float64, the rounding of a kernel does not.
    assert judge(replace(OTHER, direct=ROUNDING, emulated=emulated, wide=DIVERGED)).kind is VerdictKind.DIVERGED
    assert judge(replace(OTHER, direct=ROUNDING, emulated=emulated, wide=IDENTICAL)).kind is VerdictKind.SUSPECT
    assert judge(replace(OTHER, direct=ROUNDING, emulated=ROUNDING)).kind is VerdictKind.ROUNDING


def test_coarser_gradients_in_the_baselines_own_order_are_suspect_where_code_alone_is_another() -> None:
    """No reference is needed to add in that order; larger micro-batches make fewer sums in it, which is no fault."""
    note = FewerBits(step=0, update=0, only="linear_qkv.weight", divisor=1, num_bits=7.2, baseline_bits=12.5)
    assert ROUNDING.tensors is not None
    direct = replace(ROUNDING, tensors=replace(ROUNDING.tensors, notes=(note,)))
    code = replace(OTHER, direct=direct, changes=OwnChanges(entry="my_buffer"), is_same_order=True)
    verdict = judge(code)
    assert verdict.kind is VerdictKind.SUSPECT
    assert describe_reason(verdict).startswith(
        "within the bounds, but gradients of linear_qkv.weight at step 0, update 0 have a mantissa of 7.2 bits in the "
        "mean, in the baseline 12.5: they are sums of coarser numbers"
    )
    fewer = replace(code, changes=OwnChanges(keys=("training.micro_batch_size",)))
    assert judge(fewer).kind is VerdictKind.ROUNDING


def test_the_referee_makes_what_stays_in_float64_diverged() -> None:
    verdict, found = outcomes(replace(OTHER, direct=SUSPECT, wide=DIVERGED))
    assert (verdict, found["referee"]) == (VerdictKind.DIVERGED, "refuted")


def test_a_candidate_that_does_not_repeat_itself_is_unverified() -> None:
    """Its own runs differ by as much as noise: rounding would be said of chance."""
    again = compared(VerdictKind.DIVERGED, relative=1e-3).tensors
    assert again is not None
    verdict = withdraw(ROUNDING, again)
    assert verdict.kind is VerdictKind.UNVERIFIED
    assert describe_reason(verdict).startswith(
        f"the candidate does not repeat itself: two runs of it differ first in the {KEY.describe()} (0.001 of it), so "
        "a difference from the baseline may be chance; mock-scheduler doctor with its overrides and its --entry names "
        "the operation"
    )
    # What proofs decided is said behind it, in their own words.
    exact = judge(replace(LAYOUT, is_same_order=True, changes=OwnChanges()))
    assert exact.kind is VerdictKind.DIVERGED
    withdrawn = replace(exact, why=NotRepeated(first=again.differences[0], otherwise=exact.why))
    assert describe_reason(withdrawn).endswith(f"names the operation; {describe_reason(exact)}")
    assert withdraw(ROUNDING, compared(VerdictKind.IDENTICAL).tensors) == ROUNDING
    assert withdraw(ROUNDING, None) == ROUNDING


def test_a_divergence_far_beyond_what_two_runs_are_apart_stands() -> None:
    again = compared(VerdictKind.DIVERGED, relative=1e-3).tensors
    assert again is not None
    (apart,) = again.differences
    for distance, kind in ((1e-3, VerdictKind.UNVERIFIED), (1.0, VerdictKind.DIVERGED)):
        there = from_tensor(replace(apart, distance=distance))
        own = replace(again, differences=(replace(apart, distance=1e-3),))
        assert withdraw(replace(DIVERGED, first=there), own).kind is kind
    # A law of one run is broken in each.
    assert withdraw(first_with(OtherNorm(stated=2.0, made=1.0)), again).kind is VerdictKind.DIVERGED


def test_without_determinism_nothing_is_proved() -> None:
    why = NotDeterministic(otherwise=BeyondBounds())
    unverified = Verdict(kind=VerdictKind.UNVERIFIED, why=why)
    assert judge(replace(LAYOUT, direct=unverified)) == unverified


def test_a_reference_in_its_order_shows_what_rounding_of_its_layout_hid() -> None:
    """A module of one's own under another layout: within the noise of the baseline, and not of that reference."""
    assert outcomes(replace(OTHER, emulated=ROUNDING))[0] is VerdictKind.ROUNDING
    suspect = judge(replace(OTHER, emulated=SUSPECT))
    assert (suspect.kind, suspect.why) == (VerdictKind.SUSPECT, ApartFromReference(is_refuted=False))
    assert describe_reason(suspect).startswith(
        "against a reference in one process that adds in the order of tp2 pp1 dp1: noise does not explain this: "
    )
    diverged = judge(replace(OTHER, emulated=DIVERGED))
    assert (diverged.kind, diverged.first) == (VerdictKind.DIVERGED, DIVERGED.first)


def test_float64_decides_what_that_reference_shows() -> None:
    for emulated in (SUSPECT, DIVERGED):
        found = replace(OTHER, emulated=emulated)
        assert outcomes(replace(found, wide=ROUNDING))[0] is VerdictKind.SUSPECT
        assert outcomes(replace(found, wide=DIVERGED))[0] is VerdictKind.DIVERGED


def test_code_of_ones_own_that_equals_the_reference_in_its_order_is_identical_emulated() -> None:
    """The reference runs the baseline's code, so that equal bits prove the candidate's, whatever it might have done."""
    mine = replace(
        OTHER, changes=OwnChanges(keys=("parallel.tensor_model_parallel_size",), entry="mine"), emulated=IDENTICAL
    )
    assert outcomes(mine)[0] is VerdictKind.EMULATED
    assert outcomes(replace(mine, direct=DIVERGED))[0] is VerdictKind.SUSPECT
    assert outcomes(replace(mine, direct=DIVERGED, wide=ROUNDING))[0] is VerdictKind.EMULATED


def test_where_float64_confirms_a_divergence_it_names_the_place() -> None:
    """In bfloat16 the first tensor beyond its bound was one that is beyond it in honest runs, too."""
    elsewhere = first_at(1e-2, name="decoder.layers.0.mlp.linear_fc1.weight", fact=ELSEWHERE)
    confirmed = replace(DIVERGED, first=elsewhere)
    verdict = judge(replace(OTHER, direct=DIVERGED, wide=confirmed))
    assert (verdict.kind, verdict.first) == (VerdictKind.DIVERGED, elsewhere)
    assert describe_reason(verdict) == (
        "in float64 it does not shrink as rounding does: the largest difference is 1.0e-02 in float64 and 1.0e-02 "
        "here; first divergence: gradient of decoder.layers.0.mlp.linear_fc1.weight at step 0, update 0 was traced by "
        f"the baseline but not by the candidate; against the baseline: first divergence: {SENTENCE}; beyond their "
        "bounds: 0 of 0 metrics, 1 of 1 tensor"
    )


def test_where_float64_confirms_the_place_its_figures_stay_those_of_the_traced_runs() -> None:
    """Those of float64 stood there, which no trace of the candidate has."""
    wide = replace(DIVERGED, first=first_at(2e-2, fact=ELSEWHERE))
    verdict = judge(replace(OTHER, direct=DIVERGED, wide=wide))
    assert (verdict.first, verdict.why) == (DIVERGED.first, RefutedBy(proof="referee", is_same_place=True))
    reason = describe_reason(verdict)
    assert reason.startswith(f"first divergence: {SENTENCE}; beyond their bounds")
    assert reason.endswith("it begins at the same place")
    elsewhere = first_at(2e-2, name="decoder.layers.0.mlp.linear_fc1.weight")
    assert judge(replace(OTHER, direct=DIVERGED, wide=replace(wide, first=elsewhere))).first == elsewhere


def test_a_difference_within_its_bounds_that_stays_in_float64_passes_and_says_so() -> None:
    verdict = judge(replace(OTHER, direct=ROUNDING, wide=DIVERGED))
    assert (verdict.kind, verdict.why) == (VerdictKind.ROUNDING, StaysInFloat64(otherwise=WithinBounds()))
    assert "; in float64 it does not shrink as rounding does: " in describe_reason(verdict)


def test_every_proof_has_its_place_on_the_ladder_and_a_reason_where_it_was_not_tried() -> None:
    ladder = complete_ladder(Verdict(kind=VerdictKind.INCOMPARABLE, why=RunFailed(exit_code=1, error="it fell")))
    assert [(proof.name, proof.outcome) for proof in ladder] == [(name, "not tried") for name in PROOF_NAMES]
    assert {describe_proof(proof) for proof in ladder} == {"nothing could be compared"}


PRECISION = replace(
    OTHER, changes=OwnChanges(keys=("precision",)), must_equal_reference=True, rounds_in="bfloat16", num_processes=1
)


def test_another_precision_is_the_rounding_of_the_coarser_one_where_the_code_is_the_baselines() -> None:
    """It was ``diverged: both runs must start from the same weights``."""
    verdict = judge(replace(PRECISION, emulated=IDENTICAL))
    why = RoundingOfPrecision(precision="bfloat16", is_equal=True, otherwise=WithinBounds())
    assert (verdict.kind, verdict.why) == (VerdictKind.ROUNDING, why)
    assert write_headline(verdict) == (
        "differs by the rounding of bfloat16: every bit is equal to the baseline's code in the candidate's precision"
    )
    assert describe_smallest_error(verdict) == "one changed bit beside the baseline's code in its precision"
    # Code of its own may round elsewhere, which the comparison in one precision is held to.
    own = judge(replace(PRECISION, emulated=ROUNDING, must_equal_reference=False))
    assert write_headline(own) == (
        "differs by the rounding of bfloat16: within the noise of the baseline's code in the candidate's precision"
    )


def test_behind_the_first_update_of_two_precisions_no_bound_was_measured() -> None:
    later = replace(apart(0.3), key=replace(KEY, update=1))
    tensors = replace(two_precisions(apart(0.05), later), steps=(0,), has_two_precisions=True)
    direct = decide(None, tensors, bounds=stated(), required=())
    assert (direct.kind, direct.why) == (VerdictKind.SUSPECT, BeyondBounds(is_estimated=True))
    verdict = judge(replace(PRECISION, direct=direct, emulated=IDENTICAL))
    assert (verdict.kind, verdict.first) == (VerdictKind.ROUNDING, None)
    assert write_headline(verdict) == (
        "differs by the rounding of bfloat16: every bit is equal to the baseline's code in the candidate's precision, "
        "1 tensor of the first update within the noise of bfloat16; from the next update on, where the update itself "
        "is stored in another type, 1 tensor beyond it, gradient of decoder.final_layernorm.weight at step 0, update 1 "
        "by 3.0 times its bound"
    )
    # In the first update the bound holds: one of the two sides computes something else in its precision.
    early = decide(None, replace(tensors, differences=(apart(0.3),)), bounds=stated(), required=())
    assert judge(replace(PRECISION, direct=early, emulated=IDENTICAL)).kind is VerdictKind.DIVERGED


def two_precisions(*differences: TensorDifference) -> TensorComparison:
    """A comparison of these tensors alone."""
    return TensorComparison(
        steps=(0,), differences=differences, findings=(), baseline_conflicts=(), candidate_conflicts=()
    )


def test_another_precision_excuses_no_difference_from_the_baselines_code_in_it() -> None:
    verdict = judge(replace(PRECISION, emulated=DIVERGED))
    assert (verdict.kind, verdict.why) == (VerdictKind.DIVERGED, RefutedBy(proof="emulation"))
    # With code of its own it may round elsewhere too, and the graver comparison counts.
    own = judge(replace(PRECISION, emulated=DIVERGED, must_equal_reference=False))
    assert (own.kind, own.why) == (VerdictKind.DIVERGED, ApartFromReference(is_refuted=True))


def test_a_start_that_is_no_rounding_of_the_baselines_is_acquitted_by_no_float64() -> None:
    rounded = RoundedOtherwise(side="candidate", dtype="bfloat16", num_different=4, num_elements=9, how="towards zero")
    direct = replace(DIVERGED, first=first_at(1.0, fact=OtherStart(rounded=rounded)))
    verdict = judge(replace(PRECISION, direct=direct, emulated=ROUNDING, must_equal_reference=False, wide=IDENTICAL))
    assert verdict.kind is VerdictKind.DIVERGED
    # Other weights of one precision are nothing that the run itself contradicts.
    other = replace(direct, first=first_at(1.0, fact=OtherStart()))
    assert judge(replace(OTHER, direct=other, wide=IDENTICAL)).kind is VerdictKind.SUSPECT
