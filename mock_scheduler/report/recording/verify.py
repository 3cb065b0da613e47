"""Prints the findings of ``mock-scheduler verify``.

Contract: the first problems and notes in full, and how many more there are; JSON has all.
"""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from mock_scheduler.display.console import cut
from mock_scheduler.recording.inspection.verification import VerifyResult
from mock_scheduler.support.text import count_of, format_bytes

_NUM_NOTES = 10
_NUM_PROBLEMS = 50


def print_verification(result: VerifyResult, console: Console) -> None:
    """Print whether the recording is whole, and its problems."""
    where = f"{result.location}: {count_of(result.num_steps, 'step')}, {format_bytes(result.num_bytes)}"
    for note in cut(result.notes, _NUM_NOTES):
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    if result.is_whole:
        console.print(
            Text.assemble((f"{where}: ", ""), ("whole", "bold green"), ", every digest matches"), soft_wrap=True
        )
        return
    found = count_of(len(result.problems), "problem")
    whole = f"{format_bytes(result.num_bytes)} whole" if result.num_bytes else "nothing whole"
    read = f"{count_of(result.num_steps, 'step')} read, {whole}" if result.num_steps else "no step read"
    console.print(Text.assemble(f"{result.location}: ", (found, "bold red"), f" ({read}):"), soft_wrap=True)
    for problem in cut(result.problems, _NUM_PROBLEMS):
        console.print(Text(f"  - {problem}", style="red"), soft_wrap=True)
