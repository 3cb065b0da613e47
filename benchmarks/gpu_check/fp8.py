"""Trains the attached example with TransformerEngine's FP8 recipes: what a trace sees, what emulation and noise say."""

from __future__ import annotations

import re

from benchmarks.gpu_check.context import CheckContext
from benchmarks.gpu_check.example import align_all, candidate, describe
from benchmarks.gpu_check.findings import FindingsLog
from mock_scheduler.verdict.results import CandidateResult

#: By Megatron's names: delayed scaling, scaling by the current tensor, scaling by blocks.
RECIPES = ("delayed", "tensorwise", "blockwise")
#: As TransformerEngine says so: "FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA >= 12.9.".
_UNSUPPORTED = re.compile(r"[Cc]ompute capability|CUDA >=|not supported")


def check(context: CheckContext) -> None:
    """Aligns each recipe with its repetition, with bfloat16, and with itself under tp2."""
    candidates = [candidate("again"), candidate("bfloat16", fp8_recipe="null"), candidate("tp2", "tp2")]
    requests = {
        recipe: {
            "candidates": candidates,
            "precision": "bfloat16",
            "options": {"layers": "transformer_engine", "fp8_recipe": recipe},
            "num_perturbations": 2,
        }
        for recipe in RECIPES
    }
    for recipe, result in align_all(context, requests):
        if isinstance(result, str):
            tell_failure(context.log, recipe, result)
        else:
            judge(context.log, recipe, {item.name: item for item in result.candidates})


def tell_failure(log: FindingsLog, recipe: str, words: str) -> None:
    """Says that a recipe is not run where its error says that the GPU or a release does not have it; else it failed."""
    if _UNSUPPORTED.search(words):
        log.not_run(f"FP8, {recipe}", words)
    else:
        log.hold(f"FP8, {recipe}", is_held=False, found=words, expected="an alignment")


def judge(log: FindingsLog, recipe: str, found: dict[str, CandidateResult]) -> None:
    """Holds the repetition to equal bits, FP8 to have been on, and emulation to a refusal that names it."""
    again, plain, split = found["again"], found["bfloat16"], found["tp2"]
    log.hold(
        f"FP8, {recipe}: again",
        is_held=again.verdict.kind.value == "identical",
        found=describe(again),
        expected="identical",
    )
    log.hold(
        f"FP8, {recipe}: bfloat16 instead has other bits",
        is_held=plain.run is not None and plain.verdict.kind.value not in ("identical", "identical (emulated)"),
        found=describe(plain),
        expected="no equality, else FP8 was not on",
    )
    limits = () if again.run is None else again.run.order_limits
    log.hold(
        f"FP8, {recipe}: emulation refuses it by name",
        is_held=any("fp8" in limit for limit in limits) and split.verdict.kind.value != "identical (emulated)",
        found="; ".join(limits) or "no limit was named",
        expected="a limit of fp8, and no emulated verdict of tp2",
    )
    log.note(f"FP8, {recipe}: tp2 within the measured noise", describe(split))
    unseen = () if again.run is None else again.run.unobserved_modules
    log.table(f"FP8, {recipe}: modules that no output shows", ("module",), [(str(item),) for item in unseen])
