"""Reads the command line of an entry: ``--config-name NAME --config-path DIR a.b=c ...``, in any order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import typer

from mock_scheduler.config.loading import DEFAULT_CONFIG_PATH, ConfigSource
from mock_scheduler.support.arguments import parse_arguments

ConfigName = Annotated[str, typer.Option("--config-name", help="file in it, without .yaml")]
ConfigPath = Annotated[str, typer.Option("--config-path", help="folder of YAML files")]
Overrides = Annotated[list[str] | None, typer.Argument(help="a.b=c, in Hydra's grammar", show_default=False)]

_ROLL_SPELLING = re.compile(r"^--config_(name|path)(?==|$)")


def parse_config_arguments(arguments: Sequence[str], *, prog: str) -> ConfigSource:
    """Read the source of a run's configuration; raises ``ConfigError`` for a missing name or an unknown option.

    ``arguments``: without the program's name.
    """
    return parse_arguments(_read_source, with_one_spelling(arguments), prog=f"python -m {prog}")


def with_one_spelling(arguments: Sequence[str]) -> list[str]:
    """Spell ROLL's ``--config_name`` and ``--config_path`` as ours, so its users' commands go on working."""
    return [_ROLL_SPELLING.sub(r"--config-\1", argument) for argument in arguments]


def _read_source(
    config_name: ConfigName, overrides: Overrides = None, config_path: ConfigPath = DEFAULT_CONFIG_PATH
) -> ConfigSource:
    return ConfigSource(config_name=config_name, config_path=config_path, overrides=tuple(overrides or ()))
