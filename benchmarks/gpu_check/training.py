"""Trains our own model and the attached example on the GPU: twice, against the CPU, and with TransformerEngine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_check.cases import OTHER_ROUNDING, CaseError, Runs, differing, distance
from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.example import align_all, candidate, describe, hold_passing
from benchmarks.gpu_check.findings import FindingsLog
from mock_scheduler.verdict.results import CandidateResult

_TE = "transformer_engine"
_HALF = {"precision": "bfloat16"}
_BOTH = "local layers against TransformerEngine's, with noise and localisation"


def check(context: CheckContext) -> None:
    """Runs both trainings; TransformerEngine's parts only where its layers compute."""
    layers = ["local", *([_TE] if context.machine.has_transformer_engine else [])]
    _train_ours(context, layers)
    requests: dict[str, dict[str, Any]] = {
        impl: {**_HALF, "candidates": [candidate("again")], "options": {"layers": impl}} for impl in layers
    }
    if context.machine.has_transformer_engine:
        both = {**_HALF, "candidates": [candidate(_TE, layers=_TE)]}
        requests["both"] = {**both, "num_perturbations": 3, "localise": True}
    else:
        context.log.not_run(f"attached example: {_BOTH}", context.machine.transformer_engine)
    for name, result in align_all(context, requests):
        question = f"attached example: {_BOTH if name == 'both' else name}"
        if isinstance(result, str):
            context.log.hold(question, is_held=False, found=result, expected="an alignment")
        elif name == "both":
            hold_passing(context, question, result.candidates[0])
        else:
            hold_again(context.log, question, result.candidates[0])


def _train_ours(context: CheckContext, layers: list[str]) -> None:
    """Answers each question as soon as its cases have ended; one that failed costs no other question."""
    # The share of the time ends a case on a GPU; a rehearsal may be slow.
    runs = Runs(context.folder / "cases", timeout_s=3600.0)
    cases = ["local-float64-cpu", "local-bfloat16", "local-bfloat16-repeat", "local-float32", "local-float32-cpu"]
    cases += [f"{impl}-bfloat16{word}" for impl in layers[1:] for word in ("", "-repeat")]
    runs.begin(cases, at_once=context.at_once)
    for question, ask in {"same step twice": _ask_twice, "rounding": _ask_rounding}.items():
        for impl in layers:
            try:
                ask(context.log, runs, impl)
            except CaseError as error:
                context.log.hold(
                    f"our training, {impl}: {question}", is_held=False, found=error, expected="cases that end"
                )
    runs.wait()


def _ask_twice(log: FindingsLog, runs: Runs, impl: str) -> None:
    pair = [runs.tensors(f"{impl}-bfloat16{word}", 0) for word in ("-repeat", "")]
    hold_equal(log, f"our training, {impl}, bfloat16: the same step twice", differing(*pair))


def _ask_rounding(log: FindingsLog, runs: Runs, impl: str) -> None:
    """Asks of local layers' float32 on the device, and of TransformerEngine's bfloat16, how far float64 is."""
    wide = runs.gradient("local-float64-cpu")
    half = distance(runs.gradient("local-bfloat16"), wide)
    if impl == _TE:
        other = distance(runs.gradient(f"{_TE}-bfloat16"), wide)
        both = Distances(own=other, other=half, what="the local layers' bfloat16")
        hold_rounding(log, "our training: TransformerEngine's bfloat16 gradients against float64", both)
        return
    log.note("our training: bfloat16 gradients against the CPU's float64", f"{half:.3g}")
    single, narrow = (distance(runs.gradient(f"local-float32{word}"), wide) for word in ("", "-cpu"))
    cpu = Distances(own=single, other=narrow, what="the CPU's float32")
    hold_rounding(log, "our training: float32 gradients against the CPU's float64", cpu)


def hold_again(log: FindingsLog, question: str, item: CandidateResult) -> None:
    """Holds a repetition to be identical."""
    log.hold(
        f"{question}, bfloat16: again",
        is_held=item.verdict.kind.value == "identical",
        found=describe(item),
        expected="identical",
    )


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
