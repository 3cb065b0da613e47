"""Where the tokens of a micro-batch's share lie in the canonical order of the step's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mock_scheduler.trace.shards import Block, Split, blocks_of_indices
from pipelines.megatron.places import OwnBatch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenPlaces:
    """Some tokens of a share that are no padding.

    cells: int64 ``[n]`` on the host, where they lie in the flattened ``[b · s]`` lines of the share. split: where they
    go in the token dimension of a canonical tensor whose local one has just these n tokens, in this order.
    """

    cells: torch.Tensor
    split: Split

    @property
    def num_tokens(self) -> int:
        """n."""
        return len(self.cells)


class TokenIndex:
    """The canonical indices of a step's tokens. lengths: int64 ``[rows]``, the tokens of each row of the batch."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self.lengths = tuple(lengths.tolist())
        self.num_tokens = int(lengths.sum())
        self._starts = np.concatenate([[0], np.cumsum(lengths.numpy())])

    def places(self, own: OwnBatch, *, columns: slice = slice(None), response_only: bool = False) -> TokenPlaces:
        """The share's tokens, in canonical order.

        columns: of the share's s columns only these, as sequence parallelism splits them; cells are then those of
        the flattened ``[b · len(columns)]``. response_only: only tokens whose target is a response token.
        """
        batch = own.batch
        row_ids, positions = batch.row_ids[:, columns].cpu().numpy(), batch.positions[:, columns].cpu().numpy()
        is_kept = row_ids >= 0
        if response_only:
            is_kept &= batch.response_mask[:, columns].cpu().numpy()
        cells = np.flatnonzero(is_kept)
        indices = self._starts[row_ids.ravel()[cells]] + positions.ravel()[cells]
        order = np.argsort(indices, kind="stable")
        blocks: tuple[Block, ...] = blocks_of_indices(indices[order].tolist())
        return TokenPlaces(cells=torch.from_numpy(cells[order]), split=Split(dim=0, blocks=blocks))
