"""Reads and writes overrides in Hydra's grammar.

Contract: standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mock_scheduler.errors import ConfigError


def override_keys(overrides: Sequence[str]) -> list[str]:
    """Returns the keys to set, add or delete: ``a.b`` of ``a.b=c``, ``+a.b=c`` and ``~a.b``."""
    return [override.partition("=")[0].lstrip("+~").strip() for override in overrides]


def check_free(where: str, overrides: Sequence[str], taken: Iterable[str]) -> None:
    """Raise ``ConfigError`` for an override of a key reserved for the alignment; ``a.`` takes all keys below it."""
    keys = override_keys(overrides)
    clashes = [
        clash
        for name in taken
        for clash in dict.fromkeys(keys)
        if clash == name or (name.endswith(".") and f"{clash}.".startswith(name))
    ]
    if clashes:
        raise ConfigError(f"an alignment run sets {', '.join(clashes)} itself; remove it from {where}")


def format_override(key: str, value: object) -> str:
    """Writes ``key=value`` for a number, a bool, ``None`` or a text."""
    if value is None or isinstance(value, bool):
        return f"{key}={'null' if value is None else str(value).lower()}"
    return f"{key}={value}" if isinstance(value, int | float) else quote_override(key, str(value))


def quote_override(key: str, value: str) -> str:
    """Writes ``key='value'`` in Hydra's grammar, for any text: quotes and interpolations in it stay text."""
    return f"{key}={quote_value(value)}"


def quote_value(value: str) -> str:
    """Returns a text as a quoted value, also as an element of a list or an object.

    In a quoted value (Hydra 1.3) a quote is escaped, and so are the backslashes just before one or at the end; a ``${``
    is escaped for OmegaConf, since it resolves the value afterwards.
    """
    quoted = ""
    num_backslashes = 0
    for character in value.replace("${", "\\${"):
        if character == "'":
            quoted += "\\" * num_backslashes + "\\"
        num_backslashes = num_backslashes + 1 if character == "\\" else 0
        quoted += character
    return f"'{quoted}{chr(92) * num_backslashes}'"
