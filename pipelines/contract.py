"""The contract of an agentic run: what a recording promises, and what a run that replays it must keep."""

from __future__ import annotations

from collections.abc import Mapping

from mock_scheduler.determinism.guard import is_repeatability_setting
from mock_scheduler.recording.contract import Contract, ContractField, Match, Rule
from mock_scheduler.support.digests import JSON, iterate_leaves
from pipelines.config.schema import ConfigSection, Mode, PipelineConfig
from pipelines.environments.grid_tokens import GridTokenizer
from pipelines.environments.registry import vocab_size_in_effect
from pipelines.megatron.initial_weights import compute_initial_weights_digest
from pipelines.rollout.scheduler import first_episode

# Fields of the model that decide how it is computed or trained, and not what it computes.
_IMPLEMENTATION = (
    "transformer_impl",
    "attention_backend",
    "make_vocab_size_divisible_by",
    "moe_router_impl",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_bias_update_rate",
)
# Keys of how episodes are played that change no token, and of log-probabilities the last bits at most.
_ENGINE = ("use_kv_cache", "rows_per_forward")
_WORKERS = "num_env_workers"

# Keys of the configuration that decide how a recorded batch is trained on: they may be what is being compared. The
# keys that are in neither this table nor the one of what was played name files, or are in the contract as read back.
_TRAINING = (
    *("parallel", "training", "precision", "max_steps", "eval_steps", "order", "perturbation", "graft"),
    *("adv_estimator", "reward_normalization", "reward_clip", "advantage_clip", "whiten_advantages"),
    *("gamma", "lambd", "kl_in_reward", "critic", "ppo_epochs", "pg_clip", "pg_clip_high"),
    *("dual_clip", "policy_loss", "loss_agg_mode"),
    *("entropy_loss_coef", "entropy_loss_coef_final", "use_kl_loss", "kl_loss_coef", "kl_loss_estimator", "algorithm"),
)


_MODES: tuple[Mode, ...] = ("train", "val")
_VERSION_PREFIX = "version."
_CPU_CAPABILITY = "version.cpu_capability"  # the name of an instruction set


def build_contract(config: PipelineConfig, tokenizer: GridTokenizer, settings: Mapping[str, str]) -> Contract:
    """Every field of the contract; ``settings``: the determinism settings read back in this process.

    A run that goes on from a checkpoint has the contract of the run that began: where its data stand is checked step by
    step, by the data cursor of each request.
    """
    vocab_size = vocab_size_in_effect(config, tokenizer)
    fields = [
        ContractField(
            name="vocabulary",
            value=tokenizer.digest(),
            rule=Rule.MUST_MATCH,
            advice=f"The recorded token ids mean something else here ({tokenizer.vocab_size} tokens now): use the "
            "recording run's environments.",
            match=Match.DIGEST,
        ),
        _must_match("model.vocab_size", vocab_size),
        _must_match("seed", config.seed, "The initial weights follow from seed: set it as in the recording run."),
        _initial_weights(config, vocab_size),
        _must_match(
            "data_cursor",
            {mode: {"first_episode": first_episode(config, mode, 0)} for mode in _MODES},
            "The run begins at other episodes than the recorded one: start it where that began.",
        ),
        *(_must_match(name, value) for name, value in _configured(config).items()),
        *(
            _must_match(f"determinism.{name}", value, "Set system_envs as in the recording run.")
            for name, value in settings.items()
            if is_repeatability_setting(name)
        ),
        *(_may_differ(name, value) for name, value in _changeable(config, settings).items()),
    ]
    return Contract(fields)


def _initial_weights(config: PipelineConfig, vocab_size: int) -> ContractField:
    return ContractField(
        name="initial_weights",
        value=compute_initial_weights_digest(
            config.model, vocab_size=vocab_size, sequence_length=config.sequence_length, seed=config.seed
        ),
        rule=Rule.MUST_MATCH,
        advice="They follow from seed, the model section and the vocabulary: set these as in the recording run.",
        match=Match.DIGEST,
    )


def _must_match(name: str, value: JSON, advice: str | None = None) -> ContractField:
    advice = advice or f"Set {name} as in the recording run."
    return ContractField(name=name, value=value, rule=Rule.MUST_MATCH, advice=advice)


def _may_differ(name: str, value: JSON) -> ContractField:
    return ContractField(name=name, value=value, rule=Rule.MAY_DIFFER, advice="", match=_match_of(name))


def _match_of(name: str) -> Match:
    """How a field that may differ is compared: what decides here is what is said about the difference.

    More steps than were recorded are no breach: cache and a resumed dump add them, and mock names each missing step.
    """
    if name == "max_steps":
        return Match.AT_MOST
    is_version = name.startswith(_VERSION_PREFIX) and name != _CPU_CAPABILITY
    return Match.VERSION if is_version else Match.EQUAL


def _configured(config: PipelineConfig) -> dict[str, JSON]:
    """The keys of the configuration that decide what was played, one by one, by their dotted names.

    Sampling of training is that of ``actor_infer``, which the schema sees to; validation has what is in effect for it.
    """
    model = _without(_dump(config.model), *_IMPLEMENTATION, "vocab_size")
    train_manager = _without(_dump(config.train_env_manager), "generating_args", _WORKERS)
    val_manager = _without(_dump(config.val_env_manager), _WORKERS)
    sections: dict[str, JSON] = {
        "model": model,
        "sequence_length": config.sequence_length,
        "rollout_form": config.rollout_form,
        "rollout_batch_size": config.rollout_batch_size,
        "val_batch_size": config.val_batch_size,
        "actor_infer": _without(_dump(config.actor_infer), *_ENGINE),
        "train_env_manager": train_manager,
        "val_env_manager": {**val_manager, "generating_args": _dump(config.sampling("val"))},
        "custom_envs": {tag: _dump(config.custom_envs[tag]) for tag in config.tags_in_use},
    }
    return dict(iterate_leaves(sections))


def _changeable(config: PipelineConfig, settings: Mapping[str, str]) -> dict[str, JSON]:
    """What may be what is being compared: layout, algorithm, optimizer, precision, kernels, versions."""
    model, values = _dump(config.model), _dump(config)
    sections: dict[str, JSON] = {
        "model": {key: model[key] for key in _IMPLEMENTATION},
        "actor_infer": {key: values["actor_infer"][key] for key in _ENGINE},
        **{name: {_WORKERS: values[name][_WORKERS]} for name in ("train_env_manager", "val_env_manager")},
        **{key: values[key] for key in _TRAINING},
    }
    kernels = {name: value for name, value in settings.items() if not is_repeatability_setting(name)}
    return {**dict(iterate_leaves(sections)), **kernels}


def _without(values: Mapping[str, JSON], *names: str) -> dict[str, JSON]:
    return {key: value for key, value in values.items() if key not in names}


def _dump(section: ConfigSection) -> dict[str, JSON]:
    return section.model_dump(mode="json")
