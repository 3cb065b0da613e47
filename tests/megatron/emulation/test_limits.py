"""What keeps one process from following a layout in a training of one's own is named, all of it, before a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

from mock_scheduler.config.instruments import OrderConfig
from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.errors import LayoutError
from mock_scheduler.layouts.order_plan import OrderPlan, plan_order
from mock_scheduler.megatron.emulation import limits
from mock_scheduler.megatron.emulation.described import BuiltModel, BuiltRun, BuiltTraining
from mock_scheduler.megatron.emulation.follow import FollowedFacts, Following, OwnOrder, find_order_limits, follow
from tests.megatron.tiny_model import TinyGpt, one_rank, tiny_model

MODEL = BuiltModel(
    num_layers=4,
    num_attention_heads=8,
    query_groups=4,
    ffn_size=64,
    swiglu=True,
    add_bias_linear=False,
    qk_layernorm=False,
    untie_embeddings_and_output_weights=True,
    num_moe_experts=None,
    moe_layers=(False,) * 4,
    expert_ffn_size=64,
    moe_shared_expert_intermediate_size=None,
    moe_shared_expert_gate=False,
    moe_router_load_balancing_type="aux_loss",
    moe_aux_loss_coeff=0.01,
    moe_z_loss_coeff=0.0,
)
EXPERTS = replace(MODEL, num_moe_experts=4, moe_layers=(True,) * 4)
TRAINING = BuiltTraining(
    calculate_per_token_loss=True,
    use_distributed_optimizer=False,
    accumulate_allreduce_grads_in_fp32=True,
    overlap_grad_reduce=False,
    overlap_param_gather=False,
)


def config_of(**values: Any) -> TransformerConfig:
    # Megatron warns of its own default scope.
    return TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=8, cuda_graph_scope=[], **values)


def run_of(model: BuiltModel = MODEL, training: BuiltTraining = TRAINING, **layout: Any) -> BuiltRun:
    return BuiltRun(
        order=OrderConfig(emulate=ParallelConfig(**layout)),
        precision="float32",
        model=model,
        training=training,
        parallel=ParallelConfig(),
    )


def of_layout(run: BuiltRun) -> list[str]:
    layout = run.order.emulate
    assert layout is not None
    return list(limits.layout_limits(run, layout))


def plan_of(**layout: Any) -> OrderPlan:
    return plan_order(run_of(**layout), routers=("megatron",))


def following(plan: OrderPlan, *, num_passes: int = 0, divisions: int = 0) -> Following:
    found = object.__new__(Following)
    found.plan, found._num_passes = plan, num_passes
    found._scalings = [torch.tensor(0.5)] * divisions
    return found


def test_a_training_that_emulates_nothing_is_left_alone() -> None:
    order = follow(tiny_model(), OrderConfig())
    order.before_step()
    assert (type(order), order.num_replicas, order.facts) == (OwnOrder, None, FollowedFacts())


def test_a_run_says_before_any_reference_what_keeps_its_order_from_being_followed() -> None:
    layout = ParallelConfig(tensor_model_parallel_size=2)
    assert find_order_limits(tiny_model(), ParallelConfig()) == [
        "the model is TinyGpt; expected one DistributedDataParallel with all of it",
        "the model has no optimizer",
    ]
    # Of several processes the modules are no limit: one process may have others.
    assert find_order_limits(tiny_model(runtime=replace(one_rank(), world_size=2)), layout) == []


def test_the_shape_of_the_training_is_asked_for_first() -> None:
    model = tiny_model(runtime=replace(one_rank(), world_size=2))
    with pytest.raises(LayoutError) as error:
        follow(model, OrderConfig(emulate=ParallelConfig(tensor_model_parallel_size=2)))
    assert str(error.value) == (
        "order.emulate: one process cannot follow tp2 pp1 dp1 in this training:\n"
        "  - the training has 2 processes; start it with 1\n"
        "  - the model is TinyGpt; expected one DistributedDataParallel with all of it\n"
        "  - the model has no optimizer"
    )


def test_each_type_of_module_that_is_not_known_is_named_once_where_it_is_first_met() -> None:
    found = list(limits._unfollowed_modules(next(tiny_model().gpts())))
    assert isinstance(next(tiny_model().gpts()), TinyGpt)
    of_test = "tests.megatron.tiny_model"
    assert found[:3] == [
        f"module the model itself is a {of_test}.TinyGpt, whose products and sums are not known",
        f"module embedding is a {of_test}.Embedding, whose products and sums are not known",
        f"module decoder is a {of_test}.Decoder, whose products and sums are not known",
    ]
    assert sum("Layer," in line for line in found) == 1


@pytest.mark.parametrize(
    ("name", "value", "followed"),
    [
        ("hidden_dropout", 0.1, "0.0"),
        ("fp8", "hybrid", "None"),
        ("bias_activation_fusion", True, "False"),
        ("masked_softmax_fusion", True, "False"),
        ("gradient_accumulation_fusion", True, "False"),
        ("cross_entropy_loss_fusion", True, "False"),
        ("fp32_residual_connection", True, "False"),
        ("mtp_num_layers", 1, "None or 0"),
        ("num_layers_in_first_pipeline_stage", 1, "None"),
        ("softmax_type", "learnable", "vanilla"),
    ],
)
def test_each_setting_whose_arithmetic_is_not_followed_is_named(name: str, value: object, followed: str) -> None:
    config = config_of(hidden_dropout=0.0, attention_dropout=0.0)
    assert list(limits._unfollowed_values(config, limits._MODEL_VALUES)) == []
    setattr(config, name, value)
    assert list(limits._unfollowed_values(config, limits._MODEL_VALUES)) == [
        f"TransformerConfig.{name} {value}: only {followed} is followed"
    ]


def test_settings_of_experts_are_asked_of_experts_alone() -> None:
    config = config_of()
    config.moe_token_dispatcher_type, config.moe_router_load_balancing_type = "flex", "global_aux_loss"
    assert list(limits._unfollowed_values(config, limits._EXPERT_VALUES)) == [
        "TransformerConfig.moe_token_dispatcher_type flex: only alltoall or allgather is followed",
        "TransformerConfig.moe_router_load_balancing_type global_aux_loss: only aux_loss or seq_aux_loss or none is "
        "followed",
    ]


def test_buffers_that_add_otherwise_are_named() -> None:
    config = DistributedDataParallelConfig(average_in_collective=True, use_distributed_optimizer=True)
    assert list(limits._unfollowed_values(config, limits._BUFFER_VALUES)) == [
        "DistributedDataParallelConfig.average_in_collective True: only False is followed"
    ]


@pytest.mark.parametrize(
    ("run", "named"),
    [
        (run_of(EXPERTS, context_parallel_size=2), "context_parallel_size 2 with experts: one process routes"),
        (
            run_of(EXPERTS, data_parallel_size=2, expert_model_parallel_size=2),
            "expert_model_parallel_size 2 above tensor_model_parallel_size × context_parallel_size: experts would see",
        ),
        (
            run_of(training=replace(TRAINING, calculate_per_token_loss=False), data_parallel_size=3),
            "data_parallel_size 3 with calculate_per_token_loss false: each replica divides by its own number",
        ),
        (
            run_of(training=replace(TRAINING, overlap_grad_reduce=True), data_parallel_size=2),
            "training.overlap_grad_reduce, overlap_param_gather: they cut the buffers of gradients",
        ),
        (
            run_of(replace(EXPERTS, add_bias_linear=True), data_parallel_size=2),
            "model.add_bias_linear with experts: how their biases add is not followed",
        ),
    ],
)
def test_each_layout_that_is_not_followed_is_named(run: BuiltRun, named: str) -> None:
    (found,) = of_layout(run)
    assert found.startswith(named)


def test_layouts_that_are_followed_have_no_limits() -> None:
    means = replace(TRAINING, calculate_per_token_loss=False)
    assert of_layout(run_of(data_parallel_size=3)) == []
    assert of_layout(run_of(context_parallel_size=2)) == []
    assert of_layout(run_of(training=means, data_parallel_size=4)) == []
    sequence = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert of_layout(run_of(EXPERTS, expert_model_parallel_size=2, **sequence)) == []


def test_replicas_with_unequal_numbers_of_micro_batches_are_refused() -> None:
    with pytest.raises(LayoutError, match="an update had 3 micro-batches, which 2 data-parallel ranks cannot share"):
        following(plan_of(data_parallel_size=2), num_passes=3).before_step()


def test_gradients_that_were_divided_twice_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"gradients of one update were divided 2 times; one call"):
        following(plan_of(data_parallel_size=2), num_passes=4, divisions=2).before_step()


def test_a_line_that_sequence_parallelism_cannot_cut_is_refused() -> None:
    order = following(plan_of(tensor_model_parallel_size=2, sequence_parallel=True))
    order._check_tokens(torch.zeros(1, 6), is_packed=True)
    with pytest.raises(LayoutError, match="a line of 7 tokens is not a multiple of 2, as sequence_parallel over"):
        order._check_tokens(torch.zeros(1, 7), is_packed=False)


def test_lines_that_context_parallelism_cannot_cut_and_packed_ones_are_refused() -> None:
    order = following(plan_of(context_parallel_size=2))
    order._check_tokens(torch.zeros(1, 8), is_packed=False)
    with pytest.raises(LayoutError, match="a line of 6 tokens is not a multiple of 4, as sequence_parallel over"):
        order._check_tokens(torch.zeros(1, 6), is_packed=False)
    with pytest.raises(LayoutError, match="packed rows under context_parallel_size 2 are not followed"):
        order._check_tokens(torch.zeros(1, 8), is_packed=True)
