"""A composer puts a configuration's YAML files and overrides together, by Hydra; the caller gives the schema.

Contract: creates no folder, changes no working directory and configures no logging. No file is read that stands for
more values than it may.
"""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, ClassVar, Literal, Union, get_args, get_origin

import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, ValueType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import Container, DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from mock_scheduler.config.base import JoinedTexts
from mock_scheduler.config.locating import shipped_folder
from mock_scheduler.config.number_traps import NumberTraps, SourceFile
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.foreign_files import read_text
from mock_scheduler.support.text import bullet_list, shorten
from mock_scheduler.support.yaml_text import MAX_DEPTH, load_yaml

#: What is asked of a path: whether it is a folder or a file, or its text.
Question = tuple[Callable[[str], object], str]

_NUM_KEPT = 32
_NUMBERS = (int, float, bool, NoneType)
_NESTED_HINT = (
    "\nWithin a list or an object quote each text that holds any of = , : [ ] { }, and for the shell the whole "
    "override, as in\n  \"align.candidates=[{name: tp2, overrides: ['parallel.tensor_model_parallel_size=2']}]\""
)


# OmegaConf 2.3 lets errors of Python out, such as where a key of a list is no number.
_COMPOSING_ERRORS = (
    HydraException,
    OmegaConfBaseException,
    yaml.YAMLError,
    UserWarning,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
)


class Composer:
    """One configuration under any overrides: ``{folder}/{name}.yaml``.

    Hydra composes it without overrides once for as long as its files say the same, and overrides that only set values,
    such as an alignment's candidates, are set in a copy, with the same result as by Hydra. All other overrides go
    through Hydra each time. ``traps``: the keys whose numbers are looked at where they are written.
    """

    def __init__(self, folder: Path, name: str, *, traps: NumberTraps) -> None:
        self._folder = folder
        self._name = name
        self._traps = traps

    @property
    def origin(self) -> str:
        """Returns the name of the configuration and its file, for messages."""
        return f"configuration '{self._name}' ({self._folder / self._name}.yaml)"

    def compose(self, overrides: Sequence[Override]) -> tuple[DictConfig, list[SourceFile]]:
        """Composes the configuration, interpolations open; also lists its files where their numbers must be looked at.

        The files are in the order in which they count. Raises ``ConfigError``.
        """
        bare = self._bare() if all(map(self._sets_a_value, overrides)) else None
        composed = None if bare is None else _set_values(bare.config, overrides)
        if bare is not None and composed is not None:
            return composed, bare.find_files() if self._traps.may_be_in(composed) else []
        texts = [self._as_hydra_override(override) for override in overrides]
        composed, _ = self._ask_hydra(texts)
        return composed, self._find_files(texts) if self._traps.may_be_in(composed) else []

    def _bare(self) -> _Bare | None:
        """Composes it without any override, or takes what is kept; ``None`` where this fails."""
        key = self._folder, self._name
        try:
            kept = _KEPT.get(key)
            if kept is not None and kept.is_current:
                return kept
            config, answers = self._load_flat() or self._ask_hydra([])
        except (ConfigError, OSError, UnicodeDecodeError):  # Hydra says it
            return None
        bare = _Bare(config=config, answers=answers, find_files=lru_cache(lambda: self._find_files([])))
        if not bare.has_variable_defaults:
            _KEPT.pop(key, None)
            _KEPT[key] = bare
            if len(_KEPT) > _NUM_KEPT:
                del _KEPT[next(iter(_KEPT))]
        return bare

    def _is_group(self, override: Override) -> bool:
        return override.package is not None or os.path.isdir(self._folder / override.key_or_group)

    def _sets_a_value(self, override: Override) -> bool:
        """Says whether it sets a key of the configuration and nothing else, however the rest was composed."""
        is_own = override.key_or_group.split(".")[0] not in ("hydra", "defaults")
        return override.type is OverrideType.CHANGE and is_own and not self._is_group(override)

    def _as_hydra_override(self, override: Override) -> str:
        """Hydra changes only keys that the YAML has; ours may set every key of the schema, hence its ``++``."""
        text = override.input_line
        assert text is not None  # Hydra's parser keeps the line of every override that it reads
        return text if override.type is not OverrideType.CHANGE or self._is_group(override) else f"++{text}"

    def _shipped_overrides(self, overrides: Sequence[str]) -> list[str]:
        """Has ``defaults`` find shipped configurations too, behind the folder's own; a search path given stays."""
        shipped, own = shipped_folder(), self._folder / f"{self._name}.yaml"
        if shipped is None or shipped == self._folder.resolve():
            return []
        with suppress(UnicodeDecodeError):  # Hydra's source says it
            if any("searchpath" in text for text in (*overrides, read_text(own, what="a configuration"))):
                return []
        return [f"hydra.searchpath=['file://{shipped}']"]

    def _ask_hydra(self, overrides: Sequence[str]) -> tuple[DictConfig, Mapping[Question, object]]:
        """Returns the composed configuration, and what the disk answered to each question of Hydra's."""
        with self._hydra() as answers:
            texts = [*self._shipped_overrides(overrides), *overrides]
            return compose(config_name=self._name, overrides=texts), answers

    def _load_flat(self) -> tuple[DictConfig, Mapping[Question, object]] | None:
        """Loads a file that names no other, such as a finished run's, as ``_ask_hydra`` composes it without overrides.

        ``None`` where Hydra may find more than this file; raises ``OSError`` and ``UnicodeDecodeError``.
        """
        path, groups = str(self._folder / f"{self._name}.yaml"), str(self._folder / "hydra")
        text = _read(path)
        may_be_more = (
            not self._name.isidentifier()
            or "@package" in text
            or "${" in text.replace("${oc.env:", "")  # Hydra has resolvers of its own
            or os.path.isdir(groups)
            or f"{self._name}.yaml" in ConfigStore.instance().repo
            or Plugins.instance().discover(SearchPathPlugin)
        )
        with suppress(*_COMPOSING_ERRORS):  # Hydra says them
            config = None if may_be_more else deepcopy(_load_text(text))
            if isinstance(config, DictConfig) and config and not {"defaults", "hydra"} & {*config}:
                OmegaConf.set_struct(config, True)
                return config, {(_read, path): text, (os.path.isdir, groups): False}
        return None

    def _find_files(self, overrides: Sequence[str]) -> list[SourceFile]:
        """Finds the files that it is composed of, in the order in which they count."""
        with self._hydra():
            loader, texts = GlobalHydra.instance().config_loader(), [*self._shipped_overrides(overrides), *overrides]
            defaults = loader.compute_defaults_list(self._name, texts, RunMode.RUN).defaults
        places = [(self._find(f"{entry.config_path}.yaml"), entry.package or "") for entry in defaults]
        return [SourceFile(path=path, package=package) for path, package in places if path.is_file()]

    @contextmanager
    def _hydra(self) -> Iterator[Mapping[Question, object]]:
        """Sets Hydra up for the folder within the block; raises ``ConfigError`` for what it raises there.

        Yields what ``_bounded_files`` does.
        """
        try:
            # Hydra only warns of a defaults list without _self_, whose order it then guesses.
            with (
                warnings.catch_warnings(),
                _bounded_files() as answers,
                initialize_config_dir(config_dir=str(self._folder), version_base="1.3"),
            ):
                warnings.simplefilter("error", UserWarning)
                yield answers
        except ConfigError:
            raise
        except _COMPOSING_ERRORS as error:
            raise ConfigError(f"{self.origin} cannot be composed: {error}") from error

    def _find(self, name: str) -> Path:
        own, shipped = self._folder / name, shipped_folder()
        return own if shipped is None or own.is_file() else shipped / name


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Bare:
    """Holds a configuration without any override. answers: what the disk answered to each question of Hydra's."""

    config: DictConfig
    answers: Mapping[Question, object]
    find_files: Callable[[], list[SourceFile]]

    @property
    def is_current(self) -> bool:
        """Whether the disk answers the same now; raises ``OSError``."""
        return all(ask(path) == answer for (ask, path), answer in self.answers.items())

    @property
    def has_variable_defaults(self) -> bool:
        """Whether a file's ``defaults`` name a variable, whose value is no answer of the disk."""
        files = [_load_text(answer) for answer in self.answers.values() if isinstance(answer, str)]
        return any("${" in str(file.get("defaults")) for file in files if isinstance(file, DictConfig))


#: Composed configurations, to be given again while their files say the same; the oldest go first.
_KEPT: dict[tuple[Path, str], _Bare] = {}


def parse_overrides(overrides: Sequence[str], schema: type[BaseModel]) -> list[Override]:
    """Reads overrides in Hydra's grammar.

    Raises ``ConfigError`` with every override that cannot be read or would start a sweep; ``schema`` shapes the advice.
    """
    parsed, problems, nested = [], [], ""
    for text in overrides:
        if _is_deep(text):
            problems.append(f"{shorten(repr(text), 80)}: more than {MAX_DEPTH} levels of lists and objects")
            continue
        try:
            override = _parse(text)
        except RecursionError:
            problems.append(f"{shorten(repr(text), 80)}: nested too deep")
            continue
        except HydraException as error:
            problems.append(f"{text!r}: {str(error).splitlines()[0]}")
            nested = nested or (_NESTED_HINT if any(bracket in text for bracket in "[{") else "")
            continue
        parsed.append(override)
        if override.is_sweep_override():
            problems.append(f"{text!r}: {_describe_sweep(text, override, schema)}")
    if problems:
        raise ConfigError(
            f"overrides that cannot be read:{bullet_list(problems, limit=None)}\n"
            f"Write them as a.b=c; quote values that hold special characters, as in 'a.b=\"^x\"'.{nested}"
        )
    return parsed


def _is_deep(text: str) -> bool:
    """Says whether brackets or the key nest deeper than Hydra's parser, which recurses, may have to go."""
    if text.partition("=")[0].count(".") > MAX_DEPTH:
        return True
    depth = 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if depth > MAX_DEPTH:
            return True
    return False


@lru_cache(maxsize=4096)
def _parse(text: str) -> Override:
    """Returns one override; the runs of an alignment share most of theirs."""
    return OverridesParser.create().parse_override(text)


def _set_values(bare: DictConfig, overrides: Sequence[Override]) -> DictConfig | None:
    """Merges values as Hydra merges ``++key=value`` (1.3); ``None`` where one cannot be merged: Hydra then says why."""
    composed = deepcopy(bare)
    try:
        for override in overrides:
            OmegaConf.update(composed, override.key_or_group, override.value(), merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError):
        return None
    return composed


def _describe_sweep(text: str, override: Override, schema: type[BaseModel]) -> str:
    """Says why an override with a comma is refused, and how its meaning is written.

    A list is advised unless the schema says otherwise of the key.
    """
    one_value = "is a sweep over several runs for Hydra, and this is one; give one value"
    key, _, value = text.partition("=")
    if override.value_type is not ValueType.SIMPLE_CHOICE_SWEEP or '"' in value or "'" in value:
        return one_value
    members = [*_members(_annotation(override.key_or_group, schema))]
    if members and all(member in _NUMBERS or get_origin(member) is Literal for member in members):
        return one_value
    advice = f"""quote them, as in {shlex.quote(f'{key}="{value}"')}"""
    listed = shlex.quote(f"{key}=[{value}]")
    if JoinedTexts in members:
        advice += f", or write {listed}"
    elif not members or not all(member is str or member in _NUMBERS for member in members):
        advice += f", or where the key takes a list write {listed}"
    return f"values with a comma are a sweep over several runs for Hydra, and this is one; {advice}"


def _annotation(key: str, schema: type[BaseModel]) -> object:
    """Returns the schema's type of a dotted key; ``None`` for an unknown key."""
    found: object = schema
    for name in key.split("."):
        models = [item for item in _members(found) if isinstance(item, type) and issubclass(item, BaseModel)]
        fields = [model.model_fields[name] for model in models if name in model.model_fields]
        if not fields:
            return None
        found = fields[0].annotation
    return found


def _members(annotation: object) -> Iterator[object]:
    """Yields the types of a union, without pydantic's annotations; none for ``None``."""
    if annotation is None:
        return
    if annotation is not JoinedTexts and get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


class _BoundedFileSource(FileConfigSource):
    """Reads YAML files for Hydra as its own source does, but none that stands for more values than it may.

    A text is parsed once for all configurations that are composed of it. ``answers``: what the disk answered so far.
    """

    answers: ClassVar[dict[Question, object]]

    def is_group(self, config_path: str) -> bool:
        return bool(self._ask(os.path.isdir, os.path.join(self.path, config_path)))

    def is_config(self, config_path: str) -> bool:
        return bool(self._ask(os.path.isfile, os.path.join(self.path, self._normalize_file_name(config_path))))

    def load_config(self, config_path: str) -> ConfigResult:
        path = os.path.join(self.path, self._normalize_file_name(config_path))
        if not os.path.isfile(path):
            return super().load_config(config_path)  # which says so
        try:
            text = str(self._ask(_read, path))
            config = deepcopy(_load_text(text))  # Hydra changes it
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8: {error}") from error
        except ValueError as error:
            raise ConfigError(f"{path} {error}") from error
        return ConfigResult(
            config=config,
            path=f"{self.scheme()}://{self.path}",
            provider=self.provider,
            header=self._get_header_dict(text[:512]),  # as much as Hydra looks at
        )

    def _ask(self, ask: Callable[[str], object], path: str) -> object:
        answer = self.answers[ask, path] = ask(path)
        return answer


def _read(path: str) -> str:
    return read_text(path, what="a configuration")


class _Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]  # one of two bases
    """Makes of scalars what OmegaConf's loader does, which has no parser in C."""

    yaml_implicit_resolvers = get_yaml_loader().yaml_implicit_resolvers


@lru_cache(maxsize=128)
def _load_text(text: str) -> Container:
    """Parses a text as ``OmegaConf.load`` does; raises ``ValueError`` as ``load_yaml`` does, and for a number alone."""
    load_yaml(text)
    values = yaml.load(text, Loader=_Loader)
    if not isinstance(values, dict | list | str | None):
        raise ValueError("holds one number; expected keys and their values")
    loaded = OmegaConf.create({} if values is None else values)
    assert isinstance(loaded, Container)
    return loaded


@contextmanager
def _bounded_files() -> Iterator[Mapping[Question, object]]:
    """Has Hydra read files by our source within the block; a host program's Hydra keeps its own.

    Yields what the disk answers to each of its questions.
    """

    class Source(_BoundedFileSource):
        answers: ClassVar[dict[Question, object]] = {}

    Plugins.instance()  # registers Hydra's own sources
    types = SourcesRegistry.instance().types
    scheme = FileConfigSource.scheme()
    before = types[scheme]
    types[scheme] = Source
    try:
        yield Source.answers
    finally:
        types[scheme] = before
