"""The optimizer of a run and the schedule of its learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from pipelines.config.schema import PipelineConfig
from pipelines.megatron.model import DTYPES
from pipelines.megatron.process.full_precision import prepare_optimizer


def build_optimizer(config: PipelineConfig, chunks: Sequence[DistributedDataParallel]) -> MegatronOptimizer:
    """Megatron's Adam over the gradient buffers of a model's chunks."""
    training, dtype = config.training, DTYPES[config.precision]
    prepare_optimizer(dtype)
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=training.lr,
            min_lr=training.min_lr,
            weight_decay=training.weight_decay,
            adam_beta1=training.adam_beta1,
            adam_beta2=training.adam_beta2,
            adam_eps=training.adam_eps,
            clip_grad=training.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=training.use_distributed_optimizer,
            overlap_param_gather=training.overlap_param_gather,
        ),
        list(chunks),
    )


class LearningRateSchedule(OptimizerParamScheduler):
    """Megatron's schedule, whose warm-up would lose the run's first update to a rate of 0.

    With w = ``lr_warmup_iters``, N = ``lr_decay_iters`` (where not set: all updates of the run), and update k of the
    run, from 0::

        k < w:       lr · (k + 1) / w
        w ≤ k < N:   constant: lr
                     linear:   min_lr + (lr - min_lr) · (N - k) / (N - w)
                     cosine:   min_lr + (lr - min_lr) · (1 + cos(π · (k - w) / (N - w))) / 2
        N ≤ k:       constant: lr; else min_lr

    So the first update after the warm-up has the full rate, and the last of the decay not yet ``min_lr``.
    ``num_steps`` is k.
    """

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """The rate of update ``num_steps``; from w on it is Megatron's own (megatron-core 0.16.1)."""
        if self.num_steps < self.lr_warmup_steps:
            return float(self.max_lr) * (self.num_steps + 1) / self.lr_warmup_steps
        return float(super().get_lr(param_group))


def build_lr_schedule(
    config: PipelineConfig, optimizer: MegatronOptimizer, *, first_step: int = 0
) -> LearningRateSchedule:
    """The schedule of a model that is trained from ``first_step`` of the run on, standing at its first update."""
    training = config.training
    return LearningRateSchedule(
        optimizer,
        init_lr=0.0,
        max_lr=training.lr,
        min_lr=training.min_lr,
        lr_warmup_steps=training.lr_warmup_iters,
        # A constant rate has no decay, and Megatron wants one that is longer than the warm-up.
        lr_decay_steps=max(config.lr_decay_updates(first_step=first_step), training.lr_warmup_iters + 1),
        lr_decay_style=training.lr_decay_style,
        start_wd=training.weight_decay,
        end_wd=training.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # What the configuration says counts, also after a resume; the checkpoint only says where the run stands.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
