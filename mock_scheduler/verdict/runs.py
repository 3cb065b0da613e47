"""The verdict on two finished runs, as far as one comparison goes: they must have trained on the same rollouts."""

from __future__ import annotations

from dataclasses import replace

from mock_scheduler.compare.bounds.bounds import Bounds
from mock_scheduler.compare.pairing.selection import EVERYTHING, Selection
from mock_scheduler.compare.walk.steps import OnKey
from mock_scheduler.errors import AlignmentError, TraceError
from mock_scheduler.run_folder.finished_run import RunSummary
from mock_scheduler.verdict.results import compare_runs
from mock_scheduler.verdict.verdict import Verdict, VerdictKind, failed_run


def judge_runs(
    baseline: RunSummary,
    candidate: RunSummary,
    *,
    bounds: Bounds,
    is_deterministic: bool,
    selection: Selection = EVERYTHING,
    has_metrics: bool = True,
    on_key: OnKey | None = None,
) -> Verdict:
    """The verdict on two finished runs; a difference proves something only where each would repeat itself.

    ``is_deterministic``: whether both ran under ``DETERMINISTIC_MODE=1``. The others are those of ``compare_runs``.
    """
    other_rollouts = _describe_other_rollouts(baseline, candidate)
    if other_rollouts:
        return failed_run(VerdictKind.INCOMPARABLE, other_rollouts)
    try:
        alignment = compare_runs(
            baseline.output_dir,
            candidate.output_dir,
            bounds=bounds,
            selection=selection,
            has_metrics=has_metrics,
            on_key=on_key,
        )
    except (AlignmentError, TraceError) as error:
        return failed_run(VerdictKind.INCOMPARABLE, str(error))
    if is_deterministic or alignment.verdict is VerdictKind.IDENTICAL:
        return alignment
    reason = f"without DETERMINISTIC_MODE=1 two equal runs may differ as much: {alignment.reason}"
    return replace(alignment, verdict=VerdictKind.UNVERIFIED, reason=reason)


def _describe_other_rollouts(baseline: RunSummary, candidate: RunSummary) -> str:
    """Where two runs trained on different batches; empty where every step that both made has the same one."""
    shared = sorted(baseline.batches.keys() & candidate.batches.keys(), key=int)
    different = [step for step in shared if baseline.batches[step] != candidate.batches[step]]
    if not different:
        return ""
    return (
        f"the two runs trained on other rollouts from step {different[0]} on ({len(different)} of {len(shared)} "
        "steps), so nothing in their training can be compared; replay the baseline's recording in the candidate: "
        "rollout_mock.mode=mock and its rollout_mock.dump_dir"
    )
