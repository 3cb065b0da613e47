"""Texts with fields in braces, as in ``--nproc-per-node={world_size}``; ``{{`` and ``}}`` are braces themselves.

Contract: pure; a field is a name and nothing else, so no text of a configuration is ever evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_PART = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")


def list_fields(texts: Iterable[str]) -> list[str]:
    """Lists the names of all fields in order, each once."""
    found = (match[1] for text in texts for match in _PART.finditer(text) if match[1] is not None)
    return list(dict.fromkeys(found))


def render(text: str, values: Mapping[str, str]) -> str:
    """Puts the values in; raises ``KeyError`` for a field without one."""
    return _PART.sub(lambda match: match[0][0] if match[1] is None else values[match[1]], text)
