"""Runs msprobe's own ``compare`` on dumps of the same tensors, as the peer of a benchmark.

It is no part of the project. It is installed in an environment of its own:

    python3.11 -m venv .venv-peers && .venv-peers/bin/pip install mindstudio-probe==26.2.0 torch==2.13.0

A dump is a step folder as its ``PrecisionDebugger`` writes it with task ``tensor``: a function's result is each tensor.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch


def write_dump(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Writes tensors by name, with the figures that msprobe states of each; returns the step's folder."""
    step = folder / "step0"
    data = step / "proc0" / "dump_tensor_data"
    data.mkdir(parents=True)
    calls = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        call = f"Functional.{name.replace('.', '_')}.{number}.forward"
        file = f"{call}.output.0.pt"
        torch.save(tensor, data / file)
        low, high = map(float, torch.aminmax(tensor))
        output = {
            "type": "torch.Tensor",
            "dtype": str(tensor.dtype),
            "shape": list(tensor.shape),
            "Max": high,
            "Min": low,
            "Mean": float(tensor.double().mean()),
            "Norm": math.sqrt(float(tensor.double().square().sum())),
            "requires_grad": False,
            "data_name": file,
        }
        calls[call] = {"input_args": [], "input_kwargs": {}, "output": [output]}
    head = {"task": "tensor", "level": "mix", "framework": "pytorch", "dump_data_dir": str(data)}
    (step / "proc0" / "dump.json").write_text(json.dumps({**head, "data": calls}))
    return step


#: Compares next to nothing first, so that imports are not counted.
_RUN = """
import sys, time
from msprobe.msprobe import main
for baseline, candidate, output in (sys.argv[1:4], sys.argv[4:7]):
    sys.argv[:] = ["msprobe", "compare", "-tp", candidate, "-gp", baseline, "-o", output]
    started_s = time.perf_counter()
    main()
    elapsed_s = time.perf_counter() - started_s
print("seconds", elapsed_s)
"""


def time_compare(python: Path, small: tuple[Path, Path], steps: tuple[Path, Path], output: Path) -> float:
    """Returns the seconds of one ``msprobe compare`` of two step folders, in a process that has compared before.

    Args:
        python: Of the environment that has msprobe.
        small: Two step folders that are compared before.
        steps: The step folders of baseline and candidate.
        output: Where msprobe writes its table.

    Raises:
        SystemExit: It compared none.
    """
    runs = [*map(str, small), str(output / "small"), *map(str, steps), str(output / "whole")]
    done = subprocess.run([str(python), "-c", _RUN, *runs], check=False, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("seconds ")]
    if done.returncode or not found or not list((output / "whole").glob("*.csv")):
        raise SystemExit(f"msprobe compared nothing: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    return float(found[0].split()[1])
