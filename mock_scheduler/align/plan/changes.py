"""Finds the keys in which a candidate differs, and judges whether one may move a bit beyond the order of sums.

Contract: two checked configurations are compared by what their keys decide; nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from mock_scheduler.config.base import Decides
from mock_scheduler.support.digests import JSON

ChangeKind = Literal["nothing", "layout", "other"]
"""``nothing``: no bit may move. ``layout``: only the order of sums may. ``other``: anything may round."""

_MAY_ROUND = Decides.ROLLOUTS | Decides.TRAINING | Decides.BITS | Decides.OUTSIDE


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """The dotted keys in which two configurations differ, each in one of three classes."""

    neutral: tuple[str, ...]
    layout: tuple[str, ...]
    other: tuple[str, ...]

    @property
    def kind(self) -> ChangeKind:
        """The gravest class with a key in it."""
        if self.other:
            return "other"
        return "layout" if self.layout else "nothing"


def find_changes(
    baseline: Mapping[str, JSON], candidate: Mapping[str, JSON], effect_of: Callable[[str], Decides]
) -> Changes:
    """Finds the keys in which two configurations differ.

    Args:
        baseline: the values by their dotted keys; a key that one side lacks counts as null there.
        candidate: likewise.
        effect_of: returns what a key decides.
    """
    differing = [key for key in dict.fromkeys([*baseline, *candidate]) if baseline.get(key) != candidate.get(key)]
    kinds = {key: change_kind(effect_of(key)) for key in differing}
    neutral, layout, other = (
        tuple(key for key in differing if kinds[key] == kind) for kind in ("nothing", "layout", "other")
    )
    return Changes(neutral=neutral, layout=layout, other=other)


def change_kind(facts: Decides) -> ChangeKind:
    """Judges the change of one key by what it decides."""
    if facts & Decides.VALIDATION:
        return "nothing"  # no bit of training follows from validation, whatever is played there
    if facts & _MAY_ROUND:
        return "other"
    return "layout" if facts & Decides.ORDER else "nothing"
