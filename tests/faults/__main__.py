"""Prints the detection matrix: ``python -m tests.faults [--faults ID,...] [--precision float32,bfloat16] ...``.

The exit code is 1 where a fault was missed, never fired or showed where it must be silent, or a clean layout was called
wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from mock_scheduler.support.arguments import ArgumentParser

# Set before the libraries that read them are imported, here and in the processes that are started.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.table import Table

from mock_scheduler.display.console import Console
from tests.faults.campaign import CLEAN, Campaign
from tests.faults.catalogue import FAULTS, find_fault
from tests.faults.fault import Precision
from tests.faults.matrix.judging import Judgement
from tests.faults.matrix.page import render_found, render_page
from tests.faults.matrix.table import from_json, matrix_header, matrix_rows, summarise, to_json

_NUM_PERTURBED = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; the exit code."""
    options = _parse(arguments)
    started = time.monotonic()
    judgements = _read(options.read.split(",")) if options.read else _run(options)
    print_matrix(judgements, Console(width=max(Console().width, 240)))
    print(f"{time.monotonic() - started:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps(to_json(judgements), indent=1), encoding="utf-8")
    if options.markdown is not None:
        for name, render in (("faults.md", render_page), ("faults_found.md", render_found)):
            (options.markdown / name).write_text(render(judgements), encoding="utf-8")
    return int(any(map(_is_wrong, judgements)))


def _run(options: argparse.Namespace) -> list[Judgement]:
    faults = FAULTS if options.faults is None else tuple(find_fault(name) for name in options.faults.split(","))
    judgements: list[Judgement] = []
    for precision in options.precision.split(","):
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            campaign = Campaign(
                root=Path(folder),
                precision=precision,
                faults=faults,
                num_perturbed=options.perturbations,
                on_judged=_say,
            )
            judgements += campaign.run()
    return judgements


def _read(paths: Sequence[str]) -> list[Judgement]:
    return [item for path in paths for item in from_json(json.loads(Path(path).read_text(encoding="utf-8")))]


def print_matrix(judgements: Sequence[Judgement], console: Console) -> None:
    """The table and its summary."""
    table = Table(*matrix_header())
    for row in matrix_rows(judgements):
        table.add_row(*row)
    console.print(table)
    for item in judgements:
        console.print(f"{item.precision} {item.fault}: {item.place or '-'}: {item.sentence}", soft_wrap=True)
    console.print(summarise(judgements))


def _say(item: Judgement) -> None:
    """One line when a training has been judged, so that a long run shows where it is."""
    found = " ".join(name for name, finding in item.findings.items() if finding.outcome == "found")
    place = f"{'at' if item.is_placed else 'named'} {item.place}" if item.place else "nowhere"
    what = item.error or found or "nothing found"
    print(f"{item.precision} {item.fault}: {what}; {place}; {item.sentence}", file=sys.stderr, flush=True)


def _is_wrong(item: Judgement) -> bool:
    if item.fault.startswith(CLEAN):
        return item.is_found or bool(item.error)
    return not item.is_found or not item.is_silent or bool(item.error)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(prog="python -m tests.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", help="ids, with commas between them; all where it is not given")
    parser.add_argument("--precision", default=",".join(get_args(Precision)), help="float32, bfloat16 or both")
    parser.add_argument("--perturbations", type=int, default=_NUM_PERTURBED, help="runs that measure the noise")
    parser.add_argument(
        "--read", help="JSON files of earlier runs to print in place of running, with commas between them"
    )
    parser.add_argument("--json", type=Path, help="write everything that was found to this file")
    parser.add_argument("--markdown", type=Path, help="write the pages of the documentation to this folder")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
