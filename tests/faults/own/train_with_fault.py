"""Runs the example with a planted fault: ``torchrun ... train_with_fault.py [--fault ID] ARGUMENTS OF train.py``.

Each rank says at its end how often the fault fired, so that none that never fired passes for one that was missed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.faults.counting import Fired
from tests.faults.own.catalogue import find_own_fault
from tests.faults.own.example import find_module

_OPTION = "--fault"


def main() -> None:
    """Takes ``--fault ID`` from the command line, and leaves the rest to the example."""
    if _OPTION not in sys.argv:
        find_module("train").main()
        return
    place = sys.argv.index(_OPTION)
    fault = find_own_fault(sys.argv[place + 1])
    del sys.argv[place : place + 2]
    fired = Fired()
    with fault.inject(fired):
        try:
            find_module("train").main()
        finally:
            print(f"fault {fault.id} fired {fired.count} times on this rank", flush=True)


def count_fired(log: str) -> int:
    """Sums over the ranks of a run how often its fault fired, by its terminal output."""
    return sum(map(int, re.findall(r"fault \S+ fired (\d+) times on this rank", log)))


if __name__ == "__main__":
    main()
