"""Trains the critic of ``adv_estimator: gae``: values of tokens, and one update of its own loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mock_scheduler.megatron.probe.interface import NO_PROBE, TrainingProbe
from pipelines.algorithm.correction import correction_spec
from pipelines.algorithm.value_loss import (
    VALUE_METRIC_SUMS,
    ValueLossConfig,
    ValueLossInputs,
    ValueLossOutput,
    compute_value_loss,
    explained_variance,
)
from pipelines.batching.plan import MicroBatch
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.execution import LossSums
from pipelines.megatron.layers.expert_router import attach_router_ledger
from pipelines.megatron.layers.router_ledger import merge_router_sums, router_weight
from pipelines.megatron.passes import accumulate_gradients, forward_only
from pipelines.megatron.places import OwnBatch, exchange_rows
from pipelines.megatron.process_of_rank import Runtime
from pipelines.megatron.trained_model import TrainedModel

CRITIC = "critic"


class CriticTrainer:
    """A model like the policy's, with a value head. Every method must be called by every rank."""

    def __init__(self, config: PipelineConfig, runtime: Runtime, *, vocab_size: int) -> None:
        self._config = config
        spec = correction_spec(config)
        self._loss_config = ValueLossConfig(
            value_clip=config.critic.value_clip,
            rs_denominator="original" if spec is None else spec.rs_denominator,
        )
        self._runtime = runtime
        self.model = TrainedModel(
            config, runtime, vocab_size=vocab_size, head="value", name=CRITIC, lr=config.critic.lr
        )
        self.router_ledger = attach_router_ledger(self.model.chunks)

    def compute_values(self, batches: Sequence[OwnBatch]) -> dict[int, torch.Tensor]:
        """The value before each of this rank's targets, ``[b, s]`` by micro-batch index; empty off the last stage."""

        def reduce(own: OwnBatch, output: torch.Tensor) -> torch.Tensor:
            return output[..., 0].clone()

        return forward_only(self.model.data_parallel, batches, self._runtime, self.model.execution, reduce=reduce)

    def update(
        self,
        micro_batches: Sequence[MicroBatch],
        batches: Sequence[OwnBatch],
        old_values: Mapping[int, torch.Tensor],
        *,
        number: int,
        probe: TrainingProbe = NO_PROBE,
    ) -> dict[str, float]:
        """One update; its metrics, named ``critic/...``, are means over its response tokens."""

        def loss(own: OwnBatch, output: torch.Tensor) -> LossSums:
            new_values = output[..., 0]
            by_token = {"new_values": new_values, "old_values": old_values[own.batch.index]}
            probe.tokens("output", own, {"values": new_values}, update=number, prefix=prefix)
            terms, sums = execution.sum_shares(own, by_token, self._compute_loss)
            probe.tokens("loss", own, terms, update=number, prefix=prefix)
            return sums

        prefix, execution = self.model.prefix, self.model.execution
        sums = accumulate_gradients(self.model, batches, loss, update=number, probe=probe)
        result = self.model.update()
        probe.scalars("gradient_norm", {"grad_norm": result.grad_norm}, update=number, prefix=prefix)
        probe.state(self.model.observed, number, "parameter")
        width = len(VALUE_METRIC_SUMS)
        rows = exchange_rows(
            micro_batches,
            sums,
            self._runtime,
            width=width,
            cp_size=execution.cp_size,
            own_cp_ranks=execution.own_cp_ranks,
        )
        totals = dict(zip(VALUE_METRIC_SUMS, rows.sum(axis=1).sum(axis=0).tolist(), strict=True))
        metrics = _value_metrics(totals)
        weight = router_weight(micro_batches, self._config.training, num_tokens=totals["num_tokens"])
        router = merge_router_sums(self.router_ledger, self._config.model, self._runtime, total_weight=weight)
        probe.scalars(
            "loss", {f"mean.{name}": value for name, value in (metrics | router).items()}, update=number, prefix=prefix
        )
        return {
            f"{CRITIC}/{name}": value
            for name, value in (metrics | router | {"grad_norm": result.grad_norm, "lr": result.learning_rate}).items()
        }

    def _compute_loss(self, batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> ValueLossOutput:
        inputs = ValueLossInputs(
            new_values=values["new_values"],
            old_values=values["old_values"],
            returns=batch.returns,
            response_mask=batch.response_mask,
            kept_mask=batch.kept_mask,
            loss_weights=batch.loss_weights,
        )
        return compute_value_loss(inputs, self._loss_config)


def _value_metrics(totals: Mapping[str, float]) -> dict[str, float]:
    """The loss as it is minimised, means per kept token, and how much of the returns' variance the values explain."""
    num_kept = max(totals["kept_tokens"], 1.0)
    means = {name: totals[name] / num_kept for name in ("vf_clip_frac", "value", "return")}
    means["vf_loss"] = totals["vf_loss"] / max(totals["num_tokens"], 1.0)
    return {**means, "explained_variance": explained_variance(totals)}
