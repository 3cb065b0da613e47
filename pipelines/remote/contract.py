"""What the client of a training service and the service must have alike, whatever the layout and the kernels."""

from __future__ import annotations

from collections.abc import Mapping

from mock_scheduler.support.digests import JSON, iterate_leaves
from pipelines.config.schema import PipelineConfig
from pipelines.environments.grid_tokens import GridTokenizer
from pipelines.environments.registry import vocab_size_in_effect

_KEYS = (
    *("seed", "sequence_length", "rollout_form", "rollout_batch_size", "max_steps"),
    *("adv_estimator", "reward_normalization", "reward_clip", "advantage_clip", "whiten_advantages"),
    *("gamma", "lambd", "kl_in_reward", "critic", "ppo_epochs", "pg_clip", "pg_clip_high"),
    *("dual_clip", "policy_loss", "loss_agg_mode"),
    *("entropy_loss_coef", "entropy_loss_coef_final", "use_kl_loss", "kl_loss_coef", "kl_loss_estimator"),
    "algorithm",
)
_TRAINING_KEYS = (
    *("global_batch_size", "calculate_per_token_loss", "lr", "min_lr", "lr_decay_style", "lr_warmup_iters"),
    *("lr_decay_iters", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"),
)
# Fields of the model that decide how it is computed, and not what: they may be what is being compared.
_IMPLEMENTATION = ("transformer_impl", "attention_backend", "make_vocab_size_divisible_by", "moe_router_impl")


def service_contract(config: PipelineConfig, tokenizer: GridTokenizer) -> dict[str, JSON]:
    """Every field by its dotted key: model, algorithm, optimizer and vocabulary."""
    values = config.model_dump(mode="json")
    model: Mapping[str, JSON] = {key: value for key, value in values["model"].items() if key not in _IMPLEMENTATION}
    sections: dict[str, JSON] = {
        **{key: values[key] for key in _KEYS},
        "training": {key: values["training"][key] for key in _TRAINING_KEYS},
        "model": {**model, "vocab_size": vocab_size_in_effect(config, tokenizer)},
        "vocabulary": tokenizer.digest(),
        "actor_infer": {
            "temperature": config.actor_infer.generating_args.temperature,
            "only_action_tokens": config.actor_infer.only_action_tokens,
        },
    }
    return dict(iterate_leaves(sections))
