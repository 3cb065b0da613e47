"""Shows a doctor's diagnosis on the terminal, and as JSON: one object, ``format_version`` 1."""

from __future__ import annotations

from rich.padding import Padding
from rich.text import Text

from mock_scheduler.display.console import Console
from mock_scheduler.doctor.causes import Cause
from mock_scheduler.doctor.comparison import StepComparison
from mock_scheduler.doctor.diagnosis import Diagnosis
from mock_scheduler.doctor.differences import Difference
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.documents import dataclass_to_json, to_json
from mock_scheduler.support.text import count_of

FORMAT_VERSION = 1
_NUM_SHOWN = 5


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Prints how much was compared, the verdict, the first difference and its cause."""
    console.print()
    where = f"{count_of(len(diagnosis.steps), 'step')} and {count_of(len(diagnosis.steps[-1].ranks), 'rank')}"
    console.print(
        f"equal in both runs: {diagnosis.num_operations} operations with {diagnosis.num_digests} digests of "
        f"tensors, over {where}; {diagnosis.num_metrics} metrics compared",
        highlight=False,
    )
    console.print(_describe_settings(diagnosis), highlight=False)
    if not diagnosis.differs:
        if diagnosis.has_compared:
            console.print(Text("identical: every operation, batch and metric is equal to the last bit", "bold green"))
        else:
            console.print(Text("unverified: there was nothing to compare", "bold yellow"))
        return
    console.print(Text("unverified: the two runs differ", "bold red"))
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


def _describe_settings(diagnosis: Diagnosis) -> str:
    changed = "; ".join(setting.describe() for setting in diagnosis.settings)
    return f"settings read back: {diagnosis.num_settings}, {changed or 'equal in both runs'}"


def _print_origin(step: StepComparison, origin: Difference, console: Console) -> None:
    console.print(
        f"first difference: step {step.step}, rank {origin.global_rank}: {origin.kind.value}", highlight=False
    )
    _print_indented(origin.describe(), console)
    followers = [
        str(compared.global_rank)
        for compared in step.ranks
        if compared.difference is not None and compared.global_rank != origin.global_rank
    ]
    if followers:
        _print_indented(f"ranks that differ as well: {', '.join(followers)}", console)


def _print_indented(text: str, console: Console) -> None:
    for line in text.split("\n"):
        console.print(Padding(Text(line), (0, 0, 0, 2)))


def diagnosis_to_json(diagnosis: Diagnosis) -> dict[str, JSON]:
    """Makes JSON values of the whole diagnosis."""
    return {
        "format_version": FORMAT_VERSION,
        "exit_code": int(diagnosis.exit_code),
        "verdict": "differs" if diagnosis.differs else "identical" if diagnosis.has_compared else "nothing compared",
        "num_operations": diagnosis.num_operations,
        "num_digests": diagnosis.num_digests,
        "num_metrics": diagnosis.num_metrics,
        "num_settings": diagnosis.num_settings,
        "settings": [dataclass_to_json(setting) for setting in diagnosis.settings],
        "steps": [_step_to_json(step) for step in diagnosis.steps],
        "cause": None if diagnosis.cause is None else _cause_to_json(diagnosis.cause),
        "others": list(diagnosis.others),
    }


def _step_to_json(step: StepComparison) -> JSON:
    origin = step.origin
    return {
        "step": step.step,
        "origin": None if origin is None else {"description": origin.describe(), **dataclass_to_json(origin)},
        "ranks": to_json(step.ranks),
    }


def _cause_to_json(cause: Cause) -> JSON:
    return {
        "description": cause.describe(),
        "responsible": [setting.name for setting in cause.responsible],
        **dataclass_to_json(cause),
    }
