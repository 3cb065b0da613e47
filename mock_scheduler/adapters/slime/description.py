"""What this adapter is for, and the versions that it was tried with."""

from __future__ import annotations

NAME = "slime"
#: Packages whose presence says that the framework is installed.
PACKAGES = ("slime", "miles", "vime")
#: Not on PyPI: the revisions whose own classes and files were tried, and how.
TRIED = {
    "slime 0.3.1 (624b824a8, 2026-08-21)": "its Sample class through codec, files and the rollout function",
    "miles (31f1ca961, 2026-08-21)": "its Sample class through codec and files; the class form of the rollout function",
}
PAGE = "docs/frameworks/slime.md"
