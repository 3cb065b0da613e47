"""Which episode an identity plays: its environment's seed, and the layouts that it may be played on."""

from __future__ import annotations

from pipelines.config.environments import CustomEnvConfig
from pipelines.config.schema import Mode
from pipelines.environments.base import Split
from pipelines.seeds import derive_seed


def environment_seed(seed: int, *, tag: str, mode: Mode, scheduler_id: str, group_id: int, episode_id: int) -> int:
    """The seed of an episode's environment, in [0, 2**31), from the run's ``seed``; a group's members share it."""
    return derive_seed(seed, "environment", tag, mode, scheduler_id, group_id, episode_id)


def split_of(config: CustomEnvConfig, mode: Mode) -> Split:
    """The layouts that a mode plays in an environment: validation plays held-out ones alone where there are any."""
    if mode == "train":
        return "train"
    return "held_out" if config.env_config.held_out_fraction > 0 else "all"
