"""Runs msprobe's own ``compare`` on dumps of the same tensors, as the peer of a benchmark.

It is no part of the project. It is installed in an environment of its own:

    python3.11 -m venv .venv-peers && .venv-peers/bin/pip install mindstudio-probe==26.2.0 torch==2.13.0

A dump is a step folder as its ``PrecisionDebugger`` writes it with task ``tensor``: a function's result is each tensor.
"""

from __future__ import annotations

import json
import math
import subprocess
import time
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


def time_compare(python: Path, baseline: Path, candidate: Path, output: Path) -> float:
    """Returns the seconds of one ``msprobe compare`` of two step folders; raises ``SystemExit`` where it compared none.

    ``python``: of the environment that has msprobe.
    """
    command = [str(python.with_name("msprobe")), "compare", "-tp", str(candidate), "-gp", str(baseline)]
    started_s = time.perf_counter()
    done = subprocess.run([*command, "-o", str(output)], check=False, capture_output=True, text=True)
    elapsed_s = time.perf_counter() - started_s
    if done.returncode or not list(output.glob("*.csv")):
        raise SystemExit(f"msprobe compared nothing: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    return elapsed_s
