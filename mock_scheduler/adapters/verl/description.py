"""What of a verl run must be the same in a recording and its replay, as values of the contract.

Contract: keys of verl's configuration are read by name, and verl itself is not imported; what a release lacks is left
out. The model is described by its configuration in Hugging Face's files, and the tokenizer by its content.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from mock_scheduler.adapters.settings import describe_keys
from mock_scheduler.adapters.transformers_objects import describe_model, describe_tokenizer
from mock_scheduler.batch import SamplingParams
from mock_scheduler.scheduler import Mode
from mock_scheduler.support.digests import JSON, compute_json_digest

#: An object of verl, or its configuration, whose attributes are read by name.
VerlObject: TypeAlias = Any

_ROLLOUT = "actor_rollout_ref.rollout"
_KEYS = (
    *("data.train_batch_size", "data.max_prompt_length", "data.max_response_length"),
    *(f"{_ROLLOUT}.{name}" for name in ("n", "temperature", "top_k", "top_p", "do_sample", "calculate_log_probs")),
    *(f"{_ROLLOUT}.val_kwargs.{name}" for name in ("n", "temperature", "top_k", "top_p", "do_sample")),
    *(f"{_ROLLOUT}.multi_turn.{name}" for name in ("enable", "max_assistant_turns", "max_user_turns")),
    *("algorithm.adv_estimator", "reward.reward_manager.name", "reward.custom_reward_function.name"),
)


def describe_run(config: VerlObject) -> dict[str, JSON]:
    """Describe the run: its batches, how they are sampled and scored, its model and its tokenizer."""
    return {
        **describe_keys(config, _KEYS, "verl"),
        **describe_checkpoint(config.actor_rollout_ref.model),
    }


def describe_checkpoint(model: VerlObject) -> dict[str, JSON]:
    """Describe the model's files: kind and size of the model, tokenizer and chat template."""
    # Imported here: transformers is there wherever verl is.
    from transformers import AutoConfig, AutoTokenizer

    options = {"trust_remote_code": bool(model.get("trust_remote_code", False))}
    hf_config: Any = AutoConfig.from_pretrained(model.get("hf_config_path") or model.path, **options)
    tokenizer: Any = AutoTokenizer.from_pretrained(model.get("tokenizer_path") or model.path, **options)
    template = model.get("custom_chat_template") or getattr(tokenizer, "chat_template", None)
    return {
        **{f"verl.model.{name}": value for name, value in describe_model(hf_config).items()},
        "verl.tokenizer": describe_tokenizer(tokenizer),
        "verl.chat_template": compute_json_digest(template),
    }


def group_sizes(config: VerlObject) -> Mapping[Mode, int]:
    """Read how many rollouts each prompt has."""
    rollout = config.actor_rollout_ref.rollout
    return {"train": int(rollout.n), "val": int(rollout.val_kwargs.n)}


def read_sampling(config: VerlObject) -> Mapping[Mode, SamplingParams]:
    """Read how tokens are sampled; a ``top_k`` below 1 turns it off."""
    rollout = config.actor_rollout_ref.rollout
    is_processed = "raw" not in str(rollout.get("logprobs_mode") or "processed")

    def read(values: VerlObject) -> SamplingParams:
        return SamplingParams(
            temperature=float(values.temperature),
            top_p=float(values.top_p),
            top_k=max(int(values.top_k), 0),
            logprobs_mode="processed" if is_processed else "raw",
        )

    return {"train": read(rollout), "val": read(rollout.val_kwargs)}
