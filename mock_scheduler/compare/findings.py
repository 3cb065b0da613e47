"""A difference that is no number: something missing, or something that cannot be subtracted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mock_scheduler.config.instruments import TraceKind

Side = Literal["baseline", "candidate"]

DifferenceKind = TraceKind | Literal["metric", "step", "rows", "ledger", "recording"]
"""What differs: a traced tensor of a kind; a metric; a whole step; the rows of a batch; a sequence of calls; a step of
a recording."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One such difference, at the step and update (``None`` for what belongs to no update) where it first appears.

    ``is_selection``: it is there because the two traces were told to hold different things, so it says nothing about
    what the runs computed. ``lacks_tokens``: the candidate has the tensor, but no rank of it holds some of its tokens.
    """

    kind: DifferenceKind
    step: int
    update: int | None
    name: str
    message: str
    is_selection: bool = False
    lacks_tokens: bool = False


def other_side(side: Side) -> Side:
    """The side that it is compared with."""
    return "candidate" if side == "baseline" else "baseline"
