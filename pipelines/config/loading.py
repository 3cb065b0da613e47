"""Loading of the pipeline's configuration: its form for the library's loader; importing this imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mock_scheduler.config import loading
from mock_scheduler.config.dialects.dialects import DialectReader, ForeignKeys, RunNames
from mock_scheduler.config.loading import DEFAULT_CONFIG_PATH, ConfigForm, ConfigSource
from mock_scheduler.config.number_traps import NumberTraps
from mock_scheduler.correction.config.verl_dialect import read_verl_correction
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
    """verl's keys of rollout correction become ``algorithm``."""
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
    config_name: str, config_path: str | Path = DEFAULT_CONFIG_PATH, *, reads_once: bool = True
) -> Callable[[Sequence[str]], PipelineConfig]:
    """Builds a loader of one configuration under any overrides, as ``mock_scheduler.config.loading`` says."""
    return loading.build_loader(FORM, config_name, config_path, reads_once=reads_once)
