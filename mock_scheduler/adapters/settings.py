"""The settings of a framework that is started by its own command: one YAML file, named by an environment variable.

Contract: read once in a process, when it is first needed; an unknown key is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from mock_scheduler.config.problems import raise_problems, validation_problems
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import ConfigError
from mock_scheduler.proxy.build import read_config
from mock_scheduler.support.foreign_files import read_text


class AdapterSettings(BaseModel):
    """The keys that every such file has.

    Attributes:
        rollout_mock: the section of that name.
        resume: a dump goes on in the folder of its earlier part.
        contract: further names and values that a replay must match.
        with_engines: a replay may have engines beside it, as for a measurement of memory.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    rollout_mock: Mapping[str, Any]
    resume: bool = False
    contract: Mapping[str, Any] = {}
    with_engines: bool = False

    def mock_config(self) -> RolloutMockConfig:
        """Read the section; raises ``ConfigError`` listing every problem."""
        return read_config(self.rollout_mock)


Settings = TypeVar("Settings", bound=AdapterSettings)


def read_settings(kind: type[Settings], variable: str, path: Path | None = None) -> Settings:
    """Read the file; ``None``: the one that ``variable`` names.

    Raises:
        ConfigError: there is none, or it has problems; lists all of them.
    """
    keys = " and ".join(name for name, field in kind.model_fields.items() if field.is_required())
    named = path if path is not None else os.environ.get(variable)
    if not named:
        raise ConfigError(
            f"{variable} is not set: name a YAML file with {keys} in the environment of every process "
            "(with Ray: runtime_env={'env_vars': ...})"
        )
    try:
        value = yaml.safe_load(read_text(Path(named), what="settings"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{named} cannot be read: {error}") from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"{named} holds a {type(value).__name__}; expected the keys {keys}")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise_problems(str(named), validation_problems(error, kind))
