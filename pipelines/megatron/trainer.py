"""Trains the policy on micro-batches with Megatron's schedules, optimizer and gradient reduction.

The same calls run every layout: a pipeline stage that holds no logits simply contributes none. Metrics are summed
per micro-batch in float64, exchanged, and then added in the micro-batches' canonical order, so that pp and dp change
no bit of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from mock_scheduler.config.schema import PipelineConfig
from mock_scheduler.trace.files import TraceKind
from pipelines.algorithm.losses import METRIC_SUMS, PolicyLossConfig, PolicyLossInputs, compute_policy_loss
from pipelines.megatron.forward import forward_only, model_inputs
from pipelines.megatron.logprobs import VocabShard, vocab_parallel_logprobs
from pipelines.megatron.model import build_policy, build_transformer_config, wrap_data_parallel
from pipelines.megatron.optimizer import build_lr_schedule, build_optimizer
from pipelines.megatron.runtime import Runtime
from pipelines.megatron.weights import ModelShape, load_initial_weights
from pipelines.micro_batches import MicroBatch

UpdateProbe = Callable[[int, TraceKind], None]
"""Called with (update, kind): kind ``gradient`` after the reduction, ``parameter`` after the update."""


LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""From a micro-batch's logits to its loss, its number of tokens and its metrics, as Megatron's schedules want them."""


def _no_probe(update: int, kind: TraceKind) -> None:
    """The probe of a run that traces nothing."""


class PolicyTrainer:
    """The policy under training: model, gradient buffers, optimizer and schedule of this rank.

    ``allowed_tokens``: the tokens that the policy can choose; the softmax runs over these alone, here as in sampling.
    ``None`` means the whole vocabulary.
    Every method must be called by every rank, with the same micro-batches.
    """

    def __init__(
        self, config: PipelineConfig, runtime: Runtime, *, vocab_size: int, allowed_tokens: Sequence[int] | None = None
    ) -> None:
        self.config = config
        self.runtime = runtime
        self.allowed = torch.zeros(vocab_size, dtype=torch.bool, device=runtime.device)
        self.allowed[slice(None) if allowed_tokens is None else torch.tensor(allowed_tokens)] = True
        self.shape = ModelShape(model=config.model, vocab_size=vocab_size)
        self.transformer_config = build_transformer_config(config)
        self.policy = build_policy(config, self.transformer_config, vocab_size=vocab_size, runtime=runtime)
        load_initial_weights(self.policy, self.shape, runtime, seed=config.seed)
        self.data_parallel: DistributedDataParallel = wrap_data_parallel(
            self.policy,
            self.transformer_config,
            use_distributed_optimizer=config.training.use_distributed_optimizer,
        )
        self.optimizer = build_optimizer(config, self.data_parallel)
        self.lr_schedule = build_lr_schedule(config, self.optimizer)
        self.transformer_config.grad_scale_func = self.optimizer.scale_loss
        self._loss_config = PolicyLossConfig(
            pg_clip=config.pg_clip,
            entropy_loss_coef=config.entropy_loss_coef,
            kl_loss_coef=config.kl_loss_coef if config.use_kl_loss else 0.0,
        )
        self.reference = self._build_reference() if config.use_kl_loss else None

    @property
    def optimizers(self) -> list[MegatronOptimizer]:
        """Megatron's optimizers one by one, whether it chained several or not."""
        is_chained = isinstance(self.optimizer, ChainedOptimizer)
        return list(self.optimizer.chained_optimizers) if is_chained else [self.optimizer]

    def _build_reference(self) -> torch.nn.Module:
        """A frozen policy with the canonical initial weights, for the KL term."""
        reference = build_policy(
            self.config, self.transformer_config, vocab_size=self.shape.vocab_size, runtime=self.runtime
        )
        load_initial_weights(reference, self.shape, self.runtime, seed=self.config.seed)
        return reference.requires_grad_(False)

    def owned(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches that this data-parallel rank computes."""
        return [batch for batch in micro_batches if batch.index % self.runtime.dp_size == self.runtime.dp_rank]

    def vocab_shard(self, width: int) -> VocabShard:
        """This rank's columns of logits that are ``width`` wide."""
        start = self.runtime.tp_rank * width
        allowed = self.allowed[start : start + width]
        allowed = torch.nn.functional.pad(allowed, (0, width - len(allowed)))
        return VocabShard(
            start=start,
            width=width,
            allowed=None if bool(allowed.all()) else allowed,
            group=parallel_state.get_tensor_model_parallel_group(),
        )

    def compute_logprobs(
        self, owned: Sequence[MicroBatch], *, model: torch.nn.Module | None = None
    ) -> dict[int, torch.Tensor]:
        """The trainer's own log-probability of each target, ``[b, T]`` by micro-batch index; owned: on the device.

        At the sampling temperature, as the policy that is optimised is the one that samples. Empty off the last stage.
        """

        def reduce(position: int, logits: torch.Tensor) -> torch.Tensor:
            return self._logprobs(logits, owned[position].targets)[0]

        logprobs = forward_only(model or self.data_parallel, [batch.tokens for batch in owned], reduce=reduce)
        if not self.runtime.is_last_stage:
            return {}
        return {batch.index: values for batch, values in zip(owned, logprobs, strict=True)}

    def _logprobs(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        temperature = self.config.actor_infer.generating_args.temperature
        return vocab_parallel_logprobs(logits, targets, self.vocab_shard(logits.shape[-1]), temperature=temperature)

    def train_step(self, micro_batches: Sequence[MicroBatch], *, probe: UpdateProbe = _no_probe) -> dict[str, float]:
        """All updates of one rollout step; the metrics are means over its updates, ``lr`` that of the last one.

        micro_batches: all of the step, on the host; only those that this rank owns are moved to the device.
        """
        owned = {batch.index: batch.to(self.runtime.device) for batch in self.owned(micro_batches)}
        old_logprobs = self.compute_logprobs(list(owned.values()))
        ref_logprobs = self.compute_logprobs(list(owned.values()), model=self.reference) if self.reference else None
        differences = self._rollout_differences(micro_batches, owned, old_logprobs)
        per_update = self.config.training.num_micro_batches
        results: list[dict[str, float]] = []
        for _ in range(self.config.ppo_epochs):
            for start in range(0, len(micro_batches), per_update):
                part = [owned.get(batch.index, batch) for batch in micro_batches[start : start + per_update]]
                results.append(self._update(part, old_logprobs, ref_logprobs, update=len(results), probe=probe))
        means = {name: sum(result[name] for result in results) / len(results) for name in results[0]}
        return means | differences | {"lr": results[-1]["lr"], "num_updates": float(len(results))}

    def _rollout_differences(
        self,
        micro_batches: Sequence[MicroBatch],
        owned: Mapping[int, MicroBatch],
        old_logprobs: Mapping[int, torch.Tensor],
    ) -> dict[str, float]:
        """|old - rollout| over the response tokens of the whole step: its mean, and the largest."""
        own_rows = {
            index: sum_and_max_difference(logprobs, owned[index].rollout_logprobs, owned[index].response_mask)
            for index, logprobs in old_logprobs.items()
        }
        rows = self._exchange_rows(micro_batches, own_rows, width=2)
        num_tokens = sum(int(batch.response_mask.sum()) for batch in micro_batches)
        return {
            "rollout_logprob_diff_mean": float(rows[:, 0].sum()) / max(num_tokens, 1),
            "rollout_logprob_diff_max": float(rows[:, 1].max()),
        }

    def _exchange_rows(
        self, micro_batches: Sequence[MicroBatch], own_rows: Mapping[int, torch.Tensor], *, width: int
    ) -> np.ndarray:
        """One row of numbers per micro-batch, float64 ``[len(micro_batches), width]``, in order, on every rank.

        own_rows: ``[width]`` by micro-batch index, of those that this rank computed; empty off the last stage. The tp
        ranks hold them alike, and the first speaks. Collective.
        """
        first = micro_batches[0].index
        table = torch.zeros(len(micro_batches), width, dtype=torch.float64, device=self.runtime.device)
        if self.runtime.tp_rank == 0:
            for index, row in own_rows.items():
                table[index - first] = row
        dist.all_reduce(table)  # each row is one rank's; all others add 0
        return table.cpu().numpy()

    def _update(
        self,
        micro_batches: Sequence[MicroBatch],
        old_logprobs: dict[int, torch.Tensor],
        ref_logprobs: dict[int, torch.Tensor] | None,
        *,
        update: int,
        probe: UpdateProbe,
    ) -> dict[str, float]:
        owned = self.owned(micro_batches)
        self.data_parallel.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = get_forward_backward_func()(
            forward_step_func=self._loss_step(old_logprobs, ref_logprobs),
            data_iterator=iter(owned),
            model=[self.data_parallel],
            num_microbatches=len(owned),
            seq_length=micro_batches[0].tokens.shape[1],
            micro_batch_size=micro_batches[0].tokens.shape[0],
            forward_only=False,
        )
        probe(update, "gradient")
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        succeeded, grad_norm, _ = self.optimizer.step()
        self.lr_schedule.step(increment=1)
        probe(update, "parameter")
        metrics = self._merge_metrics(micro_batches, owned, sums)
        return metrics | {
            "grad_norm": float(grad_norm),
            "lr": learning_rate,
            "skipped_updates": 0.0 if succeeded else 1.0,
        }

    def _loss_step(
        self, old_logprobs: Mapping[int, torch.Tensor], ref_logprobs: Mapping[int, torch.Tensor] | None
    ) -> Callable[[Iterator[MicroBatch], torch.nn.Module], tuple[torch.Tensor, LossFunction]]:
        """Megatron's forward step: the model's output, and the function that makes it a loss."""

        def step(data_iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
            batch = next(data_iterator)

            def loss(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
                new_logprobs, entropy = self._logprobs(logits, batch.targets)
                inputs = PolicyLossInputs(
                    new_logprobs=new_logprobs,
                    entropy=entropy,
                    old_logprobs=old_logprobs[batch.index],
                    ref_logprobs=None if ref_logprobs is None else ref_logprobs[batch.index],
                    advantages=batch.advantages,
                    response_mask=batch.response_mask,
                )
                output = compute_policy_loss(inputs, self._loss_config)
                return output.total, output.num_tokens.int(), output.metrics

            return model(*model_inputs(batch.tokens)), loss

        return step

    def _merge_metrics(
        self, micro_batches: Sequence[MicroBatch], owned: Sequence[MicroBatch], sums: Sequence[torch.Tensor]
    ) -> dict[str, float]:
        """``sums``: of the owned micro-batches, in order; empty off the last stage."""
        computed = zip(owned, sums, strict=True) if self.runtime.is_last_stage else ()
        own_rows = {batch.index: batch_sums for batch, batch_sums in computed}
        totals = self._exchange_rows(micro_batches, own_rows, width=len(METRIC_SUMS)).sum(axis=0)
        named = dict(zip(METRIC_SUMS, (float(total) for total in totals), strict=True))
        num_tokens = named.pop("num_tokens")
        if not self.config.use_kl_loss:
            del named["kl_loss"]
        means = {name: total / max(num_tokens, 1.0) for name, total in named.items()}
        return means | {"num_response_tokens": num_tokens}


def sum_and_max_difference(one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum and largest of |one - other| where the mask is True, float64 ``[2]``; both 0 where it never is."""
    difference = torch.where(mask, one.double() - other.double(), 0.0).abs()
    return torch.stack((difference.sum(), difference.max()))
