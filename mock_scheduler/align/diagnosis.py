"""What two replays of the same steps show: ledgers of operations, batches and metrics, compared to the last bit.

Contract: reads the folders of two completed runs; writes and starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mock_scheduler.determinism.causes import Cause, find_cause
from mock_scheduler.determinism.doctor import StepComparison, compare_step
from mock_scheduler.determinism.operation_records import OperationLedger, find_ledgers
from mock_scheduler.errors import ExitCode

# Of a run's metrics, those that measure time and those of the recording's own run.
_NOT_COMPUTED = ("time/", "rollout/", "recorded/")


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What two replays showed.

    ``steps``: those whose ledgers were compared, up to the first that differs. ``cause``: of the last one's origin.
    ``others``: batches and metrics that differ, in words. ``num_metrics``: metrics that were compared.
    """

    steps: tuple[StepComparison, ...]
    cause: Cause | None
    num_metrics: int
    others: tuple[str, ...]

    @property
    def num_operations(self) -> int:
        """Operations that are equal, over all steps and ranks."""
        return sum(step.num_operations for step in self.steps)

    @property
    def num_digests(self) -> int:
        """Tensors that are equal, over all steps and ranks."""
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
    """Compare two finished runs with ``trace.operations``, by their ``output_dir``; ``step`` must be among theirs.

    Raises ``TraceError`` for a ledger that is missing or cannot be read, ``OSError`` for another file of theirs.
    """
    first, second = find_ledgers(first_dir), find_ledgers(second_dir)
    steps: list[StepComparison] = []
    for each in sorted({step, *first, *second}):
        steps.append(compare_step(each, first.get(each, {}), second.get(each, {})))
        if steps[-1].origin is not None:
            break
    num_metrics, others = _compare_results(first_dir, second_dir)
    return Diagnosis(
        steps=tuple(steps),
        cause=_find_cause(steps[-1], first, second),
        num_metrics=num_metrics,
        others=tuple(others),
    )


_Ledgers = Mapping[int, Mapping[int, OperationLedger]]


def _find_cause(step: StepComparison, first: _Ledgers, second: _Ledgers) -> Cause | None:
    if step.origin is None:
        return None
    rank = step.origin.global_rank
    one, other = (ledgers[step.step][rank].header.settings for ledgers in (first, second))
    return find_cause(step.origin, one, other)


def _compare_results(first: Path, second: Path) -> tuple[int, list[str]]:
    """How many metrics were compared, and what differs: batches of steps, metrics of steps."""
    one, other = (_read_json(folder / "run.json")["batches"] for folder in (first, second))
    problems = [
        f"the batch of step {step}" for step in sorted({*one, *other}, key=int) if one.get(step) != other.get(step)
    ]
    ones, others = _read_metrics(first), _read_metrics(second)
    problems += [
        f"metric {name} of step {step}: {ones.get((step, name), 'absent')} and {others.get((step, name), 'absent')}"
        for step, name in sorted(ones.keys() | others.keys())
        if ones.get((step, name)) != others.get((step, name))
    ]
    return len(ones.keys() & others.keys()), problems


def _read_metrics(folder: Path) -> dict[tuple[int, str], str]:
    """Each metric's text by step and name; as text, NaN equals NaN."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {
        (int(row["step"]), name): json.dumps(value)
        for row in rows
        for name, value in row["metrics"].items()
        if not name.startswith(_NOT_COMPUTED)
    }


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
