"""Says where the first and the largest divergences lie, and what they look like.

These few tensors are read once more when all are judged, since only then they are known; a tensor within its bound is
not looked at again. From a large tensor evenly spaced elements are taken, and its residual says so, so this takes
seconds whatever the sizes. Where copies within the candidate are not equal, each rank's own is held against the
baseline. For a parameter, the changes by the update are looked at rather than the parameters, in which they would be
rounding.

A parameter unequal before the first step is loaded, not computed, so it may be another tensor altogether: of another
layer, or of another expert. For this, other tensors of its shape are read from the baseline, the likeliest first, and
only where the difference is too large to be anybody's rounding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from mock_scheduler.comparison.explain.locality import find_localities, parameter_dims
from mock_scheduler.comparison.explain.parts import classify_parts
from mock_scheduler.comparison.explain.permutations import find_blocks, find_holders, find_row_order
from mock_scheduler.comparison.explain.ratios import CommonScale, find_common_scale
from mock_scheduler.comparison.explain.residual import classify_residual
from mock_scheduler.comparison.explain.spread import measure_spread
from mock_scheduler.comparison.findings import Finding, OtherStart
from mock_scheduler.comparison.measure.distance import is_bit_equal
from mock_scheduler.comparison.pairing.pairs import TensorPair, TracePair, all_of, pair_up
from mock_scheduler.comparison.pairing.routing import explain_choice
from mock_scheduler.comparison.pairing.tokens import TokenAlignment
from mock_scheduler.comparison.residuals import Reorder, Residual
from mock_scheduler.comparison.tensors import TensorDifference
from mock_scheduler.comparison.thresholds import (
    ENOUGH,
    FIRST_ELEMENTS,
    MOST_TENSORS_READ,
    NUM_FIRST,
    NUM_LARGEST,
    OTHER_TENSOR,
)
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.support.text import natural_part
from mock_scheduler.trace.entries import PHASES, STEP_KINDS, DimName, Phase, TraceKey
from mock_scheduler.trace.full.reader import ReplicaConflict, TraceReader
from mock_scheduler.trace.full.whole import WholeTensor
from mock_scheduler.trace.names import FINAL_NORM, OUTPUT_LAYER, WORD_EMBEDDINGS, is_choice

_STATE_KINDS: frozenset[TraceKind] = frozenset({"initial", "gradient", "optimizer", "parameter", "weight"})


def explain_differences(
    differences: Sequence[TensorDifference],
    traces: TracePair,
    alignments: Mapping[int, TokenAlignment],
    conflicts: Sequence[ReplicaConflict] = (),
) -> list[TensorDifference]:
    """Adds localities and a residual to the first and the largest differences beyond their bound.

    Args:
        differences: In execution order.
        traces: Both traces.
        alignments: Of the tokens, by step.
        conflicts: Unequal copies within the candidate.

    Raises:
        TraceError: A file is damaged.
    """
    explained = list(differences)
    for position in sorted(_choose(differences)):
        item = differences[position]
        key = item.key
        own = [each for each in conflicts if each.key == key]
        # Only gradients follow the scale of the loss; activations do not.
        common = None
        if PHASES[key.kind] in (Phase.BACKWARD, Phase.GRADIENT):
            common = find_common_scale(differences, step=key.step, update=key.update)
        explained[position] = _explain(item, traces, alignments[key.step], own, common)
    return explained


def dims_of(pair: TensorPair) -> tuple[DimName, ...]:
    """Returns what each dimension counts; empty where unknown."""
    dims = pair.dims or (parameter_dims(pair.key.name, pair.values[0].shape) if pair.key.kind in _STATE_KINDS else ())
    return dims if len(dims) == pair.values[0].dim() else ()


_OF_THE_WHOLE_BATCH: frozenset[TraceKind] = frozenset({"input", "advantage"})


def layout_numbers(readers: tuple[TraceReader, TraceReader], key: TraceKey) -> dict[str, float]:
    """Returns numbers of both layouts, by name: degrees of axes, micro-batches, rows and tokens. A wrong factor may be
    one. There are none for what is made of the whole batch, before it is dealt to ranks.
    """
    numbers: dict[str, float] = {}
    if key.kind in _OF_THE_WHOLE_BATCH:
        return numbers
    for whose, reader in zip(("", "baseline's "), readers[::-1], strict=True):
        found = {**_degrees(reader, key.step), **_counts(reader, key)}
        for name, number in found.items():
            # The candidate's numbers come first and keep their plain names, as it is the one with the fault.
            if number > 1 and numbers.get(name) != number:
                numbers[f"{whose}{name}" if name in numbers else name] = number
    return numbers


def _choose(differences: Sequence[TensorDifference]) -> frozenset[int]:
    exceeding = [place for place, item in enumerate(differences) if item.exceeds and item.figures is not None]
    # By margin rather than by size: bounds differ from tensor to tensor.
    largest = sorted(exceeding, key=lambda place: differences[place].margin)
    return frozenset([*exceeding[:NUM_FIRST], *largest[:NUM_LARGEST]])


def _explain(
    difference: TensorDifference,
    traces: TracePair,
    tokens: TokenAlignment,
    conflicts: Sequence[ReplicaConflict],
    common: CommonScale | None,
) -> TensorDifference:
    key = difference.key
    # A divergence is told of files as they were written, and not of one changed with its CRC-32 since.
    traces.check_digests(key)
    pair = _read_pair(key, traces, tokens)
    if pair is None:
        return difference
    residual = None
    if conflicts and pair.dtypes[0].is_floating_point:
        numbers = layout_numbers(traces.readers, key)
        residual = classify_parts(pair, traces.readers[1], tokens, conflicts, numbers)
    before = _read_pair(_parameter_before(key, traces), traces, tokens) if key.kind == "parameter" else None
    if before is not None:
        # Of a parameter itself, what an update did would be rounding.
        pair = _change(before, pair)
    # The values differ by more than the rounding of either dtype, so float64 stands for both.
    if pair.dtypes[0] != pair.dtypes[1]:
        values = WholeTensor.of(pair.baseline.double()), WholeTensor.of(pair.candidate.double())
        pair = replace(pair, values=values)
    if residual is None:
        bound = difference.tolerance if math.isfinite(difference.tolerance) else 0.0
        if is_choice(key):
            # Numbers of experts are names: ratios and distances of them mean nothing.
            return replace(difference, residual=explain_choice(pair, tokens))
        residual = _classify(key, pair, traces, start=before, bound=bound, common=common) or _find_moved_rows(
            pair, traces.readers[0]
        )
        if residual is not None and before is not None:
            residual = replace(residual, is_of_change=True)
    dims = dims_of(pair)
    boundaries = boundaries_of(key, traces.readers, is_same_order=tokens.is_same_order)
    spread = measure_spread(pair.baseline, pair.candidate, present=pair.present, boundaries=boundaries)
    if not dims:
        return replace(difference, residual=residual, spread=spread)
    localities = find_localities(pair.baseline, pair.candidate, dims=dims, present=pair.present, boundaries=boundaries)
    return replace(difference, residual=residual, localities=localities, spread=spread)


def _classify(
    key: TraceKey,
    pair: TensorPair,
    traces: TracePair,
    *,
    start: TensorPair | None,
    bound: float,
    common: CommonScale | None,
) -> Residual | None:
    is_change = start is not None
    previous_key = None if is_change else _key_before(key, traces.readers[0])
    previous = None if previous_key is None else traces.readers[0].merge(previous_key).tensor
    if previous is not None and previous.shape != pair.baseline.shape:
        previous = None
    uses = _read_uses(pair, traces.readers[0])
    return classify_residual(
        pair.baseline,
        pair.candidate,
        present=pair.present,
        # Adam's step does not follow the size of gradients, so no number of the layout makes a step larger.
        layout={} if is_change else layout_numbers(traces.readers, key),
        previous=previous,
        parts=tuple(uses.values()),
        part_names=tuple(uses),
        dims=dims_of(pair),
        holders=find_holders(key, traces.readers[1]),
        bound=bound,
        common=common,
        start=None if start is None else start.baseline,
    )


def _read_uses(pair: TensorPair, reader: TraceReader) -> dict[str, torch.Tensor]:
    """Returns the parts of a tied embedding's gradient by what made them, where one of them is most of the difference;
    else nothing, and where the trace does not show them.

    The output layer's is the product of its input and of the gradient at its output, at the size that the gradients
    have: they may be divided by a number of tokens behind it.
    """
    key = pair.key
    if (key.kind, key.name) != ("gradient", WORD_EMBEDDINGS):
        return {}
    sources = [
        replace(key, kind="activation", name=FINAL_NORM),
        replace(key, kind="activation_gradient", name=OUTPUT_LAYER.removesuffix(".weight")),
    ]
    known = reader.keys(key.step)
    if replace(key, name=OUTPUT_LAYER) in known or any(source not in known for source in sources):
        return {}
    hidden, slopes = (reader.merge(source).tensor.double() for source in sources)
    product = slopes.flatten(1).T @ hidden.flatten(1)
    baseline, candidate = pair.baseline.double(), pair.candidate.double()
    if product.shape != baseline.shape or not product.any():
        return {}
    for side in (candidate - baseline, candidate):
        size = float((side * product).sum()) / float(product.square().sum())
        if float((side - size * product).square().sum()) <= (1.0 - ENOUGH) * float(side.square().sum()):
            part = abs(size) * product
            return {"the output layer": part, "the look-up": baseline - part}
    return {}


def _find_moved_rows(pair: TensorPair, reader: TraceReader) -> Residual | None:
    """Finds rows of the batch that hold each other's one value."""
    rows = reader.footer(pair.key.step).rows
    if dims_of(pair) != ("token",) or rows.starts or rows.num_tokens != pair.baseline.numel():
        return None
    if not pair.baseline.is_floating_point():
        return None
    order = find_row_order(pair.baseline, pair.candidate, rows.lengths, present=pair.present)
    if order is None or torch.equal(order, torch.arange(len(order))):
        return None
    blocks = find_blocks(order)
    return Residual(
        kind="permutation", value=float(blocks.num_moved), explained=1.0, detail=Reorder(dim="batch row", order=blocks)
    )


def _read_pair(key: TraceKey | None, traces: TracePair, tokens: TokenAlignment) -> TensorPair | None:
    if key is None:
        return None
    pair = pair_up(key, traces.merge(key), tokens)
    return None if isinstance(pair, Finding) else pair


def _change(before: TensorPair, after: TensorPair) -> TensorPair:
    mine, other = after.baseline - before.baseline, after.candidate - before.candidate
    values = WholeTensor.of(mine), WholeTensor.of(other)
    return replace(after, values=values, present=all_of([before.present, after.present]))


def _parameter_before(key: TraceKey, traces: TracePair) -> TraceKey | None:
    """Returns the key of the parameter before an update, where both traces have it."""
    before = replace(key, update=key.update - 1) if key.update else replace(key, kind="initial")
    return before if all(reader.has(before) for reader in traces.readers) else None


def _key_before(key: TraceKey, reader: TraceReader) -> TraceKey | None:
    """Returns the key of the same tensor an update before, maybe in the step before; ``None`` where there is none."""
    # Within a step the update before is the one with the number before.
    if key.update:
        before = replace(key, update=key.update - 1)
        return before if reader.has(before) else None
    earlier = [step for step in reader.steps if step < key.step]
    if not earlier:
        return None
    if key.kind in STEP_KINDS:
        before = replace(key, step=earlier[-1])
        return before if reader.has(before) else None
    num_updates = len(reader.footer(earlier[-1]).update_rows) or 1
    before = replace(key, step=earlier[-1], update=num_updates - 1)
    return before if reader.has(before) else None


def _degrees(reader: TraceReader, step: int) -> dict[str, float]:
    """Counts, by axis, the places ranks stand at."""
    places: dict[str, set[int]] = {}
    for rank in reader.ranks(step):
        for axis, place in rank.coordinates.items():
            places.setdefault(axis, set()).add(place)
    return {axis: float(len(found)) for axis, found in places.items()}


def _counts(reader: TraceReader, key: TraceKey) -> dict[str, float]:
    """Counts micro-batches of a rank, rows and tokens of an update, as far as the trace shows them."""
    counts: dict[str, float] = {}
    footer = reader.footer(key.step)
    update = key.update
    if update < len(footer.update_rows):
        rows = footer.update_rows[update]
        counts["rows"] = float(len(rows))
        counts["tokens"] = float(sum(footer.rows.lengths[row] for row in rows))
    # A program without log-probabilities shows its micro-batches by the losses, or the activations, of their tokens.
    for kind in ("output", "loss", "activation"):
        for other in reader.keys(key.step):
            if (other.update, other.kind) == (update, kind) and reader.dims(other)[:1] == ("token",):
                ranks = [piece.place.global_rank for piece in reader.pieces(other)]
                counts["micro-batches"] = float(max(ranks.count(rank) for rank in set(ranks)))
                return counts
    return counts


def boundaries_of(
    key: TraceKey, readers: tuple[TraceReader, TraceReader], *, is_same_order: bool
) -> dict[int, tuple[int, ...]]:
    """Finds, by dimension, the indices at which a rank's piece begins, in either run."""
    starts: dict[int, set[int]] = {}
    for reader in readers:
        is_by_token = reader.dims(key)[:1] == ("token",)
        for piece in reader.pieces(key):
            for split in piece.spec.splits:
                # Tokens in another order lie elsewhere, so pieces of them have no boundaries in common.
                if split.dim > 0 or not is_by_token or is_same_order:
                    starts.setdefault(split.dim, set()).update(block.global_start for block in split.blocks)
    return {dim: tuple(sorted(found)) for dim, found in starts.items()}


_NUMBER = re.compile(r"\d+")


def explain_initial(pair: TensorPair, traces: TracePair) -> OtherStart:
    """Explains an initial parameter with unequal values in the two runs.

    ``pair``: of kind ``initial``, finite.

    Raises:
        TraceError: A file is damaged.
    """
    key = pair.key
    if pair.baseline.dtype != pair.candidate.dtype or not pair.baseline.is_floating_point():
        return OtherStart()
    found = classify_residual(
        pair.baseline,
        pair.candidate,
        present=pair.present,
        layout=layout_numbers(traces.readers, key),
        dims=dims_of(pair),
        holders=find_holders(key, traces.readers[1]),
    )
    if found is not None:
        return OtherStart(residual=found)
    # Of a part of a tensor it cannot be said that it is another one.
    if pair.present is not None or pair.sums.figures.relative < OTHER_TENSOR:
        return OtherStart()
    return OtherStart(same_as=_find_equal(key, pair.candidate, traces.readers[0]))


def _find_equal(key: TraceKey, candidate: torch.Tensor, baseline: TraceReader) -> str | None:
    """Finds the name of another initial parameter of the baseline with these bits."""
    form = candidate.dtype, tuple(candidate.shape)
    others = [
        other
        for other in baseline.keys(key.step)
        if replace(other, name=key.name) == key and other != key and baseline.dtype_and_shape(other) == form
    ]
    # A tensor with the same name but for its numbers is of another layer or expert, the likeliest mistake.
    others.sort(key=lambda other: (_NUMBER.sub("", other.name) != _NUMBER.sub("", key.name), _natural(other.name)))
    for other in others[:MOST_TENSORS_READ]:
        values = baseline.merge(other).tensor
        # A few elements tell nearly all tensors apart, at a small part of the cost.
        few = (side.reshape(-1)[:FIRST_ELEMENTS] for side in (values, candidate))
        if is_bit_equal(*few) and is_bit_equal(values, candidate):
            return other.name
    return None


def _natural(name: str) -> list[tuple[int, str]]:
    """Splits a name so that its numbers are compared as numbers."""
    return [natural_part(part) for part in re.split(r"(\d+)", name)]
