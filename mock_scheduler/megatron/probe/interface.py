"""A training step tells a probe of itself while it runs; several probes can stand for one.

Contract: the methods do nothing here, so ``TrainingProbe()`` is the probe of a run without a trace, and costs a few
empty calls per micro-batch. A probe changes no bit of the training: it reads and copies. It never communicates, except
that all ranks may gather parameters earlier than training would (``overlap_param_gather``). Every rank has its own and
is told of its own part alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.step_tokens import MetRows, MicroBatchTokens
from mock_scheduler.trace.entries import RowTable

StepRows = RowTable | MetRows
"""The rows of a step: known before it, or met by its forward passes."""


class TrainingProbe:
    """Sees the calls of one training step, in order; of updates, ``start_update`` to the last ``state`` repeat."""

    def start_step(self, rows: StepRows, batches: Sequence[MicroBatchTokens], models: Sequence[ObservedModel]) -> None:
        """The step begins: the rows of its whole batch, and this rank's shares of all its micro-batches.

        ``MetRows`` grow while the step runs: forward passes put rows in before they are announced. Then ``batches`` is
        empty.
        """

    def tokens(
        self,
        kind: TraceKind,
        own: MicroBatchTokens,
        values: Mapping[str, torch.Tensor],
        *,
        update: int = 0,
        prefix: str = "",
        of_responses: bool = True,
    ) -> None:
        """Takes values of the tokens of one micro-batch's share, ``[b, s]`` by name.

        ``prefix``: of the names, as ``critic.``. ``of_responses``: they are defined where ``response_mask`` is True,
        else at all tokens. Values may have a graph, and are freed by the caller afterwards.
        """

    def start_update(self, update: int, micro_batches: Sequence[MicroBatchTokens]) -> None:
        """An update of critic and policy begins, over all of these micro-batches."""

    def watching(self, model: ObservedModel, update: int) -> AbstractContextManager[None]:
        """The block computes the gradients of an update: all its forward and backward passes through the model."""
        return nullcontext()

    def computing(self, own: MicroBatchTokens) -> AbstractContextManager[None]:
        """The block is one forward pass of one of the model's chunks over a micro-batch's share."""
        return nullcontext()

    def bypassing(self) -> AbstractContextManager[None]:
        """The block is a forward pass through a watched model that no update trains on, as an evaluation's."""
        return nullcontext()

    def scalars(self, kind: TraceKind, values: Mapping[str, float], *, update: int, prefix: str = "") -> None:
        """Numbers of a whole update; every rank must compute the same."""

    def state(self, model: ObservedModel, update: int, kind: TraceKind) -> None:
        """The model's main gradients have been reduced (``gradient``), or it has been updated (``parameter``)."""


NO_PROBE = TrainingProbe()


class CompositeProbe(TrainingProbe):
    """Tells its probes in their order; blocks are entered in it, and left in the reverse."""

    def __init__(self, probes: Sequence[TrainingProbe]) -> None:
        self._probes = probes

    def start_step(self, rows: StepRows, batches: Sequence[MicroBatchTokens], models: Sequence[ObservedModel]) -> None:
        """Calls each."""
        for probe in self._probes:
            probe.start_step(rows, batches, models)

    def tokens(
        self,
        kind: TraceKind,
        own: MicroBatchTokens,
        values: Mapping[str, torch.Tensor],
        *,
        update: int = 0,
        prefix: str = "",
        of_responses: bool = True,
    ) -> None:
        """Calls each."""
        for probe in self._probes:
            probe.tokens(kind, own, values, update=update, prefix=prefix, of_responses=of_responses)

    def start_update(self, update: int, micro_batches: Sequence[MicroBatchTokens]) -> None:
        """Calls each."""
        for probe in self._probes:
            probe.start_update(update, micro_batches)

    @contextmanager
    def watching(self, model: ObservedModel, update: int) -> Iterator[None]:
        """Calls each."""
        with ExitStack() as stack:
            for probe in self._probes:
                stack.enter_context(probe.watching(model, update))
            yield

    @contextmanager
    def computing(self, own: MicroBatchTokens) -> Iterator[None]:
        """Calls each."""
        with ExitStack() as stack:
            for probe in self._probes:
                stack.enter_context(probe.computing(own))
            yield

    @contextmanager
    def bypassing(self) -> Iterator[None]:
        """Calls each."""
        with ExitStack() as stack:
            for probe in self._probes:
                stack.enter_context(probe.bypassing())
            yield

    def scalars(self, kind: TraceKind, values: Mapping[str, float], *, update: int, prefix: str = "") -> None:
        """Calls each."""
        for probe in self._probes:
            probe.scalars(kind, values, update=update, prefix=prefix)

    def state(self, model: ObservedModel, update: int, kind: TraceKind) -> None:
        """Calls each."""
        for probe in self._probes:
            probe.state(model, update, kind)


def combine(*probes: TrainingProbe | None) -> TrainingProbe:
    """One probe of those that are there."""
    present = [probe for probe in probes if probe is not None]
    if len(present) > 1:
        return CompositeProbe(present)
    return present[0] if present else NO_PROBE
