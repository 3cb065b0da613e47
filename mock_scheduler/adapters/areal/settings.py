"""The settings of a run of AReaL, in one YAML file that ``MOCK_SCHEDULER_AREAL`` names, or as the caller gives them."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from mock_scheduler.adapters.settings import RolloutSettings, describe_keys, read_key
from mock_scheduler.batch import SamplingParams
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.digests import JSON

#: Keys of AReaL's configuration that a replay must share.
_CONTRACT = (
    *("actor.path", "tokenizer_path", "seed", "dynamic_bs", "gconfig.n_samples", "gconfig.max_new_tokens"),
    *("gconfig.temperature", "gconfig.top_p", "gconfig.top_k", "train_dataset.path", "train_dataset.batch_size"),
    *("train_dataset.shuffle", "rollout.max_head_offpolicyness"),
)
_SPMD = "AREAL_SPMD_MODE"


class ArealSettings(RolloutSettings):
    """The content of the file: the keys of ``RolloutSettings``."""

    variable: ClassVar = "MOCK_SCHEDULER_AREAL"


def describe_config(config: Any) -> dict[str, JSON]:  # noqa: ANN401 - AReaL's
    """Describe what a replay must share with its recording."""
    return describe_keys(config, _CONTRACT, "areal")


def read_sampling(config: Any) -> SamplingParams:  # noqa: ANN401 - AReaL's
    """Read how tokens are sampled; SGLang's log-probabilities are of the logits over the temperature."""
    return SamplingParams(
        temperature=float(read_key(config, "gconfig.temperature", 1.0)),
        top_p=float(read_key(config, "gconfig.top_p", 1.0)),
        top_k=max(int(read_key(config, "gconfig.top_k", 0)), 0),
        logprobs_mode="processed",
    )


def check_supported(mock: RolloutMockConfig) -> None:
    """Refuse what this adapter cannot do; raises ``ConfigError``."""
    if not mock.enable:
        return
    if os.environ.get(_SPMD, "0").lower() in ("1", "true") and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"{_SPMD} is set: every process asks for its own part of a batch, which this adapter does not record. "
            "Start AReaL with its controller: python3 train.py scheduler.type=local (or ray, slurm)"
        )
    if mock.missing_step != "error":
        raise ConfigError(
            f"rollout_mock.missing_step={mock.missing_step} has no rollout that draws prompts from the data loader, so "
            "that these would stand still: set it to error, and replay recorded steps only"
        )
