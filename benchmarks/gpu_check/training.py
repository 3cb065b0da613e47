"""Trains our own model and the attached example on the GPU: twice, against the CPU, and with TransformerEngine."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu_check.cases import OTHER_ROUNDING, Runs, differing, distance
from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.example import align_example, candidate, describe, hold_passing
from benchmarks.gpu_check.findings import FindingsLog

_TE = "transformer_engine"


def check(context: CheckContext) -> None:
    """Runs both trainings; TransformerEngine's parts only where its layers compute."""
    runs = Runs(context.folder / "cases")
    layers = ["local", *([_TE] if context.machine.has_transformer_engine else [])]
    for impl in layers:
        pair = [runs.tensors(f"{impl}-bfloat16{word}", 0) for word in ("-repeat", "")]
        hold_equal(context.log, f"our training, {impl}, bfloat16: the same step twice", differing(*pair))
    wide, narrow = runs.gradient("local-float64-cpu"), runs.gradient("local-float32-cpu")
    single, half = runs.gradient("local-float32"), runs.gradient("local-bfloat16")
    cpu = Distances(own=distance(single, wide), other=distance(narrow, wide), what="the CPU's float32")
    hold_rounding(context.log, "our training: float32 gradients against the CPU's float64", cpu)
    context.log.note("our training: bfloat16 gradients against the CPU's float64", f"{distance(half, wide):.3g}")
    if context.machine.has_transformer_engine:
        other = distance(runs.gradient(f"{_TE}-bfloat16"), wide)
        both = Distances(own=other, other=distance(half, wide), what="the local layers' bfloat16")
        hold_rounding(context.log, "our training: TransformerEngine's bfloat16 gradients against float64", both)
    _align_example(context, layers)


def _align_example(context: CheckContext, layers: list[str]) -> None:
    for impl in layers:
        result = align_example(
            context, f"example-{impl}", [candidate("again")], precision="bfloat16", options={"layers": impl}
        )
        item = result.candidates[0]
        context.log.hold(
            f"attached example, {impl}, bfloat16: again",
            is_held=item.verdict.kind.value == "identical",
            found=describe(item),
            expected="identical",
        )
    question = "attached example: local layers against TransformerEngine's, with noise and localisation"
    if not context.machine.has_transformer_engine:
        context.log.not_run(question, context.machine.transformer_engine)
        return
    result = align_example(
        context,
        "example-local-te",
        [candidate(_TE, layers=_TE)],
        precision="bfloat16",
        num_perturbations=3,
        localise=True,
    )
    hold_passing(context, question, result.candidates[0])


@dataclass(frozen=True, kw_only=True, slots=True)
class Distances:
    """Holds two relative distances from float64: of the computation in question, and of one that is known (what)."""

    own: float
    other: float
    what: str


def hold_equal(log: FindingsLog, question: str, others: list[str]) -> None:
    """Holds two steps to equal bits; ``others``: the tensors that differ."""
    found = "all tensors have equal bits" if not others else f"{len(others)} differ, first {others[0]}"
    log.hold(question, is_held=not others, found=found, expected="equal bits")


def hold_rounding(log: FindingsLog, question: str, distances: Distances) -> None:
    """Holds a distance to a few times one of another way to round; a distance of 0 is equal bits in another dtype."""
    bound = OTHER_ROUNDING * distances.other
    log.hold(
        question,
        is_held=0.0 <= distances.own <= bound,  # False for NaN and infinity
        found=f"{distances.own:.3g}",
        expected=f"at most {bound:.3g}, {OTHER_ROUNDING:g} times that of {distances.what}",
    )
