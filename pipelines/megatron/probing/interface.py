"""What a training step tells a probe while it runs.

Contract: the methods do nothing here, so ``TrainingProbe()`` is the probe of a run that traces nothing, and costs a
few empty calls per micro-batch. A probe changes no bit of the training: it reads and copies. It
never communicates, but that parameters may be gathered earlier than training would (``overlap_param_gather``), by all
ranks.
Every rank has its own and is told of its own part alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.instruments import TraceKind
from pipelines.megatron.places import OwnBatch
from pipelines.micro_batches import MicroBatch

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
        """Numbers of a whole update, which every rank computes and must compute alike."""

    def state(self, model: TrainedModel, update: int, kind: TraceKind) -> None:
        """The model's main gradients have been reduced (``gradient``), or it has been updated (``parameter``)."""


NO_PROBE = TrainingProbe()
