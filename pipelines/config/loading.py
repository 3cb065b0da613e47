"""Loads the pipeline's configuration by the library's loader, and reads how a finished run clips; imports no torch.

Another release may have written a finished run's ``config.yaml``, so only the keys of clipping are looked at in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mock_scheduler.config import loading
from mock_scheduler.config.dialects.reader import DialectReader, ForeignKeys, RunNames
from mock_scheduler.config.loading import ConfigForm, ConfigSource
from mock_scheduler.config.locating import DEFAULT_CONFIG_PATH
from mock_scheduler.config.number_traps import NumberTraps
from mock_scheduler.correction.config.algorithm import AlgorithmConfig
from mock_scheduler.correction.config.verl_dialect import read_verl_correction
from mock_scheduler.errors import AlignmentError, ConfigError
from mock_scheduler.program import ClipRule
from mock_scheduler.run_folder.finished_run import read_stored_keys
from pipelines.config.schema import PipelineConfig


def _name_run(config: PipelineConfig) -> RunNames:
    group_size = config.train_env_manager.group_size
    return RunNames(
        exp_name=config.exp_name,
        output_dir=config.output_dir,
        rollout_mock=config.rollout_mock,
        num_prompts=config.rollout_batch_size // group_size,
        rows_per_prompt=group_size,
    )


def _read_correction(values: Mapping[str, object]) -> ForeignKeys[PipelineConfig]:
    """Turns verl's keys of rollout correction into ``algorithm``."""
    found = read_verl_correction(values)
    return ForeignKeys(
        values=found.values,
        unread=found.unread,
        problems=found.problems,
        conflicts=lambda config: found.conflicts(config.algorithm),
    )


#: How AReaL's and verl's sections are read.
DIALECTS = DialectReader(schema=PipelineConfig, name_run=_name_run, read_own=_read_correction)

#: How the pipeline's configuration is loaded.
FORM = ConfigForm(
    schema=PipelineConfig,
    resolve=DIALECTS.resolve,
    traps=NumberTraps(
        places=("algorithm", "actor_rollout_ref.actor.tis_imp_ratio_cap"),
        pair_keys=("rollout_is_threshold", "rollout_rs_threshold"),
    ),
)


def load_source(source: ConfigSource) -> PipelineConfig:
    """Loads the checked configuration of a source; raises ``ConfigError``."""
    return loading.load_config(FORM, source)


def load_config(
    config_name: str, *, config_path: str | Path = DEFAULT_CONFIG_PATH, overrides: Sequence[str] = ()
) -> PipelineConfig:
    """Loads ``{config_path}/{config_name}.yaml`` under overrides; raises ``ConfigError``."""
    return load_source(ConfigSource(config_name=config_name, config_path=str(config_path), overrides=tuple(overrides)))


def build_loader(
    config_name: str, config_path: str | Path = DEFAULT_CONFIG_PATH
) -> Callable[[Sequence[str]], PipelineConfig]:
    """Builds a loader of one configuration under any overrides, as ``mock_scheduler.config.loading`` says."""
    return loading.build_loader(FORM, config_name, config_path)


_NUMBERS = ("pg_clip", "pg_clip_high", "dual_clip")


def load_clip_rule(config_path: Path) -> ClipRule:
    """Reads how the run of a ``config.yaml`` clips; absent keys have their defaults.

    Raises ``AlignmentError`` where it cannot be read, with the name of each wrong key.
    """
    try:
        content = read_stored_keys(config_path)
    except ConfigError as error:
        raise AlignmentError(str(error)) from error
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
