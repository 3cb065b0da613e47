"""Runs the example with a planted fault: ``torchrun ... train_with_fault.py [--fault ID] ARGUMENTS OF train.py``.

Without ``--fault`` a run of an alignment has the fault that its folder is named after, if any. So a candidate has it,
the runs of its proofs do not, and candidates that differ in their faults have one reference.

Each rank says at its end how often the fault fired, so that none that never fired passes for one that was missed.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))

from mock_scheduler.config.instruments import RUN_FILE_VARIABLE
from tests.faults.counting import Fired
from tests.faults.own.catalogue import OWN_FAULTS, find_own_fault
from tests.faults.own.example import find_module

_OPTION = "--fault"


def main() -> None:
    """Takes ``--fault ID`` from the command line, and leaves the rest to the example."""
    name = _take_fault()
    if name is None:
        find_module("train").main()
        return
    fired = Fired()
    with find_own_fault(name).inject(fired):
        try:
            find_module("train").main()
        finally:
            print(f"fault {name} fired {fired.count} times on this rank", flush=True)


def _take_fault() -> str | None:
    if _OPTION in sys.argv:
        place = sys.argv.index(_OPTION)
        name = sys.argv[place + 1]
        del sys.argv[place : place + 2]
        return name
    folder = Path(os.environ.get(RUN_FILE_VARIABLE, "")).parent.name
    return folder if folder in {fault.id for fault in OWN_FAULTS} else None


def count_fired(log: str) -> int:
    """Sums over the ranks of a run how often its fault fired, by its terminal output."""
    return sum(map(int, re.findall(r"fault \S+ fired (\d+) times on this rank", log)))


if __name__ == "__main__":
    main()
