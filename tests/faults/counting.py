"""How often a fault did its harm. Nothing is imported, so that a catalogue can be read without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Fired:
    """How often a fault did its harm."""

    count: int = 0
