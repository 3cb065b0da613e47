"""The version and the place of this package, where every room can read them."""

from __future__ import annotations

from pathlib import Path

VERSION = "0.1.0"
#: The name that this package is imported by.
PACKAGE = __name__.partition(".")[0]
#: The folder that holds the package: a checkout, or ``site-packages``.
ROOT = Path(__file__).parents[2]
