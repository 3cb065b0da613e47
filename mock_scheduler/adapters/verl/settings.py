"""The settings of a run of verl, in one YAML file that ``MOCK_SCHEDULER_VERL`` names.

rollout_mock: {enable: true, mode: dump, dump_dir: /shared/dumps/v1}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from mock_scheduler.adapters import settings
from mock_scheduler.adapters.settings import RolloutSettings

VARIABLE = "MOCK_SCHEDULER_VERL"


class VerlSettings(RolloutSettings):
    """The content of the file; further keys are those of ``RolloutSettings``.

    Attributes:
        real: the agent loop manager that plays: ``module.name``.
        with_engines: a replay may have engines beside it, as for a measurement of memory.
        trace_dir: where engines in plain torch (FSDP2) write their traces; ``None``: nowhere.
        trace: as the section ``trace`` of a configuration; ``None``: whole tensors of every update.
    """

    variable: ClassVar = VARIABLE

    real: str = "verl.experimental.agent_loop.AgentLoopManager"
    with_engines: bool = False
    trace_dir: str | None = None
    trace: Mapping[str, Any] | None = None

    @property
    def is_replay(self) -> bool:
        """Whether every rollout comes from the recording."""
        config = self.mock_config()
        return config.enable and config.modes_in_use == {"mock"}

    @property
    def is_recorded(self) -> bool:
        """Whether some rollouts are live, and pass the proxy."""
        config = self.mock_config()
        return config.enable and not config.modes_in_use <= {"mock", "real"}


def load_settings(path: Path | None = None) -> VerlSettings:
    """Read the file; ``None``: the one that the variable names; raises ``ConfigError`` listing all its problems."""
    return settings.load_settings(VerlSettings, path)


def find_settings() -> VerlSettings | None:
    """Read the file that the variable names; None where it is not set."""
    return load_settings() if os.environ.get(VARIABLE) else None
