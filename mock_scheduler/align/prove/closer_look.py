"""Further runs to narrow a candidate's divergence down, and their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.align.localise.localise import localise
from mock_scheduler.align.localise.runs import full_overrides
from mock_scheduler.align.plan.planned_run import AlignPlan, PlannedRun
from mock_scheduler.align.prove.candidate_state import CandidateState
from mock_scheduler.align.prove.proof_runs import derive_run, is_same_order
from mock_scheduler.align.runs.run_store import RunStore
from mock_scheduler.compare.bounds.bounds import Bounds
from mock_scheduler.compare.noise.building import measure_noise
from mock_scheduler.program import ConfigLoader
from mock_scheduler.verdict.localisation import Localisation
from mock_scheduler.verdict.verdict import VerdictKind

#: Perturbed runs that show the noise of what only localisation traces.
_NUM_PERTURBATIONS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class CloserLook:
    """Localises candidates of one alignment; ``load`` makes configurations of overrides, ``store`` makes the runs."""

    plan: AlignPlan
    load: ConfigLoader
    store: RunStore

    def localise(self, item: CandidateState) -> Localisation | None:
        """Where a divergence begins, against a reference with the candidate's order of sums where there is one.

        Raises ``AlignmentError`` where a run fails, ``ConfigError`` where one cannot be, ``TraceError`` for its files.
        """
        reference, bounds = self.plan.baseline, None
        first = item.verdict.first
        differs = item.emulated is not None and item.emulated.kind in (VerdictKind.DIVERGED, VerdictKind.SUSPECT)
        if item.emulated_run is not None and differs:
            reference = item.emulated_run
        elif not is_same_order(self.plan.baseline, item.run):
            bounds = self._measure_all_kinds(0 if first is None else first.step)
        return localise(reference, item.run, first=first, run=self._run_further, bounds=bounds)

    def _measure_all_kinds(self, step: int) -> Bounds:
        """The noise of every tensor of one step, traced or not in ordinary runs."""
        overrides = full_overrides(self.plan.baseline, step, None)
        whole = self._run_further(self.plan.baseline, overrides, f"localise-step-{step}")
        folders = [
            self._run_further(
                self.plan.baseline, [*overrides, f"perturbation.seed={seed}"], f"localise-step-{step}-noise-{seed}"
            )
            for seed in range(_NUM_PERTURBATIONS)
        ]
        return measure_noise(whole, folders, seeds=range(len(folders)))

    def _run_further(self, planned: PlannedRun, overrides: Sequence[str], name: str) -> Path:
        """Make a run for localisation; the same one is made once."""
        run = derive_run(planned, name, overrides, load=self.load, root=self.plan.proofs_dir)
        return self.store.execute_once(run, (planned.name, *overrides))
