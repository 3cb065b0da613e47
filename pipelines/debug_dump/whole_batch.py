"""Values of all response tokens of a step's batch, put together from what ranks hold of their micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mock_scheduler.adapters.nexrl.files import Content
from mock_scheduler.batch import RolloutBatch
from pipelines.micro_batches import MicroBatch

Part = Mapping[str, torch.Tensor]
"""rows and positions, int64 ``[n]``, of n response tokens, and values of them by name."""


def response_part(micro_batch: MicroBatch, values: Mapping[str, torch.Tensor]) -> Part:
    """values: ``[b, s]`` on the host, of each column's target."""
    mask = micro_batch.response_mask.cpu()
    places = {
        "rows": micro_batch.row_ids.cpu()[mask],
        "positions": micro_batch.positions.cpu()[mask] + 1,
    }
    return {**places, **{name: value[mask] for name, value in values.items()}}


class ResponseValues:
    """Collects parts; ``by_name`` then has one value for each of the batch's R response tokens, in its order."""

    def __init__(self, batch: RolloutBatch) -> None:
        self._starts = batch.row_offsets[:-1]
        self._order = batch.response_mask.long().cumsum(0) - 1
        self._num_responses = len(batch.rollout_logprobs)
        self._values: dict[str, torch.Tensor] = {}

    def add(self, parts: Sequence[Part]) -> None:
        """Parts of any rank; a token's value is the same in each of them."""
        for part in parts:
            places = self._order[self._starts[part["rows"]] + part["positions"]]
            for name, values in part.items():
                if name in ("rows", "positions"):
                    continue
                if name not in self._values:
                    self._values[name] = torch.full((self._num_responses,), torch.nan, dtype=values.dtype)
                self._values[name][places] = values

    def by_name(self) -> dict[str, torch.Tensor]:
        """``[R]`` by name; NaN where no part had the token."""
        return dict(self._values)


def old_logprobs_content(batch: RolloutBatch, old_logprobs: torch.Tensor) -> Content:
    """The file of the trainer's log-probabilities before the step: ``[B, T]``, rows padded on the right with 0.

    old_logprobs: floating ``[R]``. ``positions`` are the tokens' own: column t has the value of token t.
    """
    inside = torch.arange(int(batch.lengths.max())) < batch.lengths[:, None]
    mask = torch.zeros(inside.shape, dtype=torch.bool)
    mask[inside] = batch.response_mask
    padded = torch.zeros(inside.shape, dtype=old_logprobs.dtype)
    padded[mask] = old_logprobs
    rows = torch.arange(len(batch))[:, None].expand(inside.shape)
    return {
        "old_log_probs": padded,
        "shape": list(padded.shape),
        "sample_ids": [str(identity) for identity in batch.identities],
        "sample_index": torch.where(inside, rows, -1),
        "positions": torch.arange(inside.shape[1]).expand(inside.shape),
        "response_mask": mask,
    }
