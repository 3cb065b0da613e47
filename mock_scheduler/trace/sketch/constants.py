"""Computes the pseudo-random constants of sketches, out of an element's canonical flat index i alone.

Contract, so any other program computes the same sketches. All arithmetic is on unsigned 64-bit integers; i is taken
modulo 2^64.

- ``mix(z)``: the output function of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): ``z += 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9; z = (z ^ z >> 27) * 0x94D049BB133111EB; z ^ z >> 31``.
- ``random(stream, j) = mix(mix(stream) ^ j)``; its *sign* is -1 where the top bit is set, else +1.
- i lies in block ``k = i div BLOCK`` at place ``p = i mod BLOCK``, a block being ``ROWS`` rows of ``NUM_SLOTS`` places.
- ``slot(i) = (p + random(4, k)) mod NUM_SLOTS``, where ``random(4, k)`` is first taken modulo ``NUM_SLOTS``
- ``sign(i) = sign of random(1, p) * sign of random(3, k)``
- ``key(i) = (random(2, p) | 1) * (random(5, k) | 1)``
- bucket b of B has weight ``sign of random(6, slot * MAX_BUCKETS + b) / sqrt(B)`` for a slot.

NUM_SLOTS is prime, so the elements of a column of a matrix, a fixed distance apart, spread over all
slots unless that distance is a multiple of it. One table serves all blocks, so a CPU keeps it in its cache.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

NUM_SLOTS = 2039
ROWS = 32
BLOCK = NUM_SLOTS * ROWS
MAX_BUCKETS = 4096

#: Weight of the upper half of a 64-bit element against its lower half in the fingerprint; odd.
UPPER_HALF = 0x9E3779B97F4A7C15

_SIGN, _KEY, _BLOCK_SIGN, _BLOCK_SHIFT, _BLOCK_KEY, _BUCKET = 1, 2, 3, 4, 5, 6

_Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tables:
    """Holds the constants of a place in a block: signs float64 and keys int64, ``[BLOCK]`` each.

    slots: 0, 1, ... int64 ``[NUM_SLOTS]``.
    """

    signs: torch.Tensor
    keys: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockConstants:
    """The constants of a block: signs float64, shifts int64 and keys int64, ``[number of blocks]`` each."""

    signs: torch.Tensor
    shifts: torch.Tensor
    keys: torch.Tensor


@lru_cache(maxsize=16)
def tables(device: torch.device) -> Tables:
    """Returns the tables on a device, 1 MB, made once."""
    places = np.arange(BLOCK, dtype=np.uint64)
    return Tables(
        signs=_signs(_random(_SIGN, places)).to(device),
        keys=_odd(_random(_KEY, places)).to(device),
        slots=torch.arange(NUM_SLOTS, device=device),
    )


@lru_cache(maxsize=4096)
def block_constants(device: torch.device, block: int, num_blocks: int) -> BlockConstants:
    """Returns the constants of ``num_blocks`` blocks from ``block`` on, on a device."""
    blocks = np.arange(block, block + num_blocks, dtype=np.uint64)
    shifts = (_random(_BLOCK_SHIFT, blocks) % np.uint64(NUM_SLOTS)).astype(np.int64)
    return BlockConstants(
        signs=_signs(_random(_BLOCK_SIGN, blocks)).to(device),
        shifts=torch.from_numpy(shifts).to(device),
        keys=_odd(_random(_BLOCK_KEY, blocks)).to(device),
    )


@lru_cache(maxsize=8)
def bucket_weights(num_buckets: int) -> torch.Tensor:
    """Returns the weight of every slot in every bucket, float64 ``[NUM_SLOTS, num_buckets]`` on the CPU."""
    first = np.arange(0, NUM_SLOTS * MAX_BUCKETS, MAX_BUCKETS, dtype=np.uint64)
    words = _random(_BUCKET, np.add.outer(first, np.arange(num_buckets, dtype=np.uint64)))
    return _signs(words) / math.sqrt(num_buckets)


@lru_cache(maxsize=64)
def dtype_key(name: str) -> int:
    """The odd factor of the fingerprint for a dtype: the first 8 bytes of its name's SHA-256, little endian, | 1."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") | 1


def _random(stream: int, indices: _Words) -> _Words:
    return _mix(_mix(np.array([stream], dtype=np.uint64)) ^ indices)


def _mix(values: _Words) -> _Words:
    words = values + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _signs(words: _Words) -> torch.Tensor:
    return torch.from_numpy(1.0 - 2.0 * (words >> np.uint64(63)).astype(np.float64))


def _odd(words: _Words) -> torch.Tensor:
    # An odd factor is invertible mod 2^64, so no change of a word is lost.
    return torch.from_numpy((words | np.uint64(1)).view(np.int64))
