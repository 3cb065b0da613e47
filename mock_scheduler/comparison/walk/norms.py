"""The norm of the gradients, held to the gradients themselves: a law of each run by itself, whatever the other did.

A norm is the root of the squares of all gradients of an update before clipping, added in float32 whatever the model
computes in. A parameter that ranks hold as copies is counted once, one that they share by its parts. So the merged
gradients of a trace make it, in every layout.

Contract: a finding is made where the baseline keeps the law and the candidate breaks it. A training whose stated norm
is another figure breaks it in both, and says nothing. Where a side has not all gradients, nothing is judged; nor a norm
that is too large where the vocabulary is padded, since rows of padding are in it and not in a trace.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from mock_scheduler.comparison.findings import DifferenceKind, Finding, NormCount, OtherNorm
from mock_scheduler.comparison.thresholds import MOST_NORM_GROUPS, NORM_EXPLAINED, NORM_HOLDS, NORM_ROUNDING, SAFETY
from mock_scheduler.comparison.walk.metrics import MetricLog
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import Piece, TraceReader
from mock_scheduler.trace.names import GRADIENT_NORM

_NUMBER = re.compile(r"\d+")

Readers = tuple[TraceReader, TraceReader]
_Squares = Mapping[TraceKey, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientSquare:
    """Holds ||g||² of one gradient of both runs."""

    key: TraceKey
    baseline: float
    candidate: float


@dataclass(frozen=True, kw_only=True)
class _Norm:
    """A stated norm with the gradients that it is of; ``update``: ``None`` for a metric, the mean over a step."""

    step: int
    update: int | None
    name: str
    stated: tuple[float, float]
    squares: tuple[GradientSquare, ...]

    @cached_property
    def made(self) -> tuple[float, float]:
        """Returns the norms that the gradients make, the mean over their updates."""
        mine = _mean_norm({item.key: item.baseline for item in self.squares})
        return mine, _mean_norm({item.key: item.candidate for item in self.squares})


def _mean_norm(squares: _Squares) -> float:
    """Returns the norm of gradients with these squares, the mean over their updates."""
    by_update: dict[int, list[float]] = {}
    for key, square in squares.items():
        by_update.setdefault(key.update, []).append(square)
    # The root is taken of each update before the mean, as each update clips by its own norm.
    return math.fsum(math.sqrt(max(math.fsum(each), 0.0)) for each in by_update.values()) / len(by_update)


def find_other_norms(
    squares: Sequence[GradientSquare],
    keys: Mapping[int, tuple[frozenset[TraceKey], frozenset[TraceKey]]],
    readers: Readers,
    logs: tuple[MetricLog, MetricLog] | None,
) -> list[Finding]:
    """Finds stated norms of the candidate that its own gradients do not make.

    Args:
        squares: Of all gradients that were compared.
        keys: By step, those of both traces.
        readers: Of both traces.
        logs: Metrics of both runs; ``None`` where they are not asked for.

    Raises:
        TraceError: A file is damaged.
    """
    found: list[Finding] = []
    for step in sorted({item.key.step for item in squares}):
        own = [item for item in squares if item.key.step == step]
        gradients = [{key for key in side if key.kind == "gradient"} for side in keys[step]]
        # One that was not compared is in the norm all the same.
        if any(side != {item.key for item in own} for side in gradients):
            continue
        # A norm that one side alone has is missing there, which the walk has told of.
        shared = [key for key in keys[step][0] & keys[step][1] if key.kind == "gradient_norm"]
        in_step = [finding for norm in _list_traced(own, shared, readers) if (finding := _judge(norm, readers))]
        # The metric is the mean of these, and tells no more.
        if not in_step and logs is not None:
            in_step = [finding for norm in _list_logged(step, own, logs) if (finding := _judge(norm, readers))]
        found += in_step
    return found


def _list_traced(squares: Sequence[GradientSquare], keys: Sequence[TraceKey], readers: Readers) -> Iterator[_Norm]:
    keys = [key for key in keys if key.name.endswith(GRADIENT_NORM)]
    prefixes = {key.name.removesuffix(GRADIENT_NORM) for key in keys}
    for key in sorted(keys, key=lambda key: (key.update, key.name)):
        own = [item for item in squares if item.key.update == key.update]
        mine, other = (float(reader.merge(key).tensor) for reader in readers)
        squares_of = of_model(own, key.name.removesuffix(GRADIENT_NORM), prefixes)
        yield _Norm(step=key.step, update=key.update, name=key.name, stated=(mine, other), squares=squares_of)


def _list_logged(step: int, squares: Sequence[GradientSquare], logs: tuple[MetricLog, MetricLog]) -> Iterator[_Norm]:
    mine, other = (log.get(step, {}) for log in logs)
    names = sorted(name for name in mine.keys() & other.keys() if name.endswith(GRADIENT_NORM))
    # ``critic/grad_norm`` is of the gradients ``critic.…``.
    prefixes = {name: name.removesuffix(GRADIENT_NORM).replace("/", ".") for name in names}
    for name in names:
        yield _Norm(
            step=step,
            update=None,
            name=name,
            stated=(mine[name], other[name]),
            squares=of_model(squares, prefixes[name], set(prefixes.values())),
        )


def of_model(squares: Sequence[GradientSquare], prefix: str, prefixes: Collection[str]) -> tuple[GradientSquare, ...]:
    """Returns the gradients of one of several models: those with its prefix, and with no longer one."""
    longer = tuple(each for each in prefixes if len(each) > len(prefix) and each.startswith(prefix))
    return tuple(
        item
        for item in squares
        if item.key.name.startswith(prefix) and not (longer and item.key.name.startswith(longer))
    )


def _judge(norm: _Norm, readers: Readers) -> Finding | None:
    values = (*norm.stated, *norm.made) if norm.squares else ()
    if not values or not all(math.isfinite(value) and value > 0.0 for value in values):
        return None
    mine, other = (stated / made - 1.0 for stated, made in zip(norm.stated, norm.made, strict=True))
    # The baseline's own miss is the measure: what its squares round, the candidate's may round too.
    if abs(mine) > NORM_HOLDS or abs(other) <= max(NORM_ROUNDING, SAFETY * abs(mine)):
        return None
    pieces = [readers[1].pieces(item.key) for item in norm.squares]
    # Padding can only add to a norm, so one that is too small is judged all the same.
    if other > 0.0 and any(_has_padding(piece) for held in pieces for piece in held):
        return None
    count = _explain(norm, readers[1], pieces)
    fact = OtherNorm(stated=norm.stated[1], made=norm.made[1], count=count)
    kind: DifferenceKind = "metric" if norm.update is None else "gradient_norm"
    return Finding(kind=kind, step=norm.step, update=norm.update, name=norm.name, fact=fact)


def _has_padding(piece: Piece) -> bool:
    """Whether a rank holds rows that are not of the whole tensor, as those of a padded vocabulary are."""
    dims = {split.dim for split in piece.spec.splits}
    return any(
        sum(block.length for split in piece.spec.splits if split.dim == dim for block in split.blocks)
        < piece.spec.local_shape[dim]
        for dim in dims
    )


def _explain(norm: _Norm, reader: TraceReader, pieces: Sequence[tuple[Piece, ...]]) -> NormCount | None:
    """Finds a sum of squares that makes the stated norm; ``None`` where nothing does.

    Raises:
        TraceError: A file is damaged.
    """
    own = {item.key: item.candidate for item in norm.squares}
    axes = dict.fromkeys(axis for held in pieces for piece in held for axis in piece.place.coordinates)
    for axis in axes:
        held = _read_places(own, reader, pieces, axis)
        if not held:
            continue
        for place, squares in held.items():
            if _makes(squares, norm):
                return NormCount(form="part", place=f"{axis}{place}")
        copies = {key: max(math.fsum(each[key] for each in held.values()) - own[key], 0.0) for key in own}
        # Shards are not copies, but for the rounding of their sum.
        copies = {key: extra for key, extra in copies.items() if extra > NORM_ROUNDING * own[key]}
        names = _find_subset(copies, own, norm, sign=1.0)
        if names is not None:
            return NormCount(form="copies", place=axis, names=names)
    names = _find_subset(own, own, norm, sign=-1.0)
    return None if not names else NormCount(form="without", names=names)


def _read_places(
    keys: Collection[TraceKey], reader: TraceReader, pieces: Sequence[tuple[Piece, ...]], axis: str
) -> dict[int, dict[TraceKey, float]]:
    """Reads, by place on an axis, the squares of what its ranks hold of each gradient."""
    ranks: dict[int, set[int]] = {}
    for piece in (each for held in pieces for each in held):
        if axis in piece.place.coordinates:
            ranks.setdefault(piece.place.coordinates[axis], set()).add(piece.place.global_rank)
    if not len(ranks) > 1:
        return {}
    held = dict(zip(keys, pieces, strict=True))
    return {
        place: {key: _square_of(reader, key, of_place & {each.place.global_rank for each in held[key]}) for key in keys}
        for place, of_place in sorted(ranks.items())
    }


def _square_of(reader: TraceReader, key: TraceKey, ranks: Collection[int]) -> float:
    if not ranks:
        return 0.0
    merged = reader.merge(key, ranks=ranks)
    values = merged.tensor.double()
    if merged.present is not None:
        values = values.masked_fill(~merged.present.expand_as(values), 0.0)
    return float(values.square().sum())


def _makes(squares: _Squares, norm: _Norm) -> bool:
    """Whether sums of these squares make the stated norm: the mean over the updates."""
    stated, made = norm.stated[1], norm.made[1]
    # Held to the gap that it has to explain: a mistake that moves the norm by little must fit as well as a large one.
    return abs(_mean_norm(squares) - stated) <= NORM_EXPLAINED * abs(stated - made)


def _find_subset(changes: _Squares, own: _Squares, norm: _Norm, *, sign: float) -> tuple[str, ...] | None:
    """Finds the kinds of tensors whose ``changes``, with this sign, make the stated norm; empty: all of them do.

    ``None``: none do, or several choices do.
    """
    roles = sorted({_role(key) for key in changes})
    if not roles:
        return None

    def fits(chosen: Collection[str]) -> bool:
        changed = {key: changes.get(key, 0.0) if _role(key) in chosen else 0.0 for key in own}
        return _makes({key: square + sign * changed[key] for key, square in own.items()}, norm)

    if fits(roles):
        return ()
    # All subsets of n kinds are 2^n sums, so of many kinds each is tried alone.
    sizes = range(1, len(roles)) if len(roles) <= MOST_NORM_GROUPS else range(1, 2)
    found = [chosen for size in sizes for chosen in combinations(roles, size) if fits(chosen)]
    # Two choices that fit alike tell nothing.
    return found[0] if len(found) == 1 else None


def _role(key: TraceKey) -> str:
    """Returns the name without its numbers: one kind of tensor in all layers and experts."""
    return _NUMBER.sub("*", key.name)
