"""Runs forward passes over the rows of a block, and keeps each layer's keys and values of the tokens read.

The same pass computes a row's whole history, where nothing is kept, or its next few tokens, after kept ones: a token at
position p sees the row's keys at positions up to p, wherever they were computed. Rows are padded on the right to the
longest; padding writes behind every row's tokens, where nobody looks before it is overwritten.

The leader of a replica tells its other ranks each forward pass beforehand, in one broadcast where it is short. Format:
int64 words ``[kind, n, continues, number of tokens]``, then n words each of ``kept`` (0 where the pass
continues nothing), ``starts``, ``lengths`` and the bits of ``uniforms``, then the tokens. The first message is always
``FIRST_WORDS`` long, so nobody need be told its size; the rest follows in a second one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from pipelines.config.schema import PipelineConfig
from pipelines.environments.grid_tokens import PAD_ID
from pipelines.megatron.layers.attention import CacheSlots, KeyValueCache, RowAttention, caching
from pipelines.megatron.passes import forward_in_sequence
from pipelines.megatron.places import ModelInputs
from pipelines.megatron.process_of_rank import Runtime
from pipelines.megatron.trained_model import TrainedModel

FIRST_WORDS = 4096

_HEADER_WORDS = 4
_IDLE, _PASS = 0, 1

Words = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardPass:
    """Holds the rows of one forward pass, with the tokens that each of them reads.

    kept: the numbers of these rows in the pass before, increasing; ``None`` where rows begin anew. starts: the position
    of each row's first new token. tokens: the new tokens of each row, at least one. uniforms: a number in [0, 1) for
    each row, which decides the next token.
    """

    kept: Sequence[int] | None
    starts: Sequence[int]
    tokens: Sequence[Sequence[int]]
    uniforms: Sequence[float]

    def encode(self) -> Words:
        """Encodes the pass as int64 words."""
        num_rows, lengths = len(self.tokens), [len(tokens) for tokens in self.tokens]
        kept = [0] * num_rows if self.kept is None else self.kept
        header = [_PASS, num_rows, int(self.kept is not None), sum(lengths)]
        parts = [header, kept, self.starts, lengths, np.array(self.uniforms, dtype=np.float64).view(np.int64)]
        return np.concatenate([np.asarray(part, dtype=np.int64) for part in [*parts, *self.tokens]])

    @classmethod
    def decode(cls, words: Words) -> ForwardPass:
        """Decodes the words of ``encode``; words behind the pass are left alone."""
        _, num_rows, continues, _ = words[:_HEADER_WORDS].tolist()
        kept, starts, lengths, uniforms = words[_HEADER_WORDS : _HEADER_WORDS + 4 * num_rows].reshape(4, num_rows)
        bounds = _HEADER_WORDS + 4 * num_rows + np.concatenate([[0], lengths.cumsum()])
        return cls(
            kept=kept.tolist() if continues else None,
            starts=starts.tolist(),
            tokens=[words[start:stop].tolist() for start, stop in pairwise(bounds)],
            uniforms=uniforms.view(np.float64).tolist(),
        )


class ReplicaChannel:
    """The way from the leader of a replica to its other ranks. ``None`` says that the leader has no pass to make."""

    def __init__(self, runtime: Runtime) -> None:
        self._device = runtime.device
        self._group = runtime.replica_group
        self._has_followers = self._group is not None and self._group.size() > 1
        self._leader = 0 if self._group is None else dist.get_global_rank(self._group, 0)

    def send(self, item: ForwardPass | None) -> None:
        """Tells all other ranks, if there are any; only the leader calls this."""
        if not self._has_followers:
            return
        words = np.array([_IDLE, 0, 0, 0], dtype=np.int64) if item is None else item.encode()
        first = np.zeros(FIRST_WORDS, dtype=np.int64)
        first[: len(words)] = words[:FIRST_WORDS]
        self._broadcast(first)
        if len(words) > FIRST_WORDS:
            self._broadcast(words[FIRST_WORDS:])

    def receive(self) -> ForwardPass | None:
        """Waits for the leader's word; every other rank calls this."""
        words = self._broadcast(np.zeros(FIRST_WORDS, dtype=np.int64))
        kind, num_rows, _, num_tokens = words[:_HEADER_WORDS].tolist()
        if kind == _IDLE:
            return None
        num_more = _HEADER_WORDS + 4 * num_rows + num_tokens - FIRST_WORDS
        if num_more > 0:
            words = np.concatenate([words, self._broadcast(np.zeros(num_more, dtype=np.int64))])
        return ForwardPass.decode(words)

    def _broadcast(self, words: Words) -> Words:
        tensor = torch.from_numpy(np.ascontiguousarray(words)).to(self._device)
        dist.broadcast(tensor, src=self._leader, group=self._group)
        received: Words = tensor.cpu().numpy()
        return received


@dataclass(frozen=True, kw_only=True, slots=True)
class PassPlaces:
    """Holds the places of a pass's new tokens.

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
    """Holds the policy's chunks on this rank, and the caches of their layers for the rows of one block.

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
