"""Diagnoses two runs of the same steps: operation logs, batches and metrics are compared to the last bit.

Contract: reads the folders of two completed runs; writes and starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.comparison.walk.metrics import NOT_COMPUTED_PREFIXES, is_bit_equal, load_run_metrics
from mock_scheduler.determinism.operations import OperationLog, find_operation_logs
from mock_scheduler.doctor.causes import Cause, SettingFound, find_cause, find_changed_settings
from mock_scheduler.doctor.comparison import StepComparison, compare_step
from mock_scheduler.errors import ExitCode
from mock_scheduler.run_folder.finished_run import load_batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Holds the result of comparing two runs.

    ``steps``: compared logs, up to the first differing one. ``cause``: of the last one's origin. ``others``: differing
    batches and metrics, in words. ``num_metrics``: compared metrics. ``num_settings``: settings that the runs read
    back; ``settings``: those with another value in each.
    """

    steps: tuple[StepComparison, ...]
    cause: Cause | None
    num_metrics: int
    others: tuple[str, ...]
    num_settings: int = 0
    settings: tuple[SettingFound, ...] = ()

    @property
    def num_operations(self) -> int:
        """Equal operations, over all steps and ranks."""
        return sum(step.num_operations for step in self.steps)

    @property
    def num_digests(self) -> int:
        """Equal tensors, over all steps and ranks."""
        return sum(step.num_digests for step in self.steps)

    @property
    def differs(self) -> bool:
        """Whether anything differs."""
        return bool(self.others) or any(step.origin is not None for step in self.steps)

    @property
    def has_compared(self) -> bool:
        """Whether there was anything to compare."""
        return self.num_digests > 0 and self.num_metrics > 0

    @property
    def exit_code(self) -> ExitCode:
        """0 where all is identical, 4 otherwise."""
        return ExitCode.UNVERIFIED if self.differs or not self.has_compared else ExitCode.ALIGNED


def diagnose(first_dir: Path, second_dir: Path, *, step: int) -> Diagnosis:
    """Compares two finished runs with ``trace.operations``, by their ``output_dir``; ``step`` must be among theirs.

    Raises ``TraceError`` for missing or unreadable operation logs or metrics, ``AlignmentError`` for unreadable facts
    about the runs.
    """
    first, second = find_operation_logs(first_dir), find_operation_logs(second_dir)
    steps: list[StepComparison] = []
    for each in sorted({step, *first, *second}):
        steps.append(compare_step(each, first.get(each, {}), second.get(each, {})))
        if steps[-1].origin is not None:
            break
    num_metrics, others = _compare_results(first_dir, second_dir)
    one, other = (_settings(logs) for logs in (first, second))
    return Diagnosis(
        steps=tuple(steps),
        cause=_find_cause(steps[-1], first, second),
        num_metrics=num_metrics,
        others=tuple(others),
        num_settings=len(one.keys() | other.keys()),
        settings=find_changed_settings(one, other),
    )


_Logs = Mapping[int, Mapping[int, OperationLog]]


def _settings(logs: _Logs) -> Mapping[str, str]:
    """Returns the settings of the first rank at the first step."""
    by_rank = logs[min(logs)] if logs else {}
    return by_rank[min(by_rank)].header.settings if by_rank else {}


def _find_cause(step: StepComparison, first: _Logs, second: _Logs) -> Cause | None:
    if step.origin is None:
        return None
    one, other = (logs[step.step][step.origin.global_rank].header.settings for logs in (first, second))
    return find_cause(step.origin, one, other)


def _compare_results(first: Path, second: Path) -> tuple[int, list[str]]:
    """Compares batches and metrics of all steps; returns the number of compared metrics, and a line per difference."""
    one, other = load_batches(first), load_batches(second)
    problems = [f"the batch of step {step}" for step in sorted({*one, *other}) if one.get(step) != other.get(step)]
    ones, others = _load_computed(first), _load_computed(second)
    for key in sorted(ones.keys() | others.keys()):
        if key not in ones or key not in others or not is_bit_equal(ones[key], others[key]):
            step, name = key
            problems.append(f"metric {name} of step {step}: {ones.get(key, 'absent')} and {others.get(key, 'absent')}")
    return len(ones.keys() & others.keys()), problems


def _load_computed(output_dir: Path) -> dict[tuple[int, str], float]:
    """Loads the metrics that a run computed itself, by step and name."""
    return {
        (step, name): value
        for step, metrics in load_run_metrics(output_dir).items()
        for name, value in metrics.items()
        if not name.startswith(NOT_COMPUTED_PREFIXES)
    }
