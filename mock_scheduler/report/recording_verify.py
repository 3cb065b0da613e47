"""Prints what ``mock-scheduler verify`` found."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from mock_scheduler.recording.verification import VerifyResult
from mock_scheduler.text import count_of, format_bytes


def print_verification(result: VerifyResult, console: Console) -> None:
    """Print whether the recording is whole and every problem in full."""
    where = f"{result.location}: {count_of(result.num_steps, 'step')}, {format_bytes(result.num_bytes)}"
    for note in result.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    if result.is_whole:
        console.print(
            Text.assemble((f"{where}: ", ""), ("whole", "bold green"), ", every digest matches"), soft_wrap=True
        )
        return
    found = count_of(len(result.problems), "problem")
    console.print(Text.assemble((f"{where} whole: ", ""), (found, "bold red")), soft_wrap=True)
    for problem in result.problems:
        console.print(Text(f"  - {problem}", style="red"), soft_wrap=True)
