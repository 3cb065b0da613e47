"""Plain scalars such as ``0.5_5`` that YAML reads as a number, found where they are written.

YAML 1.1 allows ``_`` within numbers, so that a pair of bounds without quotes, ``0.5_5``, is 0.55, and ``5_10`` is 510.
Nothing of that is left in what was loaded: the files and the command line themselves are read again.

Contract: pure functions of texts; what cannot be read was refused before. Only keys that may take pairs are looked
at: ``max_steps: 1_000`` is a number as it is meant.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from mock_scheduler.config.problems import Problem

#: Sections and keys in which a pair of bounds may stand.
_PLACES = ("algorithm", "actor_rollout_ref.actor.tis_imp_ratio_cap")
#: Keys that take a pair; the others take one number.
_PAIR_KEYS = ("rollout_is_threshold", "rollout_rs_threshold")
_NUMBER_LIKE = re.compile(r"[-+.0-9][-+.:0-9A-Za-z]*_[-+.:0-9A-Za-z_]*")
_QUOTED_OR_WORD = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[-+.\w]+""")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """A YAML file of a configuration. package: the dotted key that its content is at, ``""`` for the top level."""

    path: Path
    package: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trap:
    number: int | float
    message: str


def may_have_traps(composed: DictConfig) -> bool:
    """Whether there is a number at all where a pair of bounds may stand; without one the files need not be read."""
    values = [OmegaConf.select(composed, place, throw_on_resolution_failure=False) for place in _PLACES]
    plain = [OmegaConf.to_container(value) if OmegaConf.is_config(value) else value for value in values]
    return any(isinstance(leaf, int | float) for value in plain for _, leaf, _ in _leaves(value, value, ""))


def find_number_traps(
    files: Sequence[SourceFile], overrides: Sequence[Override], composed: DictConfig
) -> list[Problem]:
    """Every key whose value in ``composed`` is such a number; files and overrides in the order in which they count."""
    found: dict[str, _Trap | None] = {}
    for file in files:
        found.update(_traps_of_file(file))
    for override in overrides:
        found.update(_traps_of_override(override))
    return [
        (key, trap.message)
        for key, trap in found.items()
        if trap is not None and _selected(composed, key) == trap.number
    ]


def _selected(composed: DictConfig, key: str) -> object:
    return OmegaConf.select(composed, re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", key))


def _is_looked_at(key: str) -> bool:
    return any(f"{key}.".startswith(f"{place}.") for place in _PLACES)


def _traps_of_file(file: SourceFile) -> dict[str, _Trap | None]:
    """By key, in the order of the file; ``None`` for a value that is none."""
    root = yaml.compose(file.path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    traps: dict[str, _Trap | None] = {}
    for key, node in _scalars(root, file.package):
        if _is_looked_at(key):
            traps[key] = _trap_of_scalar(key, node, file.path)
    return traps


def _scalars(node: yaml.Node | None, key: str) -> Iterator[tuple[str, yaml.ScalarNode]]:
    """Every scalar with its dotted key; those of a merge key (``<<``) first, as its own keys count in their place."""
    if isinstance(node, yaml.ScalarNode):
        yield key, node
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _scalars(item, f"{key}.{index}")
    elif isinstance(node, yaml.MappingNode):
        merged = [value for name, value in node.value if name.value == "<<"]
        for value in merged:
            for inner in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                yield from _scalars(inner, key)
        for name, value in node.value:
            if name.value != "<<":
                yield from _scalars(value, f"{key}.{name.value}" if key else str(name.value))


def _trap_of_scalar(key: str, node: yaml.ScalarNode, path: Path) -> _Trap | None:
    text = str(node.value)
    if node.style is not None or not _NUMBER_LIKE.fullmatch(text):
        return None
    number = OmegaConf.select(OmegaConf.create(f"value: {text}"), "value")
    if not isinstance(number, int | float):
        return None
    place = f"{path.name}, line {node.start_mark.line + 1}"
    message = _describe(key, text, number, reader=f" in {place}, which YAML", quoted=f"'{text}'")
    return _Trap(number=number, message=message)


def _traps_of_override(override: Override) -> dict[str, _Trap | None]:
    line, key = override.input_line or "", override.key_or_group
    if "=" not in line or not any(_overlap(key, place) for place in _PLACES):
        return {}
    name, _, raw = line.partition("=")
    words: dict[str, int | float] = {}
    parser = OverridesParser.create()

    def quote(match: re.Match[str]) -> str:
        text = match.group()
        if not _NUMBER_LIKE.fullmatch(text):
            return text
        number = parser.parse_override(f"key={text}").value()
        if not isinstance(number, int | float):
            return text
        words[text] = number
        return f'"{text}"'

    quoted = _QUOTED_OR_WORD.sub(quote, raw)
    try:
        meant = parser.parse_override(f"{name}={quoted}").value() if words else override.value()
    except HydraException:
        return {}  # part of a longer text, in which no quotes may stand
    traps: dict[str, _Trap | None] = {}
    for path, read, text in _leaves(override.value(), meant, key):
        if _is_looked_at(path):
            number = words.get(text) if isinstance(text, str) and text != read else None
            hint = shlex.quote(f"{name}={quoted}")
            traps[path] = (
                None
                if number is None
                else _Trap(
                    number=number, message=_describe(path, str(text), number, reader=", which Hydra", quoted=hint)
                )
            )
    return traps


def _overlap(key: str, place: str) -> bool:
    return f"{key}.".startswith(f"{place}.") or f"{place}.".startswith(f"{key}.")


def _leaves(read: object, meant: object, key: str) -> Iterator[tuple[str, object, object]]:
    """Every value of two equal structures, with its dotted key."""
    if isinstance(read, Mapping) and isinstance(meant, Mapping):
        for (name, value), other in zip(read.items(), meant.values(), strict=True):
            yield from _leaves(value, other, f"{key}.{name}")
    elif isinstance(read, list) and isinstance(meant, list):
        for index, (value, other) in enumerate(zip(read, meant, strict=True)):
            yield from _leaves(value, other, f"{key}.{index}")
    else:
        yield key, read, meant


def _describe(key: str, text: str, number: int | float, *, reader: str, quoted: str) -> str:
    found = f"is {text} without quotes{reader} reads as the number {number}"
    if not any(name in _PAIR_KEYS for name in key.split(".")):
        return f"{found}; the key takes one number: write {number} where it is that one"
    return f"{found}: quote it where it is a pair of bounds, as in {quoted}, or write {number} where it is that number"
