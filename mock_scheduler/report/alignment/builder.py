"""Builds the view that all reports of an alignment are drawn from, out of its result and the folders that it names.

Contract: folders are only read; one that is gone leaves its part empty and says so. Bounded: each list by
``MAX_LISTED``, figures by the number of candidates that have any, so that a page of a hundred candidates stays small.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from mock_scheduler.recording.contract import Rule
from mock_scheduler.recording.matching import show
from mock_scheduler.report.alignment.curves import Curve, load_curves
from mock_scheduler.report.alignment.environment import (
    RecordingFacts,
    RunFacts,
    compare_environments,
    describe_ledger,
    load_recording_facts,
    load_run_facts,
)
from mock_scheduler.report.alignment.heat import build_error_map
from mock_scheduler.report.alignment.rows import (
    MAX_LISTED,
    all_seconds,
    candidate_seconds,
    describe_built,
    describe_emulated,
    describe_metrics,
    list_findings,
    run_seconds,
    tensor_line,
    total_seconds,
    view_start,
)
from mock_scheduler.report.alignment.sample import find_worst_sample
from mock_scheduler.report.alignment.tokens import open_if_there
from mock_scheduler.report.alignment.view import (
    AlignmentView,
    CandidateView,
    ConsequenceView,
    DifferencesView,
    MetricsView,
    OriginView,
    ProofView,
    RunView,
    SetupView,
    VerdictView,
)
from mock_scheduler.report.comparison.view import describe_equal_metrics, tensors_to_show
from mock_scheduler.support.run_files import TRACE_FOLDER
from mock_scheduler.support.text import count_of
from mock_scheduler.trace.full.reader import TraceReader
from mock_scheduler.verdict.coverage import find_nearest
from mock_scheduler.verdict.ladder import complete_ladder
from mock_scheduler.verdict.reasons import RoundingOfPrecision
from mock_scheduler.verdict.results import AlignmentResult, CandidateResult
from mock_scheduler.verdict.verdict import GRAVEST_FIRST, Outcome, Proof, Verdict, VerdictKind
from mock_scheduler.verdict.wording.bounds import describe_bounds
from mock_scheduler.verdict.wording.consequence import consequence_rows, describe_consequence
from mock_scheduler.verdict.wording.coverage import describe_unseen
from mock_scheduler.verdict.wording.localisation import compare_command, localisation_rows
from mock_scheduler.verdict.wording.own_code import (
    describe_baseline_code,
    describe_outside,
    describe_own_code,
    remark_on_changes,
)
from mock_scheduler.verdict.wording.proofs import describe_proof
from mock_scheduler.verdict.wording.verdicts import (
    TONES,
    Tone,
    describe_beside_proofs,
    describe_proved_by,
    describe_sentence,
    describe_smallest_error,
    write_headline,
)

_MAX_CELLS = 60_000  # of all heat maps of a page
_LEAST_CELLS, _MOST_CELLS = 150, 1_600  # of one heat map
_TABLES = 5
_MAX_PANELS = 120  # of all metric curves of a page
_MOST_PANELS = 6
_LAYOUT = re.compile(r"(?:(?:tp|pp|dp|cp|ep|etp|vpp)\d+|sp)(?:-(?:(?:tp|pp|dp|cp|ep|etp|vpp)\d+|sp))*")
_PLAIN = "plain"
#: The page's class of each outcome.
_SHADES: Mapping[Outcome, str] = {"proved": "proved", "refuted": "refuted", "open": "open", "not tried": "not"}


def build_view(result: AlignmentResult, *, is_full: bool = True) -> AlignmentView:
    """Build the view of ``result``; where not ``is_full``, of the result alone, without folders and figures."""
    recording = load_recording_facts(result.recording_dir) if is_full else RecordingFacts()
    baseline = load_run_facts(result.baseline.output_dir) if is_full else RunFacts()
    sizes = _Sizes.of(result.candidates)
    with ExitStack() as stack:
        traces = result.baseline.output_dir / TRACE_FOLDER
        reader = stack.enter_context(open_if_there(traces)) if is_full else None
        sources = _Sources(result=result, is_full=is_full, baseline=baseline, recording=recording, trace=reader)
        candidates = tuple(
            _view_candidate(candidate, sources, sizes, anchor=f"candidate-{candidate.name}")
            for candidate in result.candidates
        )
    verdicts = [candidate.verdict.kind for candidate in result.candidates]
    code = result.exit_code
    found = Counter(verdicts)
    counts = tuple((verdict, found[verdict]) for verdict in GRAVEST_FIRST if verdict in found)
    options = {candidate.option for candidate in candidates if candidate.layout_name}
    is_matrix = len(options) > 1 and any(candidate.layout_name for candidate in candidates)
    settings = baseline.settings or recording.settings
    return AlignmentView(
        config_name=result.config_name,
        output_dir=str(result.output_dir),
        recording_dir="" if result.recording_dir is None else str(result.recording_dir),
        exit_code=int(code),
        tone=_worst_tone(verdicts),
        counts=counts,
        headline=_headline(counts, len(candidates)),
        baseline_layout=result.baseline.layout,
        baseline_code=describe_baseline_code(result),
        baseline_seconds=run_seconds(result.baseline.elapsed_s, result.baseline.rollout_s, baseline),
        baseline_ledger=describe_ledger(baseline),
        candidates=candidates,
        is_matrix=is_matrix,
        must_match=_contract(recording, Rule.MUST_MATCH),
        may_differ=_contract(recording, Rule.MAY_DIFFER),
        settings=tuple((name, value) for name, value in settings.items() if value not in ("unset", "absent")),
        packages=tuple((baseline.packages or recording.packages).items()),
        facts=recording.facts,
        notes=(*recording.problems, *baseline.problems),
        bounds=describe_bounds(result.bounds),
        seconds=all_seconds(result.times),
        total_s=None if result.times is None else result.times.total_s,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Holds the largest size of a candidate's figures."""

    max_cells: int
    max_panels: int

    @classmethod
    def of(cls, candidates: Sequence[CandidateResult]) -> _Sizes:
        num_differing = sum(candidate.verdict.kind is not VerdictKind.IDENTICAL for candidate in candidates)
        cells = _MAX_CELLS // (_TABLES * max(num_differing, 1))
        return cls(
            max_cells=min(max(cells, _LEAST_CELLS), _MOST_CELLS),
            max_panels=min(max(_MAX_PANELS // max(len(candidates), 1), 1), _MOST_PANELS),
        )


def _worst_tone(verdicts: Sequence[VerdictKind]) -> Tone:
    tones = {TONES[verdict] for verdict in verdicts}
    return "bad" if "bad" in tones else "warn" if "warn" in tones else "good"


def _headline(counts: Sequence[tuple[VerdictKind, int]], num_candidates: int) -> str:
    """``3 of 5 candidates pass: 1 diverged, 1 incomparable, 2 rounding, 1 identical``; of one that it does, or not."""
    passing = sum(count for verdict, count in counts if verdict.passes)
    listed = ", ".join(f"{count} {verdict.value}" for verdict, count in counts)
    if num_candidates == 1:
        return f"the one candidate {'passes' if passing else 'does not pass'}: {listed}"
    which = "all" if passing == num_candidates else "none" if not passing else str(passing)
    return f"{which} of {count_of(num_candidates, 'candidate')} pass{'es' if passing == 1 else ''}: {listed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sources:
    """Holds the sources that all candidates share."""

    result: AlignmentResult
    is_full: bool
    baseline: RunFacts
    recording: RecordingFacts
    trace: TraceReader | None


def _view_candidate(candidate: CandidateResult, sources: _Sources, sizes: _Sizes, *, anchor: str) -> CandidateView:
    result, run = sources.result, candidate.run
    localisation, consequence = candidate.localisation, candidate.consequence
    layout_name, option = split_name(candidate.name)
    facts = load_run_facts(run.output_dir) if sources.is_full and run is not None else RunFacts()
    has_environment = sources.is_full and run is not None
    return CandidateView(
        name=candidate.name,
        anchor=anchor,
        layout_name=layout_name,
        option=option,
        setup=SetupView(
            layout=candidate.layout,
            overrides=candidate.overrides,
            entry=candidate.entry,
            own_code=describe_own_code(candidate),
            changes=candidate.changes,
            versions=candidate.versions,
        ),
        start=view_start(candidate.start),
        verdict=_view_verdict(candidate),
        proofs=tuple(_view_proof(proof, candidate.verdict) for proof in complete_ladder(candidate.verdict)),
        differences=_view_differences(candidate, sources, sizes),
        metrics=_view_metrics(candidate, sources, sizes),
        origin=OriginView(
            localisation=localisation_rows(localisation),
            command="" if localisation is None else compare_command(localisation),
        ),
        consequence=ConsequenceView(
            rows=consequence_rows(consequence, limit=MAX_LISTED),
            text="" if consequence is None else describe_consequence(consequence),
            is_asked=isinstance(candidate.verdict.why, RoundingOfPrecision),
        ),
        environment=compare_environments(sources.baseline, facts, sources.recording) if has_environment else None,
        sample=find_worst_sample(candidate, sources.trace, result.recording_dir) if sources.is_full else None,
        run=RunView(
            # Without a recording there is nothing whose absence a replay could show.
            built="" if run is None or result.recording_dir is None else describe_built(run.built),
            run_dir="" if run is None else str(run.output_dir),
            log_path="" if candidate.log_path is None else str(candidate.log_path),
            seconds=candidate_seconds(candidate, facts),
            total_s=total_seconds(candidate),
        ),
    )


def _view_verdict(candidate: CandidateResult) -> VerdictView:
    verdict = candidate.verdict
    headline = write_headline(verdict, emulated=candidate.emulated, localisation=candidate.localisation)
    first = describe_sentence(verdict)
    closer = candidate.localisation
    if (
        closer is not None
        and verdict.first is not None
        and verdict.first.place != (closer.step, closer.update, closer.kind, closer.name)
    ):
        first = f"before more was traced: {first}"
    return VerdictView(
        kind=verdict.kind,
        exit_code=int(verdict.exit_code),
        tone=TONES[verdict.kind],
        headline=", ".join(filter(None, (headline, remark_on_changes(candidate)))),
        reason=describe_beside_proofs(verdict),
        first_divergence=first,
        proved_by=describe_proved_by(verdict),
        smallest_error=describe_smallest_error(verdict),
        unseen=describe_unseen(verdict.unseen),
        outside=describe_outside(candidate),
    )


def _view_proof(proof: Proof, verdict: Verdict) -> ProofView:
    return ProofView(
        name=proof.name,
        outcome=proof.outcome,
        shade=_SHADES[proof.outcome],
        text=describe_proof(proof, said=verdict.first),
        num_compared=proof.num_compared,
        num_equal=proof.num_equal,
    )


def _view_differences(candidate: CandidateResult, sources: _Sources, sizes: _Sizes) -> DifferencesView:
    verdict, tensors = candidate.verdict, candidate.verdict.tensors
    bounds = sources.result.bounds
    heading, shown = ("", ()) if tensors is None else tensors_to_show(tensors)
    worst = find_nearest(tensors)
    has_map = tensors is not None and sources.is_full
    return DifferencesView(
        worst=None if worst is None else tensor_line(worst, bounds),
        emulated=describe_emulated(candidate),
        tensors_heading=heading,
        tensors=tuple(tensor_line(item, bounds) for item in shown[:MAX_LISTED]),
        num_tensors=len(shown),
        error_map=build_error_map(verdict, max_cells=sizes.max_cells) if has_map else None,
        lists=list_findings(candidate),
    )


def _view_metrics(candidate: CandidateResult, sources: _Sources, sizes: _Sizes) -> MetricsView:
    result, metrics = sources.result, candidate.verdict.metrics
    if metrics is None:
        return MetricsView(equal="", differing=(), num_differing=0, curves=())
    curves: tuple[Curve, ...] = ()
    if sources.is_full and candidate.run is not None:
        folders = result.baseline.output_dir, candidate.run.output_dir
        curves = load_curves(*folders, metrics, limit=sizes.max_panels, bounds=result.bounds)
    return MetricsView(
        equal=describe_equal_metrics(metrics),
        differing=describe_metrics(metrics),
        num_differing=sum(not item.bit_equal for item in metrics.differences),
        curves=curves,
    )


def split_name(name: str) -> tuple[str, str]:
    """``(layout, option)`` of a candidate's name ``{layout}.{option}`` or ``{layout}``; empty where it is none."""
    layout, _, option = name.partition(".")
    return (layout, option or _PLAIN) if _LAYOUT.fullmatch(layout) else ("", "")


def _contract(recording: RecordingFacts, rule: Rule) -> tuple[tuple[str, str], ...]:
    return tuple((field.name, show(field.value, field.match)) for field in recording.contract if field.rule is rule)
