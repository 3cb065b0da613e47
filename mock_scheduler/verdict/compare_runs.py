"""Compares two runs, traces, metrics or recordings on disk, and judges them.

``compare_paths`` takes two paths of any kind, ``judge_runs`` and ``compare_runs`` two finished runs, and
``judge_recordings`` the differences of two recordings; ``direct_verdict.decide`` makes the verdict.

Contract: reads, starts nothing and writes nothing. Two runs must have trained on the same rollouts, or the same rows of
their own data: each states the digest of every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from mock_scheduler.comparison.bounds.bounds import Bounds
from mock_scheduler.comparison.pairing.selection import EVERYTHING, Selection
from mock_scheduler.comparison.tensors import JUDGED_KINDS
from mock_scheduler.comparison.walk.metrics import compare_metrics, load_metrics, load_run_metrics
from mock_scheduler.comparison.walk.steps import OnKey
from mock_scheduler.comparison.walk.traces import compare_trace_folders, find_other_rows
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import AlignmentError, ConfigError, ExitCode, TraceError
from mock_scheduler.recording.inspection.comparison import NAMES, RecordingDifferences, compare_recordings
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.run_folder.finished_run import RunSummary
from mock_scheduler.run_folder.inputs import OpenedInput, check_choice, check_steps, find_read_steps, open_inputs
from mock_scheduler.support.fetched_folders import find_location, name_locations
from mock_scheduler.support.run_files import TRACE_FOLDER
from mock_scheduler.support.spread import Spread
from mock_scheduler.trace.remote import open_location
from mock_scheduler.verdict.comparison_bounds import resolve_bounds
from mock_scheduler.verdict.coverage import find_unseen
from mock_scheduler.verdict.direct_verdict import decide
from mock_scheduler.verdict.divergences import Divergence, Evidence, StepsOfOneSide
from mock_scheduler.verdict.reasons import (
    EqualRecordings,
    NoCommonStep,
    NotDeterministic,
    NotReadable,
    OtherBatches,
    OtherData,
    OtherDraws,
    OtherRecordings,
    OtherRollouts,
    UnknownRollouts,
)
from mock_scheduler.verdict.results import ComparisonResult
from mock_scheduler.verdict.verdict import Verdict, VerdictKind


def judge_runs(
    baseline: RunSummary,
    candidate: RunSummary,
    *,
    bounds: Bounds,
    is_deterministic: bool,
    selection: Selection = EVERYTHING,
    has_metrics: bool = True,
    on_key: OnKey | None = None,
    spread: Spread | None = None,
) -> Verdict:
    """The verdict on two finished runs; both must have trained on the same rollouts.

    Args:
        is_deterministic: Whether both ran under ``DETERMINISTIC_MODE=1``: a difference proves something only where
            each run would repeat itself.
        bounds, selection, has_metrics, on_key, spread: As in ``compare_runs``.
    """
    other_rollouts = _find_other_rollouts(baseline, candidate)
    if other_rollouts is not None:
        return Verdict(kind=VerdictKind.INCOMPARABLE, why=_name_other_rows(baseline, candidate, other_rollouts))
    other_draws = _find_other_draws(baseline, candidate)
    if other_draws is not None:
        return Verdict(kind=VerdictKind.INCOMPARABLE, why=other_draws)
    precisions = (baseline.precision, candidate.precision)
    selection = replace(selection, stated=(baseline.steps, candidate.steps), precisions=precisions)
    try:
        verdict = compare_runs(
            baseline.output_dir,
            candidate.output_dir,
            bounds=bounds,
            selection=selection,
            has_metrics=has_metrics,
            on_key=on_key,
            spread=spread,
        )
    except (AlignmentError, TraceError) as error:
        return Verdict(kind=VerdictKind.INCOMPARABLE, why=NotReadable(error=name_locations(str(error))))
    unseen = find_unseen(
        verdict.tensors,
        modules={**baseline.unobserved_modules, **candidate.unobserved_modules},
        parameters={**baseline.untraced_parameters, **candidate.untraced_parameters},
        metrics=verdict.metrics,
        # Runs of earlier releases, which state no precision, could not show it.
        asks_last_state=all(precisions),
        selection=selection,
    )
    verdict = replace(verdict, unseen=unseen)
    # Rows by content were compared themselves.
    is_by_content = verdict.tensors is not None and verdict.tensors.is_by_content
    if verdict.passes and not is_by_content and not baseline.batches.keys() & candidate.batches.keys():
        return replace(verdict, kind=VerdictKind.INCOMPARABLE, why=UnknownRollouts())
    draws = baseline.draws or candidate.draws
    if draws and verdict.kind is VerdictKind.DIVERGED and _drew_otherwise(verdict):
        return replace(verdict, kind=VerdictKind.INCOMPARABLE, why=OtherDraws(draws=draws))
    # Other rows or tokens are read, not computed: no repetition would change them.
    if is_deterministic or verdict.kind is VerdictKind.IDENTICAL or isinstance(verdict.why, OtherData):
        return verdict
    return replace(verdict, kind=VerdictKind.UNVERIFIED, why=NotDeterministic(otherwise=verdict.why))


def compare_runs(
    baseline_dir: Path,
    candidate_dir: Path,
    *,
    bounds: Bounds,
    selection: Selection = EVERYTHING,
    has_metrics: bool = True,
    on_key: OnKey | None = None,
    spread: Spread | None = None,
) -> Verdict:
    """Returns the verdict on two finished runs, out of their ``metrics.jsonl`` and ``trace/``.

    Unless kinds or names are chosen, gradients and parameters must be among the compared kinds.

    Args:
        has_metrics: Whether metrics are compared.
        on_key: Called with the number of compared tensors and of all.
        spread: As of ``compare_trace_folders``.

    Raises:
        AlignmentError, TraceError: The files cannot be read.
    """
    metrics, logs = None, None
    if has_metrics:
        logs = load_run_metrics(baseline_dir), load_run_metrics(candidate_dir)
        metrics = compare_metrics(*logs, bounds=bounds, selection=selection)
    tensors = compare_trace_folders(
        baseline_dir / TRACE_FOLDER,
        candidate_dir / TRACE_FOLDER,
        bounds=bounds,
        selection=selection,
        logs=logs,
        on_key=on_key,
        spread=spread,
    )
    # Whoever chooses kinds or names asks about them alone; without a choice gradients and parameters must be there.
    is_chosen = selection.kinds is not None or selection.patterns != EVERYTHING.patterns
    return decide(metrics, tensors, bounds=bounds, required=() if is_chosen else JUDGED_KINDS, selection=selection)


def judge_recordings(differences: RecordingDifferences) -> Verdict:
    """The verdict on two recordings: one differing bit is a divergence, whatever its size."""
    divergences = _find_divergences(differences)
    first = divergences[0] if divergences else None
    num_equal = sum(count_steps(ranges) for ranges in differences.identical.values())
    if differences.exit_code is ExitCode.INCOMPARABLE:
        return Verdict(kind=VerdictKind.INCOMPARABLE, why=NoCommonStep(), first=first)
    if first is None:
        return Verdict(kind=VerdictKind.IDENTICAL, why=EqualRecordings(num_steps=num_equal))
    return Verdict(kind=VerdictKind.DIVERGED, why=OtherRecordings(num_equal_steps=num_equal), first=first)


def count_steps(ranges: StepRanges) -> int:
    """How many steps there are; each range must have an end."""
    return sum((first if last is None else last) - first + 1 for first, last in ranges.ranges)


def _find_other_rollouts(baseline: RunSummary, candidate: RunSummary) -> OtherRollouts | None:
    """Where two runs trained on different batches; ``None`` where all shared steps have equal ones."""
    # Steps of one side alone are a finding of the comparison; other rollouts in a shared step make it meaningless.
    shared = sorted(baseline.batches.keys() & candidate.batches.keys(), key=int)
    different = [step for step in shared if baseline.batches[step] != candidate.batches[step]]
    if not different:
        return None
    return OtherRollouts(first_step=int(different[0]), num_steps=len(different), num_shared=len(shared))


def _name_other_rows(
    baseline: RunSummary, candidate: RunSummary, other: OtherRollouts
) -> OtherRollouts | OtherData | OtherBatches:
    """Names the first other row where both runs have data of their own and traced it."""
    try:
        is_by_content, found = find_other_rows(baseline.output_dir / TRACE_FOLDER, candidate.output_dir / TRACE_FOLDER)
    except TraceError:
        return other  # without a readable trace the digests say all there is to say
    if found is not None:
        return OtherData(finding=found)
    if is_by_content:
        return OtherBatches(first_step=other.first_step, num_steps=other.num_steps, num_shared=other.num_shared)
    return other


def _find_other_draws(baseline: RunSummary, candidate: RunSummary) -> OtherDraws | None:
    """Whether two layouts cannot draw the same: Megatron's random states follow the rank, and micro-batches the layout.

    ``None`` where nothing draws, or both have one layout: they may draw alike.
    """
    draws = baseline.draws or candidate.draws
    if not draws or baseline.layout == candidate.layout:
        return None
    return OtherDraws(draws=draws, layouts=(baseline.layout, candidate.layout))


def _drew_otherwise(verdict: Verdict) -> bool:
    """Whether a traced ledger of random draws differs."""
    ledgers = () if verdict.tensors is None else verdict.tensors.ledgers
    return any(ledger.kind == "random" and ledger.difference is not None for ledger in ledgers)


def _find_divergences(differences: RecordingDifferences) -> list[Divergence]:
    """Returns forbidden differences of the contracts, then steps of one side and differing steps, in their order."""
    found = sorted(_list_evidence(differences), key=lambda item: item[0])
    return [
        Divergence(step=max(step, 0), update=None, kind="recording", name=name, evidence=evidence)
        for (step, _, name), evidence in found
    ]


def _list_evidence(differences: RecordingDifferences) -> Iterator[tuple[tuple[int, int, str], Evidence]]:
    """Yields each difference with its sort key."""
    for field in differences.contract:
        if field.must_match:
            yield (-1, 0, field.name), field
    for side, own in zip(NAMES, differences.only, strict=True):
        for folder, steps in own.items():
            yield (steps.ranges[0][0], 0, folder), StepsOfOneSide(side=side, folder=folder, steps=steps)
    for step in differences.steps:
        yield (step.step, 1, step.folder), step


_NUM_ROWS = 5


def compare_paths(
    baseline: str | Path,
    candidate: str | Path,
    *,
    selection: Selection = EVERYTHING,
    tolerance: Sequence[str] = (),
    noise: Sequence[str | Path] = (),
    has_metrics: bool = True,
    on_key: OnKey | None = None,
    spread: Spread | None = None,
) -> ComparisonResult:
    """Compare two runs, traces, metrics or recordings.

    Args:
        baseline, candidate: Their paths, or URLs such as ``s3://bucket/runs/tp2``.
        selection: Steps, kinds and names.
        tolerance: Bounds ``name=value`` over the candidate's own.
        noise: A file of the baseline's measured noise, or perturbed runs of it.
        has_metrics: Whether metrics of runs are compared.
        on_key: Called with the number of compared tensors, or steps, and of all.
        spread: Shares the steps of traces out to other processes; ``None``: this one compares them.

    Raises:
        ConfigError: A side cannot be compared, the sides are of different kinds, a bound or the noise is none, or none
            of the chosen steps is present.
        AlignmentError: A run is not completed, or has no trace.
        TraceError, RecordingError: A file cannot be read.
    """
    has_step = find_read_steps(selection.steps)
    with ExitStack() as stack:
        paths = [stack.enter_context(open_location(one, has_step=has_step)) for one in (baseline, candidate)]
        opened = open_inputs((paths[0], paths[1]))
        check_choice(opened[0].side, selection)
        check_steps([item.side for item in opened], selection.steps)
        bounds = resolve_bounds(opened, tolerance, [stack.enter_context(open_location(one)) for one in noise])
        verdict, recordings = _judge(opened, bounds, selection, has_metrics=has_metrics, on_key=on_key, spread=spread)
    return ComparisonResult(
        baseline=opened[0].side, candidate=opened[1].side, bounds=bounds, verdict=verdict, recordings=recordings
    )


def _judge(
    opened: tuple[OpenedInput, OpenedInput],
    bounds: Bounds,
    selection: Selection,
    *,
    has_metrics: bool,
    on_key: OnKey | None,
    spread: Spread | None,
) -> tuple[Verdict, RecordingDifferences | None]:
    baseline, candidate = (item.side for item in opened)
    if spread is not None and baseline.kind in ("recording", "metrics"):
        raise ConfigError(f"only traces are shared out, and {baseline.path} is of kind {baseline.kind}")
    if baseline.kind == "recording":
        readers = RecordingReader(find_location(baseline.path)), RecordingReader(find_location(candidate.path))
        recordings = compare_recordings(readers, selection.steps, limit=_NUM_ROWS, on_step=on_key)
        return judge_recordings(recordings), recordings
    if baseline.kind == "metrics":
        logs = load_metrics(baseline.path), load_metrics(candidate.path)
        metrics = compare_metrics(*logs, bounds=bounds, selection=selection)
        return decide(metrics, None, bounds=bounds, required=(), selection=selection), None
    if baseline.run is None or candidate.run is None:
        tensors = compare_trace_folders(
            baseline.path, candidate.path, bounds=bounds, selection=selection, on_key=on_key, spread=spread
        )
        unseen = find_unseen(tensors, modules={}, parameters={}, selection=selection)
        verdict = decide(None, tensors, bounds=bounds, required=(), selection=selection)
        return replace(verdict, unseen=unseen), None
    is_deterministic = all(item.stored is not None and item.stored.is_deterministic for item in opened)
    verdict = judge_runs(
        baseline.run,
        candidate.run,
        bounds=bounds,
        is_deterministic=is_deterministic,
        selection=selection,
        has_metrics=has_metrics,
        on_key=on_key,
        spread=spread,
    )
    return verdict, None
