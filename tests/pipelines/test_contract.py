"""The contract of a run: one planted change per field, found and named; what may differ is accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from mock_scheduler.config.loading import load_config
from mock_scheduler.config.schema import PipelineConfig
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


def load(*overrides: str) -> PipelineConfig:
    return load_config("quickstart", config_path=CONFIGS, overrides=overrides)


def contract_of(config: PipelineConfig, **settings: str) -> Contract:
    return build_contract(config, build_tokenizer(config), {**SETTINGS, **settings})


RECORDED = contract_of(load())

# Field that must be named -> override that breaks it.
PLANTED = {
    "seed": "seed=43",
    "sequence_length": "sequence_length=200",
    "rollout_batch_size": "rollout_batch_size=128",
    "val_batch_size": "val_batch_size=128",
    "train_environments": "custom_envs.FrozenLake.max_steps=9",
    "val_environments": "val_env_manager={num_env_groups: 16, group_size: 4}",
    "sampling": "actor_infer.generating_args.temperature=0.9",
    "vocabulary": "custom_envs.FrozenLake.env_config.size=4",
    "model.vocab_size": "model.vocab_size=128",
    "model": "model.num_layers=4",
}


def differing_fields(config: PipelineConfig, **settings: str) -> list[str]:
    differences = contract_of(config, **settings).differences(RECORDED)
    return [difference.name for difference in differences if difference.is_blocking]


@pytest.mark.parametrize(("name", "override"), PLANTED.items(), ids=PLANTED.keys())
def test_a_changed_field_is_refused_by_name(name: str, override: str) -> None:
    with pytest.raises(ContractError, match=rf"\n  {name}: recorded .*, current "):
        check_contract(RECORDED, contract_of(load(override)), "error")


def test_every_field_that_must_match_has_a_planted_change() -> None:
    """A field added to the contract without a test of its own fails here."""
    must_match = {field.name for field in RECORDED.fields if field.rule is Rule.MUST_MATCH}
    determinism = {f"determinism.{name}" for name in SETTINGS if not name.startswith("version.")}
    assert must_match == PLANTED.keys() | determinism


@pytest.mark.parametrize(
    "change",
    [
        "model.normalization=LayerNorm",
        "model.swiglu=false",
        "model.rotary_base=1000",
        "model.init_method_std=0.02",
        "model.untie_embeddings_and_output_weights=false",
        "model.qk_layernorm=true",
        "model.ffn_hidden_size=256",
    ],
)
def test_any_field_of_the_model_that_changes_what_it_computes_is_refused(change: str) -> None:
    assert differing_fields(load(change)) == ["model"]


def test_another_action_set_of_the_policy_is_refused() -> None:
    assert differing_fields(load("actor_infer.only_action_tokens=false")) == ["sampling"]


def test_several_changes_are_all_listed() -> None:
    assert differing_fields(load("seed=1", "model.num_layers=4", "sequence_length=96")) == [
        "model",
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
