"""Plants ten faults of the catalogue in the attached example on the GPU, and holds the verdicts to place and name."""

from __future__ import annotations

from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.example import align_example, candidate, describe
from tests.faults.own.campaign import OwnJudgement, faulty_candidate, judge
from tests.faults.own.catalogue import find_own_fault

#: One of data, four of the forward pass, three of the backward pass, two of the update.
FAULTS = (
    "same-rows",
    "vocabulary-not-masked",
    "queries-scaled",
    "norm-epsilon",
    "stage-input-stale",
    "qk-norms-not-summed",
    "gradient-overwritten",
    "replica-lost",
    "norm-of-own-shard",
    "second-beta",
)


def check(context: CheckContext) -> None:
    """Aligns a clean repetition and each fault with the one process, in float32."""
    faults = [find_own_fault(name) for name in FAULTS]
    clean = {**candidate("clean.tp1"), "name": "clean.tp1"}
    result = align_example(
        context, "faults", [clean, *map(faulty_candidate, faults)], num_perturbations=0, emulate=False
    )
    for item in result.candidates:
        judgement = judge(item, model="dense", precision="float32")
        hold_judgement(context, judgement, describe(item))


def hold_judgement(context: CheckContext, judgement: OwnJudgement, found: str) -> None:
    """Holds a fault to be found at its place, and the repetition to be identical."""
    if not judgement.fault:
        context.log.hold(
            "no fault", is_held=judgement.verdict == "identical", found=found, expected="the repetition is identical"
        )
        return
    expected = find_own_fault(judgement.fault).expected
    what = expected.kind if expected.phase == "data" else f"{expected.phase} at {' or '.join(expected.names)}"
    context.log.hold(
        judgement.fault,
        is_held=judgement.is_found and judgement.is_placed,
        found=judgement.failure or f"{found} (first: {judgement.place or 'the data'}; fired {judgement.fired} times)",
        expected=f"found: {what}",
    )
