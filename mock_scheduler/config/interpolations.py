"""Judges interpolations of a configuration: how much they stand for, and which texts came out of the environment.

``a: ${b}${b}``, ``b: ${c}${c}`` and so on double with each line, so thirty lines stand for a billion texts. OmegaConf
resolves them one by one; this counts each key once, before any is resolved. Any word in an interpolation that names a
key counts as that key: more than resolvers with other arguments need, never less.

Texts out of the environment are found, so that files keep ``${oc.env:NAME}`` instead. Only free texts: a number, a bool
or a word of a closed list is no secret, and its value is needed to know what ran. A text with the variable in the file
is kept as it stands there; a text that refers to such a key, or was made of a foreign section, gets ``${oc.env:NAME}``
in the place of the variable's value.

Contract: imports no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from mock_scheduler.config.base import ConfigSection, EnvironmentTexts, KeyPath, is_section, list_alternatives
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.yaml_text import MAX_CHARACTERS, MAX_VALUES

_Key: TypeAlias = "tuple[str, ...]"

_WORD = re.compile(r"\.*[^\W\d][\w.\[\]-]*|\.*\d[\w.\[\]-]*")
_STEP = re.compile(r"[.\[\]]+")


def check_expansion(composed: DictConfig, origin: str) -> None:
    """Raise ``ConfigError`` where the interpolations of a configuration stand for more than the limits of a file.

    ``origin``: names the configuration.
    """
    count = _Count(plain=OmegaConf.to_container(composed, resolve=False))
    try:
        values, characters = count.size((), count.plain)
    except RecursionError as error:
        raise ConfigError(f"{origin}: its values or interpolations lie too deep in each other") from error
    if values > MAX_VALUES or characters > MAX_CHARACTERS:
        raise ConfigError(
            f"{origin}: with its interpolations resolved it stands for more than {MAX_VALUES:,} values or "
            f"{MAX_CHARACTERS:,} characters, the most of them in {count.name_largest()}"
        )


@dataclass(kw_only=True, slots=True)
class _Count:
    """Sizes by key: values, and characters in them; ``None`` while a key is being counted."""

    plain: object
    sizes: dict[_Key, tuple[int, int] | None] = field(default_factory=dict)

    def size(self, key: _Key, value: object) -> tuple[int, int]:
        """Count a value with all that it refers to; one that refers to itself counts as 1 there."""
        if key in self.sizes:
            return self.sizes[key] or (1, 0)
        self.sizes[key] = None
        parts = [(1, len(value) if isinstance(value, str) else 0)]
        parts += [self.size((*key, name), item) for name, item in _children(value)]
        if isinstance(value, str) and "${" in value:
            parts += [self._referred(key, word) for word in _WORD.findall(value)]
        found = sum(part[0] for part in parts), sum(part[1] for part in parts)
        self.sizes[key] = found
        return found

    def name_largest(self) -> str:
        """Name the largest value that is no list or mapping around others."""
        leaves = {key: size for key, size in self.sizes.items() if size and isinstance(self._find(key), str)}
        return ".".join(max(leaves.items(), key=lambda item: item[1])[0]) if leaves else "lists and mappings"

    def _referred(self, key: _Key, word: str) -> tuple[int, int]:
        num_dots = len(word) - len(word.lstrip("."))
        around = key[: len(key) - num_dots] if num_dots else ()
        target = (*around, *filter(None, _STEP.split(word)))
        value = self._find(target)
        return (0, 0) if value is None else self.size(target, value)

    def _find(self, key: _Key) -> object:
        value = self.plain
        for name in key:
            value = dict(_children(value)).get(name)
            if value is None:
                return None
        return value


def _children(value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(str(name), item) for name, item in value.items()]
    return [(str(index), item) for index, item in enumerate(value)] if isinstance(value, list) else []


_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*([^\s,}]+)")
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
# In a text made by other code, a shorter value may stand there by chance.
_LEAST_FOUND = 4


def with_environment_texts(config: BaseModel, composed: DictConfig) -> None:
    """Lets a configuration know which of its texts are stored unresolved.

    ``composed``: what the configuration was made of, interpolations open.
    """
    if not isinstance(config, ConfigSection):
        return
    source = dict(iterate_texts(OmegaConf.to_container(composed, resolve=False)))
    names = {name for text in source.values() for name in _VARIABLE.findall(text)}
    if names:
        config.keep_environment_texts(EnvironmentTexts(texts=_find(config, source, names)))


def _find(config: ConfigSection, source: Mapping[KeyPath, str], names: set[str]) -> dict[KeyPath, tuple[str, str]]:
    values = {name: os.environ[name] for name in names if os.environ.get(name)}
    dumped = config.model_dump(mode="json")
    has_foreign = any(path[0] not in type(config).model_fields for path in source)
    found = {}
    for path, value in iterate_texts(dumped):
        if not is_free_text(type(config), path):
            continue
        written = next((source[path[:end]] for end in range(len(path), 0, -1) if path[:end] in source), None)
        if written is not None and _can_be_kept(written, dumped) and path in source:
            found[path] = (value, written)
        elif (written is None and has_foreign) or (written is not None and "${" in written):
            least = _LEAST_FOUND if written is None else 1
            masked = _mask(value, {name: text for name, text in values.items() if len(text) >= least})
            if masked is not None:
                found[path] = (value, masked)
    return found


def _can_be_kept(written: str, dumped: Mapping[str, Any]) -> bool:
    """Says whether a text reads variables, and else only keys of the stored configuration."""
    references = _REFERENCE.findall(written)
    num_variables = len(_VARIABLE.findall(written))
    return (
        num_variables > 0
        and num_variables + len(references) == written.count("${")
        and all(_has_key(dumped, reference.split(".")) for reference in references)
    )


def _has_key(values: Any, names: list[str]) -> bool:  # noqa: ANN401 - plain values
    for name in names:
        if not isinstance(values, Mapping) or name not in values:
            return False
        values = values[name]
    return True


def _mask(value: str, variables: Mapping[str, str]) -> str | None:
    """Puts the variables in the place of their values; ``None`` where none of them is in the text."""
    longest_first = sorted(variables.items(), key=lambda item: -len(item[1]))
    pattern = "|".join(re.escape(text) for _, text in longest_first)
    names = {text: name for name, text in longest_first}
    parts = re.split(f"({pattern})", value) if pattern else [value]
    if len(parts) == 1:
        return None
    return "".join(f"${{oc.env:{names[part]}}}" if part in names else escape(part) for part in parts)


def escape(text: str) -> str:
    """Escapes every ``${``, so that it is loaded as text.

    OmegaConf halves the backslashes before a ``${`` (2.3), so the text's own are doubled.
    """
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def iterate_texts(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yields every text in plain values with the keys and indices that lead to it."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from iterate_texts(item, (*path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from iterate_texts(item, (*path, index))
    elif isinstance(value, str):
        yield path, value


def is_free_text(annotation: Any, path: KeyPath) -> bool:  # noqa: ANN401 - a type's expression
    """Says whether the schema lets any text stand at a place."""
    for kind in list_alternatives(annotation):
        if not path:
            if kind is str:
                return True
        elif is_section(kind):
            field = kind.model_fields.get(str(path[0]))
            if field is not None and is_free_text(field.annotation, path[1:]):
                return True
        elif get_origin(kind) in (dict, list) and is_free_text(get_args(kind)[-1], path[1:]):
            return True
    return False


def resolve_variables(content: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Returns a stored configuration with the variables of this process; a text without its variable stays open.

    ``origin`` names it. Raises ``ConfigError`` where its interpolations stand for more than the limits of a file.
    """
    if not _reads_variables(content, set()):
        return dict(content)
    config = OmegaConf.create(dict(content))
    check_expansion(config, origin)
    return {name: _resolve(config, content[name], (name,)) for name in content}


def _reads_variables(value: object, seen: set[int]) -> bool:
    """Looks at each part once: a YAML file may name one part many times over."""
    if isinstance(value, str):
        return "oc.env" in value
    if not isinstance(value, Mapping | list) or id(value) in seen:
        return False
    seen.add(id(value))
    items = value.values() if isinstance(value, Mapping) else value
    return any(_reads_variables(item, seen) for item in items)


def _resolve(config: DictConfig, value: Any, path: KeyPath) -> Any:  # noqa: ANN401 - plain values
    if isinstance(value, Mapping):
        return {key: _resolve(config, item, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolve(config, item, (*path, index)) for index, item in enumerate(value)]
    if isinstance(value, str) and "oc.env" in value:
        try:
            return OmegaConf.select(config, "".join(f"[{part}]" for part in path))
        except (OmegaConfBaseException, RecursionError):
            return value
    return value
