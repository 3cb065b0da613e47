"""A difference that is no number: something missing, or something that cannot be subtracted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mock_scheduler.config.trace import TraceKind

DifferenceKind = TraceKind | Literal["metric"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One such difference, at the step and update (``None`` for metrics) where it first appears."""

    kind: DifferenceKind
    step: int
    update: int | None
    name: str
    message: str
