"""Trains our own model and the attached example on the GPU: twice, against the CPU, and with TransformerEngine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_check.cases import OTHER_ROUNDING, Runs, differing, distance
from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.example import align_all, candidate, describe, hold_passing
from benchmarks.gpu_check.findings import FindingsLog
from mock_scheduler.verdict.results import CandidateResult

_TE = "transformer_engine"
_HALF = {"precision": "bfloat16"}
_BOTH = "attached example: local layers against TransformerEngine's, with noise and localisation"


def check(context: CheckContext) -> None:
    """Runs both trainings; TransformerEngine's parts only where its layers compute."""
    layers = ["local", *([_TE] if context.machine.has_transformer_engine else [])]
    _train_ours(context, layers)
    requests: list[dict[str, Any]] = [
        {"name": f"example-{impl}", "candidates": [candidate("again")], "options": {"layers": impl}} for impl in layers
    ]
    if context.machine.has_transformer_engine:
        other = {"name": "example-both", "candidates": [candidate(_TE, layers=_TE)]}
        requests.append({**other, "num_perturbations": 3, "localise": True})
    else:
        context.log.not_run(_BOTH, context.machine.transformer_engine)
    for request, result in zip(requests, align_all(context, [{**one, **_HALF} for one in requests]), strict=True):
        question = request["name"]
        if isinstance(result, str):
            context.log.hold(question, is_held=False, found=result, expected="an alignment")
        elif question == "example-both":
            hold_passing(context, _BOTH, result.candidates[0])
        else:
            hold_again(context.log, f"attached example, {question.removeprefix('example-')}", result.candidates[0])


def _train_ours(context: CheckContext, layers: list[str]) -> None:
    # The share of the time ends a case on a GPU; a rehearsal may be slow.
    runs = Runs(context.folder / "cases", timeout_s=3600.0)
    cases = [f"{impl}-bfloat16{word}" for impl in layers for word in ("", "-repeat")]
    cases += ["local-float32", "local-float64-cpu", "local-float32-cpu"]
    runs.prepare(cases, at_once=context.at_once)
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
