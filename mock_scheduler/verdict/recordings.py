"""From the differences of two recordings to a verdict: bits that differ are a divergence, whatever their size."""

from __future__ import annotations

from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import ExitCode
from mock_scheduler.recording.inspection.comparison import NAMES, RecordingDifferences
from mock_scheduler.support.text import count_of
from mock_scheduler.verdict.verdict import Divergence, Verdict, VerdictKind


def judge_recordings(differences: RecordingDifferences) -> Verdict:
    """The verdict on two recordings, with the first difference."""
    divergences = _find_divergences(differences)
    first = divergences[0] if divergences else None
    num_identical = sum(_count_steps(ranges) for ranges in differences.identical.values())
    verdict, reason = (
        VerdictKind.IDENTICAL,
        f"bit-equal: {count_of(num_identical, 'step')}; one changed bit would be found",
    )
    if differences.exit_code is ExitCode.INCOMPARABLE:
        verdict, reason = VerdictKind.INCOMPARABLE, "nothing was compared: no step is in both recordings"
    elif first is not None:
        verdict = VerdictKind.DIVERGED
        reason = f"first divergence: {first.message}; {count_of(num_identical, 'step')} bit-equal"
    return Verdict(
        verdict=verdict,
        reason=reason,
        first_divergence=first,
        metrics=None,
        tensors=None,
        sentence=None if first is None else first.message,
    )


def _find_divergences(differences: RecordingDifferences) -> list[Divergence]:
    """What the contracts do not allow, then steps of one side and steps that differ, in their order."""
    found = [
        (-1, 0, field.name, f"the contracts differ in {field.describe()}")
        for field in differences.contract
        if field.must_match
    ]
    for name, own in zip(NAMES, differences.only, strict=True):
        found += [
            (ranges.ranges[0][0], 0, folder, f"{folder} {_name_steps(ranges)} in {name} only")
            for folder, ranges in own.items()
        ]
    found += [
        (step.step, 1, step.folder, f"{step.folder} step {step.step}: {step.first()}") for step in differences.steps
    ]
    return [
        Divergence(
            step=max(step, 0), update=None, kind="recording", name=name, value=None, tolerance=None, message=message
        )
        for step, _, name, message in sorted(found)
    ]


def _name_steps(ranges: StepRanges) -> str:
    return f"step {ranges} is" if _count_steps(ranges) == 1 else f"steps {ranges} are"


def _count_steps(ranges: StepRanges) -> int:
    """Of a set of steps that are there, so that each range has an end."""
    return sum((first if last is None else last) - first + 1 for first, last in ranges.ranges)
