"""Sums the virtual ranks' gradients as their layout does, and takes the norm as its ranks take it.

Order of ``finalize_model_grads`` (megatron-core 0.16.1): each replica's gradient is scaled, and replicas are added, cp
within dp; then, over tp, gradients of whole parameters from each rank's tokens or heads alone; then, over the first and
last stage, their shared ones; then all is divided by the update's tokens. The norm adds squares of each rank's own
norm, in the order of the ranks. With the distributed optimizer each data-parallel rank owns ranges of flat buffers,
as ``distributed/param_and_grad_buffer.py`` and ``optimizer/distrib_optimizer.py`` cut them without overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.optimizer import clip_grads

from mock_scheduler.layouts.order_plan import OrderPlan
from mock_scheduler.megatron.emulation.accumulators import Accumulator, Accumulators
from mock_scheduler.megatron.emulation.parts import joined, ordered_sum
from mock_scheduler.megatron.partition import main_grad


@torch.no_grad()
def write_main_gradients(
    parameters: Sequence[torch.nn.Parameter],
    accumulators: Accumulators,
    plan: OrderPlan,
    scaling: torch.Tensor | None,
) -> None:
    """Writes every parameter's ``main_grad`` from its accumulators.

    scaling: 1 / tokens of the update, over all replicas; ``None`` where each replica has divided already.
    """
    for parameter in parameters:
        uses = [_gradient_of_use(item, plan) for item in accumulators.of(parameter)]
        gradients = [item for item in uses if item is not None]
        if not gradients:
            main_grad(parameter).zero_()
            continue
        # Two uses are a tied embedding on the first and on the last stage, whose gradients an all-reduce adds.
        total = ordered_sum(gradients)
        main_grad(parameter).copy_(total if scaling is None else total.mul_(scaling))


def _gradient_of_use(accumulator: Accumulator, plan: OrderPlan) -> torch.Tensor | None:
    """Returns the whole gradient of one use; ``None`` where no pass reached it."""
    split = accumulator.split
    if not accumulator.sums:
        return None
    parts = [_over_replicas(accumulator, plan, part) for part in range(split.num_parts)]
    if split.dim is not None:
        return joined(parts, split.dim, split.blocks)
    # A parameter that is whole on every rank got gradients of other tokens or heads there: they are added over tp.
    return ordered_sum(parts)


def _over_replicas(accumulator: Accumulator, plan: OrderPlan, part: int) -> torch.Tensor:
    """Adds a tp rank's gradient over its replicas; a replica without one adds 0, and this changes nothing else."""
    like = next(iter(accumulator.sums[place] for place in accumulator.sums if place[1] == part))
    zero = torch.zeros_like(like)
    num_replicas = plan.rounds * accumulator.split.num_replicas
    sums = [accumulator.sums.get((replica, part), zero) for replica in range(num_replicas)]
    # Each replica's gradient is scaled before the sum, as DistributedDataParallel scales a bucket before its reduction.
    scale = plan.gradient_scale
    return ordered_sum(sums if scale == 1.0 else [one * scale for one in sums])


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldParameter:
    """Holds a parameter of one stage's chunk.

    counts: whether its gradient is in the norm. alone: in a bucket of its own. holder: of an expert with buffers of its
    own, the ep rank that holds it.
    """

    parameter: torch.nn.Parameter
    accumulator: Accumulator
    is_vector: bool
    counts: bool = True
    alone: bool = False
    holder: int | None = None

    def gradient(self, part: int) -> torch.Tensor:
        """Returns the main gradient of a tp rank's part."""
        split = self.accumulator.split
        whole = main_grad(self.parameter)
        return whole if split.dim is None else split.parts(whole)[part]

    def counts_on(self, part: int) -> bool:
        """Says whether a tp rank's gradient is in the norm: of parameters whole on all ranks, the first one's."""
        return self.counts and (part == 0 or self.accumulator.split.dim is not None)


@torch.no_grad()
def gradient_norm(stages: Sequence[Sequence[Sequence[HeldParameter]]], plan: OrderPlan, dtype: torch.dtype) -> float:
    """Returns the norm over all ranks of main gradients; stages: each one's chunks' parameters. dtype: of the norm.

    Undistributed, experts have a norm of their own, over other ranks than the other parameters have theirs
    (``ChainedOptimizer.get_grad_norm``).
    """
    sources = 1 if plan.experts is None else plan.experts.sources
    if plan.norm.is_sharded:
        ranks = range(plan.tp * plan.replicas)
        own = [[*_dense(one, plan, rank), *_experts(one, plan, rank)] for one in stages for rank in ranks]
        return _norm_of_ranks(own, dtype)
    dense = _norm_of_ranks([list(_dense(one, plan, rank)) for one in stages for rank in range(plan.tp)], dtype)
    if plan.experts is None or not plan.experts.is_apart:
        return dense
    experts = _norm_of_ranks([list(_experts(one, plan, rank)) for one in stages for rank in range(sources)], dtype)
    # Each norm is rounded before it is squared again, as Megatron chains optimizers.
    return float((dense**2 + experts**2) ** 0.5)


def _norm_of_ranks(gradients: Sequence[Sequence[torch.Tensor]], dtype: torch.dtype) -> float:
    """Takes the norm of the ranks' gradients, in their order."""
    # The root is taken of a Python number: float64, whatever the dtype of the sum.
    return float(ordered_sum([_squared_norm(own, dtype) for own in gradients]).item() ** 0.5)


def _dense(chunks: Sequence[Sequence[HeldParameter]], plan: OrderPlan, rank: int) -> Iterator[torch.Tensor]:
    """Yields the gradients of a stage's rank without experts that have buffers of their own; tp is the fastest axis."""
    of_rank = [[item for item in chunk if item.holder is None] for chunk in chunks]
    yield from _gradients_of_rank(of_rank, plan, rank % plan.tp, shard=rank // plan.tp, num_shards=plan.norm.shards)


def _experts(chunks: Sequence[Sequence[HeldParameter]], plan: OrderPlan, rank: int) -> Iterator[torch.Tensor]:
    """Yields a stage's rank's gradients of experts with buffers of their own; each lot of following ranks has all."""
    if plan.experts is None or not plan.experts.is_apart:
        return
    ep = plan.experts.sources
    # Experts have no tp here: their ranks are counted through tp, cp and dp alike, ep the fastest.
    of_rank = [[item for item in chunk if item.holder == rank % ep] for chunk in chunks]
    yield from _gradients_of_rank(of_rank, plan, 0, shard=rank // ep, num_shards=plan.experts.replicas)


def _gradients_of_rank(
    chunks: Sequence[Sequence[HeldParameter]], plan: OrderPlan, part: int, *, shard: int, num_shards: int
) -> Iterator[torch.Tensor]:
    """Yields the gradients of one rank's optimizer in its order: matrices, then vectors, which have no weight decay."""
    held: list[tuple[bool, torch.Tensor]] = []
    for chunk in chunks:
        gradients = [item.gradient(part) for item in chunk]
        if not plan.norm.is_sharded:
            held += [(item.is_vector, own) for item, own in zip(chunk, gradients, strict=True) if item.counts_on(part)]
            continue
        sizes, alone = [own.numel() for own in gradients], [item.alone for item in chunk]
        for owned in owned_ranges(sizes, alone, num_shards=num_shards)[shard]:
            if chunk[owned.place].counts_on(part):
                flat = gradients[owned.place].reshape(-1)[owned.start : owned.end]
                held.append((chunk[owned.place].is_vector, flat))
    # Megatron lists gradients by parameter group: matrices, then vectors.
    for vectors in (False, True):
        yield from (own for is_vector, own in held if is_vector is vectors)


def _squared_norm(gradients: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """A rank's share ``[1]``, as ``get_grad_norm_fp32`` or, in float64, ``wide_gradient_norm`` computes it."""
    if dtype is torch.float64:
        total = torch.zeros(1, dtype=dtype, device=torch.cuda.current_device())
        for gradient in gradients:
            total += gradient.double().square().sum()
        return total
    if not gradients:
        return torch.zeros(1, dtype=torch.float32, device=torch.cuda.current_device())
    overflow = torch.zeros(1, dtype=torch.int, device=torch.cuda.current_device())
    # The kernel takes a root, which is squared again before ranks are added: both roundings are Megatron's.
    norm, _ = clip_grads.multi_tensor_applier(
        clip_grads.l2_norm_impl, overflow, [[gradient.float() for gradient in gradients]], False
    )
    return norm**2.0


# In elements: a parameter starts at a multiple of the one, and a bucket's end is padded to one of the other.
_PARAMETER_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedRange:
    """Holds elements ``[start, end)`` of the parameter at this place of a chunk's list."""

    place: int
    start: int
    end: int


def owned_ranges(sizes: Sequence[int], alone: Sequence[bool], *, num_shards: int) -> list[list[OwnedRange]]:
    """Lists each of ``num_shards`` ranks' ranges of a chunk's parameters, in the order of its optimizer.

    sizes: elements of each parameter, in the model's order. alone: whether it has a bucket of its own.
    """
    buckets = list(_buckets(sizes, alone, num_shards=num_shards))
    return [
        [owned for bucket in buckets for owned in bucket.of_shard(shard, num_shards)] for shard in range(num_shards)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bucket:
    """Holds ``[start, end)`` of the buffer, and place, start and end of each parameter in it."""

    start: int
    end: int
    parameters: tuple[tuple[int, int, int], ...]

    def of_shard(self, shard: int, num_shards: int) -> Iterator[OwnedRange]:
        # Shards cut parameters anywhere: a rank may own a few elements of one and none of the next.
        size = (self.end - self.start) // num_shards
        first = self.start + shard * size
        for place, start, end in self.parameters:
            owned = OwnedRange(place=place, start=max(first, start) - start, end=min(first + size, end) - start)
            if owned.start < owned.end:
                yield owned


def _buckets(sizes: Sequence[int], alone: Sequence[bool], *, num_shards: int) -> Iterator[_Bucket]:
    """Yields the buckets in order; parameters lie in the reverse of the model's order."""
    divisor = math.lcm(num_shards, _BUCKET_ALIGNMENT)
    bucket_start, position = 0, 0
    parameters: list[tuple[int, int, int]] = []
    # Buffers are filled in the order of the backward pass, so that the first buckets are ready first.
    for place in reversed(range(len(sizes))):
        position = _padded(position, _PARAMETER_ALIGNMENT)
        # The open bucket ends before an embedding that two stages share, and the shared one ends behind it.
        if alone[place] and parameters:
            end = _padded(position, divisor)
            yield _Bucket(start=bucket_start, end=end, parameters=tuple(parameters))
            bucket_start, position, parameters = end, end, []
        parameters.append((place, position, position + sizes[place]))
        position += sizes[place]
        if alone[place]:
            position = _padded(position, divisor)
            yield _Bucket(start=bucket_start, end=position, parameters=tuple(parameters))
            bucket_start, parameters = position, []
    if parameters:
        yield _Bucket(start=bucket_start, end=_padded(position, divisor), parameters=tuple(parameters))


def _padded(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor
