"""Aligns tp2, pp2 and dp2 on one GPU with one process, in float32 and bfloat16."""

from __future__ import annotations

from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.example import align_all, candidate, hold_passing

_LAYOUTS = ("tp2", "pp2", "dp2")
_PRECISIONS = ("float32", "bfloat16")


def check(context: CheckContext) -> None:
    """Trains the attached example under each layout; two processes share a GPU where there is one (``one_gpu``)."""
    context.log.note("processes", f"2 on {len(context.machine.gpus) or 'no'} GPU(s), over gloo where they share one")
    candidates = [candidate(layout, layout) for layout in _LAYOUTS]
    requests = {
        precision: {"candidates": candidates, "precision": precision, "num_perturbations": 3}
        for precision in _PRECISIONS
    }
    for precision, result in align_all(context, requests):
        if isinstance(result, str):
            context.log.hold(precision, is_held=False, found=result, expected="an alignment")
            continue
        for item in result.candidates:
            hold_passing(context, precision, item)
