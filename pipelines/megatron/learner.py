"""Trains one step: scores the batch with policy and critic, makes advantages, and carries out all optimizer updates.

The batch is cut into micro-batches before any layout is known; the ranks' results are put together in canonical order.
Advantages are made on the host in float64, the same on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.plausibility import valid_logprobs
from mock_scheduler.megatron.probe.interface import NO_PROBE, TrainingProbe
from mock_scheduler.support.digests import JSON
from mock_scheduler.trace.entries import RowTable
from pipelines.algorithm.correction import BatchCorrector, correction_spec, with_known_logprobs
from pipelines.algorithm.engine_mismatch import EngineMismatch
from pipelines.algorithm.training_values import ResponseScores, TrainingValues, ValueMaker, needed_scores
from pipelines.batching.placement import place_step
from pipelines.batching.plan import MicroBatch, StepPlan
from pipelines.batching.values import fill_step, response_values
from pipelines.config.schema import PipelineConfig
from pipelines.megatron.bypass import BypassCorrector, correction_of
from pipelines.megatron.critic import CRITIC, CriticTrainer
from pipelines.megatron.places import OwnBatch, exchange_rows, exchange_tokens, own_batch
from pipelines.megatron.process_of_rank import Runtime
from pipelines.megatron.trained_model import TrainedModel
from pipelines.megatron.trainer import PolicyTrainer
from pipelines.megatron.transformer_config import DTYPES

logger = logging.getLogger("pipelines.learner")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The models' scores of a step's tokens before its first update, ``[b, s]`` by micro-batch index, on the device.

    Empty off the last stage; ``None`` where the algorithm does not ask for it.
    """

    old_logprobs: Mapping[int, torch.Tensor]
    ref_logprobs: Mapping[int, torch.Tensor] | None
    values: Mapping[int, torch.Tensor] | None

    def of(self, index: int) -> dict[str, torch.Tensor]:
        """Returns one micro-batch's scores by name."""
        by_name = {"old_logprobs": self.old_logprobs, "ref_logprobs": self.ref_logprobs, "values": self.values}
        return {name: of_all[index] for name, of_all in by_name.items() if of_all is not None and index in of_all}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredStep:
    """A step between its two halves: the batch, its micro-batches without advantages, this rank's share and scores."""

    batch: RolloutBatch
    plan: StepPlan
    batches: Sequence[OwnBatch]
    scores: Scores


def row_table(batch: RolloutBatch) -> RowTable:
    """The rows of a batch as a trace has them."""
    with _disable_current_modes():  # made for probes alone, so in no log of the step's operations
        lengths = tuple(batch.lengths.tolist())
    return RowTable(identities=tuple(str(identity) for identity in batch.identities), lengths=lengths)


def show_inputs(probe: TrainingProbe, batches: Sequence[OwnBatch]) -> None:
    """Shows a probe the input of each token.

    ``tokens`` (int64) and ``response_mask`` (bool) are of all tokens, ``rollout_logprobs`` (float32) of those with
    a response token to predict: mask and log-probability at position p of a row are those of its token p + 1.
    """
    for own in batches:
        inputs = own.batch
        everywhere = {"tokens": inputs.tokens, "response_mask": inputs.response_mask}
        probe.tokens("input", own, everywhere, of_responses=False)
        probe.tokens("input", own, {"rollout_logprobs": inputs.rollout_logprobs})


class Learner:
    """Policy, reference and critic of a run. Every method must be called by every rank, with the same batch."""

    def __init__(
        self, config: PipelineConfig, runtime: Runtime, *, vocab_size: int, allowed_tokens: Sequence[int] | None = None
    ) -> None:
        self.config = config
        self.runtime = runtime
        self.policy = PolicyTrainer(config, runtime, vocab_size=vocab_size, allowed_tokens=allowed_tokens)
        self.critic = CriticTrainer(config, runtime, vocab_size=vocab_size) if config.adv_estimator == "gae" else None
        self.values = ValueMaker(config)
        self._spec = correction_spec(config)
        self._engine = EngineMismatch.build(config)
        self._execution = self.policy.policy.execution

    @property
    def models(self) -> dict[str, TrainedModel]:
        """Returns everything under training by its name in checkpoints and traces."""
        models = {"policy": self.policy.policy}
        return models if self.critic is None else {**models, "critic": self.critic.model}

    def state_dict(self) -> dict[str, JSON]:
        """Returns the state besides the models: the controller of the KL in the reward."""
        return self.values.state_dict()

    def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Goes on from a ``state_dict``."""
        self.values.load_state_dict(state)

    def train_step(self, batch: RolloutBatch, *, step: int = 0, probe: TrainingProbe = NO_PROBE) -> dict[str, float]:
        """Carries out all updates of one rollout step; metrics are means over its updates, ``lr`` the last one's."""
        if self.config.sft.covers(step):
            return self._supervise(batch, step=step, probe=probe)
        scored = self.score(batch, probe=probe)
        mismatch = self._judge_engine(scored, step)
        values, metrics = self.values.make(batch, self.response_scores(scored), policy_version=step)
        return self.update(scored, values, step=step, probe=probe) | metrics | mismatch

    def _judge_engine(self, scored: ScoredStep, step: int) -> dict[str, float]:
        """Compares with an engine beside the trainer, where one has sampled the step. Collective then."""
        if self._engine is None or not self._engine.is_due(step):
            return {}
        logprobs = self._response_values(scored.plan, scored.batches, scored.scores.old_logprobs)
        return self._engine.judge(scored.batch, logprobs, step=step)

    def score(self, batch: RolloutBatch, *, probe: TrainingProbe = NO_PROBE) -> ScoredStep:
        """Makes the first half of a step: the models' scores of its tokens."""
        plan = self._place(batch)
        batches = self._owned_of_step(plan)
        probe.start_step(row_table(batch), batches, [model.observed for model in self.models.values()])
        show_inputs(probe, batches)
        self.policy.start_routing(batch)
        scores = self._score(batches)
        for own in batches:
            probe.tokens("score", own, scores.of(own.batch.index))
        return ScoredStep(batch=batch, plan=plan, batches=batches, scores=scores)

    def response_scores(self, scored: ScoredStep) -> ResponseScores:
        """Gathers the scores that advantages need, on the host of every rank. Collective where there is anything."""
        asked = needed_scores(self.config)
        named = {"old_logprobs": scored.scores.old_logprobs, "ref_logprobs": scored.scores.ref_logprobs}
        named["values"] = scored.scores.values
        return ResponseScores(
            **{name: self._response_values(scored.plan, scored.batches, named[name] or {}) for name in asked}
        )

    def update(
        self, scored: ScoredStep, values: TrainingValues, *, step: int, probe: TrainingProbe = NO_PROBE
    ) -> dict[str, float]:
        """Makes the second half of a step: all its updates, with these values."""
        differences = self._rollout_differences(scored.plan, scored.batches, scored.scores)
        plan = self._fill(scored.plan, self._known_batch(scored), values)
        bypass = self._bypass(scored, values, step=step)
        trains_policy = step >= self.config.first_policy_step
        results = self._updates(plan, scored.scores, bypass, trains_policy=trains_policy, probe=probe)
        routing = self.policy.routing_metrics()
        self.policy.end_routing()
        # Added in the order of the updates.
        means = {name: sum(result[name] for result in results) / len(results) for name in results[0]}
        last = {name: results[-1][name] for name in ("lr", "critic/lr") if name in results[-1]}
        correction = {} if bypass is None else bypass.metrics()
        self._warn_without_signal(step, means, num_updates=len(results))
        return means | differences | correction | routing | last | {"num_updates": float(len(results))}

    def _supervise(self, batch: RolloutBatch, *, step: int, probe: TrainingProbe) -> dict[str, float]:
        """Carries out a step of the supervised start: one update after another, to the batch's own tokens."""
        ones = torch.ones(int(batch.response_mask.sum()), dtype=torch.float64)
        plan = self._fill(self._place(batch), batch, TrainingValues(advantages=ones, returns=ones))
        updates = [(update.micro_batches, self._owned(update.micro_batches)) for update in plan.updates]
        batches = [own for _, owned in updates for own in owned]
        probe.start_step(row_table(batch), batches, [model.observed for model in self.models.values()])
        show_inputs(probe, batches)
        self._start_router_step(plan)
        results = []
        for number, (micro_batches, own) in enumerate(updates):
            probe.start_update(number, micro_batches)
            rate = self.config.sft_rate(step * len(updates) + number)
            results.append(
                self.policy.update(micro_batches, own, None, None, number=number, supervised_rate=rate, probe=probe)
            )
        self.policy.policy.gather_parameters()
        means = {name: sum(result[name] for result in results) / len(results) for name in results[0]}
        self._warn_without_signal(step, means, num_updates=len(results))
        named = {"sft/loss": means.pop("pg_loss"), "sft/entropy": means.pop("entropy")}
        of_rollouts = ("total_loss", "approx_kl", "clip_frac", "policy_entropy")
        kept = {name: value for name, value in means.items() if name not in of_rollouts}
        return named | kept | {"lr": results[-1]["lr"], "num_updates": float(len(results))}

    def _warn_without_signal(self, step: int, means: Mapping[str, float], *, num_updates: int) -> None:
        """Says it where updates teach nothing. Other ranks' logs have errors alone."""
        for name, model in (("policy", ""), ("critic", f"{CRITIC}/")):
            share = means.get(f"{model}updates_without_signal", 0.0)
            if not share:
                continue
            skips = self.config.training.on_no_signal == "skip"
            logger.warning(
                "step %d: %d of %d updates of the %s have no signal (every gradient is 0, or every token is rejected): "
                "%s (training.on_no_signal=%s)",
                *(step, round(share * num_updates), num_updates, name),
                "skipped" if skips else "moments and weight decay move the weights all the same",
                self.config.training.on_no_signal,
            )

    def _known_batch(self, scored: ScoredStep) -> RolloutBatch:
        """Fills the policy's log-probabilities in where the engine gave none. Collective then."""
        if self._spec is None or valid_logprobs(scored.batch) is None:
            return scored.batch
        own = scored.scores.old_logprobs
        return with_known_logprobs(scored.batch, self._response_values(scored.plan, scored.batches, own))

    def _bypass(self, scored: ScoredStep, values: TrainingValues, *, step: int) -> BypassCorrector | None:
        """Builds the corrector of each update where the correction is one of two policies."""
        spec = self._spec
        if spec is None or not spec.bypass:
            return None
        return BypassCorrector(
            BatchCorrector(scored.batch, spec, policy_version=step),
            spec,
            values,
            self.runtime,
            compute=self.policy.compute_logprobs,
            as_computed=self.values.as_computed,
            trajectories_per_update=self.config.training.global_batch_size,
        )

    def _place(self, batch: RolloutBatch) -> StepPlan:
        """Places the step's micro-batches, without values."""
        return place_step(
            batch,
            self.config.training,
            count_multiple=self._execution.micro_batch_multiple,
            dtype=torch.promote_types(DTYPES[self.config.precision], torch.float32),
        )

    def _fill(self, plan: StepPlan, batch: RolloutBatch, values: TrainingValues) -> StepPlan:
        """The same micro-batches with the values that they are trained with."""
        return fill_step(
            plan,
            batch,
            token_advantages=values.advantages,
            token_returns=values.returns,
            token_weights=values.weights,
            token_kept=values.kept,
            loss_agg_mode=self.config.loss_agg_mode,
            rs_denominator="original" if self._spec is None else self._spec.rs_denominator,
            global_batch_size=self.config.training.global_batch_size,
        )

    def _owned(self, micro_batches: Sequence[MicroBatch]) -> list[OwnBatch]:
        """This rank's share of the micro-batches that its replica computes: every dp-th of them."""
        own = micro_batches[self.runtime.dp_rank :: self.runtime.dp_size]
        return [self._execution.arrange(own_batch(batch, self.runtime)) for batch in own]

    def _owned_of_step(self, plan: StepPlan) -> list[OwnBatch]:
        return [own for update in plan.updates for own in self._owned(update.micro_batches)]

    def _score(self, batches: Sequence[OwnBatch]) -> Scores:
        policy = self.policy
        with policy.scoring_routing(of_reference=False):
            old_logprobs = policy.compute_logprobs(batches)
        with policy.scoring_routing(of_reference=True):
            ref_logprobs = policy.compute_logprobs(batches, chunks=policy.reference) if policy.reference else None
        return Scores(
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            values=self.critic.compute_values(batches) if self.critic else None,
        )

    def _response_values(
        self, plan: StepPlan, batches: Sequence[OwnBatch], own_values: Mapping[int, torch.Tensor]
    ) -> torch.Tensor:
        """Values of this rank's tokens as those of all response tokens of the batch, in its order. Collective."""
        owned = {own.batch.index: own for own in batches}
        return response_values(plan.micro_batches, exchange_tokens(plan.micro_batches, owned, own_values, self.runtime))

    def _updates(
        self,
        plan: StepPlan,
        scores: Scores,
        bypass: BypassCorrector | None,
        *,
        trains_policy: bool,
        probe: TrainingProbe,
    ) -> list[dict[str, float]]:
        updates = [(update.micro_batches, self._owned(update.micro_batches)) for update in plan.updates]
        for share in (share for _, batches in updates for share in batches):
            probe.tokens("advantage", share, {"advantages": share.batch.advantages, "returns": share.batch.returns})
            if self._spec is not None and not self._spec.bypass:
                probe.tokens("advantage", share, correction_of(share.batch))
        self._start_router_step(plan)
        results: list[dict[str, float]] = []
        for _ in range(self.config.ppo_epochs):
            for position, (micro_batches, batches) in enumerate(updates):
                number = len(results)
                old_logprobs, term_scale, own = scores.old_logprobs, 1.0, batches
                to_update: Sequence[MicroBatch] = micro_batches
                if bypass is not None and trains_policy:
                    known = scores.old_logprobs if number == 0 else None
                    corrected = bypass.correct(position, micro_batches, batches, known)
                    to_update, term_scale = corrected.micro_batches, corrected.term_scale
                    own = self._owned(to_update)
                    old_logprobs = {share.batch.index: share.batch.rollout_logprobs for share in own}
                probe.start_update(number, to_update)
                metrics: dict[str, float] = {}
                if self.critic is not None and scores.values is not None:
                    metrics |= self.critic.update(micro_batches, batches, scores.values, number=number, probe=probe)
                if trains_policy:
                    metrics |= self.policy.update(
                        to_update,
                        own,
                        old_logprobs,
                        scores.ref_logprobs if self.config.use_kl_loss else None,
                        number=number,
                        term_scale=term_scale,
                        probe=probe,
                    )
                results.append(metrics)
        for model in self.models.values():
            model.gather_parameters()
        return results

    def _start_router_step(self, plan: StepPlan) -> None:
        row_weights = plan.row_weights.to(self.runtime.device)
        self.policy.router_ledger.start_step(row_weights)
        if self.critic is not None:
            self.critic.router_ledger.start_step(row_weights)

    def _rollout_differences(self, plan: StepPlan, batches: Sequence[OwnBatch], scores: Scores) -> dict[str, float]:
        """Returns |old - rollout| over the response tokens of the whole step: its mean, and the largest."""
        owned = {own.index: own for own in batches}
        own_rows = {
            index: self._execution.measure_shares(owned[index], logprobs, difference_from_rollout)
            for index, logprobs in scores.old_logprobs.items()
        }
        rows = exchange_rows(
            plan.micro_batches,
            own_rows,
            self.runtime,
            width=2,
            cp_size=self._execution.cp_size,
            own_cp_ranks=self._execution.own_cp_ranks,
        )
        num_tokens = float(plan.row_weights.sum())
        return {
            "rollout_logprob_diff_mean": float(rows[..., 0].sum(axis=1).sum()) / max(num_tokens, 1.0),
            "rollout_logprob_diff_max": float(rows[..., 1].max()),
        }


def difference_from_rollout(batch: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
    """Returns ``sum_and_max_difference`` of these log-probabilities from those of the rollout."""
    return sum_and_max_difference(logprobs, batch.rollout_logprobs, batch.response_mask)


def sum_and_max_difference(one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum and largest of |one - other| where the mask is True, float64 ``[2]``; both 0 where it never is."""
    difference = torch.where(mask, one.double() - other.double(), 0.0).abs()
    return torch.stack((difference.sum(), difference.max()))
