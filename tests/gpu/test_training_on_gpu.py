"""Training on a GPU: repeated and resumed to the last bit, with TransformerEngine, and without deterministic settings.

How to run, on a machine with one CUDA GPU, in about three minutes::

    pytest -m gpu tests/gpu

Without a GPU everything here is skipped, and without TransformerEngine what needs it; pytest prints why. Every case
trains in a process of its own (``benchmarks/gpu_check/training_worker.py``), since settings must be there before CUDA
starts.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from benchmarks.gpu_check.cases import OTHER_ROUNDING, Runs, differing, distance
from benchmarks.gpu_check.training_worker import NUM_STEPS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU is visible"),
    pytest.mark.timeout(280),  # the first test of an implementation pays for its runs
]
needs_te = pytest.mark.skipif(find_spec("transformer_engine") is None, reason="transformer_engine is not installed")
implementations = pytest.mark.parametrize("impl", ["local", pytest.param("transformer_engine", marks=needs_te)])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("gpu"))


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
    wide = runs.gradient("local-float32")
    local = distance(runs.gradient("local-bfloat16"), wide)
    other = distance(runs.gradient("transformer_engine-bfloat16"), wide)
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
    wide = runs.gradient("local-float32")
    fixed = distance(runs.gradient("local-bfloat16"), wide)
    assert distance(runs.gradient("local-bfloat16-free"), wide) <= OTHER_ROUNDING * fixed
