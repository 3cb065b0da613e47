"""Settings of an adapter whose framework offers no place for them: a YAML file, which an environment variable names.

Contract: an unknown key is an error, and all problems are listed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from mock_scheduler.config.problems import raise_problems, validation_problems
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.foreign_files import read_text

Settings = TypeVar("Settings", bound=BaseModel)


def load_settings_file(kind: type[Settings], *, variable: str, path: Path | None, keys: str) -> Settings:
    """Reads the file; ``path`` None: the one that the variable names. ``keys``: those that it needs, for messages.

    Raises:
        ConfigError: there is none, or it has problems; lists all of them.
    """
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
