"""The traced steps that several test modules look at: few launches, as a start takes most.

``tests/dist/workers/trace_worker.py`` says what a task is and what it writes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from benchmarks.layouts.cases import Case
from tests.dist.conftest import launch

#: Of ``probe_tasks``: ways to make micro-batches, and layouts of two ranks.
WAYS = ("micro-batch-2", "packing")
LAYOUTS = ("tp2", "pp2", "cp2", "dp2", "dp2-plain")
DENSE, EXPERTS = "dense/float64/tp1/", "moe-by-row/float64/tp1/"


def case_of(model: str, layout: str, option: str = "plain") -> Case:
    """A case in float64."""
    return Case(model=model, precision="float64", layout=layout, option=option)


_PADDED = "one-update+micro-batch-4"
#: Of several ranks, each compared with its one process, which takes row by row.
SHORT = (
    case_of("dense", "tp2", _PADDED),
    case_of("dense", "pp2", "recompute-full+one-update"),
    case_of("dense", "dp2", "micro-batch-means+one-update"),
    case_of("moe-by-row", "pp2-vpp2", "one-update"),
    case_of("moe-by-row", "cp2", _PADDED),
    case_of("moe-by-row", "tp2-sp-ep2", _PADDED),
)
TWICE = (SHORT[-1], case_of("moe-by-row", "tp2-sp-ep2", f"repeat+{_PADDED}"))
FAULT = SHORT[0]

_OF_MODULES = (
    *(f"rows:{DENSE}plain", f"rows:{EXPERTS}plain", f"state:{EXPERTS}plain", f"full:{EXPERTS}plain"),
    *(DENSE + option for option in ("plain", "critic+micro-batch-4")),
    *(EXPERTS + option for option in ("recompute-full", "packing+recompute-uniform-2")),
)
_OF_PROBES = (
    "layout/tp1",
    *(f"values/{way}" for way in WAYS),
    *(f"unchanged/{precision}" for precision in ("float32", "bfloat16")),
    "operations",
)
#: Each by its name: the number of processes, and their tasks.
LAUNCHES: dict[str, tuple[int, tuple[str, ...]]] = {
    "modules": (1, _OF_MODULES),
    "one rank": (
        1,
        (*dict.fromkeys(case.reference.name for case in SHORT), *(f"probe:{task}" for task in _OF_PROBES)),
    ),
    "two ranks": (
        2,
        (
            *(case.name for case in (*SHORT, TWICE[1])),
            f"fault:{FAULT.name}",
            *(f"probe:layout/{layout}" for layout in LAYOUTS),
        ),
    ),
}


def traced_steps(factory: pytest.TempPathFactory, *launches: str) -> Path:
    """The folder with the tasks of these launches, each of which is made once in a session."""
    folder = factory.getbasetemp() / "traced-steps"
    folder.mkdir(exist_ok=True)
    for name in launches:
        _launch_once(folder, name)
    return folder


@cache
def _launch_once(folder: Path, name: str) -> None:
    size, tasks = LAUNCHES[name]
    launch(size, folder, tasks, module="tests.dist.workers.trace_worker")
