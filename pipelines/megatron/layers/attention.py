"""Computes Megatron's local attention over rows whose tokens lie anywhere: packed, split over cp, or cached.

The caller's mask says which tokens see each other (``megatron/places``), and the rotary embedding gets each token's
place in its row. So packing, context parallelism and generation need no attention of their own: Megatron's
``DotProductAttention`` computes all of them, over keys and values gathered or kept before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention

from pipelines.config.model import RopeScalingConfig


@dataclass(kw_only=True, slots=True)
class CacheSlots:
    """Where the next forward pass writes: ``slots`` int64 ``[s, b]``, and ``end``, one behind the largest of them."""

    slots: torch.Tensor
    end: int


class KeyValueCache:
    """Keys and values of some rows' history, for one attention layer: ``[S, b, groups, head]``, slot = position.

    ``place`` is shared by the caches of all layers. A row's padding and slots beyond its end are never seen, since the
    caller's mask ends at each row's own tokens.
    """

    def __init__(self, place: CacheSlots) -> None:
        self._place = place
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def append(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[s, b, groups, head]`` to the slots of this pass; returns all keys and values before ``end``."""
        slots, end = self._place.slots, self._place.end
        rows = torch.arange(key.shape[1], device=key.device).expand_as(slots)
        self._keys, self._values = _with_room(self._keys, key, end), _with_room(self._values, value, end)
        self._keys[slots, rows] = key
        self._values[slots, rows] = value
        return self._keys[:end], self._values[:end]

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but these, int64 ``[n]``."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[:, rows], self._values[:, rows]


def _with_room(held: torch.Tensor | None, like: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Returns the held tensor, or a larger one of at least ``num_slots`` slots with the same beginning."""
    if held is not None and held.shape[0] >= num_slots:
        return held
    grown = like.new_zeros((max(num_slots, 2 * (0 if held is None else held.shape[0])), *like.shape[1:]))
    if held is not None:
        grown[: held.shape[0]] = held
    return grown


class RowAttention(DotProductAttention):
    """Megatron's ``DotProductAttention`` over the keys of all cp ranks, or of a cache.

    With context parallelism keys and values are gathered over cp, in the order of the ranks; the gradient comes back by
    reduce-scatter. Megatron's own class refuses cp > 1, and is told cp = 1.
    """

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        super().__init__(_without_context_parallel(config), *args, **kwargs)
        self.splits_context = config.context_parallel_size > 1
        self.cache: KeyValueCache | None = None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Context of the queries; mask: bool ``[b, 1, sq, sk]``, True where a key is not seen; ``None``: causal."""
        if self.cache is not None:
            key, value = self.cache.append(key, value)
        elif self.splits_context:
            group = parallel_state.get_context_parallel_group()
            key = gather_from_sequence_parallel_region(key, group=group)
            value = gather_from_sequence_parallel_region(value, group=group)
        return super().forward(query, key, value, attention_mask, **kwargs)


def _without_context_parallel(config: TransformerConfig) -> TransformerConfig:
    """The configuration without context parallelism; Megatron's own object where there is none."""
    if config.context_parallel_size == 1:
        return config
    copied = object.__new__(type(config))
    copied.__dict__.update(config.__dict__)
    copied.context_parallel_size = 1
    return copied


@contextmanager
def caching(layers: list[RowAttention], caches: list[KeyValueCache]) -> Iterator[None]:
    """Let these layers read and extend these caches, one each, in the block."""
    for layer, cache in zip(layers, caches, strict=True):
        layer.cache = cache
    try:
        yield
    finally:
        for layer in layers:
            layer.cache = None


class RowRotaryEmbedding(torch.nn.Module):
    """Megatron's rotary embedding for tokens at given positions, all below ``num_positions``.

    ``positions``: int64 ``[b, s]`` of the next forward pass, of this rank's queries and keys; ``None`` means 0, 1, ...,
    Megatron's own path.
    """

    def __init__(self, inner: RotaryEmbedding, *, num_positions: int) -> None:
        super().__init__()
        self.inner = inner
        self.num_positions = num_positions
        self.positions: torch.Tensor | None = None

    def get_rotary_seq_len(self, *args: object, **kwargs: object) -> int:
        """Returns Megatron's own."""
        return int(self.inner.get_rotary_seq_len(*args, **kwargs))

    def forward(self, max_seq_len: int, *args: object, **kwargs: object) -> torch.Tensor:
        """Angles ``[s, b, 1, head]`` at the positions that were set, else Megatron's ``[s, 1, 1, head]``."""
        if self.positions is None:
            return self.inner(max_seq_len, *args, **kwargs)
        table = self.inner.get_emb(self.num_positions).squeeze(1)  # [num_positions, 1, head]
        return table[self.positions.transpose(0, 1)]


def stretch_waves(embedding: RotaryEmbedding, scaling: RopeScalingConfig) -> None:
    """Lets the longer waves of a rotary embedding be longer still, as Llama 3's are, in the dtype of its frequencies.

    Megatron (0.16.1, 0.19.2) has the same with three of the four numbers fixed (``RotaryEmbedding._apply_scaling``).
    """
    frequencies, length = embedding.inv_freq, scaling.original_max_position_embeddings
    waves = 2 * math.pi / frequencies
    stretched = torch.where(waves > length / scaling.low_freq_factor, frequencies / scaling.factor, frequencies)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    smooth = (length / waves - scaling.low_freq_factor) / span
    between = (1 - smooth) * stretched / scaling.factor + smooth * stretched
    is_between = (waves >= length / scaling.high_freq_factor) & (waves <= length / scaling.low_freq_factor)
    embedding.inv_freq = torch.where(is_between, between, stretched)
