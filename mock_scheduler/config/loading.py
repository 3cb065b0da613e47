"""Loads a run's configuration: Hydra composes, OmegaConf resolves, and the schema of a program checks.

The command line of an entry is ``--config-name NAME --config-path DIR a.b=c ...``, in any order.

Contract: imports no torch; creates no folder, changes no working directory and configures no logging; may be called
any number of times in one process. Every failure is a ConfigError with all problems of one stage: the files, then
interpolations, then keys and values, then combinations that the schema refuses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Protocol, TypeVar

import typer
import yaml
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_omega_conf_dumper
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    InterpolationResolutionError,
)
from pydantic import BaseModel, ValidationError

from mock_scheduler.config.base import ConfigSection, EnvironmentTexts, KeyPath
from mock_scheduler.config.composing import Composer, parse_overrides
from mock_scheduler.config.dialects.reader import Resolved
from mock_scheduler.config.interpolations import check_expansion, escape, with_environment_texts
from mock_scheduler.config.locating import DEFAULT_CONFIG_PATH, check_config_exists, locate_config
from mock_scheduler.config.number_traps import NO_TRAPS, NumberTraps
from mock_scheduler.config.problems import Problem, raise_problems, validation_problems
from mock_scheduler.config.rollout_mock import RolloutMockConfig, override_problems
from mock_scheduler.config.stored_code import PROGRAM_KEY
from mock_scheduler.config.variables import find_variable_problems
from mock_scheduler.support.arguments import parse_arguments
from mock_scheduler.support.text import printable_lines

ConfigT = TypeVar("ConfigT", bound=BaseModel)


def _resolve_nothing(values: Mapping[str, object]) -> Resolved:
    return Resolved(values=dict(values))


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigForm(Generic[ConfigT]):
    """Holds the form of a program's configuration.

    ``schema``: the model that checks it. ``resolve``: turns sections of other frameworks into the schema's own.
    ``traps``: keys with numbers that may have been meant as pairs of bounds.
    """

    schema: type[ConfigT]
    resolve: Callable[[Mapping[str, object]], Resolved] = _resolve_nothing
    traps: NumberTraps = NO_TRAPS


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigSource:
    """Where a configuration comes from: a folder, a file's name without suffix, and overrides ``a.b=c``."""

    config_name: str
    config_path: str = DEFAULT_CONFIG_PATH
    overrides: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Return the command line from which ``parse_config_arguments`` reads this source back."""
        return ["--config-path", self.config_path, "--config-name", self.config_name, *self.overrides]


_DUMPER = get_omega_conf_dumper()


class Dumped(Protocol):
    """A configuration as plain values, as every pydantic model gives them."""

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        """Give the values by their keys."""
        ...


def load_config(form: ConfigForm[ConfigT], source: ConfigSource) -> ConfigT:
    """Loads a configuration: its files and overrides composed, interpolations resolved, and the result checked.

    A plain override ``a.b=c`` sets any key of the schema, whether or not the YAML has it; where its key names a folder
    under ``config_path`` it selects from the config group there, as in Hydra. ``+``, ``++`` and ``~`` are Hydra's.
    Integers in ``system_envs`` become strings. A number meant as a pair of bounds is refused where it is written.
    Raises ``ConfigError``.
    """
    return build_loader(form, source.config_name, source.config_path)(source.overrides)


def build_loader(
    form: ConfigForm[ConfigT], config_name: str, config_path: str | Path = DEFAULT_CONFIG_PATH
) -> Callable[[Sequence[str]], ConfigT]:
    """Builds a function to load one configuration under any overrides, as ``load_config`` does."""
    folder, name = Path(config_path).absolute(), config_name.removesuffix(".yaml")
    composer = Composer(folder, name, traps=form.traps)

    def load(overrides: Sequence[str]) -> ConfigT:
        check_config_exists(folder, name)
        parsed = parse_overrides(overrides, form.schema)
        composed, files = composer.compose(parsed)
        check_expansion(composed, composer.origin)
        problems = [*_interpolation_problems(composed), *form.traps.find(files, parsed, composed)]
        if problems:
            raise_problems(composer.origin, problems, source_of=_source_of(parsed))
        return _check(form, composed, composer.origin, parsed)

    return load


def _check(form: ConfigForm[ConfigT], composed: DictConfig, origin: str, overrides: Sequence[Override]) -> ConfigT:
    values = _with_string_envs(OmegaConf.to_container(composed, resolve=True))
    if PROGRAM_KEY not in form.schema.model_fields:
        values.pop(PROGRAM_KEY, None)
    resolved = form.resolve(values)
    envs = resolved.values.get("system_envs")
    problems = [*resolved.problems, *(find_variable_problems(envs) if isinstance(envs, Mapping) else ())]
    if problems:
        raise_problems(origin, problems, source_of=_source_of(overrides))
    try:
        config = form.schema.model_validate(resolved.values)
    except ValidationError as error:
        raise_problems(origin, validation_problems(error, form.schema), source_of=_source_of(overrides))
    vain = _vain_overrides(config, overrides)
    if vain:
        raise_problems(origin, vain, source_of=_source_of(overrides))
    with_environment_texts(config, composed)
    return config


def _vain_overrides(config: BaseModel, overrides: Sequence[Override]) -> list[Problem]:
    """Lists the overrides of ``rollout_mock`` that change nothing of this run."""
    keys = dict.fromkeys(key for override in overrides for key in _overridden_keys(override))
    return [
        (f"{name}.{key}", reason)
        for name, section in config
        if isinstance(section, RolloutMockConfig)
        for key, reason in override_problems(
            section, [key.removeprefix(f"{name}.") for key in keys if key.startswith(f"{name}.")]
        )
    ]


def _overridden_keys(override: Override) -> Iterator[str]:
    """Yields the dotted keys that an override sets; a section given as a whole sets the keys inside."""
    if override.is_delete():
        return
    value = override.value()
    if isinstance(value, dict):
        yield from (f"{override.key_or_group}.{key}" for key in value)
    else:
        yield override.key_or_group


def dump_config(config: Dumped) -> str:
    """Returns the whole configuration as YAML, which loads back equal; the same text for equal configurations.

    A text out of the environment is written as ``${oc.env:NAME}`` (``interpolations``): whoever loads the file
    gives it a value of its own.
    """
    texts = config.environment_texts if isinstance(config, ConfigSection) else EnvironmentTexts()
    values = _as_written(config.model_dump(mode="json"), texts, ())
    # The text of OmegaConf.to_yaml, which would make a container of the values first.
    text = yaml.dump(values, default_flow_style=False, allow_unicode=True, sort_keys=False, Dumper=_DUMPER)
    # YAML's own escapes, where a terminal would act on a character: they load back equal.
    return text if printable_lines(text) == text else yaml.safe_dump(values, sort_keys=False)


def _as_written(value: object, texts: EnvironmentTexts, path: KeyPath) -> Any:  # noqa: ANN401 - plain values
    """Writes plain values for a file: other values were resolved, so a ``${`` still there must be loaded as text."""
    if isinstance(value, dict):
        return {key: _as_written(item, texts, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_written(item, texts, (*path, index)) for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    stored = texts.stored(path, value)
    return escape(value) if stored is None else stored


def _interpolation_problems(composed: DictConfig) -> Iterator[Problem]:
    """Yields every open value: an unresolved interpolation, or ``???``."""
    for path, text in _texts(OmegaConf.to_container(composed, resolve=False), ""):
        if text == "???":
            yield path, f"has no value yet; give it as {path}=VALUE"
        elif "${" in text:
            yield from _resolution_problems(composed, path, text)


def _texts(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yields every string in a container with its path as ``OmegaConf.select`` takes it: ``a.b[0]``."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, f"{path}[{index}]")
    elif isinstance(value, str):
        yield path, value


def _resolution_problems(composed: DictConfig, path: str, text: str) -> Iterator[Problem]:
    try:
        OmegaConf.select(composed, path)
    except InterpolationKeyError as error:
        yield path, f"{text!r} refers to a key that is not there: {str(error).splitlines()[0]}"
    except (InterpolationResolutionError, GrammarParseError) as error:
        cause = str(error).splitlines()[0].removeprefix("KeyError raised while resolving interpolation: ").strip('"')
        advice = "; export it, or give a default: ${oc.env:NAME,default}" if "Environment variable" in cause else ""
        yield path, f"{text!r} cannot be resolved: {cause}{advice}"


def _with_string_envs(values: object) -> dict[str, object]:
    """``system_envs`` as the environment takes them: YAML's ``0`` means ``'0'``; a bool stays, and is refused."""
    named = {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}
    envs = named.get("system_envs")
    if not isinstance(envs, dict):
        return named
    texts = {
        name: str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        for name, value in envs.items()
    }
    return {**named, "system_envs": texts}


def _source_of(overrides: Sequence[Override]) -> Callable[[str], str | None]:
    """Makes a function from a dotted key to the override that set it, if any; of several of one key, the last."""
    in_effect = {override.key_or_group: override.input_line for override in overrides}

    def find(key: str) -> str | None:
        return next((line for name, line in in_effect.items() if _covers(name, key)), None)

    return find


def _covers(override_key: str, key: str) -> bool:
    """Says whether an override of one key set the other, at any depth."""
    return f"{override_key}.".startswith(f"{key}.") or f"{key}.".startswith(f"{override_key}.")


ConfigName = Annotated[str, typer.Option("--config-name", help="file in it, without .yaml; or a path")]
ConfigPath = Annotated[str | None, typer.Option("--config-path", help="folder of YAML files; else configs")]
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


def _read_source(config_name: ConfigName, overrides: Overrides = None, config_path: ConfigPath = None) -> ConfigSource:
    name, folder = locate_config(config_name, config_path)
    return ConfigSource(config_name=name, config_path=folder, overrides=tuple(overrides or ()))
