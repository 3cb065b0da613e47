"""Counts the values that a configuration's interpolations stand for, before any is resolved.

``a: ${b}${b}``, ``b: ${c}${c}`` and so on double with each line, so thirty lines stand for a billion texts. OmegaConf
resolves them one by one; this counts each key once. Any word in an interpolation that names a key counts as that key:
more than resolvers with other arguments need, never less.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias

from omegaconf import DictConfig, OmegaConf

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
