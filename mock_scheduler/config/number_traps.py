"""Finds plain scalars like ``0.5_5``, numbers to YAML, where a user wrote them.

YAML 1.1 allows ``_`` within numbers, so an unquoted pair of bounds, ``0.5_5``, is 0.55, and ``5_10`` is 510. The
loaded values show nothing of this, so the files and the command line are searched for the number.

Contract: pure functions of texts; an unreadable file was refused before. Only the keys named by a program are looked
at: ``max_steps: 1_000`` is a number as meant.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from mock_scheduler.config.problems import Problem

_NUMBER_LIKE = r"[-+.0-9][-+.:0-9A-Za-z]*_[-+.:0-9A-Za-z_]*"
# A value ends with its line, its list or object, or a comment.
_VALUE = re.compile(rf"([:=]\s*)({_NUMBER_LIKE})(?=\s*(?:[,}}\]]|\s#|$))")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """Holds a YAML file of a configuration. ``package``: the dotted key of its content, ``""`` for the top level."""

    path: Path
    package: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberTraps:
    """The keys at which a number may have been meant as a pair.

    ``places``: sections and keys in which a pair of bounds may stand. ``pair_keys``: names of keys for a pair; the
    other keys in these places take one number.
    """

    places: tuple[str, ...] = ()
    pair_keys: tuple[str, ...] = ()

    def may_be_in(self, composed: DictConfig) -> bool:
        """Says whether any place has a number; without one the files need not be read."""
        return next(self._numbers(composed), None) is not None

    def find(
        self, files: Sequence[SourceFile], overrides: Sequence[Override], composed: DictConfig
    ) -> Iterator[Problem]:
        """Yields every key whose number was written with ``_``; later files and overrides count more."""
        for key, number in self._numbers(composed):
            name = next(part for part in reversed(key.split(".")) if not part.isdecimal())
            deciding = [override for override in overrides if _names(override, name)]
            found = _search_overrides(deciding, name, number) if deciding else _search_files(files, name, number)
            if found is not None:
                yield key, self._describe(key, number, *found)

    def _numbers(self, composed: DictConfig) -> Iterator[tuple[str, int | float]]:
        for place in self.places:
            value = OmegaConf.select(composed, place, throw_on_resolution_failure=False)
            plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            yield from _iterate_numbers(plain, place)

    def _describe(self, key: str, number: int | float, text: str, reader: str, quoted: str) -> str:
        found = f"is {text} without quotes{reader} reads as the number {number}"
        if not any(name in self.pair_keys for name in key.split(".")):
            return f"{found}; the key takes one number: write {number} where it is that one"
        return (
            f"{found}: quote it where it is a pair of bounds, as in {quoted}, or write {number} where it is that number"
        )


NO_TRAPS = NumberTraps()


def _iterate_numbers(value: object, key: str) -> Iterator[tuple[str, int | float]]:
    """Yields every number below a value, in lists too, with its dotted key."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _iterate_numbers(item, f"{key}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _iterate_numbers(item, f"{key}.{index}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value


def _names(override: Override, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}['\"]?\s*[:=]", override.input_line or "") is not None


def _search_overrides(overrides: Sequence[Override], name: str, number: int | float) -> tuple[str, str, str] | None:
    """Returns text, reader and a quoted form where the last override of the key gave it the number."""
    line = overrides[-1].input_line or ""
    for text in _written(line, name):
        if _read_by_hydra(text) == number:
            quoted = _VALUE.sub(r'\1"\2"', line)
            return text, ", which Hydra", shlex.quote(quoted)
    return None


def _search_files(files: Sequence[SourceFile], name: str, number: int | float) -> tuple[str, str, str] | None:
    """Returns the same of the last file, and in it the first line, with the number at a key of this name."""
    for file in reversed(files):
        for index, line in enumerate(file.path.read_text(encoding="utf-8").splitlines()):
            for text in _written(line, name):
                if OmegaConf.select(OmegaConf.create(f"value: {text}"), "value") == number:
                    return text, f" in {file.path.name}, line {index + 1}, which YAML", f"'{text}'"
    return None


def _written(line: str, name: str) -> Iterator[str]:
    """Yields a line's unquoted values with ``_`` at keys of a name; a comment gives none."""
    for match in re.finditer(rf"(?<!\w){re.escape(name)}['\"]?\s*(?=[:=])", line.partition(" #")[0]):
        value = _VALUE.match(line, match.end())
        if value is not None:
            yield value[2]


def _read_by_hydra(text: str) -> object:
    try:
        return OverridesParser.create().parse_override(f"key={text}").value()
    except HydraException:
        return None
