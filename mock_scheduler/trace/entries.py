"""Defines the parts of a trace: keys and kinds, entries from probes to a sink, a rank's statements about a whole step.

Contract: plain data without files. Token tensors: the first dimension is all tokens of the step's batch, row after row
in the batch's canonical order, without padding; token t of row r has index ``offset[r] + t``. So neither padding,
micro-batches, packing nor data parallelism are in a trace, and two runs are aligned by the rows' identities.
Where no rank knows the batch's rows beforehand, a row's offset follows from its identity alone (``virtual_start``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate
from typing import Literal, Protocol

import torch

from mock_scheduler.config.instruments import LedgerKind, TraceKind
from mock_scheduler.support.text import in_words
from mock_scheduler.trace.shards import ShardSpec

DimName = Literal["token", "slot", "head", "channel", "expert", "vocab", "row", "column"]
"""The unit that a dimension counts: ``slot`` is the place among a token's chosen experts, ascending by expert;
``row`` and ``column`` are those of a weight that has no better name."""


#: The most tokens of a row whose first place follows from its identity.
ROW_PLACES = 1 << 22
#: The size of a token dimension of such rows: their places are spread over it, and most belong to no token.
VIRTUAL_TOKENS = 1 << 62
_HASH_BITS = 64
_START_BITS = 40

#: Kinds that are there once in a step; all others are there once in each of its updates.
STEP_KINDS: frozenset[TraceKind] = frozenset({"initial", "input", "score", "advantage"})


class Phase(IntEnum):
    """A stage of a training step; kinds of one phase are computed interleaved, layer by layer."""

    START = 0
    DATA = 1
    RECOMPUTATION = 2
    FORWARD = 3
    SCORES = 4
    LOSS = 5
    BACKWARD = 6
    GRADIENT = 7
    NORM = 8
    UPDATE = 9


#: Where a kind is computed. Scores, and advantages made of them, come from a pass through the modules of the first
#: update's forward pass, with equal weights: they stand behind these, of which more is traced. A micro-batch is
#: recomputed in its backward pass, which comes before the forward passes of all later ones. In ``BACKWARD`` names are
#: walked from the output to the embedding, else the other way.
PHASES: Mapping[TraceKind, Phase] = {
    "initial": Phase.START,  # parameters and buffers before the first update, in the precision of the update
    "input": Phase.DATA,  # tokens, response mask and recorded log-probabilities
    "score": Phase.SCORES,  # old and reference log-probabilities and values, before the first update
    "advantage": Phase.SCORES,  # advantages and returns
    "recomputed": Phase.RECOMPUTATION,  # outputs that a backward pass computed again, where they have other bits
    "activation": Phase.FORWARD,  # outputs of the embedding, of each layer and of its parts
    "router": Phase.FORWARD,  # logits, probabilities and choice of experts
    "logits": Phase.FORWARD,  # the output layer's logits
    "output": Phase.FORWARD,  # new log-probabilities, entropy and values
    "loss": Phase.LOSS,  # ratios, element-wise loss terms and their sums
    "activation_gradient": Phase.BACKWARD,  # gradients of the loss with respect to activations
    "gradient": Phase.GRADIENT,  # main gradients after the reduction, before clipping
    "gradient_norm": Phase.NORM,  # the norm of all main gradients, before clipping
    "optimizer": Phase.UPDATE,  # the optimizer's moments after the update
    "parameter": Phase.UPDATE,  # parameters and buffers after the update, in the precision of the update
    "weight": Phase.UPDATE,  # a model's own values, where it computes in less than float32
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceKey:
    """Names one tensor of a run. ``update`` counts the optimizer updates within the step, from 0.

    A tensor of a step rather than of an update (``STEP_KINDS``) has update 0.
    """

    step: int
    update: int
    kind: TraceKind
    name: str

    def describe(self) -> str:
        """Returns the key in words: ``gradient of output_layer.weight at step 0, update 0``."""
        if self.kind == "initial":
            return f"parameter of {self.name} before step {self.step}"
        kind = "recomputation" if self.kind == "recomputed" else in_words(self.kind)
        return f"{kind} of {self.name} at step {self.step}, update {self.update}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEntry:
    """One piece of one tensor a rank writes; a tensor of several micro-batches has a piece of each.

    ``tensor`` has ``spec.local_shape``, or is flat with just the elements of ``spec.flat_range``. It may be on any
    device; a sink copies its part before ``add`` returns.
    ``dims``: the name of each dimension; empty where nobody said.
    ``is_masked``: a token tensor defined at some tokens only (response tokens): tokens in no piece are masked
    out, where otherwise they would be missing.
    """

    update: int
    kind: TraceKind
    spec: ShardSpec
    tensor: torch.Tensor
    dims: tuple[DimName, ...] = ()
    is_masked: bool = False

    @property
    def is_by_token(self) -> bool:
        """Whether the first dimension is the batch's tokens."""
        return self.dims[:1] == ("token",)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """A rank and where it stands on each axis, for example ``{"tp": 0, "pp": 0, "dp": 1}``."""

    global_rank: int
    coordinates: Mapping[str, int]

    def describe(self) -> str:
        """Returns ``global rank 3 (tp1 pp0 dp1)``."""
        axes = " ".join(f"{axis}{place}" for axis, place in self.coordinates.items())
        return f"global rank {self.global_rank}" + (f" ({axes})" if axes else "")

    def axes_apart(self, other: RankPlace) -> tuple[str, ...]:
        """Returns the axes on which the two ranks stand at different places."""
        return tuple(axis for axis, place in self.coordinates.items() if place != other.coordinates.get(axis))


def virtual_start(identity: str) -> int:
    """Gives the place of a row's first token in a token dimension of ``VIRTUAL_TOKENS``: equal in every layout.

    The upper 40 bits of the identity's BLAKE2b of 64 bits (big endian), times ``ROW_PLACES``.
    """
    digest = hashlib.blake2b(identity.encode(), digest_size=_HASH_BITS // 8).digest()
    return (int.from_bytes(digest, "big") >> (_HASH_BITS - _START_BITS)) * ROW_PLACES


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTable:
    """Holds the rows of a step's batch in canonical order: identities as text, and tokens of each.

    starts: the place of each row's first token, by ``virtual_start``, where no rank knows the whole batch; each rank's
    table then has its own rows alone, in its own order. Empty: rows lie one after another.
    """

    identities: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()

    @classmethod
    def by_content(cls, identities: Sequence[str], lengths: Sequence[int]) -> RowTable:
        """Makes the table of rows whose places follow from their identities."""
        return cls(identities=tuple(identities), lengths=tuple(lengths), starts=tuple(map(virtual_start, identities)))

    @property
    def num_tokens(self) -> int:
        """Returns the tokens of all rows."""
        return sum(self.lengths)

    @property
    def num_places(self) -> int:
        """Returns the size of a token dimension."""
        return VIRTUAL_TOKENS if self.starts else self.num_tokens

    @property
    def first_places(self) -> tuple[int, ...]:
        """Returns the place of each row's first token."""
        return self.starts or tuple(accumulate(self.lengths, initial=0))[:-1]

    def find(self, token: int) -> tuple[int, int]:
        """Row and position within it of a token's place; raises ``IndexError`` where no token is there."""
        for row, (start, length) in enumerate(zip(self.first_places, self.lengths, strict=True)):
            if start <= token < start + length:
                return row, token - start
        raise IndexError(f"token {token} of {self.num_tokens}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unobserved:
    """A tensor this model does not show, like the output of a norm fused into a linear layer."""

    kind: TraceKind
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerCall:
    """Holds one call of a ledger, in order.

    operation: as ``all_reduce`` or ``bernoulli_``. group: the global ranks that take part; empty for random draws.
    dtype, num_elements: of the tensor that is sent or drawn.
    """

    operation: str
    group: tuple[int, ...]
    dtype: str
    num_elements: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFooter:
    """A rank's statements about a whole step, made when it has written all of it.

    rows: of the step's batch; of this rank alone where they have ``starts``. update_rows: by update, the rows it
    trains on. ranks: the global ranks that write this trace. kinds, patterns, exclude: the selection, as configured.
    unobserved: tensors that are selected and not shown by the model. ledgers: calls in order, of the selected kinds.
    """

    rows: RowTable = RowTable()
    update_rows: tuple[tuple[int, ...], ...] = ()
    ranks: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    unobserved: tuple[Unobserved, ...] = ()
    ledgers: Mapping[LedgerKind, Sequence[LedgerCall]] = field(default_factory=dict)


class TraceSink(Protocol):
    """Takes a rank's entries of one step: writes whole tensors to files, or sketches."""

    def add(self, entry: TraceEntry) -> None:
        """Take one piece; raises ``TraceError`` for a tensor that does not have its spec's shape, or given twice."""

    def close(self, footer: StepFooter) -> None:
        """End the step. Errors of earlier background writes surface here or at the next call, never later.

        Where it raises, nothing that this sink wrote of the step is left.
        """

    def abandon(self) -> None:
        """Give the step up: its files are removed, and no thread is left. Does nothing where it was closed."""
