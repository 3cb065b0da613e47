"""The configuration's keys, with the values that take effect, and what each of them decides."""

from __future__ import annotations

from mock_scheduler.config.base import Decides, effects_of
from mock_scheduler.support.digests import JSON, iterate_leaves
from pipelines.config.schema import PipelineConfig


def effect_of(key: str) -> Decides:
    """Returns what a dotted key of ``PipelineConfig`` decides; raises ``KeyError`` for one that it has not."""
    return effects_of(PipelineConfig).of(key)


def keys_in_effect(config: PipelineConfig, *, vocab_size: int) -> dict[str, JSON]:
    """Reads every value by its dotted key, in the order of the schema, as it takes effect.

    Environments that no manager names play no part. Training samples as ``actor_infer`` says, which the schema sees to,
    and has no key of its own for that; validation has the arguments that are in effect for it.

    Args:
        config: the checked configuration.
        vocab_size: the one in effect, which follows from the environments where the model section has none.
    """
    values = config.model_dump(mode="json")
    values["model"]["vocab_size"] = vocab_size
    values["custom_envs"] = {tag: values["custom_envs"][tag] for tag in config.tags_in_use}
    del values["train_env_manager"]["generating_args"]
    values["val_env_manager"]["generating_args"] = config.sampling("val").model_dump(mode="json")
    return dict(iterate_leaves(values))
