"""Plants every fault that is named: ``python -m tests.faults.plant_all MODULE ...``."""

from __future__ import annotations

import importlib
import sys

from tests.faults.harness import Fired

if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name).plant(Fired())
