"""The settings of a run of ROLL, in one YAML file that ``MOCK_SCHEDULER_ROLL`` names, or as the caller gives them."""

from __future__ import annotations

from typing import Any, ClassVar

from mock_scheduler.adapters.settings import RolloutSettings, describe_keys, read_key
from mock_scheduler.batch import SamplingParams
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.digests import JSON

#: Keys of ROLL's configuration that a replay must share.
_CONTRACT = (
    *("pretrain", "seed", "rollout_batch_size", "val_batch_size", "sequence_length", "prompt_length"),
    *("response_length", "async_generation_ratio", "actor_infer.generating_args.temperature"),
    *("actor_infer.generating_args.top_p", "actor_infer.generating_args.top_k", "train_env_manager.tags"),
    *("train_env_manager.group_size", "train_env_manager.num_env_groups"),
)
_SAMPLING = "actor_infer.generating_args"


class RollSettings(RolloutSettings):
    """The content of the file: the keys of ``RolloutSettings``."""

    variable: ClassVar = "MOCK_SCHEDULER_ROLL"


def describe_config(config: Any) -> dict[str, JSON]:  # noqa: ANN401 - ROLL's
    """Describe what a replay must share with its recording."""
    return describe_keys(config, _CONTRACT, "roll")


def read_sampling(config: Any) -> SamplingParams:  # noqa: ANN401 - ROLL's
    """Read how tokens are sampled; log-probabilities are those after temperature."""
    return SamplingParams(
        temperature=float(read_key(config, f"{_SAMPLING}.temperature", 1.0)),
        top_p=float(read_key(config, f"{_SAMPLING}.top_p", 1.0)),
        top_k=max(int(read_key(config, f"{_SAMPLING}.top_k", 0)), 0),
        logprobs_mode="processed",
    )


def check_supported(config: Any) -> None:  # noqa: ANN401 - ROLL's
    """Refuse a run that records twice; raises ``ConfigError``."""
    if read_key(config, "rollout_mock.enable", default=False):
        raise ConfigError(
            "rollout_mock.enable=true in ROLL's own configuration dumps or loads ROLL's pickles beside the recording: "
            "leave the section out there, and give it in the file of MOCK_SCHEDULER_ROLL"
        )
