"""Runs forward passes over the rows of a block, and keeps each layer's keys and values of the tokens read.

The same pass computes a row's whole history, where nothing is kept, or its next few tokens, after kept ones: a token at
position p sees the row's keys at positions up to p, wherever they were computed. Rows are padded on the right to the
longest; padding writes behind every row's tokens, where nobody looks before it is overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipelines.config.schema import PipelineConfig
from pipelines.environments.grid_tokens import PAD_ID
from pipelines.megatron.layers.attention import CacheSlots, KeyValueCache, RowAttention, caching
from pipelines.megatron.passes import forward_in_sequence
from pipelines.megatron.places import ModelInputs
from pipelines.megatron.trained_model import TrainedModel
from pipelines.rollout.messages import ForwardPass


@dataclass(frozen=True, kw_only=True, slots=True)
class PassPlaces:
    """The places of a pass's new tokens.

    is_token: bool ``[b, s]``, False on padding. positions: int64 ``[b, s]`` in the row, on padding the position of the
    row's last token. last: int64 ``[b]``, the last token's column. slots: places for keys and values, ``[s, b]``.
    """

    is_token: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor
    slots: CacheSlots


def place_tokens(starts: Sequence[int], lengths: Sequence[int], *, multiple_of: int) -> PassPlaces:
    """Places ``lengths`` new tokens from position ``starts`` on, in enough columns for the longest row.

    ``multiple_of``: divides the number of columns. All tensors are on the host.
    """
    first = torch.tensor(starts, dtype=torch.int64).unsqueeze(1)
    last = torch.tensor(lengths, dtype=torch.int64) - 1
    width = -(-max(lengths) // multiple_of) * multiple_of
    columns = torch.arange(width).unsqueeze(0)
    is_token = columns <= last.unsqueeze(1)
    positions = first + torch.minimum(columns, last.unsqueeze(1))
    end = int(positions.max()) + 1
    slots = torch.where(is_token, positions, end).transpose(0, 1).contiguous()
    return PassPlaces(
        is_token=is_token, positions=positions, last=last, slots=CacheSlots(slots=slots, end=int(slots.max()) + 1)
    )


class CachedPolicy:
    """The policy's chunks on this rank, and the caches of their layers for the rows of one block.

    Fused layers keep nothing: the configuration gives them ``use_kv_cache: false``, and every pass begins anew.
    """

    def __init__(self, trained: TrainedModel, config: PipelineConfig) -> None:
        self._chunks = list(trained.chunks)
        self._runtime = runtime = trained.runtime
        self._execution = trained.execution
        self._multiple_of = runtime.tp_size if config.parallel.sequence_parallel else 1
        self._has_local_layers = config.model.transformer_impl == "local"
        self._layers = [
            module for chunk in self._chunks for module in chunk.modules() if isinstance(module, RowAttention)
        ]
        self._slots = CacheSlots(slots=torch.zeros(0, 0, dtype=torch.int64), end=0)
        self._caches: list[KeyValueCache] = []
        self._num_rows = 0

    def read(self, item: ForwardPass) -> torch.Tensor | None:
        """Computes the logits ``[b, V / tp]`` after each row's last token; ``None`` off the last stage.

        Every rank of the replica must call it with the same pass.
        """
        self._continue(item)
        places = place_tokens(item.starts, [len(tokens) for tokens in item.tokens], multiple_of=self._multiple_of)
        device = self._runtime.device
        self._slots.slots, self._slots.end = places.slots.slots.to(device), places.slots.end
        with caching(self._layers, self._caches), self._execution.paused():
            output = forward_in_sequence(self._chunks, self._inputs(item, places), self._runtime)
        if output is None:
            return None
        return output[torch.arange(len(item.tokens), device=device), places.last.to(device)]

    def forget(self) -> None:
        """Frees all caches."""
        self._caches, self._num_rows = [], 0

    def _continue(self, item: ForwardPass) -> None:
        """Keeps the caches of the continued rows, or begins new ones."""
        if item.kept is None:
            self._caches = [KeyValueCache(self._slots) for _ in self._layers]
        elif len(item.kept) < self._num_rows:
            rows = torch.tensor(item.kept, dtype=torch.int64, device=self._runtime.device)
            for cache in self._caches:
                cache.keep(rows)
        self._num_rows = len(item.tokens)

    def _inputs(self, item: ForwardPass, places: PassPlaces) -> ModelInputs:
        is_token = places.is_token
        tokens = torch.full(is_token.shape, PAD_ID, dtype=torch.int64)
        tokens[is_token] = torch.tensor([token for row in item.tokens for token in row], dtype=torch.int64)
        rows = torch.arange(len(is_token)).unsqueeze(1)
        keys = torch.arange(places.slots.end)
        mask = (keys > places.positions.unsqueeze(2)).unsqueeze(1)
        device = self._runtime.device
        return ModelInputs(
            tokens=tokens.to(device),
            positions=places.positions.to(device),
            row_ids=torch.where(is_token, rows, -1).to(device),
            # Fused layers are causal by themselves, and read rows from their beginning.
            attention_mask=mask.to(device) if self._has_local_layers else None,
        )
