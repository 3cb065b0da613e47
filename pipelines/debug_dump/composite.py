"""Several probes as one: each is told all that a training step tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.instruments import TraceKind
from pipelines.megatron.places import OwnBatch
from pipelines.megatron.probing.interface import NO_PROBE, TrainingProbe
from pipelines.megatron.trained_model import TrainedModel
from pipelines.micro_batches import MicroBatch


class CompositeProbe(TrainingProbe):
    """Tells its probes in their order; blocks are entered in it, and left in the reverse."""

    def __init__(self, probes: Sequence[TrainingProbe]) -> None:
        self._probes = probes

    def start_step(self, batch: RolloutBatch, batches: Sequence[OwnBatch], models: Sequence[TrainedModel]) -> None:
        """As of each."""
        for probe in self._probes:
            probe.start_step(batch, batches, models)

    def tokens(
        self, kind: TraceKind, own: OwnBatch, values: Mapping[str, torch.Tensor], *, update: int = 0, prefix: str = ""
    ) -> None:
        """As of each."""
        for probe in self._probes:
            probe.tokens(kind, own, values, update=update, prefix=prefix)

    def start_update(self, update: int, micro_batches: Sequence[MicroBatch]) -> None:
        """As of each."""
        for probe in self._probes:
            probe.start_update(update, micro_batches)

    @contextmanager
    def watching(self, model: TrainedModel, update: int) -> Iterator[None]:
        """As of each."""
        with ExitStack() as stack:
            for probe in self._probes:
                stack.enter_context(probe.watching(model, update))
            yield

    @contextmanager
    def computing(self, own: OwnBatch) -> Iterator[None]:
        """As of each."""
        with ExitStack() as stack:
            for probe in self._probes:
                stack.enter_context(probe.computing(own))
            yield

    def scalars(self, kind: TraceKind, values: Mapping[str, float], *, update: int, prefix: str = "") -> None:
        """As of each."""
        for probe in self._probes:
            probe.scalars(kind, values, update=update, prefix=prefix)

    def state(self, model: TrainedModel, update: int, kind: TraceKind) -> None:
        """As of each."""
        for probe in self._probes:
            probe.state(model, update, kind)


def combine(*probes: TrainingProbe | None) -> TrainingProbe:
    """One probe of those that are there."""
    present = [probe for probe in probes if probe is not None]
    if len(present) > 1:
        return CompositeProbe(present)
    return present[0] if present else NO_PROBE
