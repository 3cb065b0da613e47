"""Order plans against what Megatron's layouts do, worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.errors import LayoutError
from mock_scheduler.layouts.layout import emulation_limits
from mock_scheduler.layouts.order_plan import OrderPlan, plan_order
from mock_scheduler.megatron.emulation.gradients import OwnedRange, owned_ranges
from pipelines.batching.plan import MicroBatch
from pipelines.config.model import ModelConfig
from pipelines.config.schema import PipelineConfig
from pipelines.config.training import TrainingConfig
from pipelines.megatron.emulation.lanes import cut_lanes, join_batches, metrics_of_lanes, sums_of_lanes
from pipelines.megatron.layers.router_ledger import RouterLedger
from pipelines.megatron.places import ModelInputs, OwnBatch

TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def config(*, emulate: dict[str, Any] | None = None, **sections: Any) -> PipelineConfig:
    values: dict[str, Any] = {"exp_name": "order", "rollout_batch_size": 128, "val_batch_size": 128, **sections}
    return PipelineConfig.model_validate({**values, "order": {"emulate": emulate}})


def plan(layout: dict[str, Any], **sections: Any) -> OrderPlan:
    return plan_order(config(emulate=layout, training={"micro_batch_size": 8}, **sections))


def sums(found: OrderPlan) -> dict[str, tuple[tuple[str, ...], int, str, float]]:
    return {item.name: (item.axes, item.size, item.dtype, item.scale) for item in found.reductions}


def accumulators(found: OrderPlan) -> dict[str, tuple[dict[str, int], tuple[str, ...]]]:
    return {item.name: (dict(item.virtual_ranks), item.reductions) for item in found.accumulators}


def test_one_process_adds_nothing_over_ranks() -> None:
    found = plan_order(config())
    assert found.reductions == ()
    assert {(item.split, item.parts, item.interleave) for item in found.gemms} == {("none", 1, 1)}
    assert {item.reductions for item in found.accumulators} == {()}


def test_an_emulated_layout_has_the_plan_of_the_layout_itself() -> None:
    layout = {**TP2_SP, "pipeline_model_parallel_size": 2, "data_parallel_size": 2}
    training = {"micro_batch_size": 8}
    assert plan(layout) == plan_order(config(parallel=layout, training=training))
    assert plan(layout).to_json() == plan_order(config(parallel=layout, training=training)).to_json()


def test_tensor_and_sequence_parallelism_in_bfloat16() -> None:
    """Products add in bfloat16, main gradients in float32; norms have an accumulator for each tp rank."""
    found = plan(TP2_SP, precision="bfloat16")
    assert sums(found) == {
        "embedding_forward": (("tp",), 2, "bfloat16", 1.0),
        "row_parallel_forward": (("tp",), 2, "bfloat16", 1.0),
        "column_parallel_dgrad": (("tp",), 2, "bfloat16", 1.0),
        "vocabulary_sums": (("tp",), 2, "float32", 1.0),
        "replicated_gradients": (("tp",), 2, "float32", 1.0),
        "gradient_norm": (("tp", "cp", "dp", "pp"), 2, "float32", 1.0),
    }
    assert accumulators(found)["replicated"] == ({"tp": 2, "cp": 1, "dp": 1}, ("replicated_gradients",))
    assert accumulators(found)["split"] == ({"cp": 1, "dp": 1}, ())
    gemms = {item.name: (item.split, item.parts, item.interleave) for item in found.gemms}
    assert gemms["fc1"] == ("output", 2, 2)
    assert gemms["fc2"] == gemms["proj"] == ("input", 2, 1)
    assert gemms["qkv"] == gemms["output"] == gemms["embedding"] == ("output", 2, 1)


def test_without_sequence_parallelism_only_norms_of_queries_and_keys_are_summed() -> None:
    layout = {"tensor_model_parallel_size": 2}
    assert "replicated_gradients" not in sums(plan(layout))
    found = plan(layout, model={"qk_layernorm": True})
    assert accumulators(found)["replicated"] == ({"tp": 1, "cp": 1, "dp": 1}, ())
    assert accumulators(found)["query_key_norm"] == ({"tp": 2, "cp": 1, "dp": 1}, ("replicated_gradients",))


def test_replicas_are_scaled_only_where_each_has_a_mean() -> None:
    layout = {"data_parallel_size": 2}
    assert sums(plan(layout))["data_parallel_gradients"] == (("cp", "dp"), 2, "float32", 1.0)
    means = plan_order(config(emulate=layout, training={"micro_batch_size": 8, "calculate_per_token_loss": False}))
    assert sums(means)["data_parallel_gradients"] == (("cp", "dp"), 2, "float32", 0.5)
    assert means.gradient_scale == 0.5


def test_stages_that_share_embeddings_add_their_gradients_after_the_replicas() -> None:
    tied = {"untie_embeddings_and_output_weights": False}
    layout = {"pipeline_model_parallel_size": 2, "data_parallel_size": 2}
    found = accumulators(plan(layout, model=tied))["embedding"]
    assert found == ({"cp": 1, "dp": 2, "pp": 2}, ("data_parallel_gradients", "tied_gradients"))
    assert accumulators(plan(layout))["embedding"][1] == ("data_parallel_gradients",)


def test_the_norm_is_cut_where_the_optimizer_is_distributed() -> None:
    layout = {"data_parallel_size": 2, "pipeline_model_parallel_size": 2}
    assert (plan(layout).norm.shards, sums(plan(layout))["gradient_norm"][1]) == (2, 4)
    whole = plan_order(config(emulate=layout, training={"micro_batch_size": 8, "use_distributed_optimizer": False}))
    assert (whole.norm.shards, sums(whole)["gradient_norm"][:2]) == (1, (("tp", "pp"), 2))


def test_interleaved_stages_need_more_micro_batches() -> None:
    layout = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "data_parallel_size": 2,
    }
    model = {"num_layers": 4}
    assert plan(layout, model=model).micro_batch_multiple == 4
    assert plan({**layout, "virtual_pipeline_model_parallel_size": None}, model=model).micro_batch_multiple == 2


def test_json_is_the_plan() -> None:
    found = json.loads(plan(TP2_SP).to_json())
    assert (found["tp"], found["sequence_parallel"], found["norm"]["parts"]) == (2, True, 2)


EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 64}


def experts(layout: dict[str, Any]) -> tuple[int, int, int, int, bool]:
    """Ranks that an expert sees at once, replicas that compute together, products at a time, accumulators, apart."""
    order = plan(layout, model=EXPERTS).experts
    assert order is not None
    return order.sources, order.lanes, order.groups, order.replicas, order.is_apart


def test_experts_see_the_tokens_of_the_ranks_of_their_group() -> None:
    """Groups of ep ranks follow one another, tp the fastest, then cp, then dp."""
    dp, cp, ep = "data_parallel_size", "context_parallel_size", "expert_model_parallel_size"
    assert plan({dp: 2}).experts is None
    assert experts({}) == (1, 1, 1, 1, False)
    assert experts({dp: 2}) == (1, 1, 1, 2, False)
    assert experts({cp: 2}) == (1, 1, 2, 2, False)
    assert experts({cp: 2, ep: 2}) == (2, 1, 1, 1, True)
    assert experts({**TP2_SP, ep: 2, dp: 2}) == (2, 1, 1, 2, True)
    assert experts({dp: 2, ep: 2}) == (2, 2, 1, 1, True)
    assert experts({dp: 4, ep: 2}) == (2, 2, 1, 2, True)
    assert experts({**TP2_SP, dp: 2, ep: 4}) == (4, 2, 1, 1, True)
    assert experts({**TP2_SP, cp: 2, ep: 2}) == (2, 1, 2, 2, True)


def test_replicas_compute_together_where_an_expert_sees_the_tokens_of_several() -> None:
    found = plan({"data_parallel_size": 4, "expert_model_parallel_size": 2}, model=EXPERTS)
    assert (found.lanes, found.rounds, found.shares, found.replicas) == (2, 2, 2, 4)
    assert sums(found)["expert_gradients"] == (("expert_dp",), 2, "float32", 1.0)
    assert accumulators(found)["expert"] == ({"expert_dp": 2}, ("expert_gradients",))


def test_experts_without_parallelism_of_their_own_are_reduced_with_all_other_gradients() -> None:
    found = plan({"data_parallel_size": 2}, model=EXPERTS)
    assert "expert_gradients" not in sums(found)
    assert "expert" not in accumulators(found)


def test_limits_name_what_of_experts_cannot_be_followed() -> None:
    def refused(
        layout: dict[str, Any], model: dict[str, Any] | None = None, training: dict[str, Any] | None = None
    ) -> tuple[str, ...]:
        config = ModelConfig.model_validate({**EXPERTS, **(model or {})})
        return emulation_limits(
            ParallelConfig.model_validate(layout), config, TrainingConfig.model_validate(training or {})
        )

    dp2_ep2 = {"data_parallel_size": 2, "expert_model_parallel_size": 2}
    where = "expert_model_parallel_size above tensor_model_parallel_size × context_parallel_size"
    assert refused(dp2_ep2) == ()
    assert refused(TP2_SP) == (
        "experts with tensor_model_parallel_size above 1 and expert_model_parallel_size 1: their gradients are known "
        "to be wrong (docs/layouts.md, experts-under-tp)",
    )
    assert refused({}, {"add_bias_linear": True, "moe_router_impl": "megatron"}) == (
        "model.moe_router_impl megatron: its losses are those of the tokens that a rank happens to hold; set it to "
        "layout_invariant",
        "model.add_bias_linear with experts: how their biases add is not followed; set it to false",
    )
    assert refused(dp2_ep2, {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True}) == (
        "model.moe_shared_expert_gate true: how the parts of the gate's products add is not followed",
    )
    assert refused({**TP2_SP, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}) == (
        "expert_tensor_parallel_size 2: products of parts of an expert are not followed; set it to 1",
    )
    assert refused({"context_parallel_size": 2, "data_parallel_size": 3, "expert_model_parallel_size": 3}) == (
        "expert_model_parallel_size 3 is neither a multiple nor a divisor of the 2 ranks that compute one micro-batch: "
        "experts would see parts of several; set it to one of these",
    )
    assert refused(
        dp2_ep2, training={"calculate_per_token_loss": False, "batching": "dynamic", "max_tokens_per_micro_batch": 64}
    ) == (
        f"{where} with max_tokens_per_micro_batch: replicas computed together need micro-batches of one shape; set "
        "training.batching to fixed and sequence_packing to false",
        f"{where} with training.calculate_per_token_loss false: each of the replicas computed together divides by its "
        "own tokens; set it to true",
    )


def test_limits_name_what_cannot_be_followed() -> None:
    means = TrainingConfig(calculate_per_token_loss=False)
    assert emulation_limits(ParallelConfig(context_parallel_size=2), ModelConfig(), means) == (
        "context_parallel_size above 1 with training.calculate_per_token_loss false: each rank divides by its own "
        "tokens, which is another loss (docs/layouts.md, loss-tuple-under-cp)",
    )
    assert emulation_limits(ParallelConfig(tensor_model_parallel_size=2), ModelConfig(), TrainingConfig()) == ()


def test_a_run_of_several_processes_emulates_nothing() -> None:
    with pytest.raises(ValidationError) as error:
        config(emulate=TP2_SP, parallel={"data_parallel_size": 2}, training={"micro_batch_size": 8})
    assert (
        "order.emulate tp2 pp1 dp1 sp cannot be followed by one process:\n"
        "  - parallel tp1 pp1 dp2: one process follows the order of several; set it to 1"
    ) in str(error.value)


def test_a_layout_that_could_not_run_is_not_emulated() -> None:
    with pytest.raises(ValidationError) as error:
        config(emulate={"tensor_model_parallel_size": 3})
    text = str(error.value)
    assert "order.emulate: layout tp3 pp1 dp1 (3 processes" in text
    assert "model.num_attention_heads 4 is not a multiple of tensor_model_parallel_size 3" in text


def test_flat_buffers_are_cut_as_the_distributed_optimizer_does() -> None:
    """Three parameters of 100, 200 and 30 elements, last first at multiples of 64: 0, 64 and 320, and 420 padded to
    512. Two ranks own 256 elements each, and the second parameter is cut after 192 of its elements.
    """
    first, second = owned_ranges([100, 200, 30], [False, False, False], num_shards=2)
    assert first == [OwnedRange(place=2, start=0, end=30), OwnedRange(place=1, start=0, end=192)]
    assert second == [OwnedRange(place=1, start=192, end=200), OwnedRange(place=0, start=0, end=100)]


def test_shared_embeddings_have_a_bucket_of_their_own() -> None:
    """70 and 10 elements at 0 and 128, whose bucket ends at the next parameter's 192, padded to 256: cut at 128. Then
    300 alone at 256 in 384: cut at 192.
    """
    first, second = owned_ranges([300, 10, 70], [True, False, False], num_shards=2)
    assert first == [OwnedRange(place=2, start=0, end=70), OwnedRange(place=0, start=0, end=192)]
    assert second == [OwnedRange(place=1, start=0, end=10), OwnedRange(place=0, start=192, end=300)]


def micro_batch(index: int, tokens: list[int], *, is_padded: bool = False) -> OwnBatch:
    """One line with one row, whose id is the batch's index; padded by its last token."""
    line = torch.tensor([tokens])
    rows, columns = torch.full_like(line, index), torch.arange(line.shape[1]).unsqueeze(0)
    if is_padded:
        rows[0, -1] = -1
    empty = torch.zeros(line.shape)
    batch = MicroBatch(
        index=index,
        tokens=line,
        targets=line,
        response_mask=empty.bool(),
        kept_mask=empty.bool(),
        row_ids=rows,
        positions=columns,
        **dict.fromkeys(("advantages", "returns", "rollout_logprobs", "weights", "loss_weights"), empty),
    )
    return OwnBatch(batch=batch, inputs=ModelInputs(tokens=line, positions=columns, row_ids=rows))


def test_replicas_that_compute_together_have_their_micro_batches_side_by_side() -> None:
    """Each with the causal mask that layers make where none is given."""
    batches = [micro_batch(0, [7, 8]), micro_batch(1, [5, 6], is_padded=True)]
    (joint,) = join_batches(batches, 2)
    assert joint.inputs.tokens.tolist() == [[7, 8, 5, 6]]
    assert joint.inputs.positions.tolist() == [[0, 1, 0, 1]]
    assert joint.batch.row_ids.tolist() == [[0, 0, 1, -1]]
    assert joint.inputs.attention_mask is not None
    assert joint.inputs.attention_mask.tolist() == [[[[False, True], [False, False], [False, True], [False, False]]]]
    cut = cut_lanes(joint, torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    assert [(own.batch.index, part.tolist()) for own, part in cut] == [(0, [[1.0, 2.0]]), (1, [[3.0, 4.0]])]
    assert join_batches(batches, 1) == batches


def test_losses_of_replicas_that_compute_together_have_the_gradients_that_they_have_alone() -> None:
    """Losses are index + 1 times the sum of outputs; metrics stay those of each micro-batch."""
    (joint,) = join_batches([micro_batch(0, [7, 8]), micro_batch(1, [5, 6])], 2)
    output = torch.tensor([[1.0, 2.0, 3.0, 4.0]], requires_grad=True)

    def loss(own: OwnBatch, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        factor = own.batch.index + 1
        return factor * values.sum(), torch.tensor(factor), torch.tensor([10.0 * factor])

    total, num_tokens, metrics = sums_of_lanes(joint, output, loss)
    total.backward()
    assert (float(total.detach()), int(num_tokens)) == (3.0 + 14.0, 3)
    assert output.grad is not None
    assert output.grad.tolist() == [[1.0, 1.0, 2.0, 2.0]]
    named = metrics_of_lanes(joint, metrics)
    assert {index: row.tolist() for index, row in named.items()} == {0: [10.0], 1: [20.0]}


def test_replicas_of_other_shapes_are_not_computed_together() -> None:
    with pytest.raises(LayoutError, match=r"micro-batches of one shape, found \[1, 2\], \[1, 3\]"):
        join_batches([micro_batch(0, [7, 8]), micro_batch(1, [5, 6, 7])], 2)
    with pytest.raises(LayoutError, match="1 micro-batches for 2 replicas that compute together"):
        join_batches([micro_batch(0, [7, 8])], 2)


def test_what_routers_add_up_is_added_in_the_order_of_the_ranks() -> None:
    """(0.1 + 0.2) + 0.3 in float64, though rank 2 came first; the other way round it is 0.6."""
    ledger = RouterLedger()
    for rank, value in ((2, 0.3), (0, 0.1), (1, 0.2)):
        number = torch.tensor(value, dtype=torch.float64)
        ledger.add(3, number, number, torch.tensor([1]), rank=rank)
    sums = ledger.take()[3]
    assert float(sums.load_balancing) == 0.6000000000000001
    assert sums.tokens_per_expert.tolist() == [3.0]
    assert ledger.take() == {}
