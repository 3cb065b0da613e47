"""Trains the policy on micro-batches: log-probabilities, one update, and the router's share of the metrics.

The same calls run every layout: a pipeline stage that holds no logits simply contributes none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.correction import CorrectionSpec
from mock_scheduler.megatron.probe.interface import NO_PROBE, TrainingProbe
from pipelines.algorithm.correction import correction_spec
from pipelines.algorithm.geometric_loss import VERL_ZERO_WEIGHT_FLOOR, compute_geometric_loss
from pipelines.algorithm.losses import (
    METRIC_SUMS,
    PolicyLossConfig,
    PolicyLossInputs,
    PolicyLossOutput,
    compute_metric_means,
    compute_policy_loss,
)
from pipelines.batching.plan import MicroBatch, has_kept_tokens
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.bypass import correction_of
from pipelines.megatron.execution import LossSums
from pipelines.megatron.layers.expert_router import attach_router_ledger
from pipelines.megatron.layers.router_ledger import merge_router_sums, router_weight
from pipelines.megatron.layers.routing import RoutingTable
from pipelines.megatron.logprobs import VocabShard
from pipelines.megatron.passes import accumulate_gradients, forward_only
from pipelines.megatron.places import OwnBatch, exchange_rows
from pipelines.megatron.process_of_rank import Runtime
from pipelines.megatron.trained_model import TrainedModel, build_frozen

#: -log p of each token, where its advantage is 1.
_SUPERVISED = PolicyLossConfig(pg_clip=1.0, loss_type="reinforce")


def needs_reference(config: PipelineConfig) -> bool:
    """Whether the algorithm compares the policy with the one that training began with."""
    return config.use_kl_loss or config.kl_in_reward.coef > 0


class PolicyTrainer:
    """The policy under training, and the frozen reference where the algorithm has one.

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
        self.policy = TrainedModel(
            config,
            runtime,
            vocab_size=vocab_size,
            head="logits",
            name="",
            lr=config.training.lr,
            first_step=config.first_policy_step,
        )
        self.reference = build_frozen(config, self.policy) if needs_reference(config) else None
        self.router_ledger = attach_router_ledger([*self.policy.chunks, *(self.reference or ())])
        self._spec = correction_spec(config)

    def start_routing(self, batch: RolloutBatch) -> None:
        """Begins a step whose experts are recorded or replayed, as ``model.moe_router_replay`` says.

        Raises:
            BatchError: the batch's routed experts are to be replayed, and it has none that fit the model.
        """
        model, device = self.config.model, self.runtime.device
        if model.moe_router_replay == "off":
            return
        if model.moe_router_replay == "replay":
            routing = RoutingTable.of_batch(batch, model, device)
        else:
            routing = RoutingTable.empty(model, batch.row_offsets[:-1].to(device), len(batch.tokens))
        routing.action = "replay"
        self.router_ledger.routing = routing

    def end_routing(self) -> None:
        """Ends the step: from now on every router chooses for itself."""
        self.router_ledger.routing = None

    def scoring_routing(self, *, of_reference: bool) -> AbstractContextManager[None]:
        """In the block the step's tokens are scored before its first update.

        Where experts are recorded, by a policy that chooses them, or by the reference, which then chooses its own.
        """
        routing = self.router_ledger.routing
        if routing is None:
            return nullcontext()
        if self.config.model.moe_router_replay == "record":
            return routing.doing(None if of_reference else "record")
        return nullcontext() if of_reference else routing.comparing()

    def routing_metrics(self) -> dict[str, float]:
        """Returns the share of replayed choices that the policy's routers would make themselves. Collective then."""
        routing = self.router_ledger.routing
        if routing is None or self.config.model.moe_router_replay != "replay":
            return {}
        counts = routing.agreement.clone()
        dist.all_reduce(counts)
        agreed, replayed = counts.tolist()
        return {"moe/replay_agreement": agreed / max(replayed, 1)}

    def _loss_config(self, term_scale: float) -> PolicyLossConfig:
        """The loss of the update that the schedule stands at; the coefficient of the entropy moves linearly."""
        spec = self._spec or CorrectionSpec()
        config, first = self.config, self.config.entropy_loss_coef
        last = first if config.entropy_loss_coef_final is None else config.entropy_loss_coef_final
        progress = min(
            self.policy.lr_schedule.num_steps / config.lr_decay_updates(first_step=config.first_policy_step), 1.0
        )
        return PolicyLossConfig(
            pg_clip=config.pg_clip,
            pg_clip_high=config.pg_clip_high,
            dual_clip=config.dual_clip,
            entropy_loss_coef=first + (last - first) * progress,
            kl_loss_coef=config.kl_loss_coef if config.use_kl_loss else 0.0,
            kl_loss_estimator=config.kl_loss_estimator,
            loss_type=spec.loss_type,
            rs_denominator=spec.rs_denominator,
            term_mask="response" if spec.bypass else "kept",
            term_scale=term_scale,
            rollout_kl_coef=spec.rollout_kl_coef,
        )

    def _choose_loss(self) -> Callable[[PolicyLossInputs, PolicyLossConfig], PolicyLossOutput]:
        if self.config.policy_loss != "gmpo":
            return compute_policy_loss
        has_floor = self._spec is not None and self._spec.release is not None
        return partial(compute_geometric_loss, zero_weight_floor=VERL_ZERO_WEIGHT_FLOOR if has_floor else None)

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
        self, batches: Sequence[OwnBatch], *, chunks: Sequence[torch.nn.Module] | None = None
    ) -> dict[int, torch.Tensor]:
        """Returns the log-probability of each of this rank's targets, ``[b, s]`` by micro-batch index.

        At the sampling temperature, as the policy that is optimised is the one that samples. Empty off the last stage.
        ``chunks``: of the reference; else the policy's.
        """

        def reduce(own: OwnBatch, logits: torch.Tensor) -> torch.Tensor:
            return self._logprobs(logits, own.batch.targets)[0]

        return forward_only(
            chunks or self.policy.data_parallel, batches, self.runtime, self.policy.execution, reduce=reduce
        )

    def _logprobs(self, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        temperature = self.config.actor_infer.generating_args.temperature
        shard = self.vocab_shard(logits.shape[-1])
        return self.policy.execution.logprobs(logits, targets, shard, temperature=temperature)

    def update(
        self,
        micro_batches: Sequence[MicroBatch],
        batches: Sequence[OwnBatch],
        old_logprobs: Mapping[int, torch.Tensor] | None,
        ref_logprobs: Mapping[int, torch.Tensor] | None,
        *,
        number: int,
        term_scale: float = 1.0,
        supervised_rate: float | None = None,
        probe: TrainingProbe = NO_PROBE,
    ) -> dict[str, float]:
        """One update; its metrics are means over its response tokens.

        micro_batches: all of the update; batches: those that this replica owns. ``number``: of the update, for the
        probe. ``ref_logprobs`` is given where the loss has a KL term. ``supervised_rate``: the learning rate of a
        supervised update, which has no ``old_logprobs``: with advantages of 1 its loss is -log p.
        """
        is_supervised = supervised_rate is not None
        loss_config = _SUPERVISED if is_supervised else self._loss_config(term_scale)
        is_bypass = self._spec is not None and self._spec.bypass and not is_supervised
        compute_loss = compute_policy_loss if is_supervised else self._choose_loss()

        def compute(batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> PolicyLossOutput:
            return compute_loss(_loss_inputs(batch, values), loss_config)

        def loss(own: OwnBatch, logits: torch.Tensor) -> LossSums:
            index = own.batch.index
            new_logprobs, entropy = self._logprobs(logits, own.batch.targets)
            old = new_logprobs.detach() if old_logprobs is None else old_logprobs[index]
            by_token = {"new_logprobs": new_logprobs, "entropy": entropy, "old_logprobs": old}
            by_token |= {} if ref_logprobs is None else {"ref_logprobs": ref_logprobs[index]}
            probe.tokens("output", own, {"logprobs": new_logprobs, "entropy": entropy}, update=number)
            terms, sums = self.policy.execution.sum_shares(own, by_token, compute)
            probe.tokens("loss", own, terms, update=number)
            if is_bypass:
                probe.tokens("loss", own, correction_of(own.batch), update=number)
            return sums

        sums = accumulate_gradients(self.policy, batches, loss, update=number, probe=probe)
        result = self.policy.update(has_loss=self._has_loss(micro_batches, loss_config), learning_rate=supervised_rate)
        probe.scalars("gradient_norm", {"grad_norm": result.grad_norm}, update=number)
        probe.state(self.policy.observed, number, "parameter")
        metrics = self._merge_metrics(micro_batches, sums)
        probe.scalars("loss", {f"mean.{name}": value for name, value in metrics.items()}, update=number)
        return metrics | {
            "grad_norm": result.grad_norm,
            "lr": result.learning_rate,
            "skipped_updates": 0.0 if result.succeeded else 1.0,
            "updates_without_signal": 0.0 if result.has_signal else 1.0,
        }

    def _has_loss(self, micro_batches: Sequence[MicroBatch], config: PolicyLossConfig) -> bool:
        """Whether a token of the update has a part in the loss: a kept one, or any where a term counts rejected ones.

        Of the whole update, which every rank knows, so that no layout decides it.
        """
        of_all = (config.entropy_loss_coef, config.kl_loss_coef) if config.term_mask == "response" else ()
        # With kept tokens as the denominator an update that is rejected as a whole has loss 0.
        counts_rejected = config.rs_denominator == "original" and any((*of_all, config.rollout_kl_coef))
        return counts_rejected or has_kept_tokens(micro_batches)

    def _merge_metrics(self, micro_batches: Sequence[MicroBatch], sums: Mapping[int, torch.Tensor]) -> dict[str, float]:
        execution = self.policy.execution
        rows = exchange_rows(
            micro_batches,
            sums,
            self.runtime,
            width=len(METRIC_SUMS),
            cp_size=execution.cp_size,
            own_cp_ranks=execution.own_cp_ranks,
        )
        totals = rows.sum(axis=1).sum(axis=0)
        named = dict(zip(METRIC_SUMS, (float(total) for total in totals), strict=True))
        num_tokens = named["num_tokens"]
        means = compute_metric_means(named)
        spec = self._spec
        unused = {
            "kl_loss": not self.config.use_kl_loss,
            "dual_clip_frac": self.config.dual_clip is None,
            "rollout_kl_loss": spec is None or spec.rollout_kl_coef == 0,
            "policy_entropy": spec is None,  # then it is that of the loss
        }
        means = {name: value for name, value in means.items() if not unused.get(name, False)}
        weight = router_weight(micro_batches, self.config.training, num_tokens=num_tokens)
        router = merge_router_sums(self.router_ledger, self.config.model, self.runtime, total_weight=weight)
        return means | router | {"num_response_tokens": named["response_tokens"]}


def _loss_inputs(batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> PolicyLossInputs:
    return PolicyLossInputs(
        new_logprobs=values["new_logprobs"],
        entropy=values["entropy"],
        old_logprobs=values["old_logprobs"],
        ref_logprobs=values.get("ref_logprobs"),
        advantages=batch.advantages,
        response_mask=batch.response_mask,
        weights=batch.weights,
        kept_mask=batch.kept_mask,
        loss_weights=batch.loss_weights,
        rollout_logprobs=batch.rollout_logprobs,
    )
