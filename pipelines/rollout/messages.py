"""The leader of a replica tells its other ranks each forward pass beforehand, in one broadcast where it is short.

Format: int64 words ``[kind, n, continues, number of tokens]``, then n words each of ``kept`` (0 where the pass
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

from pipelines.megatron.process.runtime import Runtime

FIRST_WORDS = 4096

_HEADER_WORDS = 4
_IDLE, _PASS = 0, 1

Words = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardPass:
    """The rows of one forward pass, with the tokens that each of them reads.

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
