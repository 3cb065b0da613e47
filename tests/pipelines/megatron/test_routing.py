"""Routing replay of one router: what is recorded is chosen again, for the same token, and by the present scores."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.columns import Ragged
from mock_scheduler.comparison.bounds.bounds import EXACT
from mock_scheduler.comparison.walk.traces import compare_trace_folders
from mock_scheduler.errors import BatchError, ConfigError
from mock_scheduler.verdict.direct_verdict import decide
from mock_scheduler.verdict.divergences import count_before, find_divergences
from mock_scheduler.verdict.verdict import VerdictKind
from mock_scheduler.verdict.wording.divergences import describe_divergence
from pipelines.config.loading import load_config
from pipelines.config.model import ModelConfig
from pipelines.megatron.layers.routing import RoutingTable, empty_routing, places_of, rows_of
from tests.batches import SAMPLING, make_row
from tests.dist.conftest import launch
from tests.pipelines.megatron.test_experts import (
    CHOICES,
    LENGTHS,
    build_model,
    build_router,
    lay_out,
    megatron_on_the_host,
)
from tests.pipelines.tiny_runs import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")
_ = megatron_on_the_host  # a fixture of every test here

ROW_STARTS = torch.tensor([0, 5, 8])
BIASED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
LINES = [(0, 1), (2,)]


def placed_rows(lines: list[tuple[int, ...]] = LINES, length: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states ``[s, b, h]`` and places ``[s, b]`` of these rows."""
    hidden, row_ids = lay_out(lines, length)
    positions = torch.zeros_like(row_ids)
    for row, size in enumerate(LENGTHS):
        is_own = torch.eq(row_ids.T, row)
        positions.T[is_own] = torch.arange(size)
    return hidden, places_of(row_ids, positions)


def table(model: ModelConfig) -> RoutingTable:
    return RoutingTable.empty(model, ROW_STARTS, sum(LENGTHS))


def gradients(router: TopKRouter, hidden: torch.Tensor, places: torch.Tensor) -> list[torch.Tensor]:
    """Probabilities, choice, and the gradients of weight and input for a loss that weighs every expert."""
    router.weight.grad = None
    own = hidden.clone().requires_grad_()
    probs, chosen = router(own, places)
    (probs * torch.arange(1.0, probs.shape[1] + 1)).sum().backward()
    assert own.grad is not None
    assert router.weight.grad is not None
    return [probs.detach(), chosen, router.weight.grad.clone(), own.grad]


def recorded(router: TopKRouter, model: ModelConfig, hidden: torch.Tensor, places: torch.Tensor) -> RoutingTable:
    routing = table(model)
    with torch.no_grad(), router.ledger.using(routing), routing.doing("record"):
        router(hidden, places)
    return routing


def test_a_place_tells_row_and_position_and_padding_neither() -> None:
    row_ids, positions = torch.tensor([0, 3, 2**31, -1]), torch.tensor([7, 0, 2**30, 5])
    places = places_of(row_ids, positions)
    assert rows_of(places).tolist() == [0, 3, 2**31, -1]
    assert (places >> 32).tolist() == [7, 0, 2**30, -1]
    assert rows_of(row_ids).tolist() == row_ids.tolist()  # a row alone is its first token's place


@pytest.mark.parametrize("keys", [*CHOICES.values(), BIASED], ids=[*CHOICES, "sigmoid with biases"])
@pytest.mark.parametrize("balancing", ["aux_loss", "seq_aux_loss"])
def test_a_replay_of_the_own_choice_changes_no_bit_in_any_order_of_experts(
    keys: dict[str, object], balancing: str
) -> None:
    model = build_model(balancing, num_layers=4, **keys)
    router = build_router(model)
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.linspace(-0.2, 0.2, len(router.expert_bias)))
    hidden, places = placed_rows()
    plain = gradients(router, hidden, places)
    sums = router.ledger.take()[2]
    routing = recorded(router, model, hidden, places)
    routing.experts = routing.experts.flip(2)
    with router.ledger.using(routing), routing.doing("replay"), routing.comparing():
        replayed = gradients(router, hidden, places)
    assert routing.agreement.tolist() == [sum(LENGTHS), sum(LENGTHS)]
    assert all(torch.equal(*pair) for pair in zip(plain, replayed, strict=True))
    again = router.ledger.take()[2]
    assert (again.load_balancing, again.z) == (sums.load_balancing, sums.z)
    assert torch.equal(again.tokens_per_expert, sums.tokens_per_expert)


def test_recorded_experts_are_chosen_wherever_the_token_lies_and_weighed_by_present_scores() -> None:
    model = build_model("none", num_layers=4, moe_z_loss_coeff=0.0)
    router = build_router(model)
    routing = recorded(router, model, *placed_rows())
    router.weight.data.neg_()  # which turns every choice round
    hidden, places = placed_rows([(2, 1), (0,)])  # other lines, and rows at other columns
    probs, chosen = router(hidden, places)
    with router.ledger.using(routing), routing.doing("replay"):
        replayed_probs, replayed = router(hidden, places)
    flat = places.flatten()
    logits = router.gating(hidden).view(-1, router.num_experts)
    for token in torch.nonzero(flat >= 0).flatten().tolist():
        number = int(ROW_STARTS[int(rows_of(flat)[token])] + (flat[token] >> 32))
        experts = routing.experts[number, 2].long().sort().values
        assert replayed[token].nonzero().flatten().tolist() == experts.tolist()
        assert not torch.equal(replayed[token], chosen[token])
        torch.testing.assert_close(
            replayed_probs[token, experts], logits[token, experts].softmax(0), rtol=0, atol=1e-15
        )
    assert torch.equal(replayed[flat < 0], chosen[flat < 0])
    assert torch.equal(replayed_probs[flat < 0], probs[flat < 0])


def test_balancing_losses_count_the_replayed_choice() -> None:
    model = build_model("seq_aux_loss", num_layers=4, moe_z_loss_coeff=0.0)
    router = build_router(model)
    hidden, places = placed_rows()
    routing = recorded(router, model, hidden, places)
    routing.experts = (routing.experts + 1) % router.num_experts
    routing.is_known[0] = False
    plain = gradients(router, hidden, places)
    balance = router.ledger.take()[2].load_balancing
    with router.ledger.using(routing), routing.doing("replay"), routing.comparing():
        replayed = gradients(router, hidden, places)
    assert routing.agreement.tolist() == [0, sum(LENGTHS) - 1]
    assert float(abs(router.ledger.take()[2].load_balancing - balance)) > 1e-3
    assert not torch.equal(plain[1], replayed[1])


def batch_with(experts: torch.Tensor | None) -> RolloutBatch:
    extras = {} if experts is None else {"routed_experts": Ragged(experts)}
    rows = [replace(make_row(env_id=env), extras=extras) for env in range(2)]
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=2)


def test_a_batch_fills_the_table_as_far_as_it_goes() -> None:
    model = build_model(moe_layer_freq=[0, 1], num_layers=2)
    experts = torch.tensor([[[4, 1]], [[0, 5]], [[2, 3]]], dtype=torch.uint8)
    routing = RoutingTable.of_batch(batch_with(experts), model, torch.device("cpu"))
    assert routing.is_known.tolist() == [True, True, True, False] * 2
    assert routing.experts[:3].tolist() == experts.tolist()
    assert routing.experts[4:7].tolist() == experts.tolist()
    places = places_of(torch.tensor([1, 1, -1]), torch.tensor([2, 3, 0]))
    own = torch.tensor([[0, 1], [0, 1], [0, 1]])
    with routing.doing("replay"):
        assert routing.replayed(1, places, own).tolist() == [[2, 3], [0, 1], [0, 1]]
    assert routing.replayed(1, places, own) is own


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (None, "routed_experts are none, and the model has 2 layers with experts and chooses 2 of 6: record rollouts"),
        (
            torch.zeros(3, 1, 1, dtype=torch.uint8),
            "routed_experts are ragged uint8 [n, 1, 1], and the model has 2 layers",
        ),
        (torch.tensor([[[0, 6], [0, 1]]] * 3), "routed_experts go from 0 to 6, and the model has 2 layers"),
    ],
)
def test_routing_of_another_model_is_refused(experts: torch.Tensor | None, words: str) -> None:
    model = build_model(num_layers=2)
    with pytest.raises(BatchError, match=re.escape(words)):
        RoutingTable.of_batch(batch_with(experts), model, torch.device("cpu"))


def test_no_tokens_have_the_smallest_dtype_for_the_models_experts() -> None:
    routing = empty_routing(build_model(num_layers=2))
    assert (routing.dtype, tuple(routing.shape)) == (torch.uint8, (0, 2, 2))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.moe_router_replay=replay"], "num_moe_experts is not"),
        (["actor_infer.record_routed_experts=true"], "actor_infer.record_routed_experts has no effect"),
        (["+experts", "model.moe_router_replay=replay"], "model.moe_router_replay replay: the rollouts that this run"),
        (["+experts", "model.moe_router_replay=record", "model.moe_router_impl=megatron"], "needs moe_router_impl"),
        (
            ["+experts", "actor_infer.record_routed_experts=true", "model.moe_router_impl=megatron"],
            "actor_infer.record_routed_experts needs model.moe_router_impl layout_invariant",
        ),
    ],
)
def test_a_configuration_that_cannot_replay_is_refused(overrides: list[str], words: str) -> None:
    name = "experts" if "+experts" in overrides else "quickstart"
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config(name, config_path=ROOT / "configs", overrides=[one for one in overrides if one != "+experts"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the traces of steps that replay rightly and wrongly."""
    folder = tmp_path_factory.mktemp("routing")
    launch(1, folder, (), module="tests.pipelines.workers.routing_worker")
    return folder


@pytest.mark.all
def test_one_replay_twice_is_one_training(trained: Path) -> None:
    compared = compare_trace_folders(trained / "right", trained / "again", bounds=EXACT)
    assert decide(None, compared, bounds=EXACT).kind is VerdictKind.IDENTICAL


@pytest.mark.all
@pytest.mark.parametrize(("wrong", "layer"), [("shifted by one", 1), ("of another token", 1), ("of another layer", 2)])
def test_a_wrong_replay_is_named_by_its_router(trained: Path, wrong: str, layer: int) -> None:
    """The first divergence is the choice of the first layer whose experts are those of another place."""
    compared = compare_trace_folders(trained / "right", trained / wrong, bounds=EXACT)
    assert decide(None, compared, bounds=EXACT).kind is VerdictKind.DIVERGED
    first = find_divergences(None, compared)[0]
    assert (first.kind, first.name) == ("router", f"decoder.layers.{layer}.mlp.router.chosen_experts")
    sentence = describe_divergence(count_before(first, compared))
    assert "tokens go to other experts; the first, sample default/group 0/episode 0/env 0/turn 0, token 0" in sentence
