"""The settings of a run in a framework: one YAML file that a variable of the environment names, or what a caller gives.

    rollout_mock: {enable: true, mode: dump, dump_dir: /shared/recordings/run1}
    contract: {data: v3}

Contract: an unknown key is an error, and all of them are listed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from mock_scheduler.batch import SamplingParams
from mock_scheduler.config.problems import raise_problems, validation_problems
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import ConfigError
from mock_scheduler.proxy.build import read_config
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.foreign_files import describe_failure, read_text
from mock_scheduler.support.locations import find_protocol
from mock_scheduler.support.yaml_text import load_yaml


class RolloutSettings(BaseModel):
    """What every framework's file may say.

    Attributes:
        rollout_mock: the section of that name.
        resume: a dump goes on in the folder of its earlier part.
        contract: further names and values that a replay must match.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    #: Names the file.
    variable: ClassVar[str]

    rollout_mock: Mapping[str, Any]
    resume: bool = False
    contract: Mapping[str, Any] = {}

    def mock_config(self) -> RolloutMockConfig:
        """Read the section; raises ``ConfigError`` listing every problem."""
        return read_config(self.rollout_mock)

    def with_absolute_folder(self) -> Self:
        """Return the same settings for processes that may stand in another folder, as actors of Ray do."""
        config = self.mock_config()
        if find_protocol(config.dump_dir) is not None or config.modes_in_use == {"real"}:
            return self
        folder = os.path.abspath(os.path.expanduser(config.dump_dir))
        return self.model_copy(update={"rollout_mock": {**self.rollout_mock, "dump_dir": folder}})


Settings = TypeVar("Settings", bound=RolloutSettings)
#: Settings, their content, or their file; None: the file that the variable names.
GivenSettings: TypeAlias = RolloutSettings | Mapping[str, Any] | str | Path | None


def load_settings(kind: type[Settings], given: GivenSettings = None) -> Settings:
    """Read the settings of a framework.

    Raises:
        ConfigError: there are none, or they have problems; lists all of them.
    """
    if isinstance(given, RolloutSettings):
        return kind.model_validate(given.model_dump()) if type(given) is not kind else given
    if isinstance(given, Mapping):
        return _check(kind, given, "settings")
    named = given if given is not None else os.environ.get(kind.variable)
    if not named:
        needed = " and ".join(name for name, field in kind.model_fields.items() if field.is_required())
        raise ConfigError(
            f"{kind.variable} is not set: name a YAML file with {needed} in the environment of every process (with "
            "Ray: runtime_env={'env_vars': ...})"
        )
    try:
        value = load_yaml(read_text(Path(named), what="settings"))
    except OSError as error:
        raise ConfigError(describe_failure(error, Path(named))) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named} is not UTF-8: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{named} {error}") from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"{named} holds a {type(value).__name__}; expected keys such as rollout_mock")
    return _check(kind, value, str(named))


def _check(kind: type[Settings], value: Mapping[str, Any], where: str) -> Settings:
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise_problems(where, validation_problems(error, kind))


def describe_keys(config: object, keys: Iterable[str], prefix: str) -> dict[str, JSON]:
    """Describe a framework's configuration by dotted keys, of attributes or of entries; those that it lacks are left
    out, and what is no plain value is told by its text."""
    found = {key: read_key(config, key) for key in keys}
    return {
        f"{prefix}.{key}": value if isinstance(value, str | int | float | None) else str(value)
        for key, value in found.items()
        if value is not ABSENT
    }


def read_sampling_at(config: object, key: str) -> SamplingParams:
    """Read how tokens are sampled from the section at a dotted key: all of them where it says nothing. Engines give
    log-probabilities of what they sample from."""
    found = {name: read_key(config, f"{key}.{name}", None) for name in ("temperature", "top_p", "top_k")}
    return SamplingParams(
        temperature=1.0 if found["temperature"] is None else float(found["temperature"]),
        top_p=1.0 if found["top_p"] is None else float(found["top_p"]),
        top_k=max(int(found["top_k"] or 0), 0),
        logprobs_mode="processed",
    )


ABSENT = object()


def read_key(config: object, key: str, default: object = ABSENT) -> Any:  # noqa: ANN401 - a framework's
    """Read the value at a dotted key; ``default`` where there is none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part, ABSENT) if isinstance(value, Mapping) else getattr(value, part, ABSENT)
        if value is ABSENT:
            return default
    return value
