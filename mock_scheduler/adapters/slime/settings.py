"""The settings of a run of slime's family, in one YAML file that ``MOCK_SCHEDULER_SLIME`` names.

    rollout_mock: {enable: true, mode: dump, dump_dir: dumps/v1}
    real: slime.rollout.sglang_rollout.generate_rollout

Contract: read once in a process, when the first rollout is asked for; an unknown key is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from mock_scheduler.adapters.settings_file import load_settings_file
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import ConfigError
from mock_scheduler.proxy.build import read_config

VARIABLE = "MOCK_SCHEDULER_SLIME"
FAMILY = ("slime", "miles", "vime", "relax")


class SlimeSettings(BaseModel):
    """The content of the file.

    Attributes:
        rollout_mock: the section of that name.
        real: the rollout function, or class, that plays: ``module.name``.
        framework: the package of its classes; ``None``: the first part of ``real`` where that is slime, miles or vime.
        resume: a dump goes on in the folder of its earlier part.
        contract: further names and values that a replay must match.
        with_engines: a replay may have engines beside it, as for a measurement of memory.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    rollout_mock: Mapping[str, Any]
    real: str
    framework: str | None = None
    resume: bool = False
    contract: Mapping[str, Any] = {}
    with_engines: bool = False

    @property
    def package(self) -> str:
        """The package of the framework's classes; raises ``ConfigError`` where it is not known."""
        first = self.real.partition(".")[0]
        if self.framework is None and first not in FAMILY:
            raise ConfigError(f"real is {self.real!r}: set framework to the package of its samples, as in slime")
        return self.framework or first

    def mock_config(self) -> RolloutMockConfig:
        """Read the section; raises ``ConfigError`` listing every problem."""
        return read_config(self.rollout_mock)


def load_settings(path: Path | None = None) -> SlimeSettings:
    """Read the file; ``None``: the one that the variable names.

    Raises:
        ConfigError: there is none, or it has problems; lists all of them.
    """
    return load_settings_file(SlimeSettings, variable=VARIABLE, path=path, keys="rollout_mock and real")
