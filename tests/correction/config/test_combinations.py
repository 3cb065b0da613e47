"""Combinations that would have no effect, be wrong or fail later: refused when loaded, each with its whole message."""

from __future__ import annotations

from pathlib import Path

import pytest

from mock_scheduler.errors import ConfigError
from pipelines.config.loading import load_config
from pipelines.config.schema import PipelineConfig

CONFIGS = Path(__file__).parents[3] / "configs"
LAKE = "custom_envs.FrozenLake.env_config"
RANDOM_LAKE = "custom_envs.RandomLake.env_config"
ANY_LAKE = "custom_envs.AnyLake.env_config"
BOXES = "custom_envs.Sokoban.env_config"
FUSED = "model.transformer_impl=transformer_engine"
GAE = "adv_estimator=gae"


def load(name: str, *overrides: str) -> PipelineConfig:
    return load_config(name, config_path=CONFIGS, overrides=overrides)


def refused(name: str, *overrides: str) -> str:
    """The one problem that a configuration has with these overrides, without the override that it was given by."""
    with pytest.raises(ConfigError) as caught:
        load(name, *overrides)
    origin = f"configuration '{name}' ({CONFIGS}/{name}.yaml) has 1 problem:\n  - "
    assert str(caught.value).startswith(origin)
    return str(caught.value).removeprefix(origin).partition(" (given as ")[0]


REFUSALS = [
    (
        "quickstart",
        (FUSED, "precision=float64", "actor_infer.use_kv_cache=false"),
        "model.transformer_impl transformer_engine with precision float64: TransformerEngine has no kernels for it; "
        "set model.transformer_impl=local, or another precision",
    ),
    (
        "quickstart",
        (FUSED,),
        "model.transformer_impl transformer_engine with actor_infer.use_kv_cache true: the engine keeps keys and "
        "values of local layers alone; set actor_infer.use_kv_cache=false, or model.transformer_impl=local",
    ),
    (
        "quickstart",
        (GAE, "training.min_lr=1e-3", "critic.lr=5e-4"),
        "training.min_lr 0.001 is larger than critic.lr 0.0005, and both models decay to the one min_lr; set "
        "training.min_lr to at most 0.0005, or raise critic.lr",
    ),
    (
        "quickstart",
        (GAE, "critic.warmup_steps=4"),
        "critic.warmup_steps 4 leaves no step of max_steps 4 in which the policy is trained; set it to at most 3",
    ),
    (
        "quickstart",
        ("critic.lr=0.002", "critic.warmup_steps=1"),
        "adv_estimator grpo leaves these keys without effect: critic.lr 0.002, critic.warmup_steps 1; set "
        "adv_estimator=gae, which alone has a critic, or leave them out",
    ),
    (
        "quickstart",
        ("kl_in_reward.estimator=k3",),
        "kl_in_reward: estimator k3 has no effect with coef 0, which takes no penalty off the reward; set coef above "
        "0, or leave the estimator out",
    ),
    (
        "quickstart",
        (f"{LAKE}.map_name=4x4", f"{LAKE}.p=0.9"),
        f"{LAKE}: map_name 4x4 is a map of its own, on which size 3, p 0.9 would have no effect; set map_name: null "
        "for random maps of size 3",
    ),
    (
        "frozen_lake",
        (f"{LAKE}.held_out_fraction=0.5",),
        f"{LAKE}: held_out_fraction 0.5 needs random maps, and map_name 4x4 is one map; set map_name: null, or "
        "held_out_fraction: 0",
    ),
    (
        "frozen_lake_random",
        (f"{ANY_LAKE}.held_out_fraction=0.3",),
        "custom_envs.AnyLake.env_config.held_out_fraction 0.3 of val_env_manager.tags is larger than 0.2, that of "
        "RandomLake of train_env_manager.tags and of the same env_type frozen_lake: training would play some of the "
        "layouts that validation calls held out; set both to the same fraction, or that of AnyLake to 0 to validate on "
        "all layouts",
    ),
    (
        "frozen_lake_random",
        ("train_env_manager.tags=[RandomLake,AnyLake]",),
        "custom_envs.RandomLake.env_config.held_out_fraction 0.2 of val_env_manager.tags is larger than 0.0, that of "
        "AnyLake of train_env_manager.tags and of the same env_type frozen_lake: training would play some of the "
        "layouts that validation calls held out; set both to the same fraction, or that of RandomLake to 0 to validate "
        "on all layouts",
    ),
    ("sokoban", (f"{BOXES}.size=4",), f"{BOXES}.size: is 4, should be greater than or equal to 5"),
    (
        "sokoban",
        (f"{BOXES}.box_reward=2", f"{BOXES}.step_penalty=-0.2", f"{BOXES}.solved_reward=5"),
        f"{BOXES}: sparse_reward gives 1 for a solved puzzle and nothing else, so that step_penalty -0.2, box_reward "
        "2.0, solved_reward 5.0 would have no effect; set sparse_reward: false, or leave the other rewards out",
    ),
    (
        "quickstart",
        ("model.hidden_size=60",),
        "model: hidden_size 60 / num_attention_heads 4 is an odd head size, 15, and position_embedding_type rope turns "
        "a head's elements in pairs; choose sizes whose quotient is even, or set "
        "position_embedding_type=learned_absolute",
    ),
    (
        "quickstart",
        ("model.num_moe_experts=4", "model.moe_router_bias_update_rate=0.01"),
        "model: the experts cannot be built:\n    - moe_router_bias_update_rate 0.01 has no effect without expert "
        "biases; set moe_router_enable_expert_bias=true, or leave the rate out",
    ),
    (
        "quickstart",
        ("training.micro_batch_size=12",),
        "training.global_batch_size 32 is not a multiple of training.micro_batch_size 12",
    ),
    (
        "quickstart",
        ("training.recompute_method=block", "training.recompute_num_layers=2"),
        "training: recompute_granularity none leaves these keys without effect: recompute_method block, "
        "recompute_num_layers 2; set recompute_granularity=full, which alone takes whole layers, or leave them out",
    ),
    (
        "quickstart",
        ("training.recompute_granularity=selective", "training.recompute_num_layers=2"),
        "training: recompute_granularity selective leaves these keys without effect: recompute_num_layers 2; set "
        "recompute_granularity=full, which alone takes whole layers, or leave them out",
    ),
]


@pytest.mark.parametrize(("name", "overrides", "message"), REFUSALS, ids=[" ".join(case[1]) for case in REFUSALS])
def test_what_cannot_take_effect_is_refused_with_what_to_set(
    name: str, overrides: tuple[str, ...], message: str
) -> None:
    assert refused(name, *overrides) == message


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("quickstart", (FUSED, "actor_infer.use_kv_cache=false")),
        ("quickstart", (FUSED, "rollout_mock.enable=true", "rollout_mock.mode=mock")),
        ("quickstart", (GAE, "training.min_lr=1e-3", "critic.lr=1e-3", "critic.warmup_steps=3")),
        ("quickstart", ("critic.lr=0.001", "critic.warmup_steps=0")),
        ("quickstart", ("kl_in_reward.estimator=k3", "kl_in_reward.coef=0.1")),
        ("quickstart", (f"{LAKE}.map_name=4x4", f"{LAKE}.size=4", f"{LAKE}.p=0.8")),
        # Its held-out maps are among those that training does not play.
        ("frozen_lake_random", (f"{ANY_LAKE}.held_out_fraction=0.1",)),
        ("frozen_lake_random", (f"{ANY_LAKE}.held_out_fraction=0.2",)),
        ("sokoban", (f"{BOXES}.sparse_reward=false", f"{BOXES}.box_reward=2")),
        ("sokoban", (f"{BOXES}.box_reward=1.0",)),
        ("quickstart", ("model.hidden_size=60", "model.position_embedding_type=learned_absolute")),
        (
            "quickstart",
            (
                *("model.num_moe_experts=4", "model.moe_router_bias_update_rate=0.01"),
                *("model.moe_router_enable_expert_bias=true", "model.moe_router_score_function=sigmoid"),
            ),
        ),
        (
            "quickstart",
            (
                *("training.micro_batch_size=12", "training.batching=dynamic"),
                "training.max_tokens_per_micro_batch=768",
            ),
        ),
        ("quickstart", ("training.recompute_granularity=full", "training.recompute_num_layers=2")),
    ],
    ids=str,
)
def test_what_takes_effect_or_is_the_default_is_accepted(name: str, overrides: tuple[str, ...]) -> None:
    load(name, *overrides)


def test_a_schedule_that_plays_some_steps_has_an_engine() -> None:
    mock = ("rollout_mock.enable=true", "rollout_mock.mode=mock")
    schedule = 'rollout_mock.schedule=[{mode: real, steps: "2-"}]'
    assert refused("quickstart", FUSED, *mock, schedule).startswith(
        "model.transformer_impl transformer_engine with actor_infer.use_kv_cache true: the engine keeps keys"
    )
