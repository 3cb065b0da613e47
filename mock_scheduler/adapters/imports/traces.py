"""What every reader of foreign traces shares: a rank's tensors of a step, and their way into a trace.

Contract: the pieces are placed as their files say, nothing is computed. A tensor whose place in the whole is not said
is a tensor of its rank alone (``name_apart``): runs of one layout are compared in it, and runs of two say that they
are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.trace.entries import RankPlace, RowTable, StepFooter, TraceEntry, Unobserved
from mock_scheduler.trace.full.writing import FullSink

#: The steps of each trace that was written, by its folder within the new one; "": the new folder itself.
Traces = Mapping[str, Sequence[int]]

#: Gradients of sums are one number, expanded: a file of such a tensor is far smaller than the tensor.
MAX_EXPANDED_BYTES = 2**30

_MAX_NAME = 900
_APART = "only a run of so many ranks has it, since its files do not say how the ranks share the whole tensor"
_KINDS: tuple[TraceKind, ...] = ("initial", "input", "activation", "activation_gradient", "recomputed", "gradient")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTensors:
    """What one rank wrote of a step.

    ``entries``: may be made as they are asked for. ``unobserved``: what its files have and a trace does not; complete
    when all entries were asked for. ``ranks``: of which there are files; empty: all.
    """

    step: int
    rank: int
    world_size: int
    entries: Iterable[TraceEntry]
    coordinates: Mapping[str, int] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    rows: RowTable = field(default_factory=RowTable)
    update_rows: tuple[tuple[int, ...], ...] = ()
    unobserved: list[Unobserved] = field(default_factory=list)


def write_ranks(ranks: Iterable[RankTensors], folder: Path) -> list[int]:
    """Writes a trace; gives its steps.

    Raises:
        TraceError: a tensor is given twice, or does not fit its place.
    """
    steps: dict[int, None] = {}
    for own in ranks:
        place = RankPlace(global_rank=own.rank, coordinates={"rank": own.rank, **own.coordinates})
        sink = FullSink(folder, step=own.step, place=place, world_size=own.world_size)
        try:
            for entry in own.entries:
                sink.add(entry)
        except BaseException:
            sink.abandon()
            raise
        sink.close(
            StepFooter(
                rows=own.rows,
                update_rows=own.update_rows,
                ranks=own.ranks or tuple(range(own.world_size)),
                unobserved=(
                    *own.unobserved,
                    *(Unobserved(kind=kind, name="@*", reason=_APART) for kind in _KINDS),
                ),
            )
        )
        steps[own.step] = None
    return sorted(steps)


def name_apart(name: str, axis: str, rank: int, size: int) -> str:
    """Names a tensor of one rank, or of one place on an axis, whose relation to those of the others is not said."""
    return f"@{axis}{rank}of{size}.{name}"


def list_apart(kind: TraceKind, name: str) -> Unobserved:
    """Says why a trace has a tensor under the names of its ranks alone."""
    return Unobserved(kind=kind, name=name, reason="its files do not say how the ranks share it")


def name_tensor(text: str) -> str:
    """Makes a name of a trace of a name in a file: without wrappers around the model and signs that mean something."""
    text = re.sub(r"^(?:module\.)+", "", text)
    return re.sub(r"[^\w.=+:, -]", "_", text)[:_MAX_NAME] or "_"
