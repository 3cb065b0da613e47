"""The clip, held to the norm: a law of each run by itself, seen in Adam's first moment.

An update makes the moment m of the one before, p, and of the gradient g before clipping: m = a p + b g, where
b = (1 - a) min(1, T / (norm + 1e-6)) with the threshold T. So a and b are the same for all parameters on all ranks; and
two runs with one threshold have one b where neither clips, and one b (norm + 1e-6) where both do.

Contract: a finding is made where the baseline keeps the law and the candidate breaks it, in a way that can be said: the
ranks at one place have a coefficient of their own, or some parameters have, or all have that of another norm. The norm
is that of the run's own gradients. Where a side lacks a moment or a gradient, nothing is judged; a candidate with
another a has another optimizer, and no other clip, so two updates are needed to judge the coefficient that all have.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mock_scheduler.comparison.findings import Finding, OtherClip, finding
from mock_scheduler.comparison.thresholds import CLIP_EPSILON, CLIP_HOLDS
from mock_scheduler.comparison.walk.norms import GradientSquare, Readers, of_model
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import TraceReader
from mock_scheduler.trace.names import CLIP, GRADIENT_NORM

_MOMENT = "exp_avg"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Products:
    """Holds scalar products of the moment m after an update, the one before p, and the gradient g."""

    mm: float = 0.0
    mp: float = 0.0
    mg: float = 0.0
    pp: float = 0.0
    pg: float = 0.0
    gg: float = 0.0

    def fits(self, fit: _Fit) -> bool:
        """Whether the moment is that of the two factors."""
        a, b = fit.decay, fit.gain
        rest = self.mm - 2 * a * self.mp - 2 * b * self.mg + a * a * self.pp + 2 * a * b * self.pg + b * b * self.gg
        return rest <= CLIP_HOLDS**2 * self.mm


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fit:
    """Holds the factors a and b of one update."""

    decay: float
    gain: float


_ByName = Mapping[str, _Products]


def find_other_clips(
    squares: Sequence[GradientSquare],
    keys: Mapping[int, tuple[frozenset[TraceKey], frozenset[TraceKey]]],
    readers: Readers,
) -> list[Finding]:
    """Finds updates of the candidate that were not clipped by the norm of its own gradients.

    Args:
        squares: Of all gradients that were compared.
        keys: By step, those of both traces.
        readers: Of both traces.

    Raises:
        TraceError: A file is damaged.
    """
    found: list[tuple[TraceKey, OtherClip]] = []
    decays: list[bool] = []
    for step in sorted({item.key.step for item in squares}):
        both = keys[step][0] & keys[step][1]
        norms = [key for key in both if key.kind == "gradient_norm" and key.name.endswith(GRADIENT_NORM)]
        prefixes = {key.name.removesuffix(GRADIENT_NORM) for key in norms} or {""}
        for update in sorted({item.key.update for item in squares if item.key.step == step}):
            own = [item for item in squares if (item.key.step, item.key.update) == (step, update)]
            for prefix in sorted(prefixes):
                fact = _judge(of_model(own, prefix, prefixes), readers, decays)
                if fact is not None:
                    key = TraceKey(step=step, update=update, kind="gradient_norm", name=f"{prefix}{CLIP}")
                    found.append((key, fact))
    # The first update of a run, with p = 0, cannot tell another a from another clip.
    is_known = bool(decays) and all(decays)
    return [finding(key, fact) for key, fact in found if is_known or fact.place or fact.names]


def _judge(squares: Sequence[GradientSquare], readers: Readers, decays: list[bool]) -> OtherClip | None:
    """Judges one update; ``decays`` gets whether both runs have one a, where that can be told."""
    gradients = [item.key for item in squares if item.baseline and item.candidate]
    if not gradients or not all(_has_moments(key, reader) for key in gradients for reader in readers):
        return None
    mine = {key.name: _multiply(key, readers[0]) for key in gradients}
    fit = _solve(mine.values())
    # A training that makes its moments otherwise breaks the law in both runs, and says nothing.
    if fit is None or not fit.gain or not all(item.fits(fit) for item in mine.values()):
        return None
    other = {key.name: _multiply(key, readers[1]) for key in gradients}
    other_fit = _solve(other.values())
    if other_fit is None or not all(item.fits(other_fit) for item in other.values()):
        return _find_place(gradients, readers[1], fit) or _find_names(other, fit)
    if fit.decay:
        decays.append(abs(other_fit.decay - fit.decay) <= CLIP_HOLDS)
    ratio = other_fit.gain / fit.gain
    made = [math.sqrt(math.fsum(getattr(item, side) for item in squares)) for side in ("baseline", "candidate")]
    # Between no clip, with equal factors, and the clip of both, with factors as 1 / norm, all is right.
    clipped = ratio * (made[1] + CLIP_EPSILON) / (made[0] + CLIP_EPSILON)
    if min(ratio, clipped) > 1.0 + CLIP_HOLDS or max(ratio, clipped) < 1.0 - CLIP_HOLDS:
        return OtherClip(factor=clipped)
    return None


def _moment(gradient: TraceKey) -> TraceKey:
    return replace(gradient, kind="optimizer", name=f"{gradient.name}.{_MOMENT}")


def _moment_before(gradient: TraceKey, reader: TraceReader) -> TraceKey | None:
    """Returns the moment that an update began with; ``None`` where it is not traced, or the run's first update."""
    moment = _moment(gradient)
    if gradient.update:
        return replace(moment, update=gradient.update - 1)
    if gradient.step - 1 not in reader.steps:
        return None
    num_updates = len(reader.footer(gradient.step - 1).update_rows) or 1
    return replace(moment, step=gradient.step - 1, update=num_updates - 1)


def _has_moments(gradient: TraceKey, reader: TraceReader) -> bool:
    before = _moment_before(gradient, reader)
    is_first = not gradient.step and not gradient.update
    return reader.has(_moment(gradient)) and (is_first if before is None else reader.has(before))


def _multiply(gradient: TraceKey, reader: TraceReader, ranks: Collection[int] | None = None) -> _Products:
    """Multiplies the tensors of one parameter, as all ranks hold them or only these."""
    before = _moment_before(gradient, reader)
    after, slope = (_read(key, reader, ranks) for key in (_moment(gradient), gradient))
    start = torch.zeros_like(after) if before is None else _read(before, reader, ranks)
    return _Products(
        mm=float(after @ after),
        mp=float(after @ start),
        mg=float(after @ slope),
        pp=float(start @ start),
        pg=float(start @ slope),
        gg=float(slope @ slope),
    )


def _read(key: TraceKey, reader: TraceReader, ranks: Collection[int] | None) -> torch.Tensor:
    """float64, flat; 0 where nobody holds an element."""
    merged = reader.merge(key, ranks=ranks)
    values = merged.tensor.double()
    if merged.present is not None:
        values = values.masked_fill(~merged.present.expand_as(values), 0.0)
    return values.reshape(-1)


def _solve(products: Iterable[_Products]) -> _Fit | None:
    """Solves for the two factors by least squares; ``None`` where they cannot be told apart."""
    items = list(products)
    mp, mg, pp, pg, gg = (math.fsum(getattr(item, name) for item in items) for name in ("mp", "mg", "pp", "pg", "gg"))
    if not gg:
        return None
    if not pp:
        return _Fit(decay=0.0, gain=mg / gg)
    determinant = pp * gg - pg * pg
    # A gradient along the moment leaves the two factors open.
    if determinant <= CLIP_HOLDS * pp * gg:
        return None
    return _Fit(decay=(mp * gg - mg * pg) / determinant, gain=(mg * pp - mp * pg) / determinant)


def _gain(products: Iterable[_Products], fit: _Fit) -> float | None:
    """Returns the one b of these tensors, with the decay of the baseline; ``None`` where they have none in common."""
    items = list(products)
    size = math.fsum(item.gg for item in items)
    if not size:
        return None
    own = replace(fit, gain=math.fsum(item.mg - fit.decay * item.pg for item in items) / size)
    return own.gain if all(item.fits(own) for item in items) else None


def _find_place(gradients: Sequence[TraceKey], reader: TraceReader, fit: _Fit) -> OtherClip | None:
    """Finds the place on an axis whose ranks have another coefficient than the first one's."""
    for axis, places in _list_places(gradients, reader).items():
        gains: dict[int, float | None] = {}
        for place, ranks in sorted(places.items()):
            held = [key for key in gradients if _is_held(key, reader, ranks)]
            gains[place] = _gain((_multiply(key, reader, ranks) for key in held), fit)
        first, *rest = gains.items()
        for place, gain in rest:
            if first[1] and gain and abs(gain / first[1] - 1.0) > CLIP_HOLDS:
                return OtherClip(factor=gain / first[1], place=f"{axis}{place}", than=f"{axis}{first[0]}")
    return None


def _list_places(gradients: Sequence[TraceKey], reader: TraceReader) -> dict[str, dict[int, set[int]]]:
    """Lists, by axis and place on it, the global ranks that hold gradients; axes with one place are left out."""
    found: dict[str, dict[int, set[int]]] = {}
    for piece in (piece for key in gradients for piece in reader.pieces(key)):
        for axis, place in piece.place.coordinates.items():
            found.setdefault(axis, {}).setdefault(place, set()).add(piece.place.global_rank)
    return {axis: places for axis, places in found.items() if len(places) > 1}


def _is_held(gradient: TraceKey, reader: TraceReader, ranks: Collection[int]) -> bool:
    """Whether the ranks hold anything of a gradient and of its moments."""
    before = _moment_before(gradient, reader)
    keys: Iterator[TraceKey] = (key for key in (gradient, _moment(gradient), before) if key is not None)
    return all(any(piece.place.global_rank in ranks for piece in reader.pieces(key)) for key in keys)


def _find_names(products: _ByName, fit: _Fit) -> OtherClip | None:
    """Finds the parameters whose one coefficient is another than that of most."""
    gains = {name: _gain([item], fit) for name, item in products.items()}
    known = [gain for gain in gains.values() if gain]
    if len(known) < len(gains):
        return None

    def is_other(gain: float, usual: float) -> bool:
        return abs(gain / usual - 1.0) > CLIP_HOLDS

    # That of most parameters; of as many, that which is nearer to the baseline's.
    usual = min(known, key=lambda each: (sum(is_other(gain, each) for gain in known), abs(each - fit.gain)))
    others = {name: gain / usual for name, gain in gains.items() if gain and is_other(gain, usual)}
    return OtherClip(factor=min(others.values()), names=tuple(others)) if others else None
