"""Where a divergence begins: further runs narrow it down to step, tensor and module.

1. *Over steps.* Sketches of all tensors of every step, of both runs: one pair of runs gives the first differing
   step, so nothing is searched for by halves. They end with the first known difference.
2. *Within the step.* Both runs again, up to that step, with whole tensors: all of them, or where they take more
   than ``max_trace_bytes`` the first differing ones of each pass. The first in execution order is the origin.
3. *Grafts*, where the origin is of the forward or backward pass: the candidate again, with the reference's tensors put
   in; ``decisions`` judges them. A differing main gradient behind equal tensors is the fault of its own
   reduction, a differing parameter the fault of the optimizer: no graft is needed.

Runs start at step 0, since a checkpoint of one run is no checkpoint of the other; a run is as long as the steps up to
the one that matters. Contract: nothing is removed; runs are made by ``run`` alone, one after another.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.alignment.localise.decisions import (
    GraftWalk,
    build_localisation,
    find_differing,
    find_first_step,
    find_reduction_faults,
    in_pass,
)
from mock_scheduler.alignment.localise.runs import (
    MakeRun,
    choose_names,
    estimate_bytes,
    full_overrides,
    graft_overrides,
    guess_bytes,
    sketch_overrides,
)
from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.comparison.bounds.bounds import EXACT, Bounds
from mock_scheduler.comparison.pairing.selection import Selection
from mock_scheduler.comparison.tensors import TensorComparison
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import AlignmentError, TraceError
from mock_scheduler.support.run_files import TRACE_FOLDER
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.verdict.divergences import Divergence
from mock_scheduler.verdict.localisation import DifferingTensor, Localisation, pass_of
from mock_scheduler.verdict.wording.bounds import describe_bounds_level

MAX_GRAFTS = 6
MAX_TRACE_BYTES = 4 << 30


def localise(
    reference: PlannedRun,
    candidate: PlannedRun,
    *,
    first: Divergence | None,
    run: MakeRun,
    bounds: Bounds | None = None,
    max_grafts: int = MAX_GRAFTS,
    max_trace_bytes: int = MAX_TRACE_BYTES,
) -> Localisation:
    """Narrow a divergence down; both runs were made and compared before.

    ``reference``: the plain baseline, or the one in the candidate's order of sums. ``first``: how they first
    differed; ``None``: not known when. ``bounds``: when a tensor differs, and they must have all kinds; ``None``: where
    any bit does. ``max_grafts``: runs for causes; ``max_trace_bytes``: room for the whole tensors of one step.

    Raises:
        AlignmentError: a run of the first two stages fails, or no tensor differs in them.
        TraceError: a trace cannot be read.
    """
    started_s = time.perf_counter()
    search = _Search(reference=reference, candidate=candidate, run=run, bounds=bounds, max_trace_bytes=max_trace_bytes)
    stage = search.narrow(first)
    origin = stage.differing[0]
    walk, reductions = search.graft(stage, origin, max_grafts=max_grafts)
    return build_localisation(
        search.explain(stage, origin),
        stage.differing,
        stage.comparison,
        walk=walk,
        reductions=reductions,
        is_exact=bounds is None,
        trace_dirs=stage.full,
        seconds=time.perf_counter() - started_s,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """A step with a difference. full: trace folders with whole tensors. level, compared: of the reference's trace with
    all names. comparison: of the step, in full. differing: its differing tensors, in order, never empty."""

    step: int
    full: tuple[Path, Path]
    level: str
    compared: Path
    comparison: TensorComparison
    differing: list[DifferingTensor]


@dataclass(kw_only=True, slots=True)
class _Search:
    """The runs, and how they are compared."""

    reference: PlannedRun
    candidate: PlannedRun
    run: MakeRun
    bounds: Bounds | None
    max_trace_bytes: int

    def narrow(self, first: Divergence | None) -> _Stage:
        """Finds the first differing step, and traces its whole tensors."""
        step = None if first is None else first.step
        # Nothing comes before step 0: where its tensors have room, sketches would only cost two runs.
        if step == 0 and self._guess_bytes() <= self.max_trace_bytes:
            return self._trace_whole(0)
        sketches = self._run_both("sketches", [sketch_overrides(run, step) for run in self._sides])
        found = find_first_step(self._compare(sketches, None), is_exact=self.bounds is None)
        if found is None:
            raise self._nothing("sketches of every step")
        comparison = self._compare(sketches, found)
        size = estimate_bytes(
            comparison, found, num_ranks=self.candidate.config.parallel.world_size, item_bytes=self._item_bytes
        )
        return self._trace_whole(found) if size <= self.max_trace_bytes else self._trace_some(found, sketches)

    def graft(
        self, stage: _Stage, origin: DifferingTensor, *, max_grafts: int
    ) -> tuple[GraftWalk | None, list[DifferingTensor]]:
        """Finds the causes in the origin's pass, and the main gradients with a difference of their own."""
        if pass_of(origin.key) not in ("forward", "backward"):
            return None, []
        with open_trace(stage.full[0]) as trace:
            there = trace.keys(stage.step)
        before = in_pass(stage.differing, origin.key)
        walk = GraftWalk(
            before=[self.explain(stage, item) if item.key == origin.key else item for item in before],
            max_runs=max_grafts,
            is_there=there.__contains__,
        )
        rest: list[DifferingTensor] = []
        while names := walk.next_names():
            overrides = graft_overrides(
                self.candidate,
                level=stage.level,
                kind=walk.kind,
                names=names,
                place=(origin.key.step, origin.key.update),
                trace=stage.full[0],
            )
            try:
                grafted = self._run(self.candidate, overrides, f"graft-{walk.num_runs + 1}") / TRACE_FOLDER
            except AlignmentError as error:
                walk.give_up(str(error))
                break
            rest = find_differing(self._compare((stage.compared, grafted), stage.step), is_exact=self.bounds is None)
            walk.see(in_pass(rest, origin.key))
        walk.causes = [self.explain(stage, item) for item in walk.causes]
        is_last = walk.kind == "activation_gradient" and walk.is_explained
        return walk, find_reduction_faults(rest, origin.key) if is_last else []

    def explain(self, stage: _Stage, item: DifferingTensor) -> DifferingTensor:
        """Adds the look of its difference to a tensor; a comparison looks at the first ones alone."""
        difference = item.difference
        # The first ones of a comparison have been looked at already, behind the grafts of that comparison.
        if difference is None or difference.spread is not None:
            return item
        selection = Selection(
            steps=StepRanges.of([stage.step]),
            kinds=frozenset({item.key.kind}),
            patterns=(item.key.name,),
            precisions=self._precisions,
        )
        again = compare_trace_folders(*stage.full, bounds=self.bounds or EXACT, selection=selection)
        found = [other for other in find_differing(again, is_exact=self.bounds is None) if other.key == item.key]
        return found[0] if found else item

    @property
    def _sides(self) -> tuple[PlannedRun, PlannedRun]:
        return self.reference, self.candidate

    @property
    def _precisions(self) -> tuple[str, str]:
        return self.reference.config.precision, self.candidate.config.precision

    @property
    def _item_bytes(self) -> int:
        return 8 if self.reference.config.precision == "float64" else 4

    def _trace_whole(self, step: int) -> _Stage:
        full = self._run_both("full", [full_overrides(run, step, None) for run in self._sides])
        comparison = self._compare(full, step)
        return self._stage(step, full, level="full", compared=full[0], comparison=comparison)

    def _trace_some(self, step: int, sketches: tuple[Path, Path]) -> _Stage:
        """Traces the first differing tensors of each pass whole, and everything else as sketches."""
        comparison = self._compare(sketches, step)
        differing = find_differing(comparison, is_exact=self.bounds is None)
        if not differing:
            raise self._nothing(f"sketches of step {step} for certain")
        num_ranks = self.candidate.config.parallel.world_size
        names = choose_names(
            in_pass(differing, differing[0].key),
            budget=self.max_trace_bytes,
            bytes_by_element=self._item_bytes * (1 + num_ranks),
        )
        full = self._run_both("full", [full_overrides(run, step, names) for run in self._sides])
        return self._stage(step, full, level="sketch", compared=sketches[0], comparison=comparison)

    def _stage(
        self, step: int, full: tuple[Path, Path], *, level: str, compared: Path, comparison: TensorComparison
    ) -> _Stage:
        differing = find_differing(comparison, is_exact=self.bounds is None)
        if not differing:
            raise self._nothing(f"whole tensors of step {step}")
        return _Stage(step=step, full=full, level=level, compared=compared, comparison=comparison, differing=differing)

    def _guess_bytes(self) -> float:
        """Guesses the size of whole tensors of step 0 by the reference's trace of fewer kinds; infinite without one."""
        try:
            with open_trace(self.reference.output_dir / TRACE_FOLDER) as trace:
                return guess_bytes(self.reference, trace, num_ranks=self.candidate.config.parallel.world_size)
        except TraceError:
            return math.inf

    def _compare(self, folders: tuple[Path, Path], step: int | None) -> TensorComparison:
        selection = Selection(steps=None if step is None else StepRanges.of([step]), precisions=self._precisions)
        return compare_trace_folders(*folders, bounds=self.bounds or EXACT, selection=selection)

    def _run_both(self, stage: str, overrides: list[list[str]]) -> tuple[Path, Path]:
        reference = self._run(self.reference, overrides[0], f"{stage}-reference")
        candidate = self._run(self.candidate, overrides[1], f"{stage}-candidate")
        return reference / TRACE_FOLDER, candidate / TRACE_FOLDER

    def _run(self, planned: PlannedRun, overrides: list[str], name: str) -> Path:
        return self.run(planned, overrides, f"localise-{self.candidate.name}-{name}")

    def _nothing(self, where: str) -> AlignmentError:
        bound = "its bits" if self.bounds is None else f"more than its bound ({describe_bounds_level(self.bounds)})"
        return AlignmentError(
            f"{self.candidate.name}: the divergence cannot be localised: in {where} no tensor differs from "
            f"{self.reference.name} by {bound}"
        )
