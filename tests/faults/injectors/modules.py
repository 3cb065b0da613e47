"""Faults of what modules compute, forward and backward: attention, norms, linear layers, experts, the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from pipelines.megatron import logprobs
from pipelines.megatron.layers import attention
from pipelines.megatron.layers.attention import RowRotaryEmbedding
from pipelines.megatron.layers.expert_router import LayoutInvariantRouter
from tests.faults.counting import Fired
from tests.faults.injectors.patching import (
    cp_size,
    ep_rank,
    ep_size,
    on_modules,
    on_outputs,
    pp_rank,
    replaced,
    replacing,
    tp_rank,
    tp_size,
)

Attend = Callable[..., torch.Tensor]


def _keep_input_gradient_partial(fired: Fired, module: Any) -> None:
    multiply = module.linear_qkv._forward_impl

    def without_reduction(*arguments: object, **options: object) -> torch.Tensor:
        fired.count += 1
        return multiply(*arguments, **{**options, "allreduce_dgrad": False})

    module.linear_qkv._forward_impl = without_reduction


qkv_input_gradient_partial = on_modules(SelfAttention, _keep_input_gradient_partial)


def _look_up_unmasked(fired: Fired, module: Any) -> None:
    forward = module.forward

    def unmasked(tokens: torch.Tensor) -> torch.Tensor:
        fired.count += 1
        if module.tp_group.size() == 1:
            return forward(tokens)
        rows = tokens - module.vocab_start_index
        rows = torch.where((rows < 0) | (rows >= module.num_embeddings_per_partition), 0, rows)
        return reduce_from_tensor_model_parallel_region(module.weight[rows], group=module.tp_group)

    module.forward = unmasked


vocabulary_not_masked = on_modules(VocabParallelEmbedding, _look_up_unmasked)


def _add_bias_on_each_rank(fired: Fired, output: tuple[torch.Tensor, torch.Tensor | None]) -> object:
    hidden, bias = output
    fired.count += 1
    return hidden, None if bias is None else bias * tp_size()


row_bias_on_each_rank = on_outputs(RowParallelLinear, _add_bias_on_each_rank)


def _attending(change: Callable[[Attend, Any], torch.Tensor]) -> Callable[[Fired, Attend], Attend]:
    def wrap(fired: Fired, attend: Attend) -> Attend:
        def changed(self: DotProductAttention, *tensors: torch.Tensor, **options: object) -> torch.Tensor:
            fired.count += 1
            return change(lambda *given: attend(self, *given, **options), tensors)

        return changed

    return wrap


def _flip_groups(attend: Attend, tensors: Any) -> torch.Tensor:
    query, key, value, *rest = tensors
    if tp_size() > 1:
        key, value = key.flip(2), value.flip(2)
    return attend(query, key, value, *rest)


def _scale_queries(attend: Attend, tensors: Any) -> torch.Tensor:
    query, *rest = tensors
    return attend(query * 1.02 if tp_size() > 1 else query, *rest)


def _drop_last_head(attend: Attend, tensors: Any) -> torch.Tensor:
    context = attend(*tensors)
    if tp_rank() == 0:
        return context
    kept = torch.ones(context.shape[-1], dtype=context.dtype)
    kept[-tensors[0].shape[-1] :] = 0.0
    return context * kept


key_groups_flipped = replacing(DotProductAttention, "forward", _attending(_flip_groups))
queries_scaled = replacing(DotProductAttention, "forward", _attending(_scale_queries))
head_dropped = replacing(DotProductAttention, "forward", _attending(_drop_last_head))


def _gather_from_last(fired: Fired, gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def from_last(*arguments: object, **options: object) -> torch.Tensor:
        fired.count += 1
        return torch.cat(gather(*arguments, **options).chunk(cp_size())[::-1])

    return from_last


keys_gathered_from_last = replacing(attention, "gather_from_sequence_parallel_region", _gather_from_last)


def turn_too_far(fired: Fired, module: Any) -> None:
    forward = module.forward

    def too_far(*arguments: object, **options: object) -> torch.Tensor:
        fired.count += 1
        angles = forward(*arguments, **options)
        return angles * 1.05 if pp_rank() else angles

    module.forward = too_far


rotary_of_second_stage = on_modules(RowRotaryEmbedding, turn_too_far)


def _widen_epsilon(fired: Fired, module: Any) -> None:
    fired.count += 1
    if tp_size() > 1:
        module.eps = 1e-2


norm_epsilon = on_modules((torch.nn.LayerNorm, torch.nn.RMSNorm), _widen_epsilon)


def _untag_router(fired: Fired, module: Any) -> None:
    fired.count += 1
    module.weight.sequence_parallel = False


router_not_tagged = on_modules(TopKRouter, _untag_router)


def _silence_first_expert(fired: Fired, module: Any) -> None:
    expert = module.local_experts[0]
    forward = expert.forward

    def silenced(*arguments: object, **options: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = forward(*arguments, **options)
        fired.count += 1
        return (output * 0.0 if ep_rank() else output), bias

    expert.forward = silenced


expert_silenced = on_modules(SequentialMLP, _silence_first_expert)


def _add_on_each_rank(fired: Fired, output: torch.Tensor) -> torch.Tensor:
    fired.count += 1
    return output * ep_size()


shared_experts_on_each_rank = on_outputs(SharedExpertMLP, _add_on_each_rank)


def _balance_on_each_rank(fired: Fired, own: property) -> property:
    def coefficient(self: LayoutInvariantRouter) -> float:
        fired.count += 1
        assert own.fget is not None
        return float(own.fget(self)) * tp_size() * cp_size()

    return property(coefficient)


balancing_on_each_rank = replacing(LayoutInvariantRouter, "_balancing_coeff", _balance_on_each_rank)


def _show_first_micro_batch(fired: Fired, module: Any) -> None:
    """A stage goes on with the hidden states of the first micro-batch that it was ever sent."""
    take = module.set_input_tensor
    first: list[torch.Tensor] = []

    def take_first(given: list[torch.Tensor] | torch.Tensor) -> None:
        fired.count += 1
        hidden = given[0] if isinstance(given, list) else given
        if pp_rank() and hidden is not None:
            first.append(hidden.detach().clone()) if not first else hidden.data.copy_(first[0])
        take(given)

    module.set_input_tensor = take_first


stage_input_stale = on_modules(GPTModel, _show_first_micro_batch)


def _round_messages(fired: Fired, module: Any, *, is_backward: bool) -> None:
    """What a stage is sent, or sends back, has 12 bits fewer of a float32's mantissa, or 3 of a bfloat16's."""
    take = module.set_input_tensor

    def round_down(tensor: torch.Tensor) -> torch.Tensor:
        fired.count += 1
        bits, num_lost = (torch.int32, 12) if tensor.dtype == torch.float32 else (torch.int16, 3)
        return (tensor.detach().view(bits) >> num_lost << num_lost).view(tensor.dtype)

    def round_gradient(sent: torch.Tensor) -> None:
        if sent.grad is not None:
            sent.grad = round_down(sent.grad)

    def take_rounded(given: list[torch.Tensor] | torch.Tensor) -> None:
        hidden = given[0] if isinstance(given, list) else given
        if pp_rank() and hidden is not None and is_backward and hidden.requires_grad:
            # Behind every hook on the tensor itself: what is damaged is the message.
            hidden.register_post_accumulate_grad_hook(round_gradient)
        elif pp_rank() and hidden is not None and not is_backward:
            hidden.data.copy_(round_down(hidden))
        take(given)

    module.set_input_tensor = take_rounded


stage_input_rounded = on_modules(GPTModel, partial(_round_messages, is_backward=False))
stage_gradient_rounded = on_modules(GPTModel, partial(_round_messages, is_backward=True))


@contextmanager
def recomputed_otherwise(fired: Fired) -> Iterator[None]:
    """An MLP gives 1 % more where it is recomputed in the backward pass."""
    is_backward = [False]

    def wrap_backward(backward: Callable[..., object]) -> staticmethod[..., object]:
        def flagged(*arguments: object) -> object:
            is_backward[0] = True
            try:
                return backward(*arguments)
            finally:
                is_backward[0] = False

        return staticmethod(flagged)

    def wrap_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
        def more(self: MLP, *arguments: object, **options: object) -> tuple[torch.Tensor, torch.Tensor | None]:
            output, bias = forward(self, *arguments, **options)
            if not is_backward[0]:
                return output, bias
            fired.count += 1
            return output * 1.01, bias

        return more

    with (
        replaced(megatron_random.CheckpointFunction, "backward", wrap_backward),
        replaced(MLP, "forward", wrap_forward),
    ):
        yield


def _stretch_sum(fired: Fired, all_reduce: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def stretched(tensor: torch.Tensor, op: object, group: Any) -> torch.Tensor:
        if op == torch.distributed.ReduceOp.SUM:
            fired.count += 1
            if group.size() > 1 and group.rank() == 0:
                tensor[0] *= 1.001
        return all_reduce(tensor, op, group)

    return stretched


softmax_sum_of_one_rank = replacing(logprobs, "_all_reduce", _stretch_sum)
