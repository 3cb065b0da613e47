"""Loads the configuration of a command, and refuses changes that would not reach the command; imports no torch.

Contract: what the file itself says is a statement about the command as it stands. A key with another value than there
has arguments, or is a field of the command; else a candidate would run the very same program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mock_scheduler.command_program.arguments import value_text
from mock_scheduler.command_program.config import CommandConfig
from mock_scheduler.config import loading
from mock_scheduler.config.loading import ConfigForm
from mock_scheduler.errors import ConfigError

#: How the configuration of a command is loaded.
FORM = ConfigForm(schema=CommandConfig)


def build_loader(config_name: str, config_path: str | Path) -> Callable[[Sequence[str]], CommandConfig]:
    """Builds a loader of one configuration under any overrides, as ``mock_scheduler.config.loading`` says."""
    load_any = loading.build_loader(FORM, config_name, config_path)
    path = Path(config_path).absolute() / f"{config_name.removesuffix('.yaml')}.yaml"

    @functools.cache
    def load_stated() -> CommandConfig:
        return load_any(())

    def load(overrides: Sequence[str]) -> CommandConfig:
        config = load_any(overrides)
        problems = list(_find_lost_changes(load_stated(), config)) if overrides else []
        if problems:
            raise ConfigError(f"{path}: {'; '.join(problems)}")
        return config

    return load


def _find_lost_changes(stated: CommandConfig, config: CommandConfig) -> Iterator[str]:
    before = stated.passed_keys()
    for key, value in config.passed_keys().items():
        # The instruments end a run after its last step, whatever the command was told.
        if key == "max_steps" or before.get(key) == value or config.reaches_command(key):
            continue
        yield (
            f"nothing passes {key} to the command, which is {value_text(value)} here and "
            f"{value_text(before.get(key))} in the file; add arguments.{key}, as in [--name, '{{}}'], or the field "
            f"{{{key}}}"
        )
