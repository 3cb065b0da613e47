"""A training step tells a probe of itself while it runs; several probes can stand for one.

Contract: the methods do nothing here, so ``TrainingProbe()`` is the probe of a run without a trace, and costs a few
empty calls per micro-batch. A probe changes no bit of the training: it reads and copies. It never communicates, except
that all ranks may gather parameters earlier than training would (``overlap_param_gather``). Every rank has its own and
is told of its own part alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.instruments import TraceKind
from pipelines.batching.plan import MicroBatch
from pipelines.megatron.places import OwnBatch
from pipelines.megatron.trained_model import TrainedModel

if TYPE_CHECKING:
    from pipelines.megatron.trained_model import TrainedModel


class TrainingProbe:
    """The calls of one training step, in their order; of the updates, ``start_update`` to the last ``state`` repeat."""

    def start_step(self, batch: RolloutBatch, batches: Sequence[OwnBatch], models: Sequence[TrainedModel]) -> None:
        """The step begins: its whole batch, and this rank's shares of all its micro-batches.

        Advantages and returns of ``batches`` are still 0.
        """

    def tokens(
        self, kind: TraceKind, own: OwnBatch, values: Mapping[str, torch.Tensor], *, update: int = 0, prefix: str = ""
    ) -> None:
        """Values of the tokens of one micro-batch's share, ``[b, s]`` by name; defined where ``response_mask`` is True.

        ``prefix``: of the names, as ``critic.``. Values may have a graph, and are freed by the caller afterwards.
        """

    def start_update(self, update: int, micro_batches: Sequence[MicroBatch]) -> None:
        """An update of critic and policy begins, over all of these micro-batches."""

    def watching(self, model: TrainedModel, update: int) -> AbstractContextManager[None]:
        """The block computes the gradients of an update: all its forward and backward passes through the model."""
        return nullcontext()

    def computing(self, own: OwnBatch) -> AbstractContextManager[None]:
        """The block is one forward pass of one of the model's chunks over a micro-batch's share."""
        return nullcontext()

    def scalars(self, kind: TraceKind, values: Mapping[str, float], *, update: int, prefix: str = "") -> None:
        """Numbers of a whole update; every rank must compute the same."""

    def state(self, model: TrainedModel, update: int, kind: TraceKind) -> None:
        """The model's main gradients have been reduced (``gradient``), or it has been updated (``parameter``)."""


NO_PROBE = TrainingProbe()


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
