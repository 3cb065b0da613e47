"""Tells the paths of this machine from the URLs of other places.

Contract: a location is a path, in which ``~`` may stand, a ``file://`` URL, or a URL that fsspec reaches, such as
``s3://bucket/path``. Nothing is touched.
"""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

_PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")  # two letters at least: C:// is a drive
_LOCAL = ("file", "local")


def find_protocol(location: str) -> str | None:
    """Returns the protocol of a URL, in lower case; ``None`` for a path."""
    found = _PROTOCOL.match(location)
    return None if found is None else found[1].lower()


def find_path(location: str) -> str | None:
    """Returns the path that a location of this machine names; ``None`` for a URL of another place.

    Raises ``ValueError`` where a ``file://`` URL names no path of this machine.
    """
    protocol = find_protocol(location)
    if protocol is None:
        return location
    if protocol not in _LOCAL:
        return None
    parts = urlsplit(location)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ValueError(
            f"{location!r} names no local folder: write file:///absolute/path, or the path without file://"
        )
    return unquote(parts.path)


def normalize_location(location: str) -> str:
    """Returns a path with ``~`` and ``~user`` expanded, or a URL with its protocol in lower case.

    Raises ``ValueError`` where the home folder is not known.
    """
    protocol = find_protocol(location)
    if protocol is not None:
        return protocol + location[len(protocol) :]
    expanded = os.path.expanduser(location)
    if expanded.startswith("~"):
        user = location.partition("/")[0]
        raise ValueError(
            f"{location!r} begins with the home folder of {user!r}, which is not known here; give the whole path, or "
            f"write ./{location} for a folder of that name"
        )
    return expanded
