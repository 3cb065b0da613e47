"""One candidate while an alignment goes on: its state, its result for reports, and its further runs.

Contract: a state changes by its own results alone; ``CloserLook`` makes further runs through the store, each once.
Every run for a proof is a planned run with a few overrides behind its own, in a folder of its own under ``proofs``, in
mock on the same recording where there is one, and from the same initial state. Nothing is started here: ``alignment``
makes them, and ``verdict.ladder`` judges them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mock_scheduler.alignment.localise.localise import localise
from mock_scheduler.alignment.localise.runs import full_overrides
from mock_scheduler.alignment.plan.overrides import quote_override
from mock_scheduler.alignment.plan.planned_run import AlignPlan, PlannedRun, initial_state_overrides
from mock_scheduler.alignment.runs.run_store import RunStore
from mock_scheduler.comparison.bounds.bounds import Bounds, shrinking_factor
from mock_scheduler.comparison.noise.building import measure_noise
from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.program import ConfigLoader
from mock_scheduler.run_folder.finished_run import RunSummary
from mock_scheduler.support.run_files import TRACE_FOLDER
from mock_scheduler.trace.start_report import StartReport
from mock_scheduler.verdict.consequence.figures import Consequence
from mock_scheduler.verdict.ladder import Evidence, is_settled, judge
from mock_scheduler.verdict.localisation import Localisation
from mock_scheduler.verdict.reasons import NOT_NEEDED, STRONGER_PROOF, NotTried, NotTriedCause, StillOpen
from mock_scheduler.verdict.results import CandidateResult
from mock_scheduler.verdict.verdict import WITHOUT_COMPARISON, OwnChanges, Verdict, VerdictKind

#: Addition is commutative: two terms have one sum in any order, and only from three on the order moves bits.
_NUM_ORDERLESS = 2
_MOCK = ("rollout_mock.mode=mock",)


def derive_run(
    run: PlannedRun, name: str, overrides: Sequence[str], *, load: ConfigLoader, root: Path, entry: str | None = None
) -> PlannedRun:
    """Plans the run again with further overrides, named ``name``, in ``{root}/{name}``.

    ``entry``: another module in the place of the run's own. Raises ``ConfigError`` where the overrides do not fit.
    """
    run_dir = root / name
    begins_from = run.begins_from
    if begins_from is None and run.program.initial_state_key is not None:
        begins_from = run.output_dir / TRACE_FOLDER
    complete = (
        *run.overrides,
        *(_MOCK if run.config.rollout_mock is not None else ()),
        *initial_state_overrides(run.program, begins_from),
        *overrides,
        quote_override("output_dir", str(run_dir)),
        quote_override("exp_name", f"{run.config.exp_name}-{name}"),
    )
    return replace(
        run,
        name=name,
        entry=run.entry if entry is None else entry,
        overrides=complete,
        config=load(complete),
        output_dir=run_dir,
        begins_from=begins_from,
    )


def plan_emulated(candidate: PlannedRun, baseline: PlannedRun, *, load: ConfigLoader, root: Path) -> PlannedRun:
    """Plans the reference of a candidate: one process with its layout's order of sums and the baseline's code.

    Raises ``ConfigError`` where the order cannot be followed.
    """
    layout = candidate.config.parallel
    emulated = layout.model_dump(mode="json", exclude_defaults=True, exclude={"allow_known_wrong"})
    # One process, whatever axes the candidate has: the reference's only parallelism is the order it follows.
    plain = {f"parallel.{key}": value for key, value in ParallelConfig().model_dump(mode="json").items()}
    overrides = [
        *(f"{key}={json.dumps(value)}" for key, value in plain.items()),
        f"order.emulate={_to_hydra(emulated)}",
        "order.ordered_reductions=false",  # it concerns ranks, and the reference has one
    ]
    run = derive_run(
        candidate, f"emulated-{candidate.name}", overrides, load=load, root=root, entry=candidate.program.entry
    )
    # The baseline's code: a candidate's own module or packages must not vouch for themselves.
    return replace(run, python=baseline.python, env=baseline.env, versions=baseline.versions, sources=baseline.sources)


def order_reductions(plan: AlignPlan, *, load: ConfigLoader) -> AlignPlan:
    """Puts reductions in rank order where an emulated candidate reduces over more than two ranks.

    A library's own order over more than two ranks is nobody's to follow.
    """
    if not plan.baseline.config.align.proofs.emulate:
        return plan
    return replace(plan, candidates=tuple(_order_reductions(run, load=load) for run in plan.candidates))


def describe_order_limits(run: PlannedRun) -> str:
    """Says why the order of sums of a run cannot be followed; empty where it can."""
    return "; ".join(run.program.order_limits(run.config))


def is_same_order(baseline: PlannedRun, candidate: PlannedRun) -> bool:
    """Says whether a candidate adds in the baseline's order."""
    if candidate.changes.kind == "nothing":
        return True
    if any(describe_order_limits(run) for run in (baseline, candidate)):
        return False
    ours, theirs = (run.program.plan_order(run.config) for run in (baseline, candidate))
    # Two orders that nobody knows are not known to be one.
    return ours is not None and ours == theirs


def plan_perturbed(baseline: PlannedRun, seed: int, *, load: ConfigLoader, root: Path) -> PlannedRun:
    """Plans the baseline with weights perturbed by one unit roundoff."""
    return derive_run(baseline, f"noise-{seed}", [f"perturbation.seed={seed}"], load=load, root=root)


def plan_wide(run: PlannedRun, *, load: ConfigLoader, root: Path) -> PlannedRun:
    """Plans the run in float64."""
    return derive_run(run, f"float64-{run.name}", ["precision=float64"], load=load, root=root)


def _order_reductions(run: PlannedRun, *, load: ConfigLoader) -> PlannedRun:
    config = run.config
    if not run.must_be_exact or config.order.ordered_reductions or describe_order_limits(run):
        return run
    plan = run.program.plan_order(config)
    # Where nobody knows the groups before the run, the largest one may have all processes.
    sizes = [config.parallel.world_size] if plan is None else [reduction.size for reduction in plan.reductions]
    if all(size <= _NUM_ORDERLESS for size in sizes):
        return run
    added = "order.ordered_reductions=true"
    overrides = (*run.overrides, added)
    return replace(run, own_overrides=(*run.own_overrides, added), overrides=overrides, config=load(overrides))


def _to_hydra(values: dict[str, object]) -> str:
    """Writes a mapping of plain values in Hydra's grammar; an empty one means one process."""
    return "{" + ",".join(f"{key}:{json.dumps(value)}" for key, value in values.items()) + "}"


@dataclass(kw_only=True, slots=True)
class CandidateState:
    """A candidate as planned, its baseline, and all results so far; ``None`` until there is one.

    ``direct``, ``emulated``, ``wide`` and the reasons for the missing ones: as in ``Evidence``. ``emulated_run``: the
    reference in its order of sums. ``judged``: the verdict with its proofs. ``start``: what its run started from.
    """

    run: PlannedRun
    baseline: PlannedRun
    summary: RunSummary | None = None
    start: StartReport | None = None
    direct: Verdict | None = None
    emulated_run: PlannedRun | None = None
    emulated: Verdict | None = None
    not_followed: tuple[str, ...] = ()
    not_emulated: NotTried = NOT_NEEDED
    wide: Verdict | None = None
    no_referee: NotTried = STRONGER_PROOF
    judged: Verdict | None = None
    localisation: Localisation | None = None
    consequence: Consequence | None = None

    @property
    def must_equal_baseline(self) -> bool:
        """Whether none of its changes may move a bit."""
        return self.run.must_be_exact and self.run.changes.kind == "nothing"

    @property
    def own_entry(self) -> str:
        """The module of its processes; empty where it is the baseline's."""
        return self.run.entry if self.run.entry != self.baseline.entry else ""

    @property
    def is_open(self) -> bool:
        """Whether it was compared with the baseline, and more is needed to judge it."""
        return self.direct is not None and not is_settled(self.direct)

    @property
    def verdict(self) -> Verdict:
        """The verdict so far."""
        if self.judged is not None:
            return self.judged
        if self.direct is not None and not self.is_open:
            return self.direct
        missing = StillOpen(missing="run" if self.direct is None else "judgement")
        return Verdict(kind=VerdictKind.INCOMPARABLE, why=missing)

    def judge(self) -> None:
        """Judge it by all results so far."""
        run, direct = self.run, self.direct
        # Nothing was compared: the reason stands, and no proof could change it.
        if direct is None or direct.kind in WITHOUT_COMPARISON:
            return
        self.judged = judge(
            Evidence(
                direct=direct,
                num_processes=run.config.parallel.world_size,
                changes=self._own_changes,
                is_same_order=is_same_order(self.baseline, run),
                must_be_exact=run.must_be_exact,
                emulated=self.emulated,
                not_followed=self.not_followed,
                not_emulated=self.not_emulated,
                layout=run.layout,
                wide=self.wide,
                no_referee=self.no_referee,
                shrinking=shrinking_factor(run.config.precision),
            )
        )

    def why_not_emulated(self, baseline: RunSummary) -> NotTried | None:
        """Say why no reference is run in its order of sums; ``None`` where one is."""
        if not self.baseline.config.align.proofs.emulate:
            return NotTried(cause=NotTriedCause.TURNED_OFF, keys=("align.proofs.emulate",))
        if is_same_order(self.baseline, self.run):
            return NotTried(cause=NotTriedCause.SAME_ORDER)
        # The reference has the candidate's keys, so an effect of theirs would be on both sides and prove nothing.
        if self.run.changes.other and not self.run.must_be_exact:
            return NotTried(cause=NotTriedCause.CHANGES_MORE, keys=tuple(self.run.changes.other))
        problem = describe_order_limits(self.run) or "; ".join(self._find_stated_limits(baseline))
        return NotTried(cause=NotTriedCause.ORDER_UNKNOWN, error=problem) if problem else None

    def _find_stated_limits(self, baseline: RunSummary) -> list[str]:
        """List what finished runs themselves know to keep a reference from following the order: no run is spent."""
        # The reference is the baseline's training in one process, but for keys that the candidate changes besides.
        is_alike = self.baseline.config.parallel.world_size == 1 and not self.run.changes.other
        own = () if self.summary is None else self.summary.order_limits
        return list(dict.fromkeys((*(baseline.order_limits if is_alike else ()), *own)))

    @property
    def _own_changes(self) -> OwnChanges:
        return OwnChanges(
            keys=(*self.run.changes.layout, *self.run.changes.other),
            entry=self.own_entry,
            versions=tuple(self.run.version_changes),
        )

    def to_result(self) -> CandidateResult:
        """Make the result for reports."""
        run = self.run
        return CandidateResult(
            name=run.name,
            overrides=run.own_overrides,
            layout=run.layout,
            log_path=run.log_path,
            run=self.summary,
            start=self.start,
            verdict=self.verdict,
            entry=self.own_entry,
            changes=(*run.changes.layout, *run.changes.other),
            emulated=self.emulated,
            localisation=self.localisation,
            consequence=self.consequence,
            versions=run.version_changes,
        )


#: Perturbed runs that show the noise of what only localisation traces.
_NUM_PERTURBATIONS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class CloserLook:
    """Localises candidates of one alignment; ``load`` makes configurations of overrides, ``store`` makes the runs."""

    plan: AlignPlan
    load: ConfigLoader
    store: RunStore

    def localise(self, item: CandidateState) -> Localisation | None:
        """Find where a divergence begins, against a reference with the candidate's order of sums where there is one.

        Raises ``AlignmentError`` where a run fails, ``ConfigError`` where one cannot be, ``TraceError`` for its files.
        """
        reference, bounds = self.plan.baseline, None
        first = item.verdict.first
        differs = item.emulated is not None and item.emulated.kind in (VerdictKind.DIVERGED, VerdictKind.SUSPECT)
        if item.emulated_run is not None and differs:
            reference = item.emulated_run
        # In another order of sums every bit may differ, so only noise tells a cause from rounding.
        elif not is_same_order(self.plan.baseline, item.run):
            bounds = self._measure_all_kinds(0 if first is None else first.step)
        return localise(reference, item.run, first=first, run=self._run_further, bounds=bounds)

    def _measure_all_kinds(self, step: int) -> Bounds:
        """Measure the noise of every tensor of one step, traced or not in ordinary runs."""
        # Anew, since ``noise.json`` knows only what ordinary runs trace.
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
        # Localisation may ask for one run more than once: candidate and overrides name it.
        return self.store.execute_once(run, (planned.name, *overrides))
