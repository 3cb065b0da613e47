"""Lets a training of one's own, in one process, compute in the order of ``order.emulate``.

The loop stays the training's. Megatron's schedule without a pipeline calls each micro-batch's forward and backward pass
in turn, so the n-th counted pass of an update is micro-batch n, and the virtual replica n mod dp computes it: so
Megatron's own sampler deals micro-batches to data-parallel ranks. A line's tokens are dealt to cp ranks in zigzag, as
``get_batch_on_this_cp_rank`` does, and each rank's queries see the keys of all, gathered in the order of the ranks:
that is assumed of the training's attention, since Megatron's own local one has no context parallelism. What the
training's own functions add up, such as its loss over tokens, is computed as it is there.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel

from mock_scheduler.config.instruments import OrderConfig
from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.errors import LayoutError
from mock_scheduler.layouts.order_plan import OrderPlan, plan_order
from mock_scheduler.megatron.emulation.described import describe_run
from mock_scheduler.megatron.emulation.engine import Engine
from mock_scheduler.megatron.emulation.limits import following_limits, layout_limits, model_limits
from mock_scheduler.megatron.emulation.parts import scale_gradient
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.support.text import bullet_list

#: Sums of a training's own that no module makes.
LOSS_SUMS = "the loss function's own sums"
LOSS_OF_LOGITS = "the loss function's own use of logits"
#: What is followed as it usually is, and may be otherwise in a training of one's own.
GATHERED_KEYS = "attention over the keys of all cp ranks, gathered in their order"


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowedFacts:
    """What was followed.

    plan: ``None`` in the layout's own order. not_followed: sums that were left as they are. assumed: sums that the
    training may make otherwise.
    """

    plan: OrderPlan | None = None
    not_followed: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


class TrainingOrder(Protocol):
    """The order in which a training adds."""

    @property
    def num_replicas(self) -> int | None:
        """The ranks whose gradients of a parameter's part are summed; ``None``: those of the layout."""
        ...

    @property
    def facts(self) -> FollowedFacts:
        """What was followed, up to now."""
        ...

    def before_step(self) -> None:
        """Writes the main gradients of an update; the first thing in ``optimizer.step``."""
        ...


class OwnOrder:
    """Is the identity form: a training in the order of its own layout."""

    num_replicas: int | None = None
    facts = FollowedFacts()

    def before_step(self) -> None:
        """The gradients are there."""


class Following:
    """One model whose modules compute as a layout's ranks do."""

    def __init__(self, model: ObservedModel, plan: OrderPlan) -> None:
        self.plan = plan
        self._chunk: Any = model.chunks[0]
        self._gpt = next(model.gpts())
        self._engine = Engine(plan, blocks="zigzag" if plan.cp > 1 else 1)
        self._num_passes = 0
        self._scalings: list[torch.Tensor] = []
        self._uses_logits = False
        self._engine.start(self._gpt, model.optimizer)
        # Averages over micro-batches: this process divides by those of all replicas, a replica by its own.
        self._loss_scale = 1.0 if self._gpt.config.calculate_per_token_loss else float(plan.dp)
        self._engine.set_loss_scale(self._loss_scale)
        self._watch()

    @property
    def num_replicas(self) -> int | None:
        """The ranks of the followed layout whose gradients of a parameter's part are summed."""
        return self.plan.replicas

    @property
    def facts(self) -> FollowedFacts:
        """The plan, and the sums that were left as they are."""
        return FollowedFacts(
            plan=self.plan,
            not_followed=(LOSS_SUMS, *([LOSS_OF_LOGITS] if self._uses_logits else [])),
            assumed=(GATHERED_KEYS,) if self.plan.cp > 1 else (),
        )

    def before_step(self) -> None:
        """Writes the main gradients as the layout's ranks would have them; the first thing in ``optimizer.step``.

        Raises:
            LayoutError: the replicas had no equal numbers of micro-batches, or gradients were divided twice.
        """
        passes, scalings = self._num_passes, list(self._scalings)
        self._num_passes = 0
        self._scalings.clear()
        if passes % self.plan.dp:
            raise LayoutError(
                f"order.emulate: an update had {passes} micro-batches, which {self.plan.dp} data-parallel ranks cannot "
                "share equally; give it a multiple"
            )
        if len(scalings) > 1:
            raise LayoutError(
                f"order.emulate: gradients of one update were divided {len(scalings)} times; one call of Megatron's "
                "schedule for each optimizer.step is followed"
            )
        self._engine.write_gradients(scalings[0] if scalings else None)
        self._engine.clear()

    def _watch(self) -> None:
        names = list(inspect.signature(GPTModel.forward).parameters)[1:]

        def begin(chunk: torch.nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
            # A pass that evaluates is no micro-batch of an update.
            if not (chunk.training and torch.is_grad_enabled()):
                return
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            self._check_tokens(given.get("input_ids"), is_packed=given.get("packed_seq_params") is not None)
            self._uses_logits |= given.get("labels") is None
            self._engine.begin_round(self._num_passes % self.plan.dp)
            self._num_passes += 1

        def end(chunk: torch.nn.Module, args: tuple[object, ...], output: torch.Tensor) -> torch.Tensor:
            # The loss stays as it is, and every gradient behind it is larger by a power of two, which rounds nothing.
            return scale_gradient(output, self._loss_scale)

        self._chunk.register_forward_pre_hook(begin, with_kwargs=True)
        self._chunk.register_forward_hook(end)
        scale = self._chunk.scale_gradients

        def noted(scaling: torch.Tensor) -> None:
            # ``finalize_model_grads`` divides by the tokens of all micro-batches; here they are written after it.
            self._scalings.append(scaling)
            scale(scaling)

        self._chunk.scale_gradients = noted

    def _check_tokens(self, tokens: object, *, is_packed: bool) -> None:
        tp, cp = self.plan.tp if self.plan.sequence_parallel else 1, self.plan.cp
        # Zigzag cuts a line into 2 · cp slices, of which sequence parallelism cuts each share into tp parts.
        multiple = tp * (2 * cp if cp > 1 else 1)
        if isinstance(tokens, torch.Tensor) and tokens.shape[1] % multiple:
            raise LayoutError(
                f"order.emulate: a line of {tokens.shape[1]} tokens is not a multiple of {multiple}, as "
                "sequence_parallel over tensor_model_parallel_size and slices of context_parallel_size need"
            )
        if is_packed and cp > 1:
            raise LayoutError(
                f"order.emulate: packed rows under context_parallel_size {cp} are not followed, since each is sliced "
                "by itself; train lines that are not packed"
            )


def follow(model: ObservedModel, order: OrderConfig) -> TrainingOrder:
    """Lets a built training compute in the order of ``order.emulate``; without it, in its own.

    model: with its optimizer, in its gradient buffers, before the first step.

    Raises:
        LayoutError: says everything that cannot be followed.
    """
    layout = order.emulate
    if layout is None:
        return OwnOrder()
    wrong = _shape_problems(model)
    if not wrong:
        chunk: Any = model.chunks[0]
        run = describe_run(next(model.gpts()), chunk.ddp_config, order)
        wrong = following_limits(model, run, layout)
    if wrong:
        raise LayoutError(
            f"order.emulate: one process cannot follow {layout.describe()} in this training:"
            f"{bullet_list(wrong, limit=None)}"
        )
    return Following(model, plan_order(run, routers=("megatron",)))


def find_order_limits(model: ObservedModel, layout: ParallelConfig) -> list[str]:
    """Lists what keeps one process from adding in the order of this training's layout, as far as this run knows.

    Of one process, what keeps it from following any layout; of several, what the layout itself rules out: their modules
    may be others than one process has. Each rank knows its own part.
    """
    if model.ranks.world_size == 1 and (problems := _shape_problems(model)):
        return problems
    wrapper = next((chunk for chunk in model.chunks if isinstance(chunk, DistributedDataParallel)), None)
    if wrapper is None:
        return []
    run = describe_run(next(model.gpts()), wrapper.ddp_config, OrderConfig())
    return model_limits(model, run) if model.ranks.world_size == 1 else list(layout_limits(run, layout))


def _shape_problems(model: ObservedModel) -> list[str]:
    """Says why the training is not one model in one process."""
    problems = []
    if model.ranks.world_size > 1:
        problems.append(f"the training has {model.ranks.world_size} processes; start it with 1")
    if len(model.chunks) != 1 or not isinstance(model.chunks[0], DistributedDataParallel):
        kinds = ", ".join(type(chunk).__name__ for chunk in model.chunks)
        problems.append(f"the model is {kinds}; expected one DistributedDataParallel with all of it")
    if model.optimizer is None:
        problems.append("the model has no optimizer")
    return problems
