"""The contract of a run: one planted change per field, found and named; what may differ is accepted."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from mock_scheduler.determinism.guard import is_repeatability_setting
from mock_scheduler.errors import ContractError
from mock_scheduler.recording.contract import Contract, Match, Rule, check_contract
from pipelines.config.loading import load_config
from pipelines.config.schema import PipelineConfig
from pipelines.environments.registry import build_tokenizer
from pipelines.keys import YOUNG_KEYS
from pipelines.replay_contract import build_contract
from tests.hf_checkpoints import write_checkpoint

CONFIGS = Path(__file__).parents[2] / "configs"
SETTINGS = {
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "unset",
    "NVTE_UNLISTED": "1",
    "torch.cuda.matmul.allow_tf32": "False",
    "torch.num_threads": "1",
    "torch.deterministic_algorithms": "True",
    "version.torch": "2.13.0",
    "version.cpu_capability": "AVX2",
}
REPEATABILITY = ["NCCL_ALGO", "torch.num_threads", "torch.deterministic_algorithms"]


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
    "model.num_moe_experts": "4",
    "rollout_form": "step",
    "actor_infer.max_new_tokens": "2",
    "actor_infer.only_action_tokens": "false",
    "actor_infer.weights_precision": "bfloat16",
    "actor_infer.generating_args.temperature": "0.9",
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
    f"{ENV}.env_config.held_out_fraction": "0.25",
}
# The same for a policy with experts, whose keys have no effect without.
EXPERTS = ("model.num_moe_experts=4",)
PLANTED_EXPERTS = {
    "model.moe_layer_freq": "2",
    "model.moe_ffn_hidden_size": "32",
    "model.moe_shared_expert_intermediate_size": "32",
    "model.moe_router_topk": "3",
    "model.moe_router_score_function": "sigmoid",
    "model.moe_router_pre_softmax": "true",
    "model.moe_router_topk_scaling_factor": "2.0",
}
EXPERT_BIAS = "model.moe_router_enable_expert_bias"  # needs sigmoid, and is planted on top of it
# And for the environment whose settings are others.
SOKOBAN = (f"{ENV}.env_type=sokoban", f"~{ENV}.env_config")
PLANTED_SOKOBAN = {
    "size": "5",
    "num_boxes": "2",
    "min_solution": "3",
    "max_solution": "5",
    "step_penalty": "-0.2",
    "box_reward": "2.0",
    "solved_reward": "5.0",
    "sparse_reward": "true",
    "show_walls_around": "false",
    "format_penalty": "-0.5",
    "held_out_fraction": "0.25",
}
BESIDE = {f"{ENV}.env_config.map_name": (f"{ENV}.env_config.size=4",)}  # what a change needs beside it
# These change the vocabulary or the initial weights as well, or have fields of their own where they are set.
IMPLIED = {
    f"{ENV}.env_config.map_name": [f"{ENV}.env_config.size", "vocabulary", "model.vocab_size", "initial_weights"],
    f"{ENV}.env_config.size": ["vocabulary", "model.vocab_size", "initial_weights"],
    "actor_infer.generating_args.temperature": ["val_env_manager.generating_args.temperature"],
}
INITIAL_WEIGHTS = (
    *(
        "model.num_moe_experts",
        "seed",
        "model.vocab_size",
        "model.num_layers",
        "model.hidden_size",
        "model.num_attention_heads",
    ),
    *("model.num_query_groups", "model.ffn_hidden_size", "model.normalization", "model.swiglu"),
    *("model.add_bias_linear", "model.add_qkv_bias", "model.qk_layernorm", "model.position_embedding_type"),
    *("model.untie_embeddings_and_output_weights", "model.init_method_std"),
)
IMPLIED |= {name: ["initial_weights"] for name in INITIAL_WEIGHTS}
# No other value exists, or the schema lets none through; a test below plants those of validation.
NOT_PLANTED = {f"{ENV}.env_type"} | {
    f"{section}.generating_args.{name}" for section in ("actor_infer", "val_env_manager") for name in ("top_k", "top_p")
}
NOT_PLANTED |= {"val_env_manager.generating_args.temperature"}
CHANGES_WEIGHTS = ("moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
CHANGES_VOCABULARY = ("size", "show_walls_around")


def differing_fields(config: PipelineConfig, recorded: Contract = RECORDED, **settings: str) -> list[str]:
    differences = contract_of(config, **settings).differences(recorded)
    return [difference.name for difference in differences if difference.is_blocking]


@pytest.mark.parametrize(("name", "value"), PLANTED.items(), ids=PLANTED.keys())
def test_a_changed_field_is_refused_by_name_and_nothing_else_is(name: str, value: str) -> None:
    config = load(f"{name}={value}", *BESIDE.get(name, ()))
    changed = contract_of(config)
    with pytest.raises(ContractError, match=rf"\n  {name}: recorded .+, current .+\. (Set {name} |The initial )"):
        check_contract(RECORDED, changed, "error")
    assert sorted(differing_fields(config)) == sorted([name, *IMPLIED.get(name, [])])


def test_every_field_that_must_match_has_a_planted_change() -> None:
    """A field added to the contract without a test of its own fails here."""
    must_match = {field.name for field in RECORDED.fields if field.rule is Rule.MUST_MATCH}
    determinism = {f"determinism.{name}" for name in REPEATABILITY}
    implied = {"vocabulary", "initial_weights", "data_cursor"}
    experts = PLANTED_EXPERTS.keys() | {EXPERT_BIAS}
    assert must_match == PLANTED.keys() | experts | implied | NOT_PLANTED | determinism


@pytest.mark.parametrize(("name", "value"), PLANTED_EXPERTS.items(), ids=PLANTED_EXPERTS.keys())
def test_a_changed_expert_is_refused_by_name(name: str, value: str) -> None:
    implied = ["initial_weights"] if name.endswith(CHANGES_WEIGHTS) else []
    changed = load(*EXPERTS, f"{name}={value}")
    assert sorted(differing_fields(changed, contract_of(load(*EXPERTS)))) == sorted([name, *implied])


def test_a_changed_expert_bias_is_refused_by_name() -> None:
    sigmoid = (*EXPERTS, "model.moe_router_score_function=sigmoid")
    assert differing_fields(load(*sigmoid, f"{EXPERT_BIAS}=true"), contract_of(load(*sigmoid))) == [EXPERT_BIAS]


@pytest.mark.parametrize(("name", "value"), PLANTED_SOKOBAN.items(), ids=PLANTED_SOKOBAN.keys())
def test_a_changed_puzzle_is_refused_by_name(name: str, value: str) -> None:
    implied = ["vocabulary", "model.vocab_size", "initial_weights"] if name in CHANGES_VOCABULARY else []
    key = f"{ENV}.env_config.{name}"
    changed = load(*SOKOBAN, f"{key}={value}")
    assert sorted(differing_fields(changed, contract_of(load(*SOKOBAN)))) == sorted([key, *implied])


YOUNG = {
    "model.kv_channels": (("model.kv_channels=8",), ["initial_weights"]),
    "model.rope_scaling.factor": (("model.rope_scaling={factor: 32}",), list[str]()),
    "model.moe_shared_expert_gate": (
        ("model.moe_shared_expert_intermediate_size=32", "model.moe_shared_expert_gate=true"),
        ["initial_weights", "model.moe_shared_expert_intermediate_size"],
    ),
}


@pytest.mark.parametrize("name", YOUNG)
def test_a_key_that_the_recording_does_not_know_is_refused_where_it_is_set(name: str) -> None:
    overrides, implied = YOUNG[name]
    found = differing_fields(load(*EXPERTS, *overrides), contract_of(load(*EXPERTS)))
    assert {name, *implied} <= set(found)
    assert all(key.startswith(("model.rope_scaling.", name, *implied)) for key in found)
    assert differing_fields(load(*EXPERTS, *overrides), contract_of(load(*EXPERTS, *overrides))) == []


def test_weights_of_a_hugging_face_checkpoint_are_told_by_what_they_hold(tmp_path: Path) -> None:
    model = ["~model", f"++model.hf_checkpoint={tmp_path}"]
    write_checkpoint(tmp_path, "qwen3")
    config = load_config("quickstart", config_path=CONFIGS, overrides=model)
    one, same, other = (
        build_contract(config, build_tokenizer(config), SETTINGS, weights_digest=64 * digest)
        for digest in ("a", "a", "b")
    )
    assert [difference.name for difference in same.differences(one)] == []
    (difference,) = other.differences(one)
    assert (difference.name, difference.is_blocking) == ("initial_weights", True)
    assert difference.advice == "They are those of model.hf_checkpoint: give the checkpoint of the recording run."
    assert "model.hf_checkpoint" not in {field.name for field in one.fields}


def test_every_setting_of_sokoban_has_a_planted_change() -> None:
    names = {field.name for field in contract_of(load(*SOKOBAN)).fields if field.rule is Rule.MUST_MATCH}
    assert {
        name.removeprefix(f"{ENV}.env_config.") for name in names if ".env_config." in name
    } == PLANTED_SOKOBAN.keys()


def test_losses_of_the_router_are_part_of_training_and_may_differ() -> None:
    changes = [
        "router_load_balancing_type=seq_aux_loss",
        "aux_loss_coeff=0.1",
        "z_loss_coeff=0.1",
        "router_impl=megatron",
    ]
    assert differing_fields(load(*EXPERTS, *(f"model.moe_{c}" for c in changes)), contract_of(load(*EXPERTS))) == []


# Keys that name files or runs, or whose effect is in the contract as it was read back.
EXEMPT = (
    *("exp_name", "output_dir", "track_with", "save_steps", "resume_from_checkpoint", "checkpoint_config", "trace"),
    *("rollout_mock", "align", "system_envs", "debug", "rollout_worker", "training_service"),
)
# The way to an engine's server, and of weights to it; what it samples by is verified.
EXEMPT_OF_ENGINE = ("actor_infer.engine_python", "actor_infer.weights_sync", "actor_infer.server.")


def leaves(prefix: str, value: object) -> set[str]:
    if not isinstance(value, dict):
        return {prefix}
    return set().union(*(leaves(f"{prefix}.{key}", item) for key, item in value.items()))


def test_every_key_is_in_the_contract_or_is_named_here() -> None:
    """A key added to the schema must be put under a rule: how it is trained may differ, what was played may not.

    The keys of the algorithm were in neither, so a replay with another of them did not say so.
    """
    names = {field.name for field in RECORDED.fields}
    dumped = load().model_dump(mode="json")
    keys = set().union(*(leaves(key, value) for key, value in dumped.items() if key not in EXEMPT))
    keys = {key for key in keys if not key.startswith(EXEMPT_OF_ENGINE)}
    # Sampling is in the contract under the keys that are in effect.
    assert keys - names - YOUNG_KEYS.keys() == {"train_env_manager.generating_args", "val_env_manager.generating_args"}


def test_a_recording_of_an_engine_is_replayed_with_another_and_with_none() -> None:
    recorded = contract_of(load("actor_infer.only_action_tokens=false", "actor_infer.engine=vllm"))
    replay = ("actor_infer.only_action_tokens=false", "rollout_mock.enable=true", "rollout_mock.mode=mock")
    replay = (*replay, "rollout_mock.dump_dir=dumps")
    for engine in ("megatron", "openai", "vllm"):
        assert differing_fields(load(*replay, f"actor_infer.engine={engine}"), recorded) == []
    # Raw log-probabilities are others of the same tokens.
    changed = load(*replay, "actor_infer.engine=vllm", "actor_infer.logprobs_mode=raw")
    assert differing_fields(changed, recorded) == ["actor_infer.logprobs_mode"]


@pytest.mark.parametrize(("key", "value"), [("temperature", "0.5"), ("top_k", "3"), ("top_p", "0.9")])
def test_sampling_of_validations_own_is_refused(key: str, value: str) -> None:
    changed = load(f"val_env_manager.generating_args={{{key}: {value}}}")
    assert differing_fields(changed) == [f"val_env_manager.generating_args.{key}"]


def test_sampling_that_is_written_out_is_the_same_as_that_in_effect() -> None:
    written_out = "generating_args={temperature: 1.0, top_k: 0, top_p: 1.0}"
    assert differing_fields(load(f"train_env_manager.{written_out}", f"val_env_manager.{written_out}")) == []


def test_several_changes_are_all_listed() -> None:
    assert sorted(differing_fields(load("seed=1", "model.num_layers=4", "sequence_length=96"))) == [
        "initial_weights",
        "model.num_layers",
        "seed",
        "sequence_length",
    ]


@pytest.mark.parametrize("name", REPEATABILITY)
def test_a_determinism_setting_that_changed_is_refused_by_name(name: str) -> None:
    assert differing_fields(load(), **{name: "other"}) == [f"determinism.{name}"]


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("NVTE_UNLISTED", '"1"'),
        ("NVTE_FUSED_ATTN", "missing"),
        ("NCCL_PROTO", '"unset"'),
        ("torch.cuda.matmul.allow_tf32", '"False"'),
    ],
)
def test_another_choice_of_kernels_is_accepted_and_reported(name: str, recorded: str) -> None:
    """It was refused like a setting that makes runs repeatable, though it is what most comparisons are about."""
    assert not is_repeatability_setting(name)
    differences = check_contract(RECORDED, contract_of(load(), **{name: "0"}), "error")
    assert [difference.describe() for difference in differences] == [f'{name}: recorded {recorded}, current "0"']


def test_another_algorithm_is_accepted_and_reported_key_by_key() -> None:
    changed = load(
        "pg_clip=0.1", "ppo_epochs=1", "kl_loss_coef=0.02", "reward_normalization.method=mean", "max_steps=2"
    )
    differences = check_contract(RECORDED, contract_of(changed), "error")
    assert [difference.describe() for difference in differences] == [
        "max_steps: recorded 4, current 2 (2 less than recorded)",
        'reward_normalization.method: recorded "mean_std", current "mean"',
        "ppo_epochs: recorded 2, current 1",
        "pg_clip: recorded 0.2, current 0.1",
        "kl_loss_coef: recorded 0.01, current 0.02",
    ]


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
        "model.transformer_impl=transformer_engine actor_infer.use_kv_cache=false",
        "model.make_vocab_size_divisible_by=128",
        "pg_clip=0.1",
        "ppo_epochs=1",
        "max_steps=2",
        "exp_name=other",
    ],
)
def test_what_is_being_compared_may_differ(change: str) -> None:
    assert differing_fields(load(*change.split())) == []


@pytest.mark.parametrize(
    ("name", "current", "line"),
    [
        ("version.torch", "2.14.0", 'version.torch: recorded "2.13.0", current "2.14.0" (other release)'),
        (
            "version.torch",
            "2.13.0+cu130",
            'version.torch: recorded "2.13.0", current "2.13.0+cu130" (same release, other build)',
        ),
        ("version.cpu_capability", "AVX512", 'version.cpu_capability: recorded "AVX2", current "AVX512"'),
    ],
)
def test_versions_may_differ_and_are_reported(name: str, current: str, line: str) -> None:
    differences = check_contract(RECORDED, contract_of(load(), **{name: current}), "error")
    assert [difference.describe() for difference in differences] == [line]


def test_more_steps_than_were_recorded_are_no_breach() -> None:
    """Cache and a resumed dump add steps; a replay names each step that is missing, which says more."""
    differences = check_contract(RECORDED, contract_of(load("max_steps=6")), "error")
    assert [difference.describe() for difference in differences] == [
        "max_steps: recorded 4, current 6 (2 more than recorded)"
    ]
    assert next(field.match for field in RECORDED.fields if field.name == "max_steps") is Match.AT_MOST


def test_a_run_that_begins_elsewhere_in_its_data_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pipelines.replay_contract.first_episode", lambda config, mode, step: 7 if mode == "train" else 0
    )
    with pytest.raises(ContractError) as caught:
        check_contract(RECORDED, contract_of(load()), "error", source="./dumps")
    assert str(caught.value) == (
        "[Rollout Mock] This run breaks the contract of ./dumps in 1 field:\n"
        '  data_cursor: recorded {"train":{"first_episode":0},"val":{"first_episode":0}}, current '
        '{"train":{"first_episode":7},"val":{"first_episode":0}} (differs in train.first_episode). The run begins at '
        "other episodes than the recorded one: start it where that began."
    )


@pytest.mark.parametrize("section", ["max_steps=9", "resume_from_checkpoint=somewhere", "save_steps=2"])
def test_a_run_that_goes_on_from_a_checkpoint_has_the_contract_of_the_run_that_began(section: str) -> None:
    assert differing_fields(load(section)) == []


def test_initial_weights_are_the_same_under_another_precision_and_layout() -> None:
    changed = load(
        "precision=bfloat16", "parallel.tensor_model_parallel_size=2", "model.make_vocab_size_divisible_by=64"
    )
    assert differing_fields(changed) == []


def test_a_vocabulary_size_that_is_written_out_is_the_same_as_the_derived_one() -> None:
    config = load()
    assert differing_fields(load(f"model.vocab_size={build_tokenizer(config).vocab_size}")) == []


def digest_of(contract: Contract, name: str) -> str:
    """What a message shows of a digest."""
    return str(next(field.value for field in contract.fields if field.name == name))[:12]


def test_the_message_has_both_values_and_the_advice() -> None:
    changed = contract_of(load("seed=43"))
    before, after = digest_of(RECORDED, "initial_weights"), digest_of(changed, "initial_weights")
    assert before != after
    with pytest.raises(ContractError) as caught:
        check_contract(RECORDED, changed, "error", source="./dumps")
    assert str(caught.value) == (
        "[Rollout Mock] This run breaks the contract of ./dumps in 2 fields:\n"
        "  seed: recorded 42, current 43. The initial weights follow from seed: set it as in the recording run.\n"
        f"  initial_weights: recorded {before}, current {after} (other content). They follow from seed, the model "
        "section and the vocabulary: set these as in the recording run."
    )


def test_another_vocabulary_is_shown_by_the_start_of_its_digest() -> None:
    changed = contract_of(load(f"{ENV}.env_config.size=4"))
    before, after = digest_of(RECORDED, "vocabulary"), digest_of(changed, "vocabulary")
    difference = changed.differences(RECORDED)[0]
    assert difference.describe() == (
        f"vocabulary: recorded {before}, current {after} (other content). The recorded token ids mean something else "
        "here (118 tokens now): use the recording run's environments."
    )


def test_a_list_that_changed_says_what_was_added() -> None:
    changed = contract_of(load("train_env_manager.tags=[FrozenLake,FrozenLake]"))
    assert [difference.describe() for difference in changed.differences(RECORDED)] == [
        'train_env_manager.tags: recorded ["FrozenLake"], current ["FrozenLake","FrozenLake"] (added "FrozenLake"; '
        "first difference at index 1). Set train_env_manager.tags as in the recording run."
    ]


def test_a_replay_says_that_an_unknown_variable_is_set_on_one_side_alone() -> None:
    recorded = contract_of(load(), NCCL_MINE="set, value not kept")
    found = {item.name: item.describe() for item in RECORDED.differences(recorded)}
    assert found["NCCL_MINE"] == 'NCCL_MINE: recorded "set, value not kept", current missing'
    found = {item.name: item.describe() for item in recorded.differences(RECORDED)}
    assert found["NCCL_MINE"] == 'NCCL_MINE: recorded missing, current "set, value not kept"'
