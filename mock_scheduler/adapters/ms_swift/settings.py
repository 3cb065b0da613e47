"""Holds the settings of a run of ms-swift: one YAML file that ``MOCK_SCHEDULER_MS_SWIFT`` names.

    rollout_mock: {enable: true, mode: dump, dump_dir: dumps/v1}

Contract: read in each process when the plugin is imported, and when the trainer is made; an unknown key is an error.
"""

from __future__ import annotations

import os
from typing import ClassVar

from mock_scheduler.adapters.settings import RolloutSettings, load_settings
from mock_scheduler.config.rollout_mock import RolloutMockConfig


class MsSwiftSettings(RolloutSettings):
    """Holds the content of the file; further keys are those of ``RolloutSettings``.

    Attributes:
        run_id: of a run of several processes that records, the same in all.
    """

    variable: ClassVar = "MOCK_SCHEDULER_MS_SWIFT"

    run_id: str | None = None

    def mock_config(self) -> RolloutMockConfig:
        """Read the section; raises ``ConfigError`` listing every problem."""
        config = super().mock_config()
        if config.random_states is None:
            # All: the engine is fed and woken outside the rollout, and may move the generators there.
            config = config.model_copy(update={"random_states": "all"})
        return config

    @property
    def is_replay_alone(self) -> bool:
        """Says whether no request is answered by the engine."""
        return self.mock_config().modes_in_use == {"mock"}


def find_settings() -> MsSwiftSettings | None:
    """Read the file that the variable names; None where it names none: rollouts are ms-swift's own.

    Raises:
        ConfigError: it has problems; lists all of them.
    """
    return load_settings(MsSwiftSettings) if os.environ.get(MsSwiftSettings.variable) else None
