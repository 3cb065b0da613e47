"""The steps that a run states to have, in its ``run.json``: no other one is missing there.

Contract: importing this imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mock_scheduler.config.base import NonNegativeInt, PositiveInt, Steps
from mock_scheduler.config.instruments import TraceConfig
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.documents import Document

AbsenceReason = Literal["before", "after", "untraced"]
"""Why a run has no such step: it begins later, it ends earlier, or it does not trace this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StatedSteps:
    """The steps of a run, as it was configured.

    Args:
        first: The first one; later than 0 in a run that goes on from a checkpoint, or is observed from there on.
        last: The last one; ``None`` where it ends by itself.
        traced: The traced ones; ``None`` is all.
        every: Of these, the steps that it divides.
    """

    first: NonNegativeInt = 0
    last: NonNegativeInt | None = None
    traced: Steps | None = None
    every: PositiveInt = 1

    @classmethod
    def of(cls, trace: TraceConfig, *, first: int, last: int | None) -> StatedSteps:
        """Gives those of a run with this trace."""
        return cls(first=first, last=last, traced=trace.steps, every=trace.dump_every_n_steps)

    def explain_absence(self, step: int, *, is_traced: bool) -> AbsenceReason | None:
        """Finds why the run has no such step, or no trace of it; ``None`` where it should have one."""
        if step < self.first:
            return "before"
        if self.last is not None and step > self.last:
            return "after"
        is_due = step % self.every == 0 and (self.traced is None or step in self.traced)
        return "untraced" if is_traced and not is_due else None

    def as_json(self) -> JSON:
        """Gives the value of ``steps`` in ``run.json``."""
        content: JSON = _DOCUMENT.dump(self)
        return content


_DOCUMENT = Document[StatedSteps](StatedSteps)


def load_stated_steps(content: object) -> StatedSteps:
    """Reads ``steps`` of a ``run.json``; raises ``ValueError``."""
    return _DOCUMENT.load(content)
