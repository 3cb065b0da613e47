"""Every key of a configuration has a value in effect, and says its effect on a run."""

from __future__ import annotations

from mock_scheduler.config.base import Decides, effects_of
from mock_scheduler.support.digests import JSON, iterate_leaves
from pipelines.config.schema import PipelineConfig

# Younger than the first recordings and checkpoints: unset they change nothing, and older ones do not have them.
YOUNG_KEYS = {
    "model.hf_checkpoint": None,
    "model.kv_channels": None,
    "model.rope_scaling": None,
    "model.moe_shared_expert_gate": False,
    "model.moe_router_replay": "off",
    "sft.steps": 0,
    "sft.lr": 1e-3,
    "text.tokenizer": None,
    "text.on_template_break": "error",
    "actor_infer.record_routed_experts": False,
    "actor_infer.engine": "megatron",
    "actor_infer.logprobs_mode": "processed",
}


def effect_of(key: str) -> Decides:
    """Reads the effect of a dotted key of ``PipelineConfig``; raises ``KeyError`` for an unknown key."""
    return effects_of(PipelineConfig).of(key)


def keys_in_effect(config: PipelineConfig, *, vocab_size: int) -> dict[str, JSON]:
    """Reads every value by its dotted key, in the order of the schema, as it takes effect.

    Keys in ``YOUNG_KEYS`` play a part where they are set.
    Environments that no manager names play no part. Training samples with ``actor_infer``'s arguments and has no key of
    its own for them; validation has the arguments in effect for it.

    Args:
        vocab_size: the one in effect; it follows from the environments where the model section has none.
    """
    values = config.model_dump(mode="json")
    values["model"]["vocab_size"] = vocab_size
    values["custom_envs"] = {tag: values["custom_envs"][tag] for tag in config.tags_in_use}
    del values["train_env_manager"]["generating_args"]
    values["val_env_manager"]["generating_args"] = config.sampling("val").model_dump(mode="json")
    return {key: value for key, value in iterate_leaves(values) if key not in YOUNG_KEYS or value != YOUNG_KEYS[key]}
