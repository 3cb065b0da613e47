"""Attaches the instruments to a training on Megatron-core that somebody else wrote; here is what it gets back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext


class TrainingHandle:
    """A training's end of the instruments. This one does nothing: no run file asked for anything.

    Both methods are optional; a training that calls neither is observed as well.
    """

    def step(self, number: int, rows: Sequence[str | int] | None = None) -> AbstractContextManager[None]:
        """Names the step that the block trains, and holds all its updates together.

        Args:
            number: of the step, from 0; it grows from block to block.
            rows: an id for each row that this rank's replica trains on in the block, in the order in which its
                forward passes with gradients meet them; equal in every layout. Without them a row is known by its
                tokens.
        """
        return nullcontext()

    def log(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics to the step under way, else to the step that ended last. Those of rank 0 are written."""


NOT_ATTACHED = TrainingHandle()
