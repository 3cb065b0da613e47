"""A comparison reads a few keys of the configuration that a finished run stored, and nothing else.

Contract: the rules by which a configuration is checked before a run do not apply to one that has run: another release
of Megatron, or of this project, may have written it. Keys that are not needed are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from mock_scheduler.config.align import ToleranceConfig
from mock_scheduler.config.base import ConfigSection
from mock_scheduler.config.instruments import PerturbationConfig
from mock_scheduler.config.problems import validation_problems
from mock_scheduler.determinism.settings import is_deterministic_mode
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.text import bullet_list

_Section = TypeVar("_Section", bound=ConfigSection)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredConfig:
    """The needed keys. ``tolerance``: the bounds that the run states, if any. ``perturbation``: of its weights."""

    path: Path
    precision: str
    trace_level: str
    is_deterministic: bool
    tolerance: ToleranceConfig
    perturbation: PerturbationConfig


def load_stored_config(path: Path) -> StoredConfig:
    """Reads a run's ``config.yaml``; raises ``ConfigError`` where a needed key is missing or of another kind."""
    content = read_stored_keys(path)
    problems: list[str] = []
    precision = _text(content, "precision", problems)
    trace_level = _text(_section(content, "trace", problems), "level", problems, prefix="trace.")
    envs = {str(name): str(value) for name, value in _section(content, "system_envs", problems).items()}
    stated = _section(content, "align", problems).get("tolerance")
    tolerance = _checked(ToleranceConfig, "align.tolerance", stated, problems)
    perturbation = _checked(PerturbationConfig, "perturbation", content.get("perturbation"), problems)
    if problems:
        raise ConfigError(f"{path} is not the configuration of a run:{bullet_list(problems, limit=None)}")
    return StoredConfig(
        path=path,
        precision=precision,
        trace_level=trace_level,
        is_deterministic=is_deterministic_mode(envs),
        tolerance=tolerance,
        perturbation=perturbation,
    )


def read_stored_keys(path: Path) -> dict[str, Any]:
    """Reads the keys of a run's ``config.yaml`` as they stand; raises ``ConfigError`` where there are none."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is no configuration: it has no keys")
    return content


def _section(content: Mapping[str, Any], name: str, problems: list[str]) -> Mapping[str, Any]:
    value = content.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        problems.append(f"{name} is {value!r}, expected keys")
        return {}
    return value


def _text(content: Mapping[str, Any], name: str, problems: list[str], *, prefix: str = "") -> str:
    value = content.get(name)
    if isinstance(value, str):
        return value
    # YAML reads an unquoted off as False.
    if value is False:
        return "off"
    problems.append(f"{prefix}{name} is {value!r}, expected a text")
    return ""


def _checked(section: type[_Section], name: str, value: object, problems: list[str]) -> _Section:
    """Returns a section as it stands; one without keys where it is missing or wrong, which becomes a problem."""
    try:
        return section.model_validate(value or {})
    except ValidationError as error:
        problems.extend(f"{key}: {text}" for key, text in validation_problems(error, section, section=name))
        return section()
