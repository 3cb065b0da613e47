"""A doctor's diagnosis on the terminal, and as JSON: one object, ``format_version`` 1."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from mock_scheduler.align.diagnosis import Diagnosis
from mock_scheduler.determinism.causes import Cause
from mock_scheduler.determinism.differences import Difference
from mock_scheduler.determinism.doctor import StepComparison
from mock_scheduler.report.json_file import to_json

FORMAT_VERSION = 1
_NUM_SHOWN = 5


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print how much was compared, the verdict, the first difference and what is responsible for it."""
    console.print()
    console.print(
        f"equal in both replays: {diagnosis.num_operations} operations with {diagnosis.num_digests} digests of "
        f"tensors, over {_count(len(diagnosis.steps), 'step')} and {_count(len(diagnosis.steps[-1].ranks), 'rank')}; "
        f"{diagnosis.num_metrics} metrics compared",
        highlight=False,
    )
    if not diagnosis.differs:
        if diagnosis.has_compared:
            console.print(Text("identical: every operation, batch and metric is equal to the last bit", "bold green"))
        else:
            console.print(Text("unverified: there was nothing to compare", "bold yellow"))
        return
    console.print(Text("unverified: the two replays differ", "bold red"))
    step = diagnosis.steps[-1]
    if step.origin is not None:
        _print_origin(step, step.origin, console)
    if diagnosis.cause is not None:
        _print_indented(f"why: {diagnosis.cause.why}", console)
        _print_indented(diagnosis.cause.describe(), console)
    if step.origin is None:
        _print_indented(
            "no operation that torch dispatches differs; what follows was computed by something else", console
        )
    for problem in diagnosis.others[:_NUM_SHOWN]:
        _print_indented(f"differs: {problem}", console)
    if len(diagnosis.others) > _NUM_SHOWN:
        _print_indented(f"and {len(diagnosis.others) - _NUM_SHOWN} more metrics or batches", console)


def _print_origin(step: StepComparison, origin: Difference, console: Console) -> None:
    console.print(
        f"first difference: step {step.step}, rank {origin.global_rank}: {origin.kind.value}", highlight=False
    )
    _print_indented(origin.describe(), console)
    followers = [
        str(rank.global_rank)
        for rank in step.ranks
        if rank.difference is not None and rank.global_rank != origin.global_rank
    ]
    if followers:
        _print_indented(f"ranks that differ as well: {', '.join(followers)}", console)


def _print_indented(text: str, console: Console) -> None:
    console.print(Padding(Text(text), (0, 0, 0, 2)))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def diagnosis_to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The whole diagnosis as JSON values."""
    return {
        "format_version": FORMAT_VERSION,
        "exit_code": int(diagnosis.exit_code),
        "verdict": "differs" if diagnosis.differs else "identical" if diagnosis.has_compared else "nothing compared",
        "num_operations": diagnosis.num_operations,
        "num_digests": diagnosis.num_digests,
        "num_metrics": diagnosis.num_metrics,
        "steps": [_step_to_json(step) for step in diagnosis.steps],
        "cause": None if diagnosis.cause is None else _cause_to_json(diagnosis.cause),
        "others": list(diagnosis.others),
    }


def _step_to_json(step: StepComparison) -> dict[str, Any]:
    origin = step.origin
    return {
        "step": step.step,
        "origin": None if origin is None else {"description": origin.describe(), **_as_object(to_json(origin))},
        "ranks": to_json(step.ranks),
    }


def _cause_to_json(cause: Cause) -> dict[str, Any]:
    return {
        "description": cause.describe(),
        "responsible": [setting.name for setting in cause.responsible],
        **_as_object(to_json(cause)),
    }


def _as_object(value: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    assert isinstance(value, dict)
    return value
