"""Lists what a training starts from, tensor by tensor, and where this rank holds it.

Contract: nothing is copied but where it is written; no communication. Padding rows of a vocabulary are no canonical
elements and in no traced kind, but a loss may count them: they are a tensor of their own here, named
``{name}.padding``, of as many rows as the layout has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from megatron.core.distributed import DistributedDataParallel

from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.optimizer_state import MOMENTS, counts_by_parameter, empty_state, state_dtype
from mock_scheduler.megatron.parameters import LocalParameter, iterate_parameters, iterate_state_buffers
from mock_scheduler.megatron.probe.state import updated_tensors
from mock_scheduler.trace.names import OUTPUT_LAYER, WORD_EMBEDDINGS
from mock_scheduler.trace.shards import Block, ShardSpec, Split
from mock_scheduler.trace.start_report import StartKind

#: State of Adam beside its moments: its counters.
_COUNTERS = frozenset({"step"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Holds one tensor of this rank with values of a whole one.

    tensor: of the local shape, or flat with the elements of ``flat_range``. It may be narrower than the whole one: then
    it holds the rounded values.
    """

    tensor: torch.Tensor
    flat_range: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StartTensor:
    """Holds one whole tensor that a training starts from.

    spec: the local tensor's place, without a flat range. dtype: of the whole one. padding: the place of the padding
    rows of the vocabulary among themselves; ``None`` where this rank has none.
    """

    kind: StartKind
    spec: ShardSpec
    dtype: torch.dtype
    holders: tuple[Holder, ...]
    padding: ShardSpec | None = None


def iterate_start(model: ObservedModel, *, has_moments: bool) -> Iterator[StartTensor]:
    """Yields parameters with their wide copies, buffers, and where asked for the moments that are there."""
    for local in iterate_parameters(model):
        yield _parameter_start(local, model)
        if has_moments:
            yield from _moment_starts(local, model)
    dtype = torch.promote_types(model.config.params_dtype, torch.float32)
    for item in iterate_state_buffers(model):
        holder = Holder(tensor=item.buffer.detach())
        yield StartTensor(kind="initial", spec=item.spec, dtype=dtype, holders=(holder,))


def _parameter_start(local: LocalParameter, model: ObservedModel) -> StartTensor:
    """The parameter first: it is what the forward pass computes with. The wide copy decides the next update."""
    parameter = local.parameter.detach()
    holders = [Holder(tensor=parameter)]
    holders += [
        Holder(tensor=tensor.detach(), flat_range=spec.flat_range)
        for _, spec, tensor in updated_tensors(local, model.optimizers)
        if tensor is not local.parameter
    ]
    return StartTensor(
        kind="initial",
        spec=local.spec,
        dtype=state_dtype(parameter),
        holders=tuple(holders),
        padding=padding_spec(local.spec, model),
    )


def _moment_starts(local: LocalParameter, model: ObservedModel) -> Iterator[StartTensor]:
    updated = list(updated_tensors(local, model.optimizers))
    for name in MOMENTS:
        holders = [
            Holder(tensor=optimizer.optimizer.state[inner][name].detach(), flat_range=spec.flat_range)
            for optimizer, spec, inner in updated
            if name in optimizer.optimizer.state.get(inner, {})
        ]
        if holders:
            spec = replace(local.spec, name=f"{local.spec.name}.{name}")
            yield StartTensor(
                kind="optimizer",
                spec=spec,
                dtype=state_dtype(local.parameter),
                holders=tuple(holders),
                padding=padding_spec(spec, model),
            )


# --- Padding of the vocabulary ----------------------------------------------------------------------------------------


def count_padding_rows(spec: ShardSpec, model: ObservedModel) -> int:
    """Counts the padding rows of a parameter over the vocabulary, or of its moments, on all tp ranks; 0 of others."""
    name = spec.name.removeprefix(model.prefix)
    if not name.startswith((WORD_EMBEDDINGS, OUTPUT_LAYER)) or spec.global_shape[0] != model.vocab_size:
        return 0
    return max(0, spec.local_shape[0] * model.ranks.tp_size - model.vocab_size)


def padding_spec(spec: ShardSpec, model: ObservedModel) -> ShardSpec | None:
    """The place of this rank's padding rows among all of them; ``None`` where it has none."""
    num_rows = count_padding_rows(spec, model)
    own_rows = spec.local_shape[0] if spec.local_shape else 0
    first = model.ranks.tp_rank * own_rows  # of this rank, in the padded vocabulary
    start = max(0, model.vocab_size - first)
    if not num_rows or start >= own_rows:
        return None
    block = Block(local_start=start, global_start=first + start - model.vocab_size, length=own_rows - start)
    return ShardSpec(
        name=f"{spec.name}.padding",
        global_shape=(num_rows, *spec.global_shape[1:]),
        local_shape=spec.local_shape,
        splits=(Split(dim=0, blocks=(block,)),),
    )


# --- Before and after it is set ---------------------------------------------------------------------------------------


def find_unsettable(model: ObservedModel) -> list[str]:
    """Names the state of this rank that cannot be compared or set, and why."""
    problems = []
    is_distributed = any(
        isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.use_distributed_optimizer
        for chunk in model.chunks
    )
    for optimizer in model.optimizers:
        if optimizer.is_stub_optimizer:
            continue
        if optimizer.config.use_precision_aware_optimizer:
            problems.append("use_precision_aware_optimizer keeps the main parameters out of reach; turn it off")
        states = optimizer.optimizer.state.values()
        further = {name for state in states for name in state} - {*MOMENTS} - _COUNTERS
        problems += [f"the optimizer's state {name} is none of Adam's" for name in sorted(further)]
    if model.optimizer is not None and not is_distributed:
        problems += [
            f"{local.spec.name} is to be trained, and no optimizer updates it or its wide copy"
            for local in iterate_parameters(model)
            if local.parameter.requires_grad and not list(updated_tensors(local, model.optimizers))
        ]
    return problems


def widen_buffers(model: ObservedModel) -> None:
    """Let Megatron's routers (0.16.1) widen their experts' bias, as they do when they are run or asked for state."""
    for gpt in model.gpts():
        if any(buffer.dtype in (torch.bfloat16, torch.float16) for buffer in gpt.buffers()):
            gpt.state_dict()


def counts_by_group(model: ObservedModel) -> bool:
    """Whether any optimizer counts its updates by parameter group, as TransformerEngine's and apex's Adam do."""
    return any(not optimizer.is_stub_optimizer and not counts_by_parameter(optimizer) for optimizer in model.optimizers)


def list_moments(model: ObservedModel) -> Iterator[str]:
    """Yields the names of the moments that this rank's optimizers keep, or will."""
    for local in iterate_parameters(model):
        if any(True for _ in updated_tensors(local, model.optimizers)):
            yield from (f"{local.spec.name}.{moment}" for moment in MOMENTS)


def set_num_updates(model: ObservedModel, num_updates: int) -> None:
    """Gives each parameter's state in torch's Adam this count, and one of zeros where there is none yet."""
    for optimizer in model.optimizers:
        if optimizer.is_stub_optimizer:
            continue
        for group in optimizer.optimizer.param_groups:
            for inner in group["params"]:
                state = optimizer.optimizer.state.get(inner) or empty_state(inner)
                optimizer.optimizer.state[inner] = {**state, "step": torch.tensor(float(num_updates))}


def refresh_parameters(model: ObservedModel) -> None:
    """Let Megatron make parameters of the wide copies, as after an update, and gather them. Collective, over dp."""
    for optimizer in model.optimizers:
        has_copies = model.config.params_dtype in (torch.bfloat16, torch.float16)
        if has_copies and not optimizer.is_stub_optimizer:
            optimizer._copy_main_params_to_model_params()
