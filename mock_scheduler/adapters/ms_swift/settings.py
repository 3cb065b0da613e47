"""The settings of a run of ms-swift, in one YAML file that ``MOCK_SCHEDULER_MS_SWIFT`` names.

    rollout_mock: {enable: true, mode: dump, dump_dir: dumps/v1}

Contract: read once in a process, when the trainer is made; an unknown key is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from mock_scheduler.adapters.settings_file import load_settings_file
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.proxy.build import read_config

VARIABLE = "MOCK_SCHEDULER_MS_SWIFT"


class MsSwiftSettings(BaseModel):
    """The content of the file.

    Attributes:
        rollout_mock: the section of that name.
        contract: further names and values that a replay must match.
        resume: a dump goes on in the folder of its earlier part.
        run_id: of a run of several processes that records, the same in all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    rollout_mock: Mapping[str, Any]
    contract: Mapping[str, Any] = {}
    resume: bool = False
    run_id: str | None = None

    def mock_config(self) -> RolloutMockConfig:
        """Reads the section; raises ``ConfigError`` listing every problem."""
        config = read_config(self.rollout_mock)
        if config.random_states is None:
            # All: the engine is fed and woken outside the rollout, and may move the generators there.
            config = config.model_copy(update={"random_states": "all"})
        return config

    @property
    def is_replay_alone(self) -> bool:
        """Whether no request is answered by the engine."""
        return self.mock_config().modes_in_use == {"mock"}


def load_settings() -> MsSwiftSettings | None:
    """Reads the file that the variable names; None where it names none: rollouts are ms-swift's own.

    Raises:
        ConfigError: it has problems; lists all of them.
    """
    if not os.environ.get(VARIABLE):
        return None
    return load_settings_file(MsSwiftSettings, variable=VARIABLE, path=None, keys="rollout_mock")
