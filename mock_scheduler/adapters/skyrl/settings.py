"""The settings of a run of SkyRL, in one YAML file that ``MOCK_SCHEDULER_SKYRL`` names, or as the caller gives them."""

from __future__ import annotations

from typing import Any, ClassVar

from mock_scheduler.adapters.settings import RolloutSettings, describe_keys, read_key
from mock_scheduler.batch import SamplingParams
from mock_scheduler.config.base import Mode
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.digests import JSON

#: Keys of SkyRL's configuration that a replay must share.
_CONTRACT = (
    *("trainer.policy.model.path", "trainer.train_batch_size", "trainer.max_prompt_length", "trainer.seed"),
    *("trainer.algorithm.dynamic_sampling.type", "generator.n_samples_per_prompt", "generator.max_turns"),
    *("generator.max_input_length", "generator.step_wise_trajectories", "generator.vision_language_generator"),
    *("generator.sampling_params.max_generate_length", "generator.sampling_params.temperature"),
    *("generator.sampling_params.top_p", "generator.sampling_params.top_k", "generator.sampling_params.min_p"),
    *("data.train_data", "environment.env_class"),
)
_SAMPLING: dict[Mode, str] = {"train": "generator.sampling_params", "val": "generator.eval_sampling_params"}
#: Rollouts that one step may take where SkyRL sets no limit.
_UNLIMITED = 1000


class SkyrlSettings(RolloutSettings):
    """The content of the file: the keys of ``RolloutSettings``."""

    variable: ClassVar = "MOCK_SCHEDULER_SKYRL"


def describe_config(cfg: Any) -> dict[str, JSON]:  # noqa: ANN401 - SkyRL's
    """Describe what a replay must share with its recording."""
    return describe_keys(cfg, _CONTRACT, "skyrl")


def read_sampling(cfg: Any) -> dict[Mode, SamplingParams]:  # noqa: ANN401 - SkyRL's
    """Read how tokens are sampled; SkyRL starts vLLM with log-probabilities after temperature, top-p and top-k."""
    return {
        mode: SamplingParams(
            temperature=float(read_key(cfg, f"{key}.temperature", 1.0)),
            top_p=float(read_key(cfg, f"{key}.top_p", 1.0)),
            top_k=max(int(read_key(cfg, f"{key}.top_k", 0)), 0),
            logprobs_mode="processed",
        )
        for mode, key in _SAMPLING.items()
    }


def check_supported(cfg: Any) -> None:  # noqa: ANN401 - SkyRL's
    """Refuse what this adapter cannot record; raises ``ConfigError``."""
    if read_key(cfg, "trainer.fully_async.enabled", default=False):
        raise ConfigError(
            "trainer.fully_async.enabled=true plays groups at the same time, and trains on them in the order in which "
            "they end: this adapter records neither that order nor their staleness. Use SkyRL's synchronous trainer"
        )


def rollouts_per_step(cfg: Any) -> int:  # noqa: ANN401 - SkyRL's
    """Count the rollouts that one step of training may take: more than one with dynamic sampling."""
    if read_key(cfg, "trainer.algorithm.dynamic_sampling.type", default=None) is None:
        return 1
    limit = int(read_key(cfg, "trainer.algorithm.dynamic_sampling.max_sample_batches", -1))
    return limit if limit > 0 else _UNLIMITED
