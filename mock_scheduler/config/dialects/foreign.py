"""All dialects read a section of another framework, and build the ``rollout_mock`` that it becomes, with these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import ValidationError

from mock_scheduler.config.base import ConfigSection
from mock_scheduler.config.problems import raise_problems, validation_problems
from mock_scheduler.config.rollout_mock import RolloutMockConfig

Section = TypeVar("Section", bound=ConfigSection)


def read_section(model: type[Section], values: Mapping[str, object], *, section: str, origin: str) -> Section:
    """Returns a foreign section as its model; ConfigError lists every problem under ``section``'s dotted key."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise_problems(origin, validation_problems(error, model, section=section))


def build_rollout_mock(source: str, fields: Mapping[str, object], *, remark: str = "") -> RolloutMockConfig:
    """Builds the enabled section with these fields; its ``origin`` names ``source``, its translation and ``remark``.

    Raises ``ConfigError`` for values that ``rollout_mock`` refuses.
    """
    try:
        config = RolloutMockConfig.model_validate({"enable": True, **fields})
    except ValidationError as error:
        raise_problems(source, validation_problems(error, RolloutMockConfig, section="rollout_mock"))
    return config.model_copy(update={"origin": describe_translation(source, config) + remark})


def describe_translation(source: str, config: RolloutMockConfig) -> str:
    """``verl's actor_rollout_ref.rollout.skip_rollout became rollout_mock: mode=cache, dump_dir=/data/…``."""
    retention = config.retention
    values = {
        "mode": config.mode,
        "dump_dir": config.dump_dir,
        "schedule": "; ".join(entry.describe() for entry in config.schedule),
        "steps": config.steps,
        "missing_step": config.missing_step if config.missing_step != "error" else None,
        "retention.keep_last": retention.keep_last,
        "retention.pin_steps": retention.pin_steps,
    }
    shown = ", ".join(f"{key}={value}" for key, value in values.items() if value)
    return f"{source} became rollout_mock: {shown}"
