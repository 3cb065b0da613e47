"""What an alignment knows of one candidate at any time, and the result that it is for reports."""

from __future__ import annotations

from dataclasses import dataclass

from mock_scheduler.align.plan.planned_run import PlannedRun
from mock_scheduler.align.prove.proof_runs import is_same_order
from mock_scheduler.compare.bounds.bounds import shrinking_factor
from mock_scheduler.run_folder.finished_run import RunSummary
from mock_scheduler.verdict.ladder import Evidence, Judgement, is_settled, judge
from mock_scheduler.verdict.proofs import Consequence, Localisation
from mock_scheduler.verdict.results import CandidateResult
from mock_scheduler.verdict.verdict import Verdict, VerdictKind, failed_run

_NOT_RUN = "not run yet: the alignment is still going, or was interrupted"
_NOT_JUDGED = "not judged yet: the alignment is still going, or was interrupted"


@dataclass(kw_only=True, slots=True)
class CandidateState:
    """``run``: as planned; ``baseline``: that it is compared with. All else is ``None`` until it is known.

    ``direct``, ``emulated``, ``wide``: as of ``Evidence``; ``emulated_run``: the reference in its order of sums.
    """

    run: PlannedRun
    baseline: PlannedRun
    summary: RunSummary | None = None
    direct: Verdict | None = None
    emulated_run: PlannedRun | None = None
    emulated: Verdict | None = None
    emulation_note: str = "not needed"
    wide: Verdict | None = None
    wide_note: str = "a stronger proof decides"
    judgement: Judgement | None = None
    localisation: Localisation | None = None
    consequence: Consequence | None = None

    @property
    def must_equal_baseline(self) -> bool:
        """Whether nothing that it changes may move a bit."""
        return self.run.must_be_exact and self.run.changes.kind == "nothing"

    @property
    def own_entry(self) -> str:
        """The module that its processes run; empty where it is the baseline's."""
        return self.run.entry if self.run.entry != self.baseline.entry else ""

    @property
    def is_open(self) -> bool:
        """Whether it was compared with the baseline, and more is needed to judge it."""
        return self.direct is not None and not is_settled(self.direct)

    @property
    def alignment(self) -> Verdict:
        """The verdict so far."""
        if self.judgement is not None:
            return self.judgement.alignment
        if self.direct is not None and not self.is_open:
            return self.direct
        return failed_run(VerdictKind.INCOMPARABLE, _NOT_RUN if self.direct is None else _NOT_JUDGED)

    def judge(self) -> None:
        """Judge it by all that is known by now."""
        run, direct = self.run, self.direct
        if direct is None or direct.verdict in (VerdictKind.INCOMPARABLE, VerdictKind.UNVERIFIED):
            return
        self.judgement = judge(
            Evidence(
                direct=direct,
                num_processes=run.config.parallel.world_size,
                changes=self._describe_changes(),
                is_same_order=is_same_order(self.baseline, run),
                must_be_exact=run.must_be_exact,
                emulated=self.emulated,
                emulation_note=self.emulation_note,
                layout=run.layout,
                wide=self.wide,
                wide_note=self.wide_note,
                shrinking=shrinking_factor(run.config.precision),
            )
        )

    def _describe_changes(self) -> str:
        """All that may move a bit, in one phrase."""
        code = (f"its module {self.own_entry}",) if self.own_entry else ()
        keys = (*self.run.changes.layout, *self.run.changes.other)
        return ", ".join((*keys, *code, *self.run.version_changes)) or "nothing"

    def to_result(self) -> CandidateResult:
        """As reports show it."""
        run = self.run
        return CandidateResult(
            name=run.name,
            overrides=run.own_overrides,
            layout=run.layout,
            log_path=run.log_path,
            run=self.summary,
            alignment=self.alignment,
            entry=self.own_entry,
            changes=(*run.changes.layout, *run.changes.other),
            proofs=() if self.judgement is None else self.judgement.proofs,
            emulated=self.emulated,
            localisation=self.localisation,
            consequence=self.consequence,
            versions=run.version_changes,
        )
