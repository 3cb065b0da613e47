"""Times the start of ``mock-scheduler`` beside the bare interpreter and typer programs that do nothing.

All programs are started in turn, round by round, after one round that is not counted and in which bytecode is written.
Reported: medians and fastest starts in milliseconds of wall time, the median of processor time, and of each command
of ours the ratio to a program of typer's that shows the same kind of page. What a command imports is in the last
columns: a command that imports torch waits for it, whatever else it does.

Run: ``python -m benchmarks.startup [--json FILE] [--rounds 15]``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.recording import CODEC, info, make_padded, open_writer, request
from mock_scheduler.support.arguments import ArgumentParser

TYPER_PROGRAM = (
    "import typer\n"
    "app = typer.Typer(add_completion=False)\n"
    "@app.command()\n"
    "def only() -> None:\n"
    "    'One command.'\n"
    "app(['--help'])\n"
)
OPTION_PROGRAM = TYPER_PROGRAM.replace("only()", "only(name: str = '')")
INTERPRETER, TYPER, TYPER_OPTION = "the interpreter", "a typer program's --help", "the same with one option"
_MEASURED_PACKAGES = ("pydantic", "numpy", "torch")
_NUM_ROWS, _WIDTH, _MEAN_LENGTH = 64, 512, 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program to start: the interpreter's arguments, and the program that its time is a ratio of."""

    arguments: tuple[str, ...]
    peer: str = INTERPRETER
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def start(self, environment: Mapping[str, str]) -> None:
        """Start it once, note its times, and raise where it fails."""
        before, started_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, *self.arguments], capture_output=True, check=True, env=environment)
        self.wall_s.append(time.perf_counter() - started_s)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    def imports(self, environment: Mapping[str, str]) -> list[str]:
        """The measured packages that it imports, in the order in which they end."""
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *self.arguments],
            capture_output=True,
            check=True,
            env=environment,
            text=True,
        )
        imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        return [name for name in _MEASURED_PACKAGES if name in imported]


def list_programs(recording: Path) -> dict[str, Program]:
    """The programs by name; ``inspect`` reads ``recording``."""
    ours = ("-m", "mock_scheduler.cli")
    return {
        INTERPRETER: Program(arguments=("-c", "pass")),
        TYPER: Program(arguments=("-c", TYPER_PROGRAM)),
        TYPER_OPTION: Program(arguments=("-c", OPTION_PROGRAM)),
        "import mock_scheduler": Program(arguments=("-c", "import mock_scheduler")),
        "mock-scheduler --help": Program(arguments=(*ours, "--help"), peer=TYPER),
        "mock-scheduler compare --help": Program(arguments=(*ours, "compare", "--help"), peer=TYPER_OPTION),
        "mock-scheduler config quickstart": Program(arguments=(*ours, "config", "quickstart"), peer=TYPER_OPTION),
        "mock-scheduler inspect": Program(arguments=(*ours, "inspect", str(recording)), peer=TYPER_OPTION),
    }


def record_one_step(folder: Path) -> None:
    """Writes the recording that ``inspect`` reads."""
    batch = CODEC.encode(make_padded(_NUM_ROWS, _WIDTH, mean_length=_MEAN_LENGTH), request(_NUM_ROWS))
    with closing(open_writer(folder, background=False)) as writer:
        writer.write_step(batch, info(writer, 0))


def figures(programs: Mapping[str, Program]) -> dict[str, dict[str, float]]:
    """Milliseconds of each program, and the ratios to its peer."""
    found = {}
    for name, program in programs.items():
        peer = programs[program.peer]
        found[name] = {
            "median_ms": 1e3 * statistics.median(program.wall_s),
            "fastest_ms": 1e3 * min(program.wall_s),
            "cpu_ms": 1e3 * statistics.median(program.cpu_s),
            # Round by round: a slow moment of the machine hits neighbours alike.
            "ratio": statistics.median(a / b for a, b in zip(program.wall_s, peer.wall_s, strict=True)),
            "cpu_ratio": statistics.median(program.cpu_s) / statistics.median(peer.cpu_s),
        }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the programs in turn and print the table."""
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)

    with tempfile.TemporaryDirectory(prefix="startup-benchmark-") as folder:
        recording = Path(folder, "recording")
        record_one_step(recording)
        programs = list_programs(recording)
        # An installed package has its bytecode; a checkout that may not write it would be compiled at every start.
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(Path(folder, "bytecode"))}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        imported = {name: program.imports(environment) for name, program in programs.items()}
        for _ in range(options.rounds):
            for program in programs.values():
                program.start(environment)
    results = figures(programs)

    table = Table("", "median ms", "fastest ms", "CPU ms", "ratio", "CPU ratio", "to", "imports")
    for name, values in results.items():
        table.add_row(
            name,
            *(f"{values[key]:.0f}" for key in ("median_ms", "fastest_ms", "cpu_ms")),
            *(f"{values[key]:.2f}" for key in ("ratio", "cpu_ratio")),
            programs[name].peer,
            " ".join(imported[name]),
        )
    console = Console(width=max(150, Console().width))
    console.print(table)
    console.print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
