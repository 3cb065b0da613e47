"""Builds a model under training: this rank's chunks, gradient buffers, optimizer and schedule of the learning rate.

Policy and critic are each one of these. Canonical names of a critic begin with ``critic.``, so that both can be traced
and stored side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mock_scheduler.megatron.full_precision import prepare_optimizer
from mock_scheduler.megatron.observed_model import ObservedModel, unwrapped
from mock_scheduler.megatron.parameters import (
    LocalBuffer,
    LocalParameter,
    iterate_parameters,
    iterate_state_buffers,
)
from mock_scheduler.megatron.perturbation import Perturbation
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.emulation.execution import build_execution
from pipelines.megatron.model import Head, build_chunks, wrap_data_parallel
from pipelines.megatron.process_of_rank import Runtime
from pipelines.megatron.transformer_config import DTYPES, build_transformer_config
from pipelines.megatron.weights import load_initial_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateResult:
    """The outcome of one optimizer update: the gradient's norm before clipping, the rate, and whether it was carried
    out. ``has_signal``: whether any gradient was other than 0, and any token had a part in the loss.
    """

    grad_norm: float
    learning_rate: float
    succeeded: bool
    has_signal: bool


class TrainedModel:
    """This rank's part of a model under training. Every method must be called by every rank.

    ``head``: logits for a policy, values for a critic. ``name``: the canonical names begin with it and a dot; empty for
    the policy. ``lr``: the largest learning rate. ``first_step``: the first step of the run that trains it.
    ``execution``: the order of computation.
    """

    def __init__(
        self,
        config: PipelineConfig,
        runtime: Runtime,
        *,
        vocab_size: int,
        head: Head,
        name: str,
        lr: float,
        first_step: int = 0,
    ) -> None:
        self.runtime = runtime
        self.execution = build_execution(config, runtime)
        self.vocab_size = vocab_size
        self.prefix = f"{name}." if name else ""
        self.transformer_config = build_transformer_config(config)
        self.chunks = build_chunks(
            config,
            self.transformer_config,
            vocab_size=vocab_size,
            vocab_parts=self.execution.vocab_parts,
            runtime=runtime,
            head=head,
        )
        perturbation = Perturbation.build(config.perturbation)
        load_initial_weights(self.observe(self.chunks), config.model, seed=config.seed, perturbation=perturbation)
        self.data_parallel: list[DistributedDataParallel] = wrap_data_parallel(
            self.chunks, self.transformer_config, config.training
        )
        own_rate = config.model_copy(update={"training": config.training.model_copy(update={"lr": lr})})
        self.optimizer = build_optimizer(own_rate, self.data_parallel)
        self._updates_without_signal = config.training.on_no_signal == "update"
        self.lr_schedule = build_lr_schedule(own_rate, self.optimizer, first_step=first_step)
        self.transformer_config.grad_scale_func = self.optimizer.scale_loss
        self.execution.start(unwrapped(self.chunks[0]), self.optimizer)
        #: The model as the instruments see it.
        self.observed = self.observe(self.data_parallel, self.optimizer)

    def observe(self, chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer | None = None) -> ObservedModel:
        """Gives chunks of this model's shape, with their optimizer, to the instruments."""
        return ObservedModel(
            chunks=chunks,
            ranks=self.runtime,
            vocab_size=self.vocab_size,
            num_replicas=self.execution.num_replicas,
            optimizer=optimizer,
            prefix=self.prefix,
        )

    @property
    def vocab_parts(self) -> int:
        """Counts the tp ranks' parts of the vocabulary."""
        return self.execution.vocab_parts

    def parameters(self) -> Iterator[LocalParameter]:
        """Returns every parameter of this rank with its canonical name and shard."""
        return iterate_parameters(self.observed)

    def state_buffers(self) -> Iterator[LocalBuffer]:
        """Every buffer of this rank that belongs to the model's state, with its canonical name and shard."""
        return iterate_state_buffers(self.observed)

    def zero_grad(self) -> None:
        """Clear the gradient buffers before an update."""
        for chunk in self.data_parallel:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.execution.clear()

    def gather_parameters(self) -> None:
        """Make this rank's parameters current, where their gathering would wait for the next forward pass."""
        self.observed.gather_parameters()

    def update(self, *, has_loss: bool = True, learning_rate: float | None = None) -> UpdateResult:
        """Clip, update the parameters and move the schedule on; gradients must have been reduced.

        An update without signal is skipped, or not, as ``training.on_no_signal`` says; the schedule counts it all the
        same. ``has_loss``: whether any token of the update has a part in the loss, the same on every rank.
        ``learning_rate``: in place of the schedule's, which then stays where it is.
        """
        if learning_rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
        # Read before the step: the schedule then moves on to the next update's rate.
        used_rate = float(self.optimizer.param_groups[0]["lr"])
        has_gradient = self._has_gradient()
        has_signal = has_gradient and has_loss
        if has_signal or self._updates_without_signal:
            succeeded, grad_norm, _ = self.optimizer.step()
        else:
            # Not finite is not 0: such gradients go to Megatron, which finds them.
            succeeded, grad_norm = True, self._measure_gradient() if has_gradient else 0.0
        self.lr_schedule.step(increment=1 if learning_rate is None else 0)
        return UpdateResult(
            grad_norm=float(grad_norm),
            learning_rate=used_rate,
            succeeded=bool(succeeded),
            has_signal=has_signal,
        )

    def _has_gradient(self) -> bool:
        """Whether any rank holds a gradient other than 0. Collective, so that all ranks decide alike."""
        own = any(
            bool(buffer.grad_data.any())
            for chunk in self.data_parallel
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        )
        found = torch.tensor(own, dtype=torch.int32, device=self.runtime.device)
        if self.runtime.world_size > 1:
            torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
        return bool(found)

    def _measure_gradient(self) -> float:
        """Measures the norm of a gradient that is not used, as that of the routers' losses alone. Collective."""
        return 0.0 if self.optimizer.prepare_grads() else float(self.optimizer.get_grad_norm())


def build_frozen(config: PipelineConfig, model: TrainedModel) -> list[torch.nn.Module]:
    """Chunks with the canonical initial weights that are never trained: the reference policy."""
    # A configuration of its own: the trained model's knows its optimizer, which Megatron's experts would copy.
    transformer_config = build_transformer_config(config)
    chunks = build_chunks(
        config,
        transformer_config,
        vocab_size=model.vocab_size,
        vocab_parts=model.vocab_parts,
        runtime=model.runtime,
    )
    perturbation = Perturbation.build(config.perturbation)
    load_initial_weights(model.observe(chunks), config.model, seed=config.seed, perturbation=perturbation)
    build_execution(config, model.runtime).start(unwrapped(chunks[0]), None)
    return [chunk.requires_grad_(False) for chunk in chunks]


def build_optimizer(config: PipelineConfig, chunks: Sequence[DistributedDataParallel]) -> MegatronOptimizer:
    """Returns Megatron's Adam over the gradient buffers of a model's chunks."""
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
