"""The state of one candidate while an alignment goes on, and its result for reports."""

from __future__ import annotations

from dataclasses import dataclass

from mock_scheduler.align.plan.planned_run import PlannedRun
from mock_scheduler.align.prove.proof_runs import is_same_order
from mock_scheduler.compare.bounds.bounds import shrinking_factor
from mock_scheduler.run_folder.finished_run import RunSummary
from mock_scheduler.verdict.consequence.figures import Consequence
from mock_scheduler.verdict.ladder import Evidence, is_settled, judge
from mock_scheduler.verdict.localisation import Localisation
from mock_scheduler.verdict.reasons import NOT_NEEDED, STRONGER_PROOF, NotTried, StillOpen
from mock_scheduler.verdict.results import CandidateResult
from mock_scheduler.verdict.verdict import WITHOUT_COMPARISON, OwnChanges, Verdict, VerdictKind


@dataclass(kw_only=True, slots=True)
class CandidateState:
    """A candidate as planned, its baseline, and all results so far; ``None`` until there is one.

    ``direct``, ``emulated``, ``wide`` and the reasons for the missing ones: as in ``Evidence``. ``emulated_run``: the
    reference in its order of sums. ``judged``: the verdict with its proofs.
    """

    run: PlannedRun
    baseline: PlannedRun
    summary: RunSummary | None = None
    direct: Verdict | None = None
    emulated_run: PlannedRun | None = None
    emulated: Verdict | None = None
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
                not_emulated=self.not_emulated,
                layout=run.layout,
                wide=self.wide,
                no_referee=self.no_referee,
                shrinking=shrinking_factor(run.config.precision),
            )
        )

    @property
    def _own_changes(self) -> OwnChanges:
        return OwnChanges(
            keys=(*self.run.changes.layout, *self.run.changes.other),
            entry=self.own_entry,
            versions=tuple(self.run.version_changes),
        )

    def to_result(self) -> CandidateResult:
        """The result for reports."""
        run = self.run
        return CandidateResult(
            name=run.name,
            overrides=run.own_overrides,
            layout=run.layout,
            log_path=run.log_path,
            run=self.summary,
            verdict=self.verdict,
            entry=self.own_entry,
            changes=(*run.changes.layout, *run.changes.other),
            emulated=self.emulated,
            localisation=self.localisation,
            consequence=self.consequence,
            versions=run.version_changes,
        )
