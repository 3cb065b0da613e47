"""Corrects rollouts of two policies, the one under training and the sampling one, update by update.

Before each update the policy is evaluated over the update's rows, and weights and rejected tokens follow from its
present answers; for the step's first update the scores are these answers already. No rank communicates within the loss,
and sequences shared among ranks are whole here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mock_scheduler.correction import CorrectionResult, CorrectionSpec
from pipelines.algorithm.correction import BatchCorrector, corrected_step_metrics, with_known_logprobs
from pipelines.algorithm.training_values import TrainingValues
from pipelines.batching.plan import MicroBatch
from pipelines.batching.values import response_values, with_values
from pipelines.megatron.places import OwnBatch, exchange_tokens
from pipelines.megatron.process_of_rank import Runtime

LogprobsFunction = Callable[[Sequence[OwnBatch]], Mapping[int, torch.Tensor]]


def correction_of(batch: MicroBatch) -> dict[str, torch.Tensor]:
    """Returns a micro-batch's weights and kept tokens (1 or 0) for a trace."""
    return {"weights": batch.weights, "kept": batch.kept_mask.to(batch.weights.dtype)}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CorrectedUpdate:
    """An update's micro-batches with weights and rejected tokens, and the factor of terms over all response tokens."""

    micro_batches: Sequence[MicroBatch]
    term_scale: float


class BypassCorrector:
    """Corrects the updates of one step. Every rank makes one and calls it alike.

    compute: the policy's log-probabilities of a rank's batches.
    trajectories_per_update: those of update u are [u·G, (u + 1)·G).
    """

    def __init__(
        self,
        corrector: BatchCorrector,
        spec: CorrectionSpec,
        values: TrainingValues,
        runtime: Runtime,
        *,
        compute: LogprobsFunction,
        as_computed: Callable[[torch.Tensor], torch.Tensor],
        trajectories_per_update: int,
    ) -> None:
        self._corrector = corrector
        self._spec = spec
        self._values = values
        self._runtime = runtime
        self._compute = compute
        self._as_computed = as_computed
        self._size = trajectories_per_update
        self._results: list[CorrectionResult] = []

    def correct(
        self,
        position: int,
        micro_batches: Sequence[MicroBatch],
        batches: Sequence[OwnBatch],
        known: Mapping[int, torch.Tensor] | None,
    ) -> CorrectedUpdate:
        """Corrects the update at a position of the plan by the policy as it is now. Collective.

        known: the policy's answers for this rank's tokens, where they were computed since it last changed. Raises
        ``CorrectionError`` as ``BatchCorrector.correct`` does.
        """
        own_values = self._compute(batches) if known is None else known
        owned = {own.batch.index: own for own in batches}
        own_values = {index: values for index, values in own_values.items() if index in owned}
        logprobs = self._as_computed(
            response_values(micro_batches, exchange_tokens(micro_batches, owned, own_values, self._runtime))
        )
        trajectories = (position * self._size, (position + 1) * self._size)
        result = self._corrector.correct(logprobs, trajectories=trajectories, advantages=self._values.advantages)
        self._results.append(result)
        tokens = self._corrector.token_range(*trajectories)
        num_kept, num_tokens = int(result.kept.sum()), len(result.kept)
        is_kept = self._spec.rs_denominator == "kept"
        return CorrectedUpdate(
            micro_batches=with_values(
                micro_batches,
                self._corrector.batch,
                self._values_of(result, logprobs, tokens),
                first=tokens.start,
            ),
            term_scale=num_kept / num_tokens if is_kept and num_tokens else 1.0,
        )

    def _values_of(self, result: CorrectionResult, logprobs: torch.Tensor, tokens: slice) -> dict[str, torch.Tensor]:
        """Makes the training values of this update's response tokens, by field of ``MicroBatch``.

        ``loss_weights`` stay as planned: with kept tokens as the denominator they are 1, as bypass then has
        ``token-mean`` alone.
        """
        spec = self._spec
        rollout_logprobs = with_known_logprobs(self._corrector.batch, logprobs, tokens).rollout_logprobs[tokens]
        values = {"kept_mask": result.kept, "rollout_logprobs": rollout_logprobs}
        if spec.loss_type == "reinforce" and result.weights_by_token is not None:
            values["weights"] = result.weights_by_token
        if spec.rollout_kl_in_advantage > 0:
            log_ratio = logprobs.double() - rollout_logprobs.double()
            values["advantages"] = self._values.advantages[tokens] - spec.rollout_kl_in_advantage * log_ratio
        return values

    def metrics(self) -> dict[str, float]:
        """Computes the metrics of all updates together; empty before the first."""
        return corrected_step_metrics(self._results, self._spec) if self._results else {}
