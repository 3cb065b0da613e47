"""Order plans against what Megatron's layouts do, worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from mock_scheduler.config.model import ModelConfig
from mock_scheduler.config.schema import ParallelConfig, PipelineConfig, TrainingConfig
from mock_scheduler.order_plan import OrderPlan, limits, plan_order
from pipelines.megatron.emulation.buffers import OwnedRange, owned_ranges

TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def config(*, emulate: dict[str, Any] | None = None, **sections: Any) -> PipelineConfig:  # noqa: ANN401
    values: dict[str, Any] = {"exp_name": "order", "rollout_batch_size": 128, "val_batch_size": 128, **sections}
    return PipelineConfig.model_validate({**values, "order": {"emulate": emulate}})


def plan(layout: dict[str, Any], **sections: Any) -> OrderPlan:  # noqa: ANN401
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


def test_limits_name_what_cannot_be_followed() -> None:
    experts = ModelConfig(num_moe_experts=4)
    assert limits(ParallelConfig(), experts, TrainingConfig()) == (
        "model.num_moe_experts: the order in which experts see tokens is not followed yet",
    )
    means = TrainingConfig(calculate_per_token_loss=False)
    assert limits(ParallelConfig(context_parallel_size=2), ModelConfig(), means) == (
        "context_parallel_size above 1 with training.calculate_per_token_loss false: each rank divides by its own "
        "tokens, which is another loss (docs/layouts.md, loss-tuple-under-cp)",
    )
    assert limits(ParallelConfig(tensor_model_parallel_size=2), ModelConfig(), TrainingConfig()) == ()


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
