"""Layouts: what Megatron cannot run is refused with every rule, and what it computes wrongly unless it is allowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.layouts.cases import RULES_OF_OTHER_MODELS
from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.errors import ConfigError
from mock_scheduler.layouts.layout import Workload, layout_problems
from mock_scheduler.layouts.rules import known_wrong
from mock_scheduler.layouts.rules.known_wrong import (
    KNOWN_WRONG,
    check_allowed_names,
    check_known_wrong,
    find_known_wrong,
    layout_values,
)
from mock_scheduler.layouts.rules.rule import Effect
from pipelines.config import schema
from pipelines.config.loading import load_config
from pipelines.config.model import ModelConfig
from pipelines.config.training import LOSS_VALUES, TrainingConfig

ROOT = Path(__file__).parents[2]
OLD, NEW = "0.16.1", "0.19.2"

# Divisible by everything that the cases split: 8 layers, 8 heads in 4 groups, 4 experts, 8 micro-batches, rows of 8.
DENSE = {"num_layers": 8, "num_attention_heads": 8, "num_query_groups": 4}
EXPERTS = {**DENSE, "num_moe_experts": 4}
TP2, SP2 = {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}


def problems_of(parallel: dict[str, object], model: dict[str, object], **work: int | None) -> list[str]:
    workload = {"num_micro_batches": 8, "sequence_multiple_of": 8, **work}
    return layout_problems(ParallelConfig(**parallel), Workload(model=ModelConfig(**model), **workload))


@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        (SP2, DENSE),
        ({"tensor_model_parallel_size": 4, "sequence_parallel": True, **CP2}, DENSE),
        ({**VPP2, "data_parallel_size": 4}, DENSE),
        ({**SP2, "expert_model_parallel_size": 2, **VPP2, **CP2}, EXPERTS),
        ({"data_parallel_size": 8, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 2}, EXPERTS),
    ],
    ids=["tp2-sp", "tp4-sp-cp2", "pp2-vpp2-dp4", "tp2-sp-pp2-vpp2-cp2-ep2", "dp8-ep4-etp2"],
)
def test_layouts_that_divide_have_no_problem(parallel: dict[str, object], model: dict[str, object]) -> None:
    assert problems_of(parallel, model) == []


RULES = [
    (
        {"tensor_model_parallel_size": 3},
        {**DENSE, "moe_shared_expert_intermediate_size": 100, "num_moe_experts": 2, "moe_layer_freq": 2},
        {},
        [
            "model.num_attention_heads 8 is not a multiple of tensor_model_parallel_size 3",
            "model.num_query_groups 4 is not a multiple of tensor_model_parallel_size 3",
            "model.ffn_hidden_size 256 is not a multiple of tensor_model_parallel_size 3",
            "model.moe_shared_expert_intermediate_size 100 is not a multiple of tensor_model_parallel_size 3",
            "experts with tensor_model_parallel_size 3 need sequence_parallel: without it every rank routes every "
            "token",
        ],
    ),
    (
        {"pipeline_model_parallel_size": 3},
        DENSE,
        {},
        ["model.num_layers 8 is not a multiple of pipeline_model_parallel_size 3"],
    ),
    (
        {**PP2, "virtual_pipeline_model_parallel_size": 3},
        DENSE,
        {},
        [
            "model.num_layers 8 is not a multiple of pipeline_model_parallel_size 2 × "
            "virtual_pipeline_model_parallel_size 3 = 6"
        ],
    ),
    (
        {"virtual_pipeline_model_parallel_size": 2},
        DENSE,
        {},
        ["virtual_pipeline_model_parallel_size 2 needs pipeline_model_parallel_size > 1"],
    ),
    (
        {**PP2, "virtual_pipeline_model_parallel_size": 1},
        DENSE,
        {},
        ["virtual_pipeline_model_parallel_size 1 would have no effect; leave it out, or set it above 1"],
    ),
    (
        PP2,
        DENSE,
        {"layers_per_recomputation": 3},
        [
            "the 4 layers of a pipeline stage are not a multiple of training.recompute_num_layers 3, as "
            "recompute_method uniform needs"
        ],
    ),
    (
        VPP2,
        DENSE,
        {"layers_per_recomputation": 4},
        [
            "the 2 layers of a model chunk are not a multiple of training.recompute_num_layers 4, as "
            "recompute_method uniform needs"
        ],
    ),
    (
        {"data_parallel_size": 3},
        DENSE,
        {},
        ["micro-batches per update 8 is not a multiple of data_parallel_size 3"],
    ),
    (
        {**VPP2, "data_parallel_size": 8},
        DENSE,
        {},
        ["micro-batches per update and data-parallel rank 1 is not a multiple of pipeline_model_parallel_size 2"],
    ),
    (
        {"sequence_parallel": True},
        DENSE,
        {},
        ["sequence_parallel needs tensor_model_parallel_size > 1"],
    ),
    (
        SP2,
        DENSE,
        {"sequence_multiple_of": 3},
        [
            "training.sequence_multiple_of 3 is not a multiple of tensor_model_parallel_size 2, as "
            "sequence_parallel needs"
        ],
    ),
    (
        CP2,
        DENSE,
        {"sequence_multiple_of": 6},
        [
            "training.sequence_multiple_of 6 is not a multiple of 2 × context_parallel_size 2, as context "
            "parallelism needs"
        ],
    ),
    (
        {"tensor_model_parallel_size": 4, "sequence_parallel": True, **CP2},
        DENSE,
        {"sequence_multiple_of": 4},
        [
            "training.sequence_multiple_of 4 is not a multiple of 8, as context_parallel_size 2 and sequence_parallel "
            "over tensor_model_parallel_size 4 need"
        ],
    ),
    (
        {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "data_parallel_size": 4},
        DENSE,
        {},
        [
            "expert_model_parallel_size 2 needs experts: model.num_moe_experts is not set",
            "expert_tensor_parallel_size 2 needs experts: model.num_moe_experts is not set",
        ],
    ),
    (
        {"expert_model_parallel_size": 3, "expert_tensor_parallel_size": 2, "data_parallel_size": 4},
        {**EXPERTS, "moe_ffn_hidden_size": 33, "add_bias_linear": True},
        {},
        [
            "model.num_moe_experts 4 is not a multiple of expert_model_parallel_size 3",
            "model.moe_ffn_hidden_size 33 is not a multiple of expert_tensor_parallel_size 2",
            "the 4 ranks of a pipeline stage (tensor_model_parallel_size 1 × context_parallel_size 1 × "
            "data_parallel_size 4) are not a multiple of expert_model_parallel_size 3 × expert_tensor_parallel_size 2",
            "experts with biases (model.add_bias_linear) need expert_tensor_parallel_size 1, found 2",
        ],
    ),
]


@pytest.mark.parametrize(("parallel", "model", "work", "problems"), RULES, ids=range(len(RULES)))
def test_every_rule_is_named_with_what_was_found(
    parallel: dict[str, object], model: dict[str, object], work: dict[str, int], problems: list[str]
) -> None:
    assert problems_of(parallel, model, **work) == problems


def test_a_dense_width_counts_only_where_a_layer_is_dense() -> None:
    model = {**DENSE, "num_moe_experts": 4, "ffn_hidden_size": 33, "moe_ffn_hidden_size": 32}
    assert problems_of(SP2, model) == []
    assert problems_of(SP2, {**model, "moe_layer_freq": 2}) == [
        "model.ffn_hidden_size 33 is not a multiple of tensor_model_parallel_size 2"
    ]


def test_numbers_of_micro_batches_that_follow_from_the_data_are_not_judged() -> None:
    assert problems_of({**VPP2, "data_parallel_size": 3}, DENSE, num_micro_batches=None) == []


def test_a_mean_over_micro_batches_needs_their_number_where_empty_ones_would_count() -> None:
    work = {"num_micro_batches": None, "averages_micro_batches": True}
    assert problems_of({**VPP2, "data_parallel_size": 2}, DENSE, **work) == [
        "training.calculate_per_token_loss false is a mean over micro-batches, and with data_parallel_size 2 and "
        "virtual_pipeline_model_parallel_size 2 an update is filled up with empty ones, which would count; set it to "
        "true, or fix the number of micro-batches (training.batching fixed without sequence_packing, rollout_form "
        "trajectory)"
    ]
    assert problems_of({**SP2, **PP2}, DENSE, **work) == []
    assert problems_of({**VPP2, "data_parallel_size": 2}, DENSE, averages_micro_batches=True) == []


@pytest.mark.parametrize(
    ("parallel", "splits"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size 2"),
        (VPP2, "virtual_pipeline_model_parallel_size 2"),
        ({**VPP2, "data_parallel_size": 2}, "data_parallel_size 2 and virtual_pipeline_model_parallel_size 2"),
    ],
    ids=["dp2", "vpp2", "vpp2-dp2"],
)
def test_megatrons_own_router_takes_no_empty_micro_batches(parallel: dict[str, object], splits: str) -> None:
    """Without a token its losses were 0 / 0, and an update of padding alone counted it."""
    model = {**EXPERTS, "moe_router_impl": "megatron"}
    assert problems_of(parallel, model, num_micro_batches=None) == [
        f"model.moe_router_impl megatron with model.num_moe_experts 4: with {splits} an update is filled up with empty "
        "micro-batches, for which Megatron's own router divides by 0 or counts padding; set model.moe_router_impl to "
        "layout_invariant, or fix the number of micro-batches (training.batching fixed without sequence_packing, "
        "rollout_form trajectory)"
    ]
    assert problems_of(parallel, model) == []
    assert problems_of(parallel, EXPERTS, num_micro_batches=None) == []


@pytest.mark.parametrize(
    ("parallel", "problem"),
    [
        (
            PP2,
            "training.recompute_num_layers 5 is larger than the 4 layers of a pipeline stage, of which "
            "recompute_method block takes the first ones; set it to at most 4",
        ),
        (
            VPP2,
            "training.recompute_num_layers 5 is larger than the 2 layers of a model chunk, of which "
            "recompute_method block takes the first ones; set it to at most 2",
        ),
    ],
    ids=["stage", "chunk"],
)
def test_block_recomputation_takes_no_more_layers_than_there_are(parallel: dict[str, object], problem: str) -> None:
    assert problems_of(parallel, DENSE, layers_of_block_recomputation=5) == [problem]
    assert problems_of({}, DENSE, layers_of_block_recomputation=8) == []


def test_transformer_engine_is_not_split_over_the_context() -> None:
    fused = {**DENSE, "transformer_impl": "transformer_engine"}
    assert problems_of(CP2, fused) == [
        "context_parallel_size 2 with model.transformer_impl transformer_engine is not supported here yet: masks and "
        "packed lines are described to each rank as the local layers take them; set model.transformer_impl to local, "
        "or context_parallel_size to 1"
    ]
    assert problems_of(SP2, fused) == []


DYNAMIC = ("training.batching=dynamic", "training.max_tokens_per_micro_batch=768")
EXPERTS_ON_DP2 = ("model.num_moe_experts=4", "parallel.data_parallel_size=2")
MEANS_OF_LINES = ("training.calculate_per_token_loss=false", "parallel.data_parallel_size=2")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            (*MEANS_OF_LINES, "training.batching=dynamic", "training.max_tokens_per_micro_batch=768"),
            "training.calculate_per_token_loss false is a mean over micro-batches, and with data_parallel_size 2 an",
        ),
        (
            (*MEANS_OF_LINES, "rollout_form=step"),
            "training.calculate_per_token_loss false is a mean over micro-batches",
        ),
        (
            ("training.recompute_granularity=full", "training.recompute_num_layers=3"),
            "the 2 layers of a pipeline stage are not a multiple of training.recompute_num_layers 3",
        ),
        (
            (
                "training.recompute_granularity=full",
                "training.recompute_method=block",
                "training.recompute_num_layers=3",
            ),
            "training.recompute_num_layers 3 is larger than the 2 layers of a pipeline stage",
        ),
        (
            (*EXPERTS_ON_DP2, "model.moe_router_impl=megatron", *DYNAMIC),
            "model.moe_router_impl megatron with model.num_moe_experts 4: with data_parallel_size 2 an update is",
        ),
        (
            (*EXPERTS_ON_DP2, "model.moe_router_impl=megatron", "rollout_form=step"),
            "model.moe_router_impl megatron with model.num_moe_experts 4: with data_parallel_size 2 an update is",
        ),
    ],
    ids=["dynamic", "step", "recompute", "block", "router, dynamic", "router, step"],
)
def test_the_rules_see_how_training_batches_and_recomputes(overrides: tuple[str, ...], problem: str) -> None:
    first, rule = refusal_of(*overrides).splitlines()
    assert first.endswith("cannot be run:")
    assert rule.startswith(f"    - {problem}")


@pytest.mark.parametrize(
    "overrides",
    [
        MEANS_OF_LINES,
        ("training.recompute_granularity=full", "training.recompute_method=block", "training.recompute_num_layers=2"),
        (*EXPERTS_ON_DP2, "model.moe_router_impl=megatron"),
        (*EXPERTS_ON_DP2, *DYNAMIC),
        ("model.num_moe_experts=4", "model.moe_router_impl=megatron", *DYNAMIC),
    ],
    ids=["fixed", "block", "fixed with Megatron's router", "dynamic with the invariant router", "dynamic on dp1"],
)
def test_the_rules_leave_alone_what_training_does_not_do(overrides: tuple[str, ...]) -> None:
    load(*overrides)


def load(*overrides: str, config_path: Path = ROOT / "configs") -> schema.PipelineConfig:
    return load_config("quickstart", config_path=config_path, overrides=overrides)


def refusal_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value).partition("\n")[2]


MOE_TP2 = ("model.num_moe_experts=4", "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
MOE_TP2_EP2 = (*MOE_TP2, "parallel.expert_model_parallel_size=2")
AUX_LOSS = ("model.moe_router_load_balancing_type=aux_loss", "model.moe_aux_loss_coeff=0.1")
CROSSING = (
    *("model.num_layers=4", "parallel.pipeline_model_parallel_size=2"),
    *("parallel.virtual_pipeline_model_parallel_size=2", "parallel.overlap_p2p_comm=false"),
)
CP2_MEANS = ("parallel.context_parallel_size=2", "training.calculate_per_token_loss=false")
OFF, ON = "sequence parallelism off", "sequence parallelism on"


@pytest.mark.parametrize(
    ("overrides", "layout", "problem", "name"),
    [
        (
            CROSSING,
            f"tp1 pp2 vpp2 dp1 (2 processes: tp 1, pp 2, vpp 2, cp 1, ep 1, etp 1, dp 1, {OFF})",
            "pipeline_model_parallel_size is 2, virtual_pipeline_model_parallel_size is 2, overlap_p2p_comm is False, "
            "batch_p2p_comm is True: activations of the two stages cross, without an error: loss 4.2348 in place of "
            "4.1858 was measured. Set overlap_p2p_comm=True and batch_p2p_comm=False (parallel.overlap_p2p_comm=true "
            "is both). [pipeline-crossing; issue 1450, PRs 5271 and 7177; measured with 0.16.1 and 0.19.2]",
            "pipeline-crossing",
        ),
        (
            MOE_TP2,
            f"tp2 pp1 dp1 sp (2 processes: tp 2, pp 1, vpp 1, cp 1, ep 1, etp 1, dp 1, {ON})",
            "tensor_model_parallel_size is 2, expert_tensor_parallel_size is 1, expert_model_parallel_size is 1, "
            "num_moe_experts is 4: gradients of experts are summed over the ranks that hold the same dense weights, "
            "not over those that hold the same experts: with tp 2 their relative error was up to 0.62, and replicas "
            "of 16 expert tensors differed, while the loss was equal. Set expert_model_parallel_size above 1, or "
            "expert_tensor_parallel_size to tensor_model_parallel_size, or install megatron-core>=0.19. "
            "[experts-under-tp; PR 5916; measured wrong with 0.16.1, right with 0.19.2]",
            "experts-under-tp",
        ),
        (
            (*MOE_TP2_EP2, *AUX_LOSS, "model.moe_router_impl=megatron"),
            f"tp2 pp1 ep2 dp1 sp (2 processes: tp 2, pp 1, vpp 1, cp 1, ep 2, etp 1, dp 1, {ON})",
            "moe_router_load_balancing_type is 'aux_loss', moe_aux_loss_coeff is 0.1, moe_z_loss_coeff is 0.0, "
            "calculate_per_token_loss is True, tensor_model_parallel_size is 2, context_parallel_size is 1: the "
            "router's auxiliary losses count tp × cp times too little: with tp 2 and ep 2 the relative error of the "
            "router's gradient was 0.377, while the loss was equal. Set model.moe_router_impl=layout_invariant, or "
            "calculate_per_token_loss=False, or install megatron-core>=0.19. [aux-loss-per-token; issue 1652, PR 5047; "
            "measured wrong with 0.16.1, right with 0.19.2]",
            "aux-loss-per-token",
        ),
        (
            CP2_MEANS,
            f"tp1 pp1 cp2 dp1 (2 processes: tp 1, pp 1, vpp 1, cp 2, ep 1, etp 1, dp 1, {OFF})",
            "context_parallel_size is 2, calculate_per_token_loss is False, loss_values is 3: each cp rank divides by "
            "the response tokens of its own part of the rows, of which there are unequally many: with cp 2 the "
            "relative error of gradients was 0.875, while the loss was equal. Set calculate_per_token_loss=True, or "
            "context_parallel_size=1. [loss-tuple-under-cp; issue 7452, PR 7513; measured with 0.16.1 and 0.19.2]",
            "loss-tuple-under-cp",
        ),
        (
            (*MOE_TP2_EP2, "model.add_bias_linear=true"),
            f"tp2 pp1 ep2 dp1 sp (2 processes: tp 2, pp 1, vpp 1, cp 1, ep 2, etp 1, dp 1, {ON})",
            "num_moe_experts is 4, add_bias_linear is True, tensor_model_parallel_size is 2, sequence_parallel is "
            "True, transformer_impl is 'local': gradients of the experts' second biases are summed over tp, whose "
            "ranks hold different experts, or count twice: with tp 2 and ep 2, gradients of 1 and of 2 of two experts "
            "both became "
            "3. Set add_bias_linear=False, or tensor_model_parallel_size=1. [expert-bias-under-tp; "
            "megatron/core/tensor_parallel/layers.py, RowParallelLinear; measured with 0.16.1, found in 0.19.2]",
            "expert-bias-under-tp",
        ),
    ],
    ids=[rule.name for rule in KNOWN_WRONG if rule.name not in RULES_OF_OTHER_MODELS],
)
def test_a_known_wrong_layout_is_refused_when_it_is_loaded_unless_it_is_allowed(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], layout: str, problem: str, name: str
) -> None:
    monkeypatch.setattr(schema, "installed_megatron", lambda: OLD)
    assert refusal_of(*overrides) == (
        f"  - layout {layout} is known to compute wrong values with megatron-core 0.16.1:\n"
        f"    - {problem}\n"
        f"  To run it all the same, with a warning: parallel.allow_known_wrong=[{name}]"
    )
    assert load(*overrides, f"parallel.allow_known_wrong=[{name}]").parallel.allow_known_wrong == [name]


@pytest.mark.parametrize(
    "overrides",
    [
        (*CROSSING[:3], "parallel.overlap_p2p_comm=true"),
        # The schedule without chunks never overlaps, and does not cross.
        ("parallel.pipeline_model_parallel_size=2", "parallel.overlap_p2p_comm=false"),
        MOE_TP2_EP2,
        ("model.num_moe_experts=4", "parallel.data_parallel_size=2"),
        (*MOE_TP2_EP2, *AUX_LOSS, "model.moe_z_loss_coeff=0.01"),
        (*MOE_TP2_EP2, "model.moe_router_impl=megatron"),
        (*MOE_TP2_EP2, *AUX_LOSS, "model.moe_router_impl=megatron", "training.calculate_per_token_loss=false"),
        (
            *(*MOE_TP2_EP2, "model.add_bias_linear=true", "model.transformer_impl=transformer_engine"),
            "actor_infer.use_kv_cache=false",
        ),
        ("model.num_moe_experts=4", "model.add_bias_linear=true", "parallel.data_parallel_size=2"),
        ("parallel.context_parallel_size=2",),
        ("training.calculate_per_token_loss=false",),
    ],
    ids=str,
)
def test_the_cures_are_accepted(monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]) -> None:
    monkeypatch.setattr(schema, "installed_megatron", lambda: OLD)
    load(*overrides)


def values_of(
    parallel: dict[str, object], model: dict[str, object], training: dict[str, object] | None = None
) -> dict[str, object]:
    return layout_values(
        ParallelConfig(**parallel), ModelConfig(**model), TrainingConfig(**(training or {})), loss_values=LOSS_VALUES
    )


LATENT = {"multi_latent_attention": True, "qk_layernorm": True}
WRONG = {
    "pipeline-crossing": values_of({**VPP2, "overlap_p2p_comm": False}, DENSE),
    "experts-under-tp": values_of(SP2, EXPERTS),
    "aux-loss-per-token": values_of(
        {**CP2, "expert_model_parallel_size": 2}, {**EXPERTS, "moe_z_loss_coeff": 0.01, "moe_router_impl": "megatron"}
    ),
    "loss-tuple-under-cp": values_of(CP2, DENSE, {"calculate_per_token_loss": False}),
    "expert-bias-under-tp": values_of({**SP2, "expert_model_parallel_size": 2}, {**EXPERTS, "add_bias_linear": True}),
    "latent-keys-under-tp": {**values_of(SP2, DENSE), **LATENT},
}
OF_ALL_VERSIONS = ["pipeline-crossing", "loss-tuple-under-cp", "expert-bias-under-tp", "latent-keys-under-tp"]


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ("0.16.1", list(WRONG)),
        ("0.18.2", list(WRONG)),
        ("0.19", OF_ALL_VERSIONS),
        ("0.19.2", OF_ALL_VERSIONS),
        (None, OF_ALL_VERSIONS),
    ],
)
def test_a_rule_holds_for_its_versions_and_without_megatron_only_where_it_holds_for_all(
    version: str | None, names: list[str]
) -> None:
    found = {
        name: [conflict.rule.name for conflict in find_known_wrong(values, version=version)]
        for name, values in WRONG.items()
    }
    assert found == {name: [name] if name in names else [] for name in WRONG}


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({}, ["latent-keys-under-tp", "latent-norm-under-tp"]),
        ({"sequence_parallel": True}, ["latent-keys-under-tp"]),
        ({"qk_layernorm": False}, ["latent-keys-under-tp"]),
        ({"tensor_model_parallel_size": 1}, []),
        ({"transformer_impl": "transformer_engine"}, []),
        ({"multi_latent_attention": False}, []),
    ],
)
def test_latent_attention_is_wrong_under_tp_where_layers_are_local(values: dict[str, object], names: list[str]) -> None:
    known = {**values_of({"tensor_model_parallel_size": 2}, DENSE), **LATENT, **values}
    assert [found.rule.name for found in find_known_wrong(known, version=OLD)] == names


def test_experts_that_are_split_more_than_the_rest_are_reduced_wrongly_too() -> None:
    parallel = {"data_parallel_size": 2, "expert_tensor_parallel_size": 2}
    assert [found.rule.name for found in find_known_wrong(values_of(parallel, EXPERTS), version=OLD)] == [
        "experts-under-tp"
    ]
    assert find_known_wrong(values_of({**SP2, "expert_tensor_parallel_size": 2}, EXPERTS), version=OLD) == []


def test_all_rules_that_apply_are_listed_and_the_line_to_allow_them_keeps_what_is_allowed() -> None:
    parallel = ParallelConfig(**SP2, **CP2, allow_known_wrong=["pipeline-crossing"])
    values = layout_values(
        parallel, ModelConfig(**EXPERTS), TrainingConfig(calculate_per_token_loss=False), loss_values=LOSS_VALUES
    )
    with pytest.raises(ConfigError) as caught:
        check_known_wrong(parallel, values, version=OLD)
    lines = str(caught.value).splitlines()
    assert [line.partition(" [")[2].partition(";")[0] for line in lines[1:-1]] == [
        "experts-under-tp",
        "loss-tuple-under-cp",
    ]
    assert lines[-1] == (
        "To run it all the same, with a warning: "
        "parallel.allow_known_wrong=[pipeline-crossing,experts-under-tp,loss-tuple-under-cp]"
    )


def test_without_megatron_the_refusal_says_that_no_version_is_right() -> None:
    parallel = ParallelConfig(**CP2)
    with pytest.raises(ConfigError, match="wrong values with megatron-core of any version:"):
        check_known_wrong(parallel, WRONG["loss-tuple-under-cp"], version=None)


def test_an_allowed_name_that_is_no_rule_is_refused_with_the_known_ones() -> None:
    assert refusal_of("parallel.allow_known_wrong=[experts-under-etp,everything]") == (
        "  - parallel.allow_known_wrong has names that are no rule about known wrong layouts (known: "
        "pipeline-crossing, experts-under-tp, aux-loss-per-token, loss-tuple-under-cp, expert-bias-under-tp, "
        "latent-keys-under-tp, latent-norm-under-tp):\n"
        "    - 'experts-under-etp'; nearest: experts-under-tp\n"
        "    - 'everything'"
    )
    check_allowed_names([rule.name for rule in KNOWN_WRONG])


def test_every_rule_to_allow_is_about_wrong_values() -> None:
    assert {rule.effect for rule in KNOWN_WRONG} == {Effect.WRONG}


def test_the_installed_version_is_read_from_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(known_wrong, "read_package_version", lambda *names: asked.append(names) or "0.17.0")
    assert known_wrong.installed_megatron() == "0.17.0"
    assert asked == [("megatron-core",)]


@pytest.mark.parametrize("command", ["launch", "config"])
def test_the_command_line_refuses_a_wrong_layout_and_imports_no_torch(command: str) -> None:
    code = (
        "import sys\nfrom mock_scheduler.cli import main\n"
        f"code = main([{command!r}, 'quickstart', *{CP2_MEANS!r}])\n"
        "print(code, sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'megatron'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "5 []\n"
    assert "layout tp1 pp1 cp2 dp1 (2 processes: tp 1, pp 1, vpp 1, cp 2," in done.stderr
    assert "[loss-tuple-under-cp; " in done.stderr


def rows_of(text: str, header: str) -> dict[str, list[str]]:
    """Of the Markdown table with this first column, the cells after the first by the first's code."""
    lines = text.partition(f"\n| {header} |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {first.strip("` "): rest for first, *rest in cells}


def test_the_page_has_every_rule_as_it_is() -> None:
    """Where it fails, copy ``breaks``, ``change`` and the versions of the rule into docs/layouts.md."""
    rows = rows_of((ROOT / "docs" / "layouts.md").read_text(encoding="utf-8"), "rule")
    assert {name: cells[1:] for name, cells in rows.items()} == {
        rule.name: [rule.describe_versions(), rule.breaks, rule.change] for rule in KNOWN_WRONG
    }


def test_the_page_has_every_key_of_the_layout() -> None:
    rows = rows_of((ROOT / "docs" / "layouts.md").read_text(encoding="utf-8"), "key, `parallel.` +")
    assert list(rows) == list(ParallelConfig.model_fields)
