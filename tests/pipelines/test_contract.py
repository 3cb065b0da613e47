"""The contract of a run: one planted change per field, found and named; what may differ is accepted."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from mock_scheduler.config.loading import load_config
from mock_scheduler.config.schema import ModelConfig, PipelineConfig
from mock_scheduler.errors import ContractError
from mock_scheduler.recording.contract import Contract, Rule, check_contract
from pipelines.contract import build_contract
from pipelines.environments.registry import build_tokenizer

CONFIGS = Path(__file__).parents[2] / "configs"
SETTINGS = {
    "NCCL_ALGO": "Ring",
    "NVTE_UNLISTED": "1",
    "torch.num_threads": "1",
    "torch.deterministic_algorithms": "True",
    "version.torch": "2.13.0",
    "version.cpu_capability": "AVX2",
}


@functools.cache
def load(*overrides: str) -> PipelineConfig:
    return load_config("quickstart", config_path=CONFIGS, overrides=overrides)


def contract_of(config: PipelineConfig, **settings: str) -> Contract:
    return build_contract(config, build_tokenizer(config), {**SETTINGS, **settings})


RECORDED = contract_of(load())

# Every configured field that must match -> another value of it; the overrides that it needs beside it follow below.
ENV = "custom_envs.FrozenLake"
PLANTED = {
    "seed": "43",
    "sequence_length": "200",
    "rollout_batch_size": "128",
    "val_batch_size": "128",
    "model.vocab_size": "128",
    "model.num_layers": "4",
    "model.hidden_size": "32",
    "model.num_attention_heads": "2",
    "model.num_query_groups": "4",
    "model.ffn_hidden_size": "256",
    "model.normalization": "LayerNorm",
    "model.layernorm_epsilon": "1e-6",
    "model.swiglu": "false",
    "model.add_bias_linear": "true",
    "model.add_qkv_bias": "true",
    "model.qk_layernorm": "true",
    "model.position_embedding_type": "learned_absolute",
    "model.rotary_base": "1000",
    "model.untie_embeddings_and_output_weights": "false",
    "model.init_method_std": "0.02",
    "actor_infer.only_action_tokens": "false",
    "actor_infer.generating_args.temperature": "0.9",
    "actor_infer.generating_args.top_k": "3",
    "actor_infer.generating_args.top_p": "0.9",
    "train_env_manager.num_env_groups": "4",
    "train_env_manager.group_size": "4",
    "train_env_manager.tags": "[FrozenLake,FrozenLake]",
    "val_env_manager.num_env_groups": "4",
    "val_env_manager.group_size": "4",
    "val_env_manager.tags": "[FrozenLake,FrozenLake]",
    f"{ENV}.max_steps": "9",
    f"{ENV}.env_config.map_name": "4x4",
    f"{ENV}.env_config.size": "4",
    f"{ENV}.env_config.p": "0.7",
    f"{ENV}.env_config.is_slippery": "true",
    f"{ENV}.env_config.format_penalty": "-0.5",
}
# These change the vocabulary as well, or have fields of their own where they are set.
IMPLIED = {
    f"{ENV}.env_config.map_name": ["vocabulary", "model.vocab_size"],
    f"{ENV}.env_config.size": ["vocabulary", "model.vocab_size"],
}
# No other value exists yet, and the tests below plant the last two.
NOT_PLANTED = {f"{ENV}.env_type", "train_env_manager.generating_args", "val_env_manager.generating_args"}


def differing_fields(config: PipelineConfig, **settings: str) -> list[str]:
    differences = contract_of(config, **settings).differences(RECORDED)
    return [difference.name for difference in differences if difference.is_blocking]


@pytest.mark.parametrize(("name", "value"), PLANTED.items(), ids=PLANTED.keys())
def test_a_changed_field_is_refused_by_name_and_nothing_else_is(name: str, value: str) -> None:
    changed = contract_of(load(f"{name}={value}"))
    with pytest.raises(
        ContractError, match=rf"\n  {name}: recorded .+, current .+\. (Set {name} |The initial weights )"
    ):
        check_contract(RECORDED, changed, "error")
    assert sorted(differing_fields(load(f"{name}={value}"))) == sorted([name, *IMPLIED.get(name, [])])


def test_every_field_that_must_match_has_a_planted_change() -> None:
    """A field added to the contract without a test of its own fails here."""
    must_match = {field.name for field in RECORDED.fields if field.rule is Rule.MUST_MATCH}
    determinism = {f"determinism.{name}" for name in SETTINGS if not name.startswith("version.")}
    assert must_match == PLANTED.keys() | {"vocabulary"} | NOT_PLANTED | determinism


def test_every_key_of_the_model_is_in_the_contract() -> None:
    """A key added to the schema must be put under a rule: how it is computed may differ, what is computed may not."""
    names = {field.name for field in RECORDED.fields}
    exempt = {"model.make_vocab_size_divisible_by"}
    assert {f"model.{key}" for key in ModelConfig.model_fields} - exempt <= names


@pytest.mark.parametrize("manager", ["train_env_manager", "val_env_manager"])
def test_sampling_of_one_managers_own_is_refused(manager: str) -> None:
    assert f"{manager}.generating_args.temperature" in differing_fields(
        load(f"{manager}.generating_args={{temperature: 0.5}}")
    )


def test_several_changes_are_all_listed() -> None:
    assert sorted(differing_fields(load("seed=1", "model.num_layers=4", "sequence_length=96"))) == [
        "model.num_layers",
        "seed",
        "sequence_length",
    ]


@pytest.mark.parametrize("name", [name for name in SETTINGS if not name.startswith("version.")])
def test_a_determinism_setting_that_changed_is_refused_by_name(name: str) -> None:
    assert differing_fields(load(), **{name: "other"}) == [f"determinism.{name}"]


def test_a_setting_that_only_the_replaying_run_has_is_refused() -> None:
    assert differing_fields(load(), NVTE_NEW="1") == ["determinism.NVTE_NEW"]


@pytest.mark.parametrize(
    "change",
    [
        "parallel.tensor_model_parallel_size=2",
        "parallel.pipeline_model_parallel_size=2",
        "parallel.data_parallel_size=2",
        "training.micro_batch_size=4",
        "training.lr=1e-4",
        "training.use_distributed_optimizer=false",
        "precision=bfloat16",
        "model.transformer_impl=transformer_engine",
        "model.make_vocab_size_divisible_by=128",
        "pg_clip=0.1",
        "ppo_epochs=1",
        "max_steps=2",
        "exp_name=other",
    ],
)
def test_what_is_being_compared_may_differ(change: str) -> None:
    assert differing_fields(load(change)) == []


def test_versions_may_differ_and_are_reported() -> None:
    differences = contract_of(load(), **{"version.torch": "2.14.0"}).differences(RECORDED)
    assert [(item.name, item.is_blocking) for item in differences] == [("version.torch", False)]


def test_a_vocabulary_size_that_is_written_out_is_the_same_as_the_derived_one() -> None:
    config = load()
    assert differing_fields(load(f"model.vocab_size={build_tokenizer(config).vocab_size}")) == []


def test_the_message_has_both_values_and_the_advice() -> None:
    with pytest.raises(ContractError) as caught:
        check_contract(RECORDED, contract_of(load("seed=43")), "error", source="./dumps")
    assert str(caught.value) == (
        "[Rollout Mock] This run breaks the contract of ./dumps in 1 field:\n"
        "  seed: recorded 42, current 43. The initial weights follow from seed: set it as in the recording run."
    )
