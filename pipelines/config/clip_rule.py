"""A finished run's ``config.yaml`` says how its policy loss clips; importing this imports no torch.

Contract: another release may have written the file, so that only the keys that matter are looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mock_scheduler.correction.config.algorithm import AlgorithmConfig
from mock_scheduler.errors import AlignmentError
from mock_scheduler.program import ClipRule
from pipelines.config.schema import PipelineConfig

_NUMBERS = ("pg_clip", "pg_clip_high", "dual_clip")


def load_clip_rule(config_path: Path) -> ClipRule:
    """Reads how the run of a ``config.yaml`` clips; keys that the file lacks have their defaults.

    Raises ``AlignmentError`` where it cannot be read, with the name of each wrong key.
    """
    try:
        content = yaml.safe_load(config_path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise AlignmentError(f"{config_path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise AlignmentError(f"{config_path} is not a configuration: it has no keys")
    numbers, problems = _numbers(content)
    algorithm = AlgorithmConfig()
    try:
        algorithm = AlgorithmConfig.model_validate(content.get("algorithm") or {})
    except ValidationError as error:
        problems.append(f"algorithm: {error.errors()[0]['msg']}")
    if problems:
        raise AlignmentError(f"{config_path} does not say how the loss clips: {'; '.join(problems)}")
    low, high, dual = numbers["pg_clip"], numbers["pg_clip_high"], numbers["dual_clip"]
    assert low is not None
    spec = None if algorithm.rollout_correction is None else algorithm.rollout_correction.spec
    is_geometric = content.get("policy_loss") == "gmpo"
    return ClipRule(
        low=low,
        high=low if high is None else high,
        dual=None if is_geometric else dual,
        is_geometric=is_geometric,
        is_bypass=spec is not None and spec.bypass,
        has_clip=spec is None or spec.loss_type == "ppo_clip",
    )


def _numbers(content: Mapping[str, Any]) -> tuple[dict[str, float | None], list[str]]:
    values: dict[str, float | None] = {}
    problems = []
    for name in _NUMBERS:
        value = content.get(name, PipelineConfig.model_fields[name].default)
        is_number = isinstance(value, float | int) and not isinstance(value, bool)
        if not is_number and not (value is None and name != "pg_clip"):
            problems.append(f"{name} is {value!r}, expected a number")
        values[name] = float(value) if is_number else None
    return values, problems
