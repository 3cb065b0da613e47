"""Finds the code that a stored configuration names, so that nothing of a received folder runs unasked.

A run leaves its whole configuration as ``config.yaml``, an alignment and a reproduction do too. Such a file may come
from anybody, and it can name an interpreter, an entry module, a program and variables for every process. A
configuration of one's own lies in a folder without a run's files, and is trusted.

Contract: imports no torch, and nothing that a file names. The file is read as plain YAML before Hydra sees it; a part
that only Hydra could put together (``defaults``, ``hydra``, an interpolation, an override that cannot be read) counts
as code. So does what brings data or secrets of this machine to another: an address, a token's variable or file, and a
text that is made of variables. Settings of the table with plain values are no code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from mock_scheduler.errors import ConfigError
from mock_scheduler.support.foreign_files import describe_failure, read_bytes, read_text
from mock_scheduler.support.run_files import (
    ALIGN_FILE,
    ATTACHED_FILE,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    DOCTOR_FILE,
    ERROR_FILE,
    LEDGER_FILE,
    LOG_FILE,
    METRICS_FILE,
    OPERATIONS_FOLDER,
    RUN_FILE,
    TENSORBOARD_FOLDER,
    TRACE_FOLDER,
)
from mock_scheduler.support.yaml_text import load_yaml

#: The top-level key by which a configuration names its program; a schema without this field never sees it.
PROGRAM_KEY = "program"
#: The option of every command, and in Python ``run_stored_code=True``.
FLAG = "--run-stored-code"

#: The top-level key of a configuration whose program is a command.
COMMAND_KEY = "command"

_COMMAND = re.compile(rf"^{COMMAND_KEY}:", re.MULTILINE)
# What such a configuration puts into the command line and the environment of its processes.
_COMMAND_CODE = (COMMAND_KEY, "arguments", "options", "launcher", "cancel", "env", "working_dir")
_NAMED = re.compile(rf"""^{PROGRAM_KEY}:\s*['"]?([^\s'"#]+)""", re.MULTILINE)
_HOME = (RUN_FILE, METRICS_FILE, LEDGER_FILE, ERROR_FILE, LOG_FILE, TRACE_FOLDER, OPERATIONS_FOLDER)
_LEFT_BESIDE = (*_HOME, ATTACHED_FILE, TENSORBOARD_FOLDER, CHECKPOINTS_FOLDER, "recording", "reproduce.sh", "README.md")
_LEFT_ABOVE = (ALIGN_FILE, DOCTOR_FILE, ".mock-scheduler-align", ".mock-scheduler-doctor", "minimise.json")
_COMPOSED = ("defaults", "hydra")
_Path: TypeAlias = "tuple[str, ...]"
_KINDS_OF_CANDIDATES = {"python": "interpreter", "entry": "entry"}
_MAX_DEPTH = 20
# Hydra puts a whole file elsewhere by a comment in its head.
_PACKAGE = re.compile(r"@\s*package")
# A setting chooses between known ways; a path or a plug-in's name lets the process load a file.
_PLAIN_VALUE = re.compile(r"[\w.,:^=+ -]*")
_PLACES = ("_DIR", "_FILE")
# The interface on which NCCL listens, without asking for a key; only the loopback one is nobody else's.
_INTERFACE, _OWN_INTERFACES = "_SOCKET_IFNAME", ("lo", "=lo", "lo0", "=lo0")
_MAX_SHOWN = 2000
# An interpolation; behind an odd number of backslashes it is a plain text.
_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
_ADDRESS = re.compile(r"\w:(?://|:)")
# Keys by which a run reaches another machine, or reads what it shows there.
_ADDRESS_KEYS = (("url",), ("host",), ("service_file",), ("token_variable",))
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Use(IntEnum):
    """What a command does with a configuration; each does all before it, too."""

    LOAD = 0
    RUN = 1
    ALIGN = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCode:
    """Holds one piece of code that a stored configuration names. ``use``: the least use for which it runs."""

    kind: str
    key: str
    value: str
    use: Use

    def describe(self) -> str:
        """One line; the value is quoted, so that no terminal acts on it."""
        rest = len(self.value) - _MAX_SHOWN
        more = f" and {rest:,} more characters" if rest > 0 else ""
        return f"{self.kind}: {ascii(self.key)[1:-1]} = {self.value[:_MAX_SHOWN]!a}{more}"


def read_program_name(path: Path) -> str | None:
    """Reads the program that a configuration's file names on a line of its own; ``None`` where it names none."""
    return _find_program_name(_read(path))


def names_command(path: Path) -> bool:
    """Says whether a configuration's file has a command, on a line of its own."""
    return _COMMAND.search(_read(path)) is not None


def _read(path: Path) -> str:
    return read_bytes(path, what="a configuration").decode("utf-8", errors="replace") if path.is_file() else ""


def _find_program_name(text: str) -> str | None:
    named = _NAMED.search(text)
    return named[1] if named else None


def is_stored(path: Path) -> bool:
    """Says whether a configuration's file was left by a run: it lies among a run's or an alignment's files."""
    folder = path.absolute().parent
    if any((folder / name).exists() for name in (*_LEFT_BESIDE, *_LEFT_ABOVE)):
        return True  # whatever its name: whoever sends the folder chooses that
    return path.name == CONFIG_FILE and any((folder.parent / name).exists() for name in _LEFT_ABOVE)


def find_stored_code(
    path: Path,
    *,
    own_programs: Sequence[str],
    settings: Sequence[str],
    overrides: Sequence[object] = (),
    only: str | None = None,
) -> list[StoredCode]:
    """Finds all code that a stored configuration, or overrides stored beside it, name.

    Args:
        path: the file.
        own_programs: programs of this project, which are no stored code.
        settings: names of variables that are settings.
        overrides: further ones, of a candidate.
        only: the one candidate that will run; ``None``: all.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        text = read_text(path, what="a configuration")
        content = load_yaml(text)
    except OSError as error:
        raise ConfigError(describe_failure(error, path)) from error
    except ValueError as error:
        raise ConfigError(f"{path} {error}") from error
    finder = _Finder(folder=path.parent, settings=frozenset(settings), only=only, seen=set())
    named = _find_program_name(text)
    found = [] if named in (None, *own_programs) else [_code("program", PROGRAM_KEY, named, Use.LOAD)]
    heads = [line.strip() for line in text.splitlines() if line.lstrip().startswith("#") and _PACKAGE.search(line)]
    found += [_code("further configuration", "package", head, Use.LOAD) for head in heads]
    return [*found, *finder.walk(content, ()), *finder.of_overrides(overrides, "overrides", Use.ALIGN)]


def refuse_stored_code(origin: Path, found: Sequence[StoredCode], *, use: Use, is_allowed: bool) -> str:
    """Describes the code that would run; raises ``ConfigError`` with this text unless it ``is_allowed``.

    Returns an empty text where nothing would run.
    """
    lines = list(dict.fromkeys(item.describe() for item in found if item.use <= use))
    if not lines:
        return ""
    listed = "".join(f"\n  - {line}" for line in lines)
    if is_allowed:
        return f"{FLAG}: the stored configuration {ascii(str(origin))[1:-1]} names what is used now:{listed}"
    raise ConfigError(
        f"the stored configuration {ascii(str(origin))[1:-1]} names what this would run or read:{listed}\n"
        f"Nothing has run. If you trust whoever wrote this folder, add {FLAG} (in Python: run_stored_code=True)"
    )


def _code(kind: str, key: str, value: object, use: Use) -> StoredCode:
    return StoredCode(kind=kind, key=key, value=value if isinstance(value, str) else repr(value), use=use)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finder:
    """Walks plain values. ``seen``: parts of the file that were walked under a key, since YAML may name one twice."""

    folder: Path
    settings: frozenset[str]
    only: str | None
    seen: set[tuple[int, _Path]]

    def walk(self, value: Any, path: _Path) -> Iterator[StoredCode]:  # noqa: ANN401 - plain values
        """Yields the code named by a value at a path of keys, and by all values below it."""
        yield from self._look_at(value, path)
        if path and path[0] in _COMMAND_CODE:
            return  # it was named as a whole
        # A list of one candidate a thousand times over is walked once.
        place = (id(value), tuple("*" if name.isdecimal() else name for name in path))
        if (
            self._is_another_candidate(value, path)
            or not isinstance(value, Mapping | list)
            or place in self.seen
            or len(path) > _MAX_DEPTH
        ):
            return
        self.seen.add(place)
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, item in items:
            yield from self.walk(item, (*path, str(name)))

    def of_overrides(self, overrides: Sequence[object], key: str, use: Use) -> Iterator[StoredCode]:
        """Yields the code named by overrides in Hydra's grammar."""
        for text in overrides:
            try:
                override = OverridesParser.create().parse_override(str(text))
            except HydraException:
                yield _code("unreadable override", key, text, use)
                continue
            name = override.key_or_group
            is_group = override.package is not None or (self.folder / name).is_dir()
            if is_group or name.split(".")[0] in _COMPOSED:
                yield _code("further configuration", key, text, use)
                continue
            if name == PROGRAM_KEY:
                yield _code("program", key, text, use)
            try:
                value = override.value()
            except (HydraException, ValueError, TypeError):
                value = str(text)
            yield from self.walk(_plain(value), tuple(name.split(".")))

    def _look_at(self, value: Any, path: _Path) -> Iterator[StoredCode]:  # noqa: ANN401 - plain values
        found = list(self._look_for_code(value, path))
        yield from found
        if not found:  # it is shown as a whole
            yield from self._look_for_addresses(value, path)

    def _look_for_addresses(self, value: Any, path: _Path) -> Iterator[StoredCode]:  # noqa: ANN401 - plain values
        key, is_composed = ".".join(path), path[:1] in [(name,) for name in _COMPOSED]
        if is_composed or not isinstance(value, str | int):
            return  # it was named as a whole, or its parts are looked at
        if _INTERPOLATION.search(str(value)):
            yield _code("text to be resolved", key, value, Use.LOAD)
        elif _ADDRESS.search(str(value)) or (path[-1:] in _ADDRESS_KEYS and value not in _LOOPBACK):
            yield _code("address", key, value, Use.RUN)

    def _look_for_code(self, value: Any, path: _Path) -> Iterator[StoredCode]:  # noqa: ANN401 - plain values
        key = ".".join(path)
        match path:
            case ("defaults" | "hydra",):
                yield _code("further configuration", key, value, Use.LOAD)
            case (name, *_) if name in _COMMAND_CODE:
                if value not in (None, [], {}):
                    yield _code("command", key, value, Use.RUN)
            case (*_, name) if len(name) > 2 and name.startswith("_") and name.endswith("_"):
                yield _code("class", key, value, Use.LOAD)
            case ("align", "entry" as name) | ("align", "candidates", _, "python" | "entry" as name) if (
                value is not None
            ):
                yield _code(_KINDS_OF_CANDIDATES[name], key, value, Use.ALIGN)
            # It says where jobs are sent, and may have them run a shell's lines first.
            case ("align", "executor") if value not in (None, {}, {"kind": "local"}):
                yield _code("executor", key, value, Use.ALIGN)
            case ("align", "executor", first, *_) if first != "kind" or value != "local":
                yield _code("executor", key, value, Use.ALIGN)
            # Overrides of runs, each by itself.
            case ("align", "baseline", *_):
                yield from self._of_override(value, path[:2])
            case ("align", "candidates", _, "overrides", *_) | ("align", "matrix", "options", _, *_):
                yield from self._of_override(value, path[:4])
            case ("align",) | ("align", "candidates" | "matrix") | ("align", "candidates", _) | ("align", "matrix", _):
                if isinstance(value, str):
                    yield _code("unresolved section", key, value, Use.ALIGN)
            case ("system_envs",) if isinstance(value, str):
                yield _code("unresolved section", key, value, Use.RUN)
            case ("system_envs", *names) if names and not self._is_setting(".".join(names), value):
                yield _code("environment", key, value, Use.RUN)

    def _of_override(self, value: object, path: _Path) -> Iterator[StoredCode]:
        if not isinstance(value, Mapping | list):
            yield from self.of_overrides([value], ".".join(path), Use.ALIGN)

    def _is_another_candidate(self, value: object, path: _Path) -> bool:
        if self.only is None or len(path) != 3 or path[:2] != ("align", "candidates") or not isinstance(value, Mapping):
            return False
        name = value.get("name")
        return isinstance(name, str) and name != self.only and "${" not in name

    def _is_setting(self, name: str, value: object) -> bool:
        is_plain = isinstance(value, str | int) and _PLAIN_VALUE.fullmatch(str(value)) is not None
        is_choice = not name.endswith(("_PLUGIN", *_PLACES)) or value in ("", "none")
        is_private = not name.endswith(_INTERFACE) or value in _OWN_INTERFACES
        return name in self.settings and is_plain and is_choice and is_private


def _plain(value: Any) -> Any:  # noqa: ANN401 - Hydra's values
    """Turns Hydra's quoted texts in lists and mappings into texts."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
