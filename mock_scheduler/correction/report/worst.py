"""The tokens and the trajectories whose two log-probabilities are furthest apart."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mock_scheduler.correction.report.scored_step import ScoredStep
from mock_scheduler.correction.report.view import WorstSequence, WorstToken
from mock_scheduler.recording.inspection.vocabulary import Vocabulary


@dataclass(kw_only=True, slots=True)
class WorstFinder:
    """Keeps the worst of all steps: tokens by |log ratio|, trajectories by |sum of log ratios|; ``num`` of each.

    Among equals, earlier steps and places come first.
    """

    num: int
    vocabulary: Vocabulary | None
    tokens: list[WorstToken] = field(default_factory=list)
    sequences: list[WorstSequence] = field(default_factory=list)

    def add(self, step: ScoredStep, log_ratio: torch.Tensor, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Looks through a step.

        Args:
            step: The step.
            log_ratio: float64 ``[M]``, NaN where it is not known.
            sums: The sums of known log ratios, ``[S]``.
            counts: Their numbers, ``[S]``.
        """
        if not self.num:
            return
        sizes = torch.where(log_ratio.isnan(), -1.0, log_ratio.abs())
        worst = [index for index in _largest(sizes, self.num) if sizes[index] >= 0]
        self.tokens = sorted(
            [*self.tokens, *(self._token(step, index, log_ratio) for index in worst)],
            key=lambda token: -abs(token.log_ratio),
        )[: self.num]
        totals = torch.where(counts > 0, sums.abs(), -1.0)
        chosen = [number for number in _largest(totals, self.num) if counts[number] > 0]
        found = [self._sequence(step, number, log_ratio, sizes, int(counts[number])) for number in chosen]
        self.sequences = sorted([*self.sequences, *found], key=lambda item: -abs(item.log_ratio_sum))[: self.num]

    def _token(self, step: ScoredStep, index: int, log_ratio: torch.Tensor) -> WorstToken:
        batch = step.batch
        row = int(torch.searchsorted(batch.response_offsets, index, right=True)) - 1
        trajectory = int(torch.searchsorted(step.offsets, index, right=True)) - 1
        place = int(step.places[index])
        token_id = int(batch.tokens[place])
        assert step.train_logprobs is not None
        return WorstToken(
            step=step.info.step,
            identity=str(batch.identities[row]),
            position=index - int(step.offsets[trajectory]),
            row_position=place - int(batch.row_offsets[row]),
            token_id=token_id,
            text=None if self.vocabulary is None else self.vocabulary.decode([token_id]),
            rollout_logprob=float(batch.rollout_logprobs[index]),
            train_logprob=float(step.train_logprobs[index]),
            log_ratio=float(log_ratio[index]),
        )

    def _sequence(
        self, step: ScoredStep, number: int, log_ratio: torch.Tensor, sizes: torch.Tensor, length: int
    ) -> WorstSequence:
        start, stop = int(step.offsets[number]), int(step.offsets[number + 1])
        row = step.first_rows[number]
        total = float(log_ratio[start:stop].nansum())
        return WorstSequence(
            step=step.info.step,
            identity=str(step.batch.identities[row]).rpartition("/turn ")[0],
            tag=step.batch.tags[row],
            length=length,
            reward=float(step.rewards[number]),
            log_ratio_sum=total,
            log_ratio_mean=total / length,
            worst_token=self._token(step, start + int(sizes[start:stop].argmax()), log_ratio),
        )


def _largest(values: torch.Tensor, num: int) -> list[int]:
    """Places of the largest values, the first of equal ones first."""
    order = torch.sort(values, descending=True, stable=True).indices
    return [int(index) for index in order[:num]]
