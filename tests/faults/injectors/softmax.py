"""Faults of the softmax over a vocabulary split over tp, and of what the loss makes of it in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from pipelines.algorithm import losses
from pipelines.algorithm.losses import KeptTokens, PolicyLossConfig, PolicyLossInputs, PolicyLossOutput
from pipelines.megatron import logprobs, trainer
from pipelines.megatron.execution import Execution
from pipelines.megatron.logprobs import Exponentials
from tests.faults.counting import Fired
from tests.faults.fault import Injector
from tests.faults.injectors.patching import dp_rank, dp_size, replacing, tp_rank, tp_size


def round_to_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    """Rounds values, in the dtype that they have; the gradient passes."""
    return tensor + (tensor.detach().bfloat16().to(tensor.dtype) - tensor.detach())


def _keep_own_maximum(fired: Fired, all_reduce: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def own(tensor: torch.Tensor, op: object, group: Any) -> torch.Tensor:
        local = tensor.clone()
        reduced = all_reduce(tensor, op, group)
        if op != torch.distributed.ReduceOp.MAX or tp_rank() != 1:
            return reduced
        fired.count += int((local != reduced).sum())
        return local

    return own


maximum_of_own_rank = replacing(logprobs, "_all_reduce", _keep_own_maximum)


def _summing(change: Callable[[torch.Tensor, Exponentials], torch.Tensor], *, is_of_second: bool = True) -> Injector:
    """A rank's parts of Z, z_t and sum_j exp(z_j) z_j are others under tp, or on its second rank alone."""

    def wrap(fired: Fired, sum_up: Callable[[Exponentials], torch.Tensor]) -> Callable[[Exponentials], torch.Tensor]:
        def changed(local: Exponentials) -> torch.Tensor:
            sums = sum_up(local)
            if is_of_second and tp_rank() != 1:
                return sums
            other = change(sums, local)
            fired.count += int((other != sums).any(dim=0).sum())
            return other if tp_size() > 1 else sums

        return changed

    return replacing(logprobs, "local_sums", wrap)


def _without_first_column(sums: torch.Tensor, local: Exponentials) -> torch.Tensor:
    return torch.stack((local.exponentials[..., 1:].sum(dim=-1), sums[1], sums[2]))


column_left_out = _summing(_without_first_column)
target_lost = _summing(lambda sums, local: torch.stack((sums[0], torch.zeros_like(sums[1]), sums[2])))
entropy_of_first_rank = _summing(lambda sums, local: torch.stack((sums[0], sums[1], torch.zeros_like(sums[2]))))
sums_rounded = _summing(lambda sums, local: round_to_bfloat16(sums), is_of_second=False)


def _forget_mean(fired: Fired, differentiate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The gradient of the entropy, -p_j (log p_j + H), is without its H."""

    def without_mean(
        local: object, total: object, log_total: object, entropy: torch.Tensor, grads: Any
    ) -> torch.Tensor:
        fired.count += 1
        return differentiate(local, total, log_total, entropy * (1.0 if tp_size() == 1 else 0.0), grads)

    return without_mean


entropy_gradient_lost = replacing(logprobs, "local_gradient", _forget_mean)


def _train_hotter(fired: Fired, compute: Callable[..., Any]) -> Callable[..., Any]:
    def hotter(self: Execution, *arguments: object, temperature: float) -> object:
        if torch.is_grad_enabled():
            fired.count += 1
            temperature *= 1.02 if tp_size() > 1 else 1.0
        return compute(self, *arguments, temperature=temperature)

    return hotter


temperature_in_training = replacing(Execution, "logprobs", _train_hotter)


def _round_log_ratio(fired: Fired, keep: Callable[..., KeptTokens]) -> Callable[..., KeptTokens]:
    def rounded(inputs: PolicyLossInputs) -> KeptTokens:
        tokens = keep(inputs)
        log_ratio = round_to_bfloat16(tokens.log_ratio)
        fired.count += int((log_ratio != tokens.log_ratio).sum())
        return replace(tokens, log_ratio=log_ratio) if dp_size() > 1 else tokens

    return rounded


ratio_rounded = replacing(losses, "keep_tokens", _round_log_ratio)


def _shift_old_logprobs(fired: Fired, compute: Callable[..., PolicyLossOutput]) -> Callable[..., PolicyLossOutput]:
    def shifted(inputs: PolicyLossInputs, config: PolicyLossConfig) -> PolicyLossOutput:
        fired.count += int(dp_rank() == 1)
        old = inputs.old_logprobs
        return compute(replace(inputs, old_logprobs=old.roll(1, dims=-1) if dp_rank() == 1 else old), config)

    return shifted


old_logprobs_shifted = replacing(trainer, "compute_policy_loss", _shift_old_logprobs)
