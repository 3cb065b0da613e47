"""Faults of the optimizer: clipping, moments, step counts, rates, decay, and parameters that are not handed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as megatron_optimizer

from pipelines.megatron import trained_model
from pipelines.megatron.trained_model import TrainedModel
from tests.faults import optimizer_frozen
from tests.faults.counting import Fired
from tests.faults.fault import Injector
from tests.faults.injectors.patching import dp_rank, dp_size, replacing, tp_rank, tp_size, without_all_reduce


def _clip_nothing(fired: Fired, clip: Callable[..., None]) -> Callable[..., None]:
    def unclipped(*arguments: object, **options: object) -> None:
        fired.count += 1
        if tp_size() == 1:
            clip(*arguments, **options)

    return unclipped


not_clipped = replacing(megatron_optimizer, "clip_grad_by_total_norm_fp32", _clip_nothing)


def _clipping(factor: Callable[[], float]) -> Injector:
    """Gradients are clipped at another norm."""

    def wrap(fired: Fired, clip: Callable[..., None]) -> Callable[..., None]:
        def clip_elsewhere(parameters: object, max_norm: float, *arguments: object, **options: object) -> None:
            fired.count += 1
            clip(parameters, max_norm * factor(), *arguments, **options)

        return clip_elsewhere

    return replacing(megatron_optimizer, "clip_grad_by_total_norm_fp32", wrap)


clipped_later = _clipping(lambda: 1.0 if tp_size() == 1 else 0.31 / 0.3)
clipped_by_rank = _clipping(lambda: 0.9 if tp_rank() == 1 else 1.0)
norm_of_own_shard = without_all_reduce(clip_grads, lambda tensor: True)


def _gather_nothing(fired: Fired, gather: Callable[..., None]) -> Callable[..., None]:
    def ungathered(self: DistributedDataParallel, *arguments: object, **options: object) -> None:
        fired.count += 1
        if dp_size() == 1:
            gather(self, *arguments, **options)

    return ungathered


parameters_not_gathered = replacing(DistributedDataParallel, "start_param_sync", _gather_nothing)


def _keep_embedding(fired: Fired, update: Callable[..., Any]) -> Callable[..., Any]:
    def keep(self: TrainedModel, **options: object) -> object:
        named = (pair for chunk in self.data_parallel for pair in chunk.named_parameters())
        held = [(one, one.detach().clone()) for name, one in named if name.endswith("word_embeddings.weight")]
        result = update(self, **options)
        if dp_rank() == 1:
            for parameter, value in held:
                fired.count += 1
                parameter.data.copy_(value)
        return result

    return keep


embedding_stale = replacing(TrainedModel, "update", _keep_embedding)


def decay_everything(fired: Fired, build: Callable[..., Any]) -> Callable[..., Any]:
    def decaying(*arguments: object, **options: object) -> object:
        optimizer = build(*arguments, **options)
        fired.count += 1
        for group in optimizer.param_groups:
            group["wd_mult"] = 1.0 if tp_size() > 1 else group["wd_mult"]
        return optimizer

    return decaying


norms_decayed = replacing(trained_model, "build_optimizer", decay_everything)

Step = Callable[[torch.optim.AdamW], None]


def _stepping(harmed: Callable[[Step, torch.optim.AdamW], None]) -> Injector:
    """Adam's step is another one under tp; ``harmed`` gets the real one."""

    def wrap(fired: Fired, step: Any) -> Any:
        @torch.no_grad()
        def other_step(optimizer: torch.optim.AdamW) -> None:
            fired.count += 1
            if tp_size() > 1:
                harmed(step, optimizer)
            else:
                step(optimizer)

        return other_step

    return replacing(torch.optim.AdamW, "step", wrap)


def _count_from_one(step: Step, optimizer: torch.optim.AdamW) -> None:
    step(optimizer)
    for state in optimizer.state.values():
        state["step"].zero_()


def _lose_moment(step: Step, optimizer: torch.optim.AdamW) -> None:
    step(optimizer)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].zero_()


def _put_epsilon_under_root(step: Step, optimizer: torch.optim.AdamW) -> None:
    step(optimizer)
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        for parameter in (parameter for parameter in group["params"] if parameter in optimizer.state):
            state = optimizer.state[parameter]
            number = float(state["step"])
            mean, square = state["exp_avg"] / (1 - beta1**number), state["exp_avg_sq"] / (1 - beta2**number)
            right, wrong = square.sqrt() + group["eps"], (square + group["eps"]).sqrt()
            parameter.add_(mean / right - mean / wrong, alpha=group["lr"])


@contextmanager
def _other_values(optimizer: torch.optim.AdamW, **values: Callable[[Any], Any]) -> Iterator[None]:
    held = [{name: group[name] for name in values} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group.update({name: change(group[name]) for name, change in values.items()})
    try:
        yield
    finally:
        for group, before in zip(optimizer.param_groups, held, strict=True):
            group.update(before)


def _go_further(step: Step, optimizer: torch.optim.AdamW) -> None:
    with _other_values(optimizer, lr=lambda rate: rate * 1.1):
        step(optimizer)


def _forget_sooner(step: Step, optimizer: torch.optim.AdamW) -> None:
    with _other_values(optimizer, betas=lambda betas: (betas[0], betas[1] - 0.01)):
        step(optimizer)


def _forget_later(step: Step, optimizer: torch.optim.AdamW) -> None:
    """From the second update on, as where a resume puts other values into the groups."""
    is_later = bool(optimizer.state)
    with _other_values(optimizer, betas=lambda betas: (0.8 if is_later else betas[0], betas[1])):
        step(optimizer)


def _couple_decay(step: Step, optimizer: torch.optim.AdamW) -> None:
    for group in optimizer.param_groups:
        for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
            parameter.grad.add_(parameter, alpha=group["weight_decay"])
    with _other_values(optimizer, weight_decay=lambda decay: 0.0):
        step(optimizer)


def _round_moments(step: Step, optimizer: torch.optim.AdamW) -> None:
    step(optimizer)
    for state in optimizer.state.values():
        state["exp_avg"].copy_(state["exp_avg"].bfloat16())


def _round_parameters(step: Step, optimizer: torch.optim.AdamW) -> None:
    step(optimizer)
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        parameter.copy_(parameter.bfloat16())


def _skip_first(step: Step, optimizer: torch.optim.AdamW) -> None:
    parameter = optimizer.param_groups[0]["params"][0]
    held = parameter.clone()
    step(optimizer)
    if tp_rank() == 1:
        parameter.copy_(held)


beta_later = _stepping(_forget_later)
decay_coupled = _stepping(_couple_decay)
moments_rounded = _stepping(_round_moments)
parameters_rounded = _stepping(_round_parameters)
parameter_skipped = _stepping(_skip_first)
step_count_lost = _stepping(_count_from_one)
moment_lost = _stepping(_lose_moment)
epsilon_under_root = _stepping(_put_epsilon_under_root)
rate_of_its_own = _stepping(_go_further)
second_beta = _stepping(_forget_sooner)


def _lose_on_second_rank(step: Step, optimizer: torch.optim.AdamW) -> None:
    if tp_rank() == 1:
        optimizer_frozen.lose_update(step, optimizer)
    else:
        step(optimizer)


frozen_on_one_rank = _stepping(_lose_on_second_rank)
