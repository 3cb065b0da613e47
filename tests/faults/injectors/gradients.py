"""Faults of losses and of what is done with gradients: scales, denominators, accumulation and reductions."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.transformer.moe import moe_utils

from pipelines.algorithm.losses import PolicyLossConfig, PolicyLossOutput
from pipelines.megatron import trainer
from pipelines.megatron.places import OwnBatch
from pipelines.megatron.trainer import PolicyTrainer
from tests.faults.counting import Fired
from tests.faults.fault import Injector
from tests.faults.injectors.patching import (
    cp_size,
    dp_rank,
    dp_size,
    ep_size,
    on_data_parallel,
    replacing,
    tp_size,
    without_all_reduce,
)

# The package exports a function of the module's name, so the module itself must be taken from the import system.
_finalize = importlib.import_module("megatron.core.distributed.finalize_model_grads")


def _left_out(name: str) -> Injector:
    def wrap(fired: Fired, reduce: Callable[..., None]) -> Callable[..., None]:
        def skip(*arguments: object) -> None:
            fired.count += 1

        return skip

    return replacing(_finalize, name, wrap)


norms_not_summed = _left_out("_allreduce_non_tensor_model_parallel_grads")
tied_not_summed = _left_out("_allreduce_word_embedding_grads")
tokens_not_summed = without_all_reduce(_finalize, lambda tensor: tensor.numel() == 1)


def _sum_norms_over_dp(fired: Fired, reduce: Callable[..., None]) -> Callable[..., None]:
    def over_dp(model: object, config: object, tp_group: object) -> None:
        fired.count += 1
        reduce(model, config, parallel_state.get_data_parallel_group())

    return over_dp


norms_summed_over_dp = replacing(_finalize, "_allreduce_non_tensor_model_parallel_grads", _sum_norms_over_dp)


def _average_norms(fired: Fired, reduce: Callable[..., None]) -> Callable[..., None]:
    def average(model: Sequence[Any], *arguments: object) -> None:
        reduce(model, *arguments)
        fired.count += 1
        for parameter in (parameter for chunk in model for parameter in chunk.parameters()):
            if getattr(parameter, "sequence_parallel", False):
                parameter.main_grad.div_(tp_size())

    return average


norms_averaged = replacing(_finalize, "_allreduce_non_tensor_model_parallel_grads", _average_norms)


def _move_bias_the_other_way(fired: Fired, update: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def other_way(counts: torch.Tensor, bias: torch.Tensor, rate: float) -> torch.Tensor:
        fired.count += 1
        return update(counts, bias, -rate if dp_size() > 1 else rate)

    return other_way


def _move_bias_by_own_tokens(fired: Fired, update: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Counts where another sign comes of it, or where there is nobody to add the counts to."""
    alone = without_all_reduce(moe_utils, lambda tensor: not tensor.requires_grad)

    def by_own_tokens(counts: torch.Tensor, bias: torch.Tensor, rate: float) -> torch.Tensor:
        right = update(counts.clone(), bias, rate)
        with alone(Fired()):
            moved = update(counts, bias, rate)
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        fired.count += int(group.size() == 1 or not torch.equal(moved, right))
        return moved

    return by_own_tokens


expert_counts_not_summed = replacing(_finalize, "get_updated_expert_bias", _move_bias_by_own_tokens)
expert_bias_reversed = replacing(_finalize, "get_updated_expert_bias", _move_bias_the_other_way)


def _on_buckets(*, is_expert: bool, harm: Callable[[Any], None]) -> Injector:
    def on_all(fired: Fired, chunk: DistributedDataParallel) -> None:
        for group in chunk.expert_parallel_bucket_groups if is_expert else chunk.bucket_groups:
            fired.count += 1
            harm(group)

    return on_data_parallel(on_all)


def _leave_undivided(group: Any) -> None:
    for bucket in group.buckets:
        bucket.gradient_scaling_factor = 1.0


def _scale_by_ep(group: Any) -> None:
    for bucket in group.buckets:
        bucket.gradient_scaling_factor *= ep_size()


def _reduce_over_dp_alone(group: Any) -> None:
    group.data_parallel_group = parallel_state.get_data_parallel_group()


def _reduce_over_pairs(group: Any) -> None:
    for first in range(0, dist.get_world_size(), 2):
        pair = dist.new_group([first, first + 1])
        if dist.get_rank() in (first, first + 1):
            group.data_parallel_group = pair


dp_not_divided = _on_buckets(is_expert=False, harm=_leave_undivided)
experts_scaled = _on_buckets(is_expert=True, harm=_scale_by_ep)
cp_not_reduced = _on_buckets(is_expert=False, harm=_reduce_over_dp_alone)
dp_reduced_in_pairs = _on_buckets(is_expert=False, harm=_reduce_over_pairs)


def _lose_own_gradient(fired: Fired, start: Callable[..., None]) -> Callable[..., None]:
    def lose(self: _ParamAndGradBucketGroup, *arguments: object, **options: object) -> None:
        fired.count += 1
        if dp_rank() == 1:
            for bucket in self.buckets:
                bucket.grad_data.zero_()
        start(self, *arguments, **options)

    return lose


replica_lost = replacing(_ParamAndGradBucketGroup, "start_grad_sync", _lose_own_gradient)


def _count_twice(fired: Fired, chunk: DistributedDataParallel) -> None:
    for name, parameter in chunk.named_parameters():
        if name.endswith("linear_fc2.weight"):
            fired.count += 1
            parameter.register_hook(lambda gradient: gradient * min(tp_size(), 2))


weight_gradient_twice = on_data_parallel(_count_twice)


def _enlarge(fired: Fired, chunk: DistributedDataParallel) -> None:
    for name, parameter in chunk.named_parameters():
        if name.endswith("layers.1.mlp.linear_fc2.weight"):
            fired.count += 1
            parameter.register_hook(lambda gradient: gradient * (1.0 + 0.01 * (tp_size() - 1)))


one_gradient_enlarged = on_data_parallel(_enlarge)
"""1 % for each further tp rank."""


def _accumulating(harm: Callable[[torch.nn.Parameter], None]) -> Injector:
    """Something is done to a parameter before a micro-batch's gradient is added to its main gradient."""

    def wrap(fired: Fired, make: Callable[..., Any]) -> Callable[..., Any]:
        def make_harmed(self: DistributedDataParallel, parameter: torch.nn.Parameter) -> Callable[..., None]:
            hook = make(self, parameter)

            def harmed(*arguments: object) -> None:
                fired.count += 1
                if parameter.grad is not None:
                    harm(parameter)
                hook(*arguments)

            return harmed

        return make_harmed

    return replacing(DistributedDataParallel, "_make_backward_post_hook", wrap)


def _overwrite(parameter: Any) -> None:
    parameter.main_grad.zero_()


def _add_in_bfloat16(parameter: Any) -> None:
    if bool(parameter.main_grad.any()):
        parameter.main_grad.copy_(parameter.main_grad.bfloat16() + parameter.grad.bfloat16())
        parameter.grad = None


gradient_overwritten = _accumulating(_overwrite)
accumulated_in_bfloat16 = _accumulating(_add_in_bfloat16)


def _losing(change: Callable[[PolicyLossOutput, Any], PolicyLossOutput]) -> Injector:
    """The loss of a micro-batch is changed when it has been computed; ``change`` gets its inputs too."""

    def wrap(fired: Fired, compute: Callable[..., PolicyLossOutput]) -> Callable[..., PolicyLossOutput]:
        def changed(inputs: Any, config: PolicyLossConfig) -> PolicyLossOutput:
            fired.count += 1
            return change(compute(inputs, config), inputs)

        return changed

    return replacing(trainer, "compute_policy_loss", wrap)


def scaled_by(error: float) -> Injector:
    """The loss is larger by this part for each further tp rank."""
    return _losing(lambda output, inputs: replace(output, total=output.total * (1.0 + error * (tp_size() - 1))))


divided_by_cp = _losing(lambda output, inputs: replace(output, total=output.total / cp_size()))


def _count_all_tokens(output: PolicyLossOutput, inputs: Any) -> PolicyLossOutput:
    if dp_size() == 1:
        return output
    return replace(output, num_tokens=torch.full_like(output.num_tokens, inputs.response_mask.numel()))


padding_counted = _losing(_count_all_tokens)


def _with_loss(change: Callable[[Any, Sequence[OwnBatch], OwnBatch, torch.Tensor], Any]) -> Injector:
    """The loss function is changed where a whole update is known; ``change`` gets it, all batches, this one, logits."""

    def wrap(fired: Fired, accumulate: Callable[..., Any]) -> Callable[..., Any]:
        def changed(model: object, batches: Sequence[OwnBatch], loss: Any, **options: object) -> object:
            def lose(own: OwnBatch, logits: torch.Tensor) -> object:
                fired.count += 1
                return change(loss, batches, own, logits)

            return accumulate(model, batches, lose, **options)

        return changed

    return replacing(trainer, "accumulate_gradients", wrap)


def _divide_again(loss: Any, batches: Sequence[OwnBatch], own: OwnBatch, logits: torch.Tensor) -> object:
    total, *rest = loss(own, logits)
    return (total / len(batches), *rest)


def _drop_last(loss: Any, batches: Sequence[OwnBatch], own: OwnBatch, logits: torch.Tensor) -> object:
    total, *rest = loss(own, logits)
    is_dropped = tp_size() > 1 and own is batches[-1]
    return (total * (0.0 if is_dropped else 1.0), *rest)


def _forget_token(loss: Any, batches: Sequence[OwnBatch], own: OwnBatch, logits: torch.Tensor) -> object:
    if tp_size() > 1 and own is batches[0]:
        kept = torch.ones(logits.shape[:2], dtype=torch.bool)
        kept[tuple(own.batch.response_mask.nonzero()[0].tolist())] = False
        logits = torch.where(kept.unsqueeze(-1), logits, logits.detach())
    return loss(own, logits)


divided_by_micro_batches = _with_loss(_divide_again)
last_micro_batch_dropped = _with_loss(_drop_last)
token_forgotten = _with_loss(_forget_token)


def _with_config(change: Callable[[PolicyLossConfig], PolicyLossConfig]) -> Injector:
    def wrap(fired: Fired, build: Callable[..., PolicyLossConfig]) -> Callable[..., PolicyLossConfig]:
        def changed(self: PolicyTrainer, *arguments: object) -> PolicyLossConfig:
            fired.count += 1
            config = build(self, *arguments)
            return change(config) if dp_size() > 1 else config

        return changed

    return replacing(PolicyTrainer, "_loss_config", wrap)


entropy_coefficient = _with_config(lambda config: replace(config, entropy_loss_coef=config.entropy_loss_coef * 1.5))
clip_range = _with_config(lambda config: replace(config, pg_clip=1e-4))


def _updating(name: str, *, compute: Callable[[PolicyTrainer, Any], Any]) -> Injector:
    """In every update, scores that were made before the first one are made anew of the weights as they are."""

    def wrap(fired: Fired, update: Callable[..., Any]) -> Callable[..., Any]:
        def renewed(
            self: PolicyTrainer,
            micro_batches: object,
            batches: Sequence[OwnBatch],
            old_logprobs: object,
            ref_logprobs: object,
            **options: object,
        ) -> object:
            fired.count += 1
            scores = {"old": old_logprobs, "ref": ref_logprobs, name: compute(self, batches)}
            return update(self, micro_batches, batches, scores["old"], scores["ref"], **options)

        return renewed

    return replacing(PolicyTrainer, "update", wrap)


old_logprobs_renewed = _updating("old", compute=lambda self, batches: self.compute_logprobs(batches))
reference_renewed = _updating("ref", compute=lambda self, batches: self.compute_logprobs(batches))
