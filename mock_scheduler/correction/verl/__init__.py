"""verl's releases of rollout correction, reproduced with their bugs.

``correct`` is the one entry. ``releases.py`` is the table of differences between the releases; configuration reads it
too, and no other code of the project knows a release by name. ``reproduce.py`` is the code behind the entry; it
imports torch when ``correct`` is first asked for, so that configuration imports none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mock_scheduler.correction.verl.reproduce import ReleaseCorrection, correct

__all__ = ["ReleaseCorrection", "correct"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mock_scheduler.correction.verl import reproduce  # imports torch

    return getattr(reproduce, name)
