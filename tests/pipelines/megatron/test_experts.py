"""The router of layers with experts, in one process: against plain torch, against Megatron's, and against itself."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.megatron.host_device import define_router_gemm
from pipelines.config.model import ModelConfig
from pipelines.megatron.layers.expert_router import LayoutInvariantRouter, attach_router_ledger
from pipelines.megatron.layers.experts import (
    RowMoELayer,
    expert_mlp_spec,
    moe_config_fields,
    padding_mask_argument,
)
from pipelines.megatron.layers.router_ledger import RouterLedger, RouterSums, all_reduce_router_sums
from tests.plain_experts import choose, router_losses

pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")

HIDDEN, EXPERTS = 8, 6
LENGTHS = (5, 3, 4)  # real tokens of rows 0, 1 and 2
RESPONSES = torch.tensor([3, 1, 2])
CHOICES = {
    "softmax": {},
    "softmax before the choice": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "sigmoid of one": {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
}
# Megatron's own record of the routers' losses: a table up to 0.18, an object from 0.19 on.
TRACKER = "megatron.core.transformer.moe.moe_logging"
HAS_OBJECT = importlib.util.find_spec(TRACKER) is not None
choices = pytest.mark.parametrize("keys", CHOICES.values(), ids=CHOICES)
balancings = pytest.mark.parametrize("balancing", ["none", "aux_loss", "seq_aux_loss"])


@pytest.fixture(autouse=True)
def megatron_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a router asks for outside a process group, and no loss scale left by another test."""
    define_router_gemm()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    if HAS_OBJECT:
        monkeypatch.setattr(importlib.import_module(TRACKER), "_MOE_METRICS_TRACKER", None)
    else:
        monkeypatch.setattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER", {})
    monkeypatch.setattr(moe_utils, "reduce_from_tensor_model_parallel_region", lambda values, group: values)


def build_model(balancing: str = "seq_aux_loss", **keys: object) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "hidden_size": HIDDEN,
            "num_moe_experts": EXPERTS,
            "moe_router_load_balancing_type": balancing,
            "moe_aux_loss_coeff": 0.0 if balancing == "none" else 0.3,
            "moe_z_loss_coeff": 0.02,
            **keys,
        }
    )


def build_router(
    model: ModelConfig,
    *,
    dtype: torch.dtype = torch.float64,
    router_class: type[TopKRouter] = LayoutInvariantRouter,
    **settings: object,
) -> TopKRouter:
    fields = moe_config_fields(model, ParallelConfig(), dtype) | {
        "calculate_per_token_loss": True,
        "add_bias_linear": False,
    }
    shape = {"num_layers": 4, "hidden_size": HIDDEN, "num_attention_heads": 4}
    config = TransformerConfig(params_dtype=dtype, **{**shape, **fields, **settings})
    group = SimpleNamespace(size=lambda: 1)
    groups = SimpleNamespace(tp=group, cp=group, tp_cp=group, tp_dp_cp=group)
    router = router_class(config=config, pg_collection=groups)
    router.set_layer_number(3)
    router.weight.data.copy_(random_router(seed=1))
    if isinstance(router, LayoutInvariantRouter):
        router.ledger.start_step(RESPONSES)
    return router


def random_router(*, seed: int) -> torch.Tensor:
    return torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.4


def hidden_of_rows(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """``[N_r, h]`` for each row."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(sum(LENGTHS), HIDDEN, generator=generator, dtype=torch.float64) * 2
    return list(rows.to(dtype).split(LENGTHS))


def lay_out(lines: Sequence[Sequence[int]], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states ``[s, b, h]`` and row ids ``[s, b]`` of lines that hold these rows, then padding of odd values."""
    rows = hidden_of_rows()
    hidden = torch.full((length, len(lines), HIDDEN), 0.7, dtype=torch.float64)
    row_ids = torch.full((length, len(lines)), -1)
    for column, line in enumerate(lines):
        start = 0
        for row in line:
            hidden[start : start + LENGTHS[row], column] = rows[row]
            row_ids[start : start + LENGTHS[row], column] = row
            start += LENGTHS[row]
    return hidden, row_ids


def run(
    router: LayoutInvariantRouter, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, RouterSums]:
    """The router's gradient and its ledger after these micro-batches; the main loss is 0."""
    router.weight.grad = None
    for hidden, row_ids in batches:
        probs, _ = router(hidden.clone().requires_grad_(), row_ids)
        (probs * 0.0).sum().backward()
    assert router.weight.grad is not None
    return router.weight.grad, router.ledger.take()[2]


@choices
def test_probabilities_and_choice_in_float64_are_those_of_plain_torch(keys: dict[str, object]) -> None:
    model = build_model(**keys)
    router = build_router(model)
    hidden = torch.cat(hidden_of_rows()).unsqueeze(1)
    probs, routing_map = router(hidden, None)
    expected, chosen = choose(model, hidden.squeeze(1) @ router.weight.detach().T)
    assert probs.dtype == torch.float64
    assert torch.equal(routing_map, chosen)
    assert float((probs.detach() - expected).abs().max()) < 1e-14


@choices
# Of logits in bfloat16, which no model of the pipeline has, 0.16 rounds the scores and 0.19 the weights alone.
@pytest.mark.parametrize(
    ("dtype", "router_dtype"), [(torch.bfloat16, "fp32"), (torch.float32, None), (torch.float32, "fp32")]
)
def test_narrow_models_choose_as_megatron_bit_for_bit(
    keys: dict[str, object], dtype: torch.dtype, router_dtype: str | None
) -> None:
    model = build_model(**keys)
    bias = {"moe_router_enable_expert_bias": keys.get("moe_router_score_function") == "sigmoid"}
    results = []
    for router_class in (LayoutInvariantRouter, TopKRouter):
        router = build_router(model, dtype=dtype, router_class=router_class, moe_router_dtype=router_dtype, **bias)
        if router.expert_bias is not None:
            router.expert_bias.copy_(torch.linspace(-0.5, 0.5, EXPERTS))
        router.eval()
        results.append(router(torch.cat(hidden_of_rows(dtype)).unsqueeze(1), None))
    (probs, routing_map), (expected, expected_map) = results
    assert probs.dtype == expected.dtype
    assert torch.equal(routing_map, expected_map)
    assert torch.equal(probs, expected)


@choices
@balancings
def test_losses_and_router_gradient_are_those_of_plain_torch(keys: dict[str, object], balancing: str) -> None:
    """Autograd of the formulas written out row by row; the coefficients are in the gradient, not in the ledger."""
    model = build_model(balancing, **keys)
    router = build_router(model)
    found, sums = run(router, [lay_out([(0,), (1, 2)], length=9)])
    weight = router.weight.detach().clone().requires_grad_()
    logits = torch.cat(hidden_of_rows()) @ weight.T
    rows = [row for row, length in enumerate(LENGTHS) for _ in range(length)]
    balance, z = router_losses(model, logits, rows, dict(enumerate(RESPONSES.tolist())))
    (model.moe_aux_loss_coeff * balance + model.moe_z_loss_coeff * z).backward()
    assert weight.grad is not None
    torch.testing.assert_close(found, weight.grad, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(sums.load_balancing, balance.detach(), rtol=1e-14, atol=0.0)
    torch.testing.assert_close(sums.z, z.detach(), rtol=1e-14, atol=0.0)


@balancings
def test_router_gradient_is_the_slope_of_the_ledgers_losses(balancing: str) -> None:
    model = build_model(balancing)
    router = build_router(model)
    batches = [lay_out([(0,), (1, 2)], length=9)]
    gradient, _ = run(router, batches)
    direction = random_router(seed=5)
    losses = []
    for step in (1e-5, -1e-5):
        router.weight.data.add_(direction, alpha=step)
        _, sums = run(router, batches)
        router.weight.data.sub_(direction, alpha=step)
        losses.append(0.3 * sums.load_balancing + 0.02 * sums.z)
    slope = (losses[0] - losses[1]) / 2e-5
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-8, atol=0.0)


@pytest.mark.parametrize(
    "batches",
    [
        [lay_out([(0,), (1,), (2,)], length=17)],
        [lay_out([(2, 0, 1)], length=12)],
        [lay_out([(1, 0), ()], length=8), lay_out([(2,)], length=4), lay_out([()], length=4)],
        [lay_out([(row,)], length=5) for row in range(3)],
    ],
    ids=["padded", "packed in one line", "micro-batches, one empty", "one row each"],
)
@pytest.mark.parametrize("balancing", ["none", "seq_aux_loss"])
def test_padding_packing_and_batching_change_nothing(
    batches: list[tuple[torch.Tensor, torch.Tensor]], balancing: str
) -> None:
    router = build_router(build_model(balancing))
    expected, expected_sums = run(router, [lay_out([(0,), (1, 2)], length=9)])
    found, sums = run(router, batches)
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-12
    torch.testing.assert_close(sums.load_balancing, expected_sums.load_balancing, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(sums.z, expected_sums.z, rtol=1e-12, atol=0.0)
    assert torch.equal(sums.tokens_per_expert, expected_sums.tokens_per_expert)
    assert float(sums.tokens_per_expert.sum()) == 2 * sum(LENGTHS)


def test_aux_loss_of_a_micro_batch_does_not_see_its_padding() -> None:
    router = build_router(build_model("aux_loss"))
    expected, _ = run(router, [lay_out([(2, 0, 1)], length=12)])
    found, _ = run(router, [lay_out([(0,), (1,), (2,)], length=17)])
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-12


@pytest.mark.parametrize("balancing", ["aux_loss", "seq_aux_loss"])
@pytest.mark.parametrize("is_per_token", [False, True])
def test_of_one_row_without_padding_the_losses_are_megatrons(balancing: str, is_per_token: bool) -> None:
    """With every token a response token, so that its weight is Megatron's; the values by Megatron's own tracker."""
    model = build_model(balancing)
    hidden = hidden_of_rows(torch.float32)[0].unsqueeze(1)
    gradients = []
    for router_class in (LayoutInvariantRouter, TopKRouter):
        settings = {"router_class": router_class, "calculate_per_token_loss": is_per_token}
        router = build_router(model, dtype=torch.float32, **settings)
        if isinstance(router, LayoutInvariantRouter):
            router.ledger.start_step(torch.tensor([LENGTHS[0]]))
            ledger = router.ledger
        probs, _ = router(hidden, None)
        (probs * 0.0).sum().backward()
        gradients.append(router.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)
    sums, weight = ledger.take()[2], LENGTHS[0] if is_per_token else 1
    name = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}[balancing]
    for found, expected in ((sums.load_balancing, tracked(name)), (sums.z, tracked("z_loss"))):
        torch.testing.assert_close(found / weight, expected[2].double(), rtol=1e-6, atol=0.0)


def tracked(name: str) -> torch.Tensor:
    """Megatron's own losses of this name, by layer."""
    if HAS_OBJECT:
        found = importlib.import_module(TRACKER).get_moe_metrics_tracker().metrics[name].values
    else:
        found = moe_utils.get_moe_layer_wise_logging_tracker()[name]["values"]
    assert isinstance(found, torch.Tensor)
    return found


def test_without_per_token_loss_rows_weigh_alike() -> None:
    """The mean over the rows of a micro-batch, whatever their response tokens."""
    router = build_router(build_model(), calculate_per_token_loss=False)
    _, sums = run(router, [lay_out([(0,), (1, 2)], length=9)])
    alone = []
    for row in range(3):
        _, own = run(router, [lay_out([(row,)], length=6)])
        alone.append(own.load_balancing)
    torch.testing.assert_close(sums.load_balancing, torch.stack(alone).mean(), rtol=1e-14, atol=0.0)


def test_only_the_pass_with_gradient_counts() -> None:
    """Recomputation runs a first pass without one; evaluation has none, or runs in eval mode."""
    router = build_router(build_model(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True))
    hidden, row_ids = lay_out([(0,), (1, 2)], length=9)
    with torch.no_grad():
        router(hidden, row_ids)
    router.eval()
    router(hidden, row_ids)
    assert router.ledger.take() == {}
    assert float(router.local_tokens_per_expert.sum()) == 0.0
    router.train()
    _, routing_map = router(hidden, row_ids)
    sums = router.ledger.take()[2]
    assert torch.equal(sums.tokens_per_expert, routing_map[row_ids.flatten() >= 0].sum(dim=0).double())
    assert torch.equal(router.local_tokens_per_expert.double(), sums.tokens_per_expert)
    assert router.ledger.take() == {}


def test_expert_bias_and_its_counter_stay_float32_in_a_bfloat16_model() -> None:
    """Megatron (0.16.1) leaves the counter in bfloat16, where 256 + 1 is 256."""
    model = build_model(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    router = build_router(model, dtype=torch.bfloat16).bfloat16()
    router.local_tokens_per_expert += 256
    hidden, row_ids = lay_out([(0,)], length=6)
    router(hidden.bfloat16(), row_ids)
    assert (router.expert_bias.dtype, router.local_tokens_per_expert.dtype) == (torch.float32, torch.float32)
    assert float(router.local_tokens_per_expert.sum()) == EXPERTS * 256 + 2 * LENGTHS[0]


def test_a_router_with_losses_refuses_a_step_that_was_not_begun() -> None:
    router = build_router(build_model())
    router.ledger = RouterLedger()
    with pytest.raises(RuntimeError) as error:
        router(*lay_out([(0,)], length=6))
    assert str(error.value) == "a router with losses ran before RouterLedger.start_step gave the rows' weights"


def test_one_ledger_serves_the_routers_of_all_chunks() -> None:
    routers = [build_router(build_model()) for _ in range(2)]
    routers[1].set_layer_number(4)
    ledger = attach_router_ledger([torch.nn.Sequential(router) for router in routers])
    ledger.start_step(RESPONSES)
    for router in routers:
        router(*lay_out([(0,)], length=6))
    assert list(ledger.take()) == [2, 3]


def test_sums_of_all_ranks_have_a_row_for_every_layer_with_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda table: table.mul_(2.0))
    model = build_model(num_layers=3, moe_layer_freq=2)
    one = torch.tensor(1.5, dtype=torch.float64)
    own = RouterSums(load_balancing=one, z=one * 2, tokens_per_expert=torch.arange(6.0, dtype=torch.float64))
    sums = all_reduce_router_sums({2: own}, model, device=torch.device("cpu"))
    assert list(sums) == [0, 2]
    assert (float(sums[0].z), float(sums[2].load_balancing), float(sums[2].z)) == (0.0, 3.0, 6.0)
    assert sums[2].tokens_per_expert.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_dense_models_add_nothing_to_megatrons_configuration() -> None:
    assert moe_config_fields(ModelConfig(), ParallelConfig(), torch.float32) == {}


@pytest.mark.parametrize(
    ("dtype", "router_dtype"), [(torch.float32, None), (torch.bfloat16, "fp32"), (torch.float64, "fp64")]
)
def test_configuration_has_megatrons_names(dtype: torch.dtype, router_dtype: str | None) -> None:
    model = build_model(
        num_layers=3,
        moe_layer_freq=2,
        moe_z_loss_coeff=0.0,
        moe_shared_expert_intermediate_size=16,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )
    parallel = ParallelConfig(expert_model_parallel_size=2, data_parallel_size=2)
    assert moe_config_fields(model, parallel, dtype) == {
        "num_moe_experts": 6,
        "moe_layer_freq": [1, 0, 1],
        "moe_ffn_hidden_size": 32,
        "moe_shared_expert_intermediate_size": 16,
        "moe_shared_expert_gate": False,
        "moe_router_topk": 2,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": None,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.3,
        "moe_z_loss_coeff": None,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 1e-3,
        "moe_router_dtype": router_dtype,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }


@pytest.mark.parametrize(
    ("impl", "layer_class", "router_class"),
    [("layout_invariant", RowMoELayer, LayoutInvariantRouter), ("megatron", MoELayer, TopKRouter)],
)
def test_specs_name_the_configured_layer_and_router(impl: str, layer_class: type, router_class: type) -> None:
    spec = expert_mlp_spec(build_model(moe_router_impl=impl))
    if isinstance(spec, functools.partial):  # from megatron-core 0.19 on
        assert (spec.func, spec.keywords["submodules"].router) == (layer_class, router_class)
    else:
        assert (spec.module, spec.submodules.router) == (layer_class, router_class)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [[0, 1, -1]]),
        ({"moe_router_impl": "megatron"}, [[False, False, True]]),
        (
            {
                "moe_router_impl": "megatron",
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
            },
            None,
        ),
        ({"num_moe_experts": None}, None),
    ],
    ids=["rows", "mask of Megatron", "Megatron's expert bias", "dense"],
)
def test_each_router_gets_the_mask_that_it_reads(keys: dict[str, object], expected: object) -> None:
    model = ModelConfig() if "num_moe_experts" in keys else build_model(**keys)
    mask = padding_mask_argument(torch.tensor([[0, 1, -1]]), model, is_first_chunk=True, sequence_parallel=True)
    assert (None if mask is None else mask.tolist()) == expected
