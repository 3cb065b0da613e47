"""Training on a GPU: repeated and resumed to the last bit, with TransformerEngine, and without deterministic settings.

How to run, on a machine with one CUDA GPU, in about three minutes::

    pytest -m gpu tests/gpu

Without a GPU everything here is skipped, and without TransformerEngine what needs it; pytest prints why. Every case
trains in a process of its own (``tests/gpu/training_worker.py``), since settings must be there before CUDA starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import open_trace
from tests.gpu.training_worker import FACTS_FILE, NUM_STEPS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU is visible"),
    pytest.mark.timeout(280),  # the first test of an implementation pays for its runs
]
needs_te = pytest.mark.skipif(find_spec("transformer_engine") is None, reason="transformer_engine is not installed")
implementations = pytest.mark.parametrize("impl", ["local", pytest.param("transformer_engine", marks=needs_te)])

ROOT = Path(__file__).parents[2]
# The launchers' settings (configs/base.yaml); CUDA and TransformerEngine read them when they start.
DETERMINISTIC = {
    "DETERMINISTIC_MODE": "1",
    "PYTHONHASHSEED": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_ALGO": "Ring",
}
ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
# How much farther from float32 another way to compute in bfloat16 may be than the local layers are: the rounding errors
# of both are of one size, and a wrong computation is farther by orders of magnitude.
OTHER_ROUNDING = 4.0
TIMEOUT_S = 120.0

Tensors = dict[TraceKey, torch.Tensor]


class Runs:
    """Runs cases, each once, and reads what they left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def facts(self, case: str) -> dict[str, Any]:
        """What a case wrote; the case is run at the first call."""
        path = self.folder / case / FACTS_FILE
        if not path.is_file():
            self._run(case)
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return facts

    def tensors(self, case: str, step: int) -> Tensors:
        """Everything traced in a step."""
        self.facts(case)
        with open_trace(self.folder / case) as trace:
            return {key: trace.merge(key).tensor for key in trace.keys(step)}

    def _run(self, case: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if name not in DETERMINISTIC}
        settings = {"DETERMINISTIC_MODE": "0"} if "free" in case.split("-") else DETERMINISTIC
        finished = subprocess.run(
            [sys.executable, "-m", "tests.gpu.training_worker", str(self.folder), case],
            cwd=ROOT,
            env={**inherited, **ONE_PROCESS, **settings},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert finished.returncode == 0, (finished.stdout + finished.stderr)[-6000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("gpu"))


def differing(found: Tensors, expected: Tensors) -> list[str]:
    """Tensors that are not equal to the last bit."""
    assert found.keys() == expected.keys()
    assert found
    return sorted(key.describe() for key in found if not torch.equal(found[key], expected[key]))


def gradient_of_first_update(runs: Runs, case: str) -> dict[str, torch.Tensor]:
    """float64, by canonical name: alike in all implementations."""
    tensors = runs.tensors(case, 0)
    return {key.name: tensor.double() for key, tensor in tensors.items() if key.kind == "gradient" and key.update == 0}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative distance of all gradients taken as one vector."""
    assert found.keys() == expected.keys()
    squares = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return (squares / sum(float(tensor.square().sum()) for tensor in expected.values())) ** 0.5


@implementations
def test_three_steps_in_bfloat16_are_repeated_to_the_last_bit(runs: Runs, impl: str) -> None:
    first, second = runs.facts(f"{impl}-bfloat16"), runs.facts(f"{impl}-bfloat16-repeat")
    assert first["device"] == "cuda"
    assert first["is_deterministic"] is True
    assert second["metrics"] == first["metrics"]
    assert list(first["metrics"]) == [str(step) for step in range(NUM_STEPS)]
    for step in range(NUM_STEPS):
        assert differing(*(runs.tensors(f"{impl}-bfloat16{word}", step) for word in ("-repeat", ""))) == []


@implementations
def test_a_resumed_step_in_bfloat16_has_the_same_bits(runs: Runs, impl: str) -> None:
    """Whichever Adam is there: torch's counts by parameter, TransformerEngine's and apex's by group."""
    whole = runs.facts(f"{impl}-bfloat16")
    rest = runs.facts(f"{impl}-bfloat16-resumed")
    last = NUM_STEPS - 1
    assert rest["optimizer"] == whole["optimizer"]
    assert rest["metrics"] == {str(last): whole["metrics"][str(last)]}
    assert differing(*(runs.tensors(f"{impl}-bfloat16{word}", last) for word in ("-resumed", ""))) == []


@needs_te
def test_transformer_engines_layers_are_the_local_ones_but_for_rounding(runs: Runs) -> None:
    wide = gradient_of_first_update(runs, "local-float32")
    local = distance(gradient_of_first_update(runs, "local-bfloat16"), wide)
    other = distance(gradient_of_first_update(runs, "transformer_engine-bfloat16"), wide)
    assert 0.0 < local < 0.1
    assert other <= OTHER_ROUNDING * local
    losses = [
        runs.facts(case)["metrics"]["0"]["total_loss"]
        for case in ("local-float32", "local-bfloat16", "transformer_engine-bfloat16")
    ]
    assert abs(losses[2] - losses[0]) <= max(OTHER_ROUNDING * abs(losses[1] - losses[0]), 1e-2)


def test_without_deterministic_settings_training_differs_by_rounding_at_most(runs: Runs) -> None:
    """The settings choose kernels and orders of summation, never what is computed."""
    free = runs.facts("local-bfloat16-free")
    assert free["is_deterministic"] is False
    wide = gradient_of_first_update(runs, "local-float32")
    fixed = distance(gradient_of_first_update(runs, "local-bfloat16"), wide)
    assert distance(gradient_of_first_update(runs, "local-bfloat16-free"), wide) <= OTHER_ROUNDING * fixed
