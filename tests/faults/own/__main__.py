"""Prints what is found in the example of a training: ``python -m tests.faults.own [--faults ID,...] [...]``.

The exit code is 1 where a fault was missed or never fired, or a clean layout did not pass.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from rich.table import Table

from mock_scheduler.display.console import Console
from mock_scheduler.support.arguments import ArgumentParser
from tests.faults.fault import PRECISIONS
from tests.faults.own.campaign import CLEAN, OwnJudgement, run_campaign
from tests.faults.own.catalogue import OWN_FAULTS, Model, find_own_fault

_HEADER = ("model and run", "precision", "fault", "verdict", "first difference", "placed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, prints, writes; returns the exit code."""
    options = _parse(arguments)
    started = time.monotonic()
    faults = OWN_FAULTS if options.faults is None else tuple(map(find_own_fault, options.faults.split(",")))
    judgements: list[OwnJudgement] = []
    with tempfile.TemporaryDirectory(prefix="own-faults-") as made:
        root = Path(options.keep or made)
        for precision in options.precision.split(","):
            for model in options.models.split(","):
                found = run_campaign(
                    root,
                    model=model,
                    precision=precision,
                    faults=faults,
                    num_perturbations=options.perturbations,
                    emulate=not options.without_emulation,
                )
                judgements += found
                print(summarise(found), file=sys.stderr, flush=True)
    print_table(judgements, Console(width=max(Console().width, 240)))
    print(f"{time.monotonic() - started:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(item) for item in judgements], indent=1), encoding="utf-8")
    return int(any(item.is_wrong for item in judgements))


def print_table(judgements: Sequence[OwnJudgement], console: Console) -> None:
    """Prints one row for each candidate, and the sums."""
    table = Table(*_HEADER)
    for item in judgements:
        placed = "" if not item.fault else "yes" if item.is_placed else "no"
        table.add_row(item.run, item.precision, item.fault, item.failure or item.verdict, item.place, placed)
    console.print(table)
    for item in judgements:
        if item.is_wrong or (item.fault and not item.is_placed):
            console.print(f"{item.precision} {item.run} {item.fault}: {item.sentence}", soft_wrap=True)
    console.print(summarise(judgements))


def summarise(judgements: Sequence[OwnJudgement]) -> str:
    """Says by precision how many faults were found and placed, and how many clean layouts passed."""
    lines = []
    for precision in dict.fromkeys(item.precision for item in judgements):
        own = [item for item in judgements if item.precision == precision]
        faulty, clean = [item for item in own if item.fault], [item for item in own if not item.fault]
        kinds = {kind: sum(item.verdict == kind for item in clean) for kind in sorted({item.verdict for item in clean})}
        lines.append(
            f"{precision}: {sum(item.is_found for item in faulty)} of {len(faulty)} faults found, "
            f"{sum(item.is_found and item.is_placed for item in faulty)} at the right place; "
            f"{len(clean)} clean layouts: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}; "
            f"{sum(bool(item.failure) for item in own)} failures."
        )
    return "\n".join(lines)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m tests.faults.own", description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", help="ids, with commas between them; all where it is not given")
    parser.add_argument("--precision", default=",".join(PRECISIONS), help="float32, bfloat16 or both")
    parser.add_argument("--models", default=",".join(CLEAN), help=f"of {', '.join(get_args(Model))}")
    parser.add_argument("--perturbations", type=int, default=5, help="runs that measure the noise")
    parser.add_argument("--without-emulation", action="store_true", help="leave out references in other orders of sums")
    parser.add_argument("--json", type=Path, help="write everything that was found to this file")
    parser.add_argument("--keep", type=Path, help="leave the alignments in this folder")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
