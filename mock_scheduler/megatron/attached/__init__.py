"""Attaches the instruments to a training on Megatron-core that somebody else wrote; here is what it gets back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext


class TrainingHandle:
    """A training's end of the instruments. This one does nothing: no run file asked for anything.

    All methods are optional; a training that calls none is observed as well.
    """

    def step(self, number: int | None = None, rows: Sequence[str | int] | None = None) -> AbstractContextManager[None]:
        """Names the step that the block trains, and holds all its updates together.

        Args:
            number: of the step, from 0; it grows from block to block. ``None``: the one after the last.
            rows: an id for each row that this rank's replica trains on in the block, in the order in which its
                forward passes with gradients meet them; equal in every layout. Without them a row is known by its
                tokens.
        """
        return nullcontext()

    def log(self, metrics: Mapping[str, float]) -> None:
        """Adds metrics to the step under way, else to the step that ended last. Those of rank 0 are written."""

    def end(self) -> None:
        """Ends the observation, and leaves the run's files; without it they are left when the process exits.

        For a loop that goes on after its training, or leaves by ``os._exit``. It does not communicate.
        """


NOT_ATTACHED = TrainingHandle()
