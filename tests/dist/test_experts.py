"""Layers with experts on four real gloo processes: in every layout the gradients of plain torch in one process.

Everything is in float64, so that an error of rounding is below 1e-12 and a wrong computation is not.
"""

from __future__ import annotations

import sys
import uuid
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mock_scheduler.launch.launcher import LaunchPlan, run_plan
from tests.dist.workers.experts_worker import (
    CASES,
    LEARNING_RATE,
    Case,
    build_batches,
    initial_weight,
    own_part,
    row_lengths,
    row_weights,
)
from tests.plain_experts import choose, layer_output, router_losses, weight_shapes

pytestmark = [pytest.mark.all, pytest.mark.timeout(300)]  # the first test pays for the launch

ROOT = Path(__file__).parents[2]
NUM_RANKS = 4
BOUND = 1e-12
MEGATRON = version("megatron-core")
is_faulty = pytest.mark.skipif(MEGATRON != "0.16.1", reason=f"a fault of megatron-core 0.16.1; this is {MEGATRON}")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensors]]:
    """What each rank wrote, by case; all cases in one launch."""
    folder = tmp_path_factory.mktemp("experts")
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", uuid.uuid4().hex)
    ranks = ("--nproc-per-node", str(NUM_RANKS), "--nnodes", "1", *rendezvous)
    worker = ("-m", "tests.dist.workers.experts_worker", str(folder))
    plan = LaunchPlan(
        argv=(sys.executable, "-m", "mock_scheduler.launch.launcher", str(folder), *ranks, *worker),
        env={"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        num_processes=NUM_RANKS,
        world_size=NUM_RANKS,
    )
    log_path = folder / "ranks.log"
    assert run_plan(plan, log_path=log_path, cwd=ROOT) == 0, log_path.read_text(encoding="utf-8")[-6000:]
    assert "Unknown MLP type" not in log_path.read_text(encoding="utf-8")
    return {name: [load_file(folder / name / f"{rank}.safetensors") for rank in range(NUM_RANKS)] for name in CASES}


def expected_of_stack(case: Case) -> tuple[Tensors, Tensors]:
    """Weights of a stack of layers with experts, and their gradients and the routers' sums by plain torch."""
    model, rows = case.model, dict(enumerate(row_weights(case)))
    weights = {
        f"layers.{layer}.{name}": initial_weight(f"layers.{layer}.{name}", torch.Size(shape)).requires_grad_()
        for layer in range(model.num_layers)
        for name, shape in weight_shapes(model).items()
    }
    sums = {}
    total = torch.zeros((), dtype=torch.float64)
    for batch in build_batches(case):
        hidden, row_ids = batch.hidden.flatten(0, 1), batch.row_ids.flatten().tolist()
        for layer in range(model.num_layers):
            own = {name: weights[f"layers.{layer}.{name}"] for name in weight_shapes(model)}
            logits = hidden @ own["router.weight"].T
            balance, z = router_losses(model, logits, row_ids, rows)
            total = total + model.moe_aux_loss_coeff * balance + model.moe_z_loss_coeff * z
            chosen = choose(model, logits)[1][batch.row_ids.flatten() >= 0].sum(dim=0).double()
            for name, value in (("load_balancing", balance), ("z", z), ("tokens_per_expert", chosen)):
                sums[f"{name}.{layer}"] = sums.get(f"{name}.{layer}", 0.0) + value.detach()
            hidden = hidden + layer_output(model, own, hidden)
        total = total + (hidden * batch.slopes.flatten(0, 1)).sum()
    (total / sum(row_weights(case))).backward()
    return {name: weight.detach() for name, weight in weights.items()}, sums | {
        name: weight.grad for name, weight in weights.items() if weight.grad is not None
    }


def relative_errors(case: Case, ranks: list[Tensors], expected: Tensors) -> dict[tuple[int, str], float]:
    """|found - expected| / |expected| of every tensor of every rank that plain torch has too."""
    tp_size = case.parallel.tensor_model_parallel_size
    errors = {}
    for rank, tensors in enumerate(ranks):
        for name in tensors.keys() & expected.keys():
            whole = own_part(name, expected[name], tp_rank=rank % tp_size, tp_size=tp_size)
            errors[rank, name] = float((tensors[name] - whole).norm() / whole.norm())
    return errors


def num_experts_of_rank(tensors: Tensors) -> int:
    return len([name for name in tensors if name.startswith("layers.0.experts.") and "linear_fc1" in name])


@pytest.mark.parametrize("name", ["ep2", "ep4", "tp2-sp-ep2", "tp2-sp-ep2 aux_loss", "cp2-ep2", "cp2-ep2 aux_loss"])
def test_gradients_and_sums_are_those_of_one_process(runs: dict[str, list[Tensors]], name: str) -> None:
    case, ranks = CASES[name], runs[name]
    _, expected = expected_of_stack(case)
    errors = relative_errors(case, ranks, expected)
    assert {key: error for key, error in errors.items() if not error < BOUND} == {}
    assert {num_experts_of_rank(tensors) for tensors in ranks} == {4 // case.parallel.expert_model_parallel_size}
    assert {key for _, key in errors} == expected.keys()
    assert float(expected["tokens_per_expert.0"].sum()) == 2 * sum(row_lengths(case))


@pytest.mark.parametrize("name", ["ep2", "tp2-sp-ep2 aux_loss"])
def test_expert_bias_follows_the_real_tokens_of_all_ranks(runs: dict[str, list[Tensors]], name: str) -> None:
    _, expected = expected_of_stack(CASES[name])
    for layer in range(2):
        tokens = expected[f"tokens_per_expert.{layer}"]
        bias = torch.sign(tokens.mean() - tokens).float() * CASES[name].model.moe_router_bias_update_rate
        for tensors in runs[name]:
            assert torch.equal(tensors[f"layers.{layer}.router.expert_bias"], bias)


def test_the_distributed_optimizer_takes_float64_gradients_as_they_are(runs: dict[str, list[Tensors]]) -> None:
    """Adam's first step is lr · g / (|g| + eps)."""
    weights, gradients = expected_of_stack(CASES["ep2 after Adam"])
    for tensors in runs["ep2 after Adam"]:
        assert num_experts_of_rank(tensors) == 2
        for name in tensors.keys() & weights.keys():
            gradient = gradients[name]
            stepped = weights[name] - LEARNING_RATE * gradient / (gradient.abs() + 1e-8)
            torch.testing.assert_close(tensors[name], stepped, rtol=0.0, atol=1e-13)


def test_a_whole_model_that_recomputes_is_the_same_when_split(runs: dict[str, list[Tensors]]) -> None:
    """The rows reach the router through the model, sequence parallelism and recomputation, which counts once."""
    whole, case = runs["gpt"][0], CASES["gpt tp2-sp-ep2"]
    errors = relative_errors(case, runs["gpt tp2-sp-ep2"], whole)
    assert {key: error for key, error in errors.items() if not error < BOUND} == {}
    assert {name for _, name in errors} == whole.keys()
    assert [name for name in whole if "router" in name] == ["decoder.layers.1.mlp.router.weight"]
    assert float(whole["tokens_per_expert.1"].sum()) == 2 * sum(row_lengths(case))


def test_megatrons_own_router_is_right_where_nothing_splits_the_sequence(runs: dict[str, list[Tensors]]) -> None:
    """All tokens are real and of the response; it computes scores in float32."""
    case = CASES["megatron ep2"]
    _, expected = expected_of_stack(case)
    expected = {name: tensor for name, tensor in expected.items() if name.startswith("layers.")}
    assert max(relative_errors(case, runs["megatron ep2"], expected).values()) < 1e-5


@is_faulty
def test_megatrons_own_router_scales_its_losses_wrongly_under_tp(runs: dict[str, list[Tensors]]) -> None:
    """R4 of the reference: the router's gradient is wrong, and nothing of the last layer's experts."""
    case = CASES["megatron tp2-sp-ep2"]
    _, expected = expected_of_stack(case)
    expected = {name: tensor for name, tensor in expected.items() if name.startswith("layers.1.")}
    errors = relative_errors(case, runs["megatron tp2-sp-ep2"], expected)
    wrong = {name for (_, name), error in errors.items() if error > 0.1}
    assert wrong == {"layers.1.router.weight"}
    assert max(error for (_, name), error in errors.items() if name not in wrong) < 1e-5


@is_faulty
def test_megatron_leaves_gradients_of_experts_unsummed_under_tp_without_ep(runs: dict[str, list[Tensors]]) -> None:
    """R2 of the reference: tp ranks see other tokens, and their replicas of an expert disagree."""
    ranks, case = runs["megatron tp2-sp"], CASES["megatron tp2-sp"]
    experts = [name for name in ranks[0] if ".local_experts." in name]
    assert len(experts) == 16
    assert all(not torch.equal(ranks[0][name], ranks[1][name]) for name in experts)
    _, expected = expected_of_stack(case)
    errors = relative_errors(case, ranks, {name: expected[name] for name in experts})
    assert max(errors.values()) > 0.1
