"""The settings of a run of NeMo-RL, in one YAML file that ``MOCK_SCHEDULER_NEMO_RL`` names, or as the caller gives
them."""

from __future__ import annotations

from typing import Any, ClassVar

from mock_scheduler.adapters.settings import RolloutSettings, describe_keys, read_key, read_sampling_at
from mock_scheduler.adapters.transformers_objects import describe_tokenizer
from mock_scheduler.batch import SamplingParams
from mock_scheduler.config.base import Mode
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.digests import JSON, compute_json_digest

_GENERATION = "policy.generation"
_SAMPLING = ("temperature", "top_p", "top_k")
#: Keys of NeMo-RL's configuration that a replay must share.
_CONTRACT = (
    *("policy.model_name", "policy.max_total_sequence_length", "env.should_use_nemo_gym", "grpo.seed"),
    *("grpo.num_prompts_per_step", "grpo.num_generations_per_prompt", "grpo.max_rollout_turns"),
    *("grpo.use_dynamic_sampling", "grpo.batch_multiplier", "grpo.val_batch_size"),
    *("grpo.val_num_generations_per_prompt", "data.shuffle", "data.max_input_seq_length"),
    *(f"{_GENERATION}.{name}" for name in ("max_new_tokens", "stop_token_ids", "stop_strings", "bad_words")),
    *(f"{_GENERATION}.{prefix}{name}" for prefix in ("", "val_") for name in _SAMPLING),
)
#: Numbers that are kept for the rollouts of one step with dynamic sampling. ``dynamic_sampling_max_gen_batches`` is no
#: bound: NeMo-RL counts anew where an epoch ends within a step.
_SEVERAL = 1000


class NemoRlSettings(RolloutSettings):
    """The content of the file: the keys of ``RolloutSettings``."""

    variable: ClassVar = "MOCK_SCHEDULER_NEMO_RL"


def describe_run(config: Any, tokenizer: Any) -> dict[str, JSON]:  # noqa: ANN401 - NeMo-RL's, and transformers'
    """Describe what a replay must share with its recording."""
    return {
        **describe_keys(config, _CONTRACT, "nemo_rl"),
        "nemo_rl.tokenizer": describe_tokenizer(tokenizer),
        "nemo_rl.chat_template": compute_json_digest(getattr(tokenizer, "chat_template", None)),
    }


def read_sampling(config: Any) -> dict[Mode, SamplingParams]:  # noqa: ANN401 - NeMo-RL's
    """Read how tokens are sampled; where a release has none for validation, as in training."""
    val = {name: read_key(config, f"{_GENERATION}.val_{name}", _read(config, name)) for name in _SAMPLING}
    return {"train": read_sampling_at(config, _GENERATION), "val": read_sampling_at({"val": val}, "val")}


def _read(config: Any, name: str) -> Any:  # noqa: ANN401 - NeMo-RL's
    return read_key(config, f"{_GENERATION}.{name}", None)


def rollouts_per_step(config: Any) -> dict[Mode, int]:  # noqa: ANN401 - NeMo-RL's
    """Count the rollouts that a step may have here: several with dynamic sampling, and in validation."""
    is_dynamic = bool(read_key(config, "grpo.use_dynamic_sampling", default=False))
    return {"train": _SEVERAL if is_dynamic else 1, "val": _SEVERAL}


def group_sizes(config: Any) -> dict[Mode, int]:  # noqa: ANN401 - NeMo-RL's
    """Count the rows of one prompt."""
    return {
        "train": int(config.grpo.num_generations_per_prompt),
        "val": int(read_key(config, "grpo.val_num_generations_per_prompt", 1)),
    }


def check_supported(config: Any, *, replays: bool) -> None:  # noqa: ANN401 - NeMo-RL's
    """Refuse what this adapter cannot record, or would not keep from starting; raises ``ConfigError``."""
    if read_key(config, "grpo.async_grpo.enabled", default=False):
        raise ConfigError(
            "grpo.async_grpo.enabled=true plays groups at the same time in an actor of its own, and trains on them in "
            "the order in which they end: this adapter records neither. Set it to false"
        )
    if read_key(config, "data_plane.enabled", default=False):
        raise ConfigError(
            "data_plane.enabled=true has another trainer (grpo_train_sync), which plays in an actor of its own and is "
            "not recorded. Set it to false"
        )
    transport = read_key(config, f"{_GENERATION}.refit_transport", default=None)
    if replays and transport is not None:
        raise ConfigError(
            f"{_GENERATION}.refit_transport={transport} prepares the policy to send weights, which a replay does not. "
            "Set it to null for the replay; the recording stays as it is"
        )
