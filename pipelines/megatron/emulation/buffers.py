"""Which ranges of a rank's flat gradient buffers each data-parallel rank owns, as the distributed optimizer cuts them.

Padding and order are those of ``distributed/param_and_grad_buffer.py`` and ``optimizer/distrib_optimizer.py``
(megatron-core 0.16.1) without overlap, where a buffer has a bucket of its own for embeddings that stages share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_PARAMETER_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedRange:
    """Elements ``[start, end)`` of the parameter at this place of a chunk's list."""

    place: int
    start: int
    end: int


def owned_ranges(sizes: Sequence[int], alone: Sequence[bool], *, num_shards: int) -> list[list[OwnedRange]]:
    """What each of ``num_shards`` ranks owns of a chunk's parameters, in the order of its optimizer.

    sizes: elements of each parameter, in the model's order. alone: whether it has a bucket of its own.
    """
    buckets = list(_buckets(sizes, alone, num_shards=num_shards))
    return [
        [owned for bucket in buckets for owned in bucket.of_shard(shard, num_shards)] for shard in range(num_shards)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bucket:
    """``[start, end)`` of the buffer, and place, start and end of each parameter in it."""

    start: int
    end: int
    parameters: tuple[tuple[int, int, int], ...]

    def of_shard(self, shard: int, num_shards: int) -> Iterator[OwnedRange]:
        size = (self.end - self.start) // num_shards
        first = self.start + shard * size
        for place, start, end in self.parameters:
            owned = OwnedRange(place=place, start=max(first, start) - start, end=min(first + size, end) - start)
            if owned.start < owned.end:
                yield owned


def _buckets(sizes: Sequence[int], alone: Sequence[bool], *, num_shards: int) -> Iterator[_Bucket]:
    """The buckets in order; parameters lie in the reverse of the model's order."""
    divisor = math.lcm(num_shards, _BUCKET_ALIGNMENT)
    bucket_start, position = 0, 0
    parameters: list[tuple[int, int, int]] = []
    for place in reversed(range(len(sizes))):
        position = _padded(position, _PARAMETER_ALIGNMENT)
        if alone[place] and parameters:
            end = _padded(position, divisor)
            yield _Bucket(start=bucket_start, end=end, parameters=tuple(parameters))
            bucket_start, position, parameters = end, end, []
        parameters.append((place, position, position + sizes[place]))
        position += sizes[place]
        if alone[place]:
            position = _padded(position, divisor)
            yield _Bucket(start=bucket_start, end=position, parameters=tuple(parameters))
            bucket_start, parameters = position, []
    if parameters:
        yield _Bucket(start=bucket_start, end=_padded(position, divisor), parameters=tuple(parameters))


def _padded(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor
