"""What the keys of the pipeline decide: each states it, each fact is read by a rule, each key is read by code."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated

import pytest

from mock_scheduler.alignment.plan.planned_run import change_kind
from mock_scheduler.config.base import ConfigSection, Decides, effects_of
from mock_scheduler.support.digests import JSON
from pipelines.config.loading import load_config
from pipelines.config.model import ModelConfig
from pipelines.config.schema import PipelineConfig
from pipelines.environments.registry import build_tokenizer
from pipelines.keys import YOUNG_KEYS, keys_in_effect
from pipelines.megatron.hf_source import HuggingFaceSource
from pipelines.megatron.run_state import fixed_settings
from pipelines.training import service_contract

ROOT = Path(__file__).parents[3]
CONFIGS = ROOT / "configs"
EFFECTS = effects_of(PipelineConfig).by_key


@functools.cache
def load(*overrides: str) -> PipelineConfig:
    return load_config("quickstart", config_path=CONFIGS, overrides=overrides)


@functools.cache
def read_sources() -> tuple[set[str], set[str]]:
    """Every attribute that is read, and every text, as a key may be read by its name; and the facts that rules name."""
    names, facts = set(), set()
    for path in (path for package in ("mock_scheduler", "pipelines") for path in (ROOT / package).rglob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        is_rule = not is_schema(module)
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute):
                if isinstance(node.ctx, ast.Load):
                    names.add(node.attr)
                if is_rule and isinstance(node.value, ast.Name) and node.value.id == "Decides":
                    facts.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names, facts


def keys_that_nothing_reads(keys: Iterable[str], names: Collection[str]) -> list[str]:
    return [key for key in keys if key.removesuffix(".*").rpartition(".")[2] not in names]


def is_schema(module: ast.Module) -> bool:
    classes = (node for node in module.body if isinstance(node, ast.ClassDef))
    return any(isinstance(base, ast.Name) and base.id == "ConfigSection" for item in classes for base in item.bases)


def test_every_key_states_what_it_decides() -> None:
    """``effects_of`` raises, with the name of every key that does not."""
    assert len(EFFECTS) > 250


def test_every_leaf_of_a_configuration_has_facts() -> None:
    config = load("custom_envs.FrozenLake.max_steps=9", "order.emulate={data_parallel_size: 2}", "system_envs.A=1")
    for key in keys_in_effect(config, vocab_size=100):
        assert isinstance(effects_of(PipelineConfig).of(key), Decides)


def test_every_key_is_read_by_code() -> None:
    unread = keys_that_nothing_reads(EFFECTS, read_sources()[0])
    assert not unread, f"no code reads {', '.join(unread)}: a key without an effect; read it, or take it out"


def test_a_key_that_no_code_reads_is_found() -> None:
    class Planted(ConfigSection):
        seed: Annotated[int, Decides.ROLLOUTS] = 0
        nobody_looks_here: Annotated[int, Decides.ROLLOUTS] = 0

    names = read_sources()[0]
    assert keys_that_nothing_reads(effects_of(Planted).by_key, names) == ["nobody_looks_here"]


def test_every_fact_is_stated_by_a_key_and_read_by_a_rule() -> None:
    all_facts = {fact.name for fact in Decides}
    stated = {fact.name for facts in EFFECTS.values() for fact in facts}
    assert stated == all_facts, "no key states these"
    read = read_sources()[1]
    assert read == all_facts, "no rule reads these"


# What no sample, tensor or seeded part of a run follows from.
FREE_MODEL_KEYS = {
    *("attention_backend", "make_vocab_size_divisible_by", "moe_aux_loss_coeff", "moe_router_bias_update_rate"),
    *("moe_router_impl", "moe_router_load_balancing_type", "moe_z_loss_coeff"),
}


def test_a_checkpoint_fixes_what_its_tensors_and_counters_follow_from() -> None:
    fixed = fixed_settings(load("adv_estimator=gae"), vocab_size=69)
    model = {f"model.{name}" for name in ModelConfig.model_fields.keys() - FREE_MODEL_KEYS} - YOUNG_KEYS.keys()
    assert fixed.keys() == model | {
        *("seed", "precision", "rollout_form", "rollout_batch_size", "models"),
        *("train_env_manager.num_env_groups", "train_env_manager.group_size"),
    }
    assert (fixed["model.vocab_size"], fixed["models"]) == (69, ["policy", "critic"])


TRAINED_BY = {
    *("seed", "sequence_length", "rollout_form", "rollout_batch_size", "max_steps", "vocabulary"),
    *("adv_estimator", "reward_normalization.grouping", "reward_normalization.method", "reward_clip"),
    *("advantage_clip", "whiten_advantages", "gamma", "lambd", "kl_in_reward.coef", "kl_in_reward.estimator"),
    *("kl_in_reward.target", "kl_in_reward.horizon", "critic.lr", "critic.value_clip", "critic.warmup_steps"),
    *("ppo_epochs", "pg_clip", "pg_clip_high", "dual_clip", "policy_loss", "loss_agg_mode", "entropy_loss_coef"),
    *("entropy_loss_coef_final", "use_kl_loss", "kl_loss_coef", "kl_loss_estimator"),
    *("algorithm.rollout_correction", "algorithm.flat_keys"),
    *(f"training.{name}" for name in ("global_batch_size", "calculate_per_token_loss", "lr", "min_lr")),
    *(f"training.{name}" for name in ("lr_decay_style", "lr_warmup_iters", "lr_decay_iters", "weight_decay")),
    *(f"training.{name}" for name in ("adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "on_no_signal")),
    *("actor_infer.only_action_tokens", "actor_infer.generating_args.temperature"),
}
KERNELS = {"transformer_impl", "attention_backend", "make_vocab_size_divisible_by", "moe_router_impl"}


@pytest.mark.parametrize("own", ["val_env_manager", "train_env_manager"])
def test_client_and_service_share_the_mathematics_of_training_and_nothing_else(own: str) -> None:
    config = load(f"{own}.generating_args={{temperature: 1.0}}")
    shared = service_contract(config, build_tokenizer(config))
    model = {f"model.{name}" for name in ModelConfig.model_fields.keys() - KERNELS} - YOUNG_KEYS.keys()
    assert shared.keys() == TRAINED_BY | model
    source = HuggingFaceSource(digest="0" * 64, headers={}, companions={})
    begun = service_contract(config, build_tokenizer(config), source=source)
    assert begun == {**shared, "initial_weights": "0" * 64}


def test_a_younger_key_takes_part_where_it_is_set() -> None:
    """Unset it is in no older recording or checkpoint, which so stay as good as they were."""
    unset = keys_in_effect(load(), vocab_size=69)
    assert unset.keys().isdisjoint(YOUNG_KEYS)
    scaling = "model.rope_scaling={factor: 32}"
    gate = (
        "model.num_moe_experts=4",
        "model.moe_shared_expert_intermediate_size=8",
        "model.moe_shared_expert_gate=true",
    )
    found = keys_in_effect(load("model.kv_channels=8", scaling, *gate), vocab_size=69)
    young = {key: value for key, value in found.items() if key not in unset}
    assert young == {
        "model.kv_channels": 8,
        "model.rope_scaling.factor": 32,
        "model.rope_scaling.low_freq_factor": 1,
        "model.rope_scaling.high_freq_factor": 4,
        "model.rope_scaling.original_max_position_embeddings": 8192,
        "model.moe_shared_expert_gate": True,
    }
    assert all(Decides.ROLLOUTS in EFFECTS[key] for key in young)


NEUTRAL = {
    *("exp_name", "output_dir", "track_with", "save_steps", "eval_steps", "val_batch_size"),
    *(f"training.recompute_{name}" for name in ("granularity", "method", "num_layers")),
    *("training.overlap_grad_reduce", "training.overlap_param_gather", "parallel.overlap_p2p_comm"),
    *("parallel.allow_known_wrong", "train_env_manager.num_env_workers", "actor_infer.use_kv_cache"),
    *("actor_infer.engine", "actor_infer.engine_python", "actor_infer.weights_sync"),
    *("actor_infer.rows_per_forward", "actor_infer.record_routed_experts"),
    *("order.emulate.overlap_p2p_comm", "order.emulate.allow_known_wrong"),
}
NEUTRAL_SECTIONS = (
    *("checkpoint_config.", "rollout_mock.", "trace.", "debug.", "align.", "rollout_worker.", "val_env_manager."),
    "env_workers.",
    "actor_infer.server.",
)


def test_a_change_moves_no_bit_only_the_order_of_sums_or_anything() -> None:
    """The list that alignment had called ``order.emulate`` neutral and each degree in it a change of anything; the
    order of sums is all that follows. It knew nothing of where a training service listens, which moves no bit."""
    listening = {
        f"training_service.{name}"
        for name in ("host", "port", "max_request_bytes", "timeout_s", "service_file", "token_variable")
    }
    for key, facts in EFFECTS.items():
        name = key.removesuffix(".*")
        # A resumed run trains as one that was never interrupted, and weights are compared as such.
        places = {"resume_from_checkpoint", "model.hf_checkpoint", "text.tokenizer"}
        if name in NEUTRAL | listening | places or key.startswith(NEUTRAL_SECTIONS):
            expected = "nothing"
        elif key.startswith(("parallel.", "order.")) or key == "training.use_distributed_optimizer":
            expected = "layout"
        else:
            expected = "other"
        assert change_kind(facts) == expected, key


def test_labels_are_names_folders_and_what_an_alignment_does_with_runs() -> None:
    labels = {key for key, facts in EFFECTS.items() if Decides.LABEL in facts and not key.startswith("align.")}
    assert labels == {
        *("exp_name", "output_dir", "checkpoint_config.output_dir"),
        *("rollout_mock.dump_dir", "resume_from_checkpoint", "graft.trace_dir", "model.hf_checkpoint"),
        "text.tokenizer",
    }
    assert all(Decides.LABEL in facts for key, facts in EFFECTS.items() if key.startswith("align."))


def test_keys_are_read_as_they_take_effect() -> None:
    unused = "custom_envs.Other={env_type: sokoban}"
    values: dict[str, JSON] = keys_in_effect(load(unused, "train_env_manager.generating_args={}"), vocab_size=118)
    assert values["model.vocab_size"] == 118
    assert values["val_env_manager.generating_args.temperature"] == 1.0
    assert not [key for key in values if key.startswith(("custom_envs.Other", "train_env_manager.generating_args"))]
