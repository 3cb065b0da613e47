"""Times ``mock-scheduler --help`` against the bare interpreter and a one-command typer program.

The three are started in turn, round by round. Reported: the medians and the fastest starts in milliseconds, and the
ratio of ours to the typer program's. The bar of the design is 0.3 s on an idle machine.

Run: ``python -m benchmarks.startup [--json FILE] [--rounds 15]``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

TYPER_PROGRAM = (
    "import typer\n"
    "app = typer.Typer(add_completion=False)\n"
    "@app.command()\n"
    "def only() -> None:\n"
    "    'One command.'\n"
    "app(['--help'])\n"
)
PROGRAMS = {
    "the interpreter": ("-c", "pass"),
    "a typer program's --help": ("-c", TYPER_PROGRAM),
    "mock-scheduler --help": ("-m", "mock_scheduler.cli", "--help"),
}


def _start_s(arguments: tuple[str, ...]) -> float:
    started_s = time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
    return time.perf_counter() - started_s


def main() -> None:
    """Start the programs in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    starts_s: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(options.rounds):
        for name, arguments in PROGRAMS.items():
            starts_s[name].append(_start_s(arguments))
    medians_ms = {name: 1e3 * statistics.median(durations) for name, durations in starts_s.items()}
    fastest_ms = {name: 1e3 * min(durations) for name, durations in starts_s.items()}
    _, typer_name, own_name = PROGRAMS
    ratio = medians_ms[own_name] / medians_ms[typer_name]

    table = Table("", "median ms", "fastest ms")
    for name in PROGRAMS:
        table.add_row(name, f"{medians_ms[name]:.0f}", f"{fastest_ms[name]:.0f}")
    console = Console()
    console.print(table)
    console.print(f"ratio of medians, {own_name} to {typer_name}: {ratio:.2f}")
    if options.json:
        results = {"medians_ms": medians_ms, "fastest_ms": fastest_ms, "ratio": ratio}
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
