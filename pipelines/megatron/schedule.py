"""One optimizer update of any model: forward and backward over its micro-batches with Megatron's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from pipelines.megatron.emulation.lanes import metrics_of_lanes, sums_of_lanes
from pipelines.megatron.forward import iterators, line_shape, run_chunk
from pipelines.megatron.places import OwnBatch
from pipelines.megatron.probing.interface import NO_PROBE, TrainingProbe
from pipelines.megatron.trained_model import TrainedModel

LossSums = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The loss summed over this rank's response tokens, their number (int), and metrics without graph, float64."""

LossFunction = Callable[[OwnBatch, torch.Tensor], LossSums]
"""From a micro-batch and the model's output for it to its sums."""


def accumulate_gradients(
    model: TrainedModel,
    batches: Sequence[OwnBatch],
    loss: LossFunction,
    *,
    update: int = 0,
    probe: TrainingProbe = NO_PROBE,
) -> dict[int, torch.Tensor]:
    """Gradients of all batches, accumulated and reduced over the layout; the metrics by micro-batch index.

    The metrics are empty off the last stage. Every rank must call it, with the batches that its replica owns.
    ``update``: its number within the step, for the probe.
    """
    model.zero_grad()
    rounds = [batches] if model.emulation is None else model.emulation.rounds(model.together(batches))
    by_batch: dict[int, torch.Tensor] = {}
    with probe.watching(model, update):
        for own_batches in rounds:
            sums = get_forward_backward_func()(
                forward_step_func=_loss_step(loss, probe),
                data_iterator=iterators(own_batches, len(model.data_parallel)),
                model=list(model.data_parallel),
                num_microbatches=len(own_batches),
                forward_only=False,
                **line_shape(own_batches, model.runtime),
            )
            if model.runtime.is_last_stage:
                for own, metrics in zip(own_batches, sums, strict=True):
                    by_batch |= metrics_of_lanes(own, metrics)
    probe.state(model, update, "gradient")
    return by_batch


def _loss_step(
    loss: LossFunction, probe: TrainingProbe
) -> Callable[[Iterator[tuple[int, OwnBatch]], torch.nn.Module], tuple[torch.Tensor, Callable[..., LossSums]]]:
    """Megatron's forward step: the model's output, and the function that makes it a loss."""

    def step(
        data_iterator: Iterator[tuple[int, OwnBatch]], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., LossSums]]:
        _, own = next(data_iterator)
        with probe.computing(own):
            output = run_chunk(model, own.inputs)
        return output, lambda output: sums_of_lanes(own, output, loss)

    return step
