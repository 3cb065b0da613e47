"""Runs the cases of ``training_worker``, each once and in a process of its own, and compares what they left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.processes import DETERMINISTIC, ROOT
from benchmarks.gpu_check.training_worker import FACTS_FILE
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import open_trace

_ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
#: How much farther from float64 another way to compute may be than the one that is compared with: the rounding errors
#: of both are of one size, and a wrong computation is farther by orders of magnitude.
OTHER_ROUNDING = 4.0

Tensors = dict[TraceKey, torch.Tensor]


class CaseError(RuntimeError):
    """A case failed; the message has the end of its output."""


class Runs:
    """Runs cases, each once, and reads what they left. A case with the word ``cpu`` sees no GPU."""

    def __init__(self, folder: Path, *, timeout_s: float = 120.0) -> None:
        self.folder = folder
        self._timeout_s = timeout_s
        self._begun: dict[str, Future[None]] = {}

    def begin(self, cases: Sequence[str], *, at_once: int) -> None:
        """Begins cases beside each other, in their order; who reads one waits for it."""
        pool = ThreadPoolExecutor(at_once)
        self._begun |= {case: pool.submit(self._run, case) for case in cases}
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Waits until no case is running."""
        futures.wait(self._begun.values())

    def facts(self, case: str) -> dict[str, Any]:
        """Reads what a case wrote; one that was not begun is run. Raises ``CaseError`` where it fails or failed."""
        if case not in self._begun:
            self.begin([case], at_once=1)
        self._begun[case].result()
        path = self.folder / case / FACTS_FILE
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return facts

    def tensors(self, case: str, step: int) -> Tensors:
        """Reads everything traced in a step."""
        self.facts(case)
        with open_trace(self.folder / case) as trace:
            return {key: trace.merge(key).tensor for key in trace.keys(step)}

    def gradient(self, case: str) -> dict[str, torch.Tensor]:
        """Reads the gradient of the first update, float64, by canonical name: alike in all implementations."""
        tensors = self.tensors(case, 0)
        return {
            key.name: tensor.double() for key, tensor in tensors.items() if key.kind == "gradient" and key.update == 0
        }

    def _run(self, case: str) -> None:
        words = case.split("-")
        inherited = {name: value for name, value in os.environ.items() if name not in DETERMINISTIC}
        settings = {"DETERMINISTIC_MODE": "0"} if "free" in words else dict(DETERMINISTIC)
        if "cpu" in words:
            settings["CUDA_VISIBLE_DEVICES"] = ""
        finished = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_check.training_worker", str(self.folder), case],
            cwd=ROOT,
            env={**inherited, **_ONE_PROCESS, **settings},
            capture_output=True,
            text=True,
            timeout=self._timeout_s,
            check=False,
        )
        if finished.returncode:
            raise CaseError(f"{case}: {(finished.stdout + finished.stderr).strip()[-1500:]}")


def differing(found: Tensors, expected: Tensors) -> list[str]:
    """Lists the tensors that are not equal to the last bit, and the ones that one side lacks."""
    if not found and not expected:
        return ["nothing was traced"]
    alike = found.keys() & expected.keys()
    others = [f"{key.describe()} (on one side)" for key in found.keys() ^ expected.keys()]
    return sorted([*others, *(key.describe() for key in alike if not torch.equal(found[key], expected[key]))])


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Computes the relative distance of all gradients taken as one vector; infinite where names differ."""
    if found.keys() != expected.keys() or not expected:
        return float("inf")
    squares = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    norm = sum(float(tensor.square().sum()) for tensor in expected.values())
    return float((squares / norm) ** 0.5) if norm else float("inf")
