"""Builders for tests of ``algorithm``: configurations of two lines, and what loading them says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from mock_scheduler.config.problems import validation_problems
from mock_scheduler.correction.config.rules import Action, CorrectionSpec, Level, Rule
from mock_scheduler.errors import ConfigError
from pipelines.config.loading import load_config
from pipelines.config.schema import PipelineConfig

SECTION = "algorithm.rollout_correction"
VETO = Rule(level="token", action="reject_sequence", lower=1e-4, name="veto")


def load_text(folder: Path, text: str, *overrides: str) -> PipelineConfig:
    """The configuration of this YAML, to which only a name is added."""
    (folder / "run.yaml").write_text(f"exp_name: x\n{text}", encoding="utf-8")
    return load_config("run", config_path=folder, overrides=overrides)


def problems_of_text(folder: Path, text: str, *overrides: str) -> list[str]:
    """Every problem that is listed, without the header."""
    with pytest.raises(ConfigError) as caught:
        load_text(folder, text, *overrides)
    header, *problems = str(caught.value).split("\n  - ")
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    assert header == f"configuration 'run' ({folder}/run.yaml) has {count}:"
    return problems


def load_algorithm(folder: Path, algorithm: Mapping[str, object], **others: object) -> PipelineConfig:
    """The configuration with this section ``algorithm`` and these top-level keys."""
    return load_text(folder, yaml.safe_dump({"algorithm": dict(algorithm), **others}))


def problems_of(correction: object, **others: object) -> list[str]:
    """What a section ``rollout_correction`` is refused for, as loading lists it, without the section's own key."""
    values = {"exp_name": "x", "algorithm": {"rollout_correction": correction}, **others}
    with pytest.raises(ValidationError) as caught:
        PipelineConfig.model_validate(values)
    found = [f"{key}: {text}" for key, text in validation_problems(caught.value, PipelineConfig)]
    return [problem.removeprefix(f"{SECTION}.") for problem in found]


def nested(*lines: str) -> str:
    return "algorithm:\n  rollout_correction:\n" + "".join(f"    {line}\n" for line in lines)


def cut(level: Level, upper: float) -> Rule:
    return Rule(level=level, action="truncate", upper=upper, name="rollout_is")


def outside(level: Level, lower: float, upper: float) -> Rule:
    action: Action = "reject_token" if level == "token" else "reject_sequence"
    return Rule(level=level, action=action, lower=lower, upper=upper, name=level)


def spec_of(config: PipelineConfig) -> CorrectionSpec:
    section = config.algorithm.rollout_correction
    assert section is not None
    return section.spec
