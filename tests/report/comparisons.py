"""Comparisons for tests of reports: a model of a few layers, identical, rounding, diverged, estimated or empty."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mock_scheduler.comparison.findings import Finding, LedgerNotCompared, NotCompared, NotShown, OnlyIn
from mock_scheduler.comparison.pairing.order import order_keys
from mock_scheduler.comparison.residuals import Locality, PartialSums, Residual
from mock_scheduler.comparison.tensors import (
    ExpertFlips,
    Figures,
    LedgerComparison,
    LedgerDifference,
    TensorComparison,
    TensorDifference,
    WorstElement,
)
from mock_scheduler.comparison.walk.metrics import MetricLog, compare_metrics
from mock_scheduler.run_folder.finished_run import RunSummary
from mock_scheduler.run_folder.inputs import ComparedInput
from mock_scheduler.trace.entries import LedgerCall, RankPlace, TraceKey
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.verdict.divergences import Divergence, count_before
from mock_scheduler.verdict.reasons import BeyondBounds, BitEqual, OtherRollouts, WithinBounds
from mock_scheduler.verdict.results import ComparisonResult
from mock_scheduler.verdict.verdict import Verdict, VerdictKind
from tests.comparison.stated import stated

BOUNDS = stated()
FAULT = "decoder.layers.2.self_attention.linear_proj"
SENTENCE = (
    f"step 0, update 0, forward: activation of {FAULT} differs by 0.0031 (bound 0.0001): the part of tp1 is "
    "missing from the candidate, channels 32 to 63 hold 98.0 % of the difference (32 of 64 channels): just the piece "
    "of one rank, largest at index [17, 40] (sample train/g0/e1/v3/t0, token 5), held by "
    "global rank 0 (tp0 pp0 dp0) in the baseline and global rank 0 (tp0 pp0 dp0), global rank 1 (tp1 pp0 dp0) in the candidate; the 15 tensors before it are equal"
)
PARTS = (
    "input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
TP0 = RankPlace(global_rank=0, coordinates={"tp": 0, "pp": 0, "dp": 0})
TP1 = RankPlace(global_rank=1, coordinates={"tp": 1, "pp": 0, "dp": 0})


def make_keys(*, layers: int, step: int, update: int = 0) -> Iterator[TraceKey]:
    """A dense model's tensors of one update: activations and their gradients, main gradients and parameters."""
    outer = ("embedding", "decoder.final_layernorm", "output_layer")
    inner = [f"decoder.layers.{layer}.{part}" for layer in range(layers) for part in PARTS]
    for name in (*outer, *inner):
        yield TraceKey(step=step, update=update, kind="activation", name=name)
        yield TraceKey(step=step, update=update, kind="activation_gradient", name=name)
        yield TraceKey(step=step, update=update, kind="gradient", name=f"{name}.weight")
        yield TraceKey(step=step, update=update, kind="parameter", name=f"{name}.weight")
    yield TraceKey(step=step, update=update, kind="output", name="logprobs")
    yield TraceKey(step=step, update=update, kind="loss", name="pg_loss")


def make_difference(key: TraceKey, relative: float, **changes: Any) -> TensorDifference:
    """One tensor with a plausible set of figures."""
    is_equal = relative == 0
    worst = WorstElement(
        index=(17, 40),
        baseline=0.125,
        candidate=0.125 + relative,
        sample="train/g0/e1/v3/t0",
        position=5,
        baseline_ranks=(TP0,),
        candidate_ranks=(TP0, TP1),
    )
    figures = Figures(
        num_elements=4096,
        num_different=4000,
        max_abs=relative,
        norm=relative * 8,
        relative=relative,
        slope=1.0 - relative / 3,
        cosine=1.0 - relative**2,
        max_ulp=min(int(relative / 2**-24), 10**9) if math.isfinite(relative) else None,
        worst=worst,
    )
    bounds = {"parameter": 5e-3}
    difference = TensorDifference(
        key=key,
        num_elements=4096,
        bit_equal=is_equal,
        max_abs=relative,
        relative=relative,
        tolerance=bounds.get(key.kind, 1e-4),
        is_within_ulp=relative < 2e-7,
        figures=None if is_equal else figures,
    )
    return replace(difference, **changes)


def make_metrics(*, steps: int, relative: float, name: str = "pg_loss") -> tuple[MetricLog, MetricLog]:
    """Two runs' logs, which part from the first step on."""
    baseline = {
        step: {name: 0.5 + 0.1 * math.sin(step), "entropy": 2.0 - 0.01 * step, "reward": float(step % 3)}
        for step in range(steps)
    }
    candidate = {
        step: {**values, name: values[name] * (1 + relative * (1 + step))} for step, values in baseline.items()
    }
    return baseline, candidate


def make_tensors(
    *, layers: int = 6, steps: int = 2, updates: int = 1, is_faulty: bool = False, size: float = 1e-7
) -> TensorComparison:
    """``size``: of the rounding; ``is_faulty``: layer 2's projection is wrong, and all that comes after it."""
    keys = order_keys(
        key
        for step in range(steps)
        for update in range(updates)
        for key in make_keys(layers=layers, step=step, update=update)
    )
    fault = TraceKey(step=0, update=0, kind="activation", name=FAULT)
    start = keys.index(fault) if is_faulty else len(keys)
    differences = []
    for index, key in enumerate(keys):
        wobble = 1 + 0.5 * math.sin(index)
        if index < start:
            relative = 0.0 if is_faulty or index % 5 == 0 else size * wobble
        else:
            growth = 1.02 ** min(index - start, 200)
            relative = 3.1e-3 if index == start else 1.5e-3 * wobble * growth
        differences.append(make_difference(key, relative if size or is_faulty else 0.0))
    if is_faulty:
        differences[start] = replace(
            differences[start],
            localities=(
                Locality(
                    dim="channel", first=32, last=63, share=0.98, num_indices=32, dim_size=64, num_pieces=1,
                ),
            ),
            residual=Residual(
                kind="missing part", value=-1.0, explained=0.97, detail=PartialSums(parts=("tp1",), num_parts=None)
            ),
        )  # fmt: skip
    return TensorComparison(
        steps=tuple(range(steps)),
        differences=tuple(differences),
        findings=(),
        baseline_conflicts=(),
        candidate_conflicts=(),
    )


def make_result(tmp_path: Path, verdict: Verdict, *, level: str = "full", name: str = "tp2") -> ComparisonResult:
    """Two runs in ``tmp_path``."""

    def side(run: str, layout: str) -> ComparedInput:
        summary = RunSummary(
            name=run, output_dir=tmp_path / run, layout=layout, wall_s=9.0, rollout_s=1.0, elapsed_s=9.0, built={},
            batches={},
        )  # fmt: skip
        return ComparedInput(
            name=run,
            path=tmp_path / run,
            kind="run",
            level="sketch" if level == "sketch" else "full",
            run=summary,
        )

    return ComparisonResult(
        baseline=side("base", "tp1 pp1 dp1"),
        candidate=side(name, "tp2 pp1 dp1"),
        bounds=BOUNDS,
        verdict=verdict,
    )


def identical(tmp_path: Path) -> ComparisonResult:
    """Every bit is equal."""
    logs = make_metrics(steps=3, relative=0.0)
    verdict = Verdict(
        kind=VerdictKind.IDENTICAL,
        why=BitEqual(),
        metrics=compare_metrics(*logs, bounds=BOUNDS),
        tensors=make_tensors(size=0.0),
        bounds=BOUNDS,
    )
    return make_result(tmp_path, verdict)


def rounding(tmp_path: Path) -> ComparisonResult:
    """Nothing is beyond its bound."""
    logs = make_metrics(steps=3, relative=1e-7)
    verdict = Verdict(
        kind=VerdictKind.ROUNDING,
        why=WithinBounds(),
        metrics=compare_metrics(*logs, bounds=BOUNDS),
        tensors=make_tensors(),
        bounds=BOUNDS,
    )
    return make_result(tmp_path, verdict)


def diverged(tmp_path: Path, *, layers: int = 6, steps: int = 2, metric: str = "pg_loss") -> ComparisonResult:
    """A fault in layer 2, and one of everything else that a report shows."""
    tensors = make_tensors(layers=layers, steps=steps, is_faulty=True)
    difference = next(item for item in tensors.differences if item.exceeds)
    gone = Finding(
        kind="gradient", step=0, update=0, name="decoder.layers.1.mlp.linear_fc1.bias",
        fact=OnlyIn(side="baseline"),
    )  # fmt: skip
    key = TraceKey(step=0, update=0, kind="gradient", name="decoder.layers.0.input_layernorm.weight")
    conflict = ReplicaConflict(key=key, first=TP0, second=TP1, num_elements=64, max_abs=0.25)
    router = TraceKey(step=0, update=0, kind="router", name="decoder.layers.1.mlp.router")
    tensors = replace(
        tensors,
        findings=(gone,),
        candidate_conflicts=(conflict,),
        not_compared=(
            NotCompared(
                kind="activation", name="decoder.layers.0.input_layernorm", sides=("candidate",),
                reasons=(NotShown(reason="fused into the linear layer after it"),), first_step=0, num_steps=2,
            ),
        ),
        flips=(ExpertFlips(key=router, num_tokens=64, num_flipped=2, largest_gap=3e-7),),
        ledgers=(
            LedgerComparison(kind="random", step=0, num_ranks=2, num_calls=12, difference=None),
            LedgerComparison(
                kind="collective", step=0, num_ranks=2, num_calls=40,
                difference=LedgerDifference(
                    position=12,
                    calls=(
                        LedgerCall(operation="all_reduce", num_elements=64, dtype="float32", group=(0, 1)),
                        LedgerCall(operation="all_gather", num_elements=64, dtype="float32", group=(0, 1)),
                    ),
                    num_calls=(20, 20),
                    places=(TP1,),
                ),
            ),
        ),
        notes=(LedgerNotCompared(kind="random", only="candidate"),),
    )  # fmt: skip
    logs = make_metrics(steps=max(steps, 3), relative=2e-3, name=metric)
    first = Divergence(
        step=0, update=0, kind="activation", name=FAULT, evidence=difference, value=difference.relative,
        bound=difference.tolerance,
    )  # fmt: skip
    verdict = Verdict(
        kind=VerdictKind.DIVERGED,
        why=BeyondBounds(),
        first=count_before(first, tensors),
        metrics=compare_metrics(*logs, bounds=BOUNDS),
        tensors=tensors,
        bounds=BOUNDS,
    )
    return make_result(tmp_path, verdict)


def sketched(tmp_path: Path) -> ComparisonResult:
    """The same, estimated; the fault's neighbours cannot be decided."""
    result = diverged(tmp_path)
    tensors = result.verdict.tensors
    assert tensors is not None
    differences = tuple(
        replace(
            item, figures=None, localities=(), residual=None, max_abs=0.0, low=0.6 * item.relative,
            high=1.5 * item.relative, relative=item.relative,
        )
        if index % 3 or item.relative == 0
        else replace(item, figures=None, localities=(), residual=None, max_abs=0.0, low=5e-5, relative=1e-4, high=2e-4)
        for index, item in enumerate(tensors.differences)
    )  # fmt: skip
    verdict = replace(
        result.verdict,
        tensors=replace(tensors, level="sketch", differences=differences),
        full_dump=("trace.level=full", "trace.steps='0'", "trace.patterns=['decoder.layers.2.*']"),
    )
    return make_result(tmp_path, verdict, level="sketch")


def incomparable(tmp_path: Path) -> ComparisonResult:
    """Nothing was compared."""
    why = OtherRollouts(first_step=1, num_steps=2, num_shared=3)
    return make_result(tmp_path, Verdict(kind=VerdictKind.INCOMPARABLE, why=why))


def infinite(tmp_path: Path) -> ComparisonResult:
    """Figures that JSON has no numbers for, and nothing else."""
    key = TraceKey(step=0, update=0, kind="gradient", name="output_layer.weight")
    difference = make_difference(key, math.inf, figures=None)
    tensors = replace(make_tensors(steps=1, size=0.0), differences=(difference,))
    verdict = Verdict(kind=VerdictKind.DIVERGED, why=BeyondBounds(), tensors=tensors, bounds=BOUNDS)
    return make_result(tmp_path, verdict)


def write_logs(result: ComparisonResult, baseline: MetricLog, candidate: MetricLog) -> None:
    """The ``metrics.jsonl`` of both runs."""
    for side, log in ((result.baseline, baseline), (result.candidate, candidate)):
        side.path.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"step": step, "metrics": dict(values)}) for step, values in log.items()]
        (side.path / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
