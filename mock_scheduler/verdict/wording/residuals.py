"""Says the explanation of a difference and its place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from mock_scheduler.comparison.residuals import (
    BlockOrder,
    ElementBlock,
    Locality,
    MisplacedShards,
    Multiple,
    Narrowed,
    OneElement,
    OtherChoice,
    PartialSums,
    Reorder,
    Residual,
    ResidualKind,
    Sample,
    Shift,
    UnreducedCopies,
    WrongCopies,
    WrongCut,
    Zero,
)
from mock_scheduler.support.text import count_of, list_some
from mock_scheduler.trace.entries import DimName

_NUM_NAMED = 4
#: |ratio - 1| below which a ratio is written with more decimals.
_NEAR, _VERY_NEAR = 0.05, 5e-3
_NOUNS: Mapping[DimName, str] = {"vocab": "vocabulary row"}
_NARROW: Mapping[int, str] = {2: "float8_e5m2", 3: "float8_e4m3", 7: "bfloat16", 10: "float16 or TF32", 23: "float32"}
_WHOLE: Mapping[ResidualKind, str] = {
    "stale": "candidate is the baseline's tensor of the update before",
    "sign": "candidate is the baseline with its sign reversed",
}
_BLOCKS: Mapping[ResidualKind, str] = {
    "doubled part": "candidate is twice the baseline",
    "sign": "candidate is the baseline with its sign reversed",
    "ratio": "candidate is half the baseline",
}


def describe_residual(residual: Residual) -> str:
    """Says the explanation of a difference: ``candidate is 2.000 times the baseline: tp``."""
    text = f"{_describe_form(residual)}{_describe_sample(residual.sample)}"
    if not residual.is_of_change:
        return text
    hint = ", as another learning rate or count of updates makes it" if residual.kind == "ratio" else ""
    return f"of the change by the update: {text}{hint}"


def describe_locality(locality: Locality) -> str:
    """Says the place of a difference: ``head 3 holds 99.0 % of the difference (1 of 8 heads)``."""
    noun = _NOUNS.get(locality.dim, locality.dim)
    share = f"{100 * locality.share:.1f} % of the difference"
    count = f"{locality.num_indices:,} of {locality.dim_size:,} {noun}s"
    if locality.first == locality.last:
        text = f"{noun} {locality.first:,} holds {share} ({count})"
    elif locality.is_scattered:
        text = f"{count}, between {locality.first:,} and {locality.last:,}, hold {share}"
    else:
        text = f"{noun}s {locality.first:,} to {locality.last:,} hold {share} ({count})"
    text += f"{_describe_pieces(locality)}{_describe_sample(locality.sample)}"
    if locality.relative is None or locality.noise is None:
        return text
    return f"{text}; it differs by {locality.relative:.2g} there, in perturbed runs by at most {locality.noise:.2g}"


def format_ratio(ratio: float, error: float = 0.0) -> str:
    """Writes a ratio with three decimals, or seven very near to 1.

    Near to 1, decimals are written only as far as the standard error leaves them (two errors are half of the last
    decimal), or as far as they tell the ratio from 1.
    """
    if abs(ratio - 1.0) < _NEAR:
        most = 7 if abs(ratio - 1.0) < _VERY_NEAR else 3
        decimals = most if error <= 0.0 else min(max(math.floor(-math.log10(4.0 * error)), 1), most)
        while decimals < most and float(f"{ratio:.{decimals}f}") == 1.0:
            decimals += 1
        return f"{ratio:.{decimals}f}"
    return f"{ratio:.3f}" if abs(ratio) >= 0.1 else f"{ratio:.4g}"


def describe_narrowing(bits: int) -> str:
    """Says to how many bits values were rounded: ``narrowed to 7 bits of mantissa (bfloat16)``."""
    name = _NARROW.get(bits)
    return f"narrowed to {bits} bits of mantissa{f' ({name})' if name else ''}"


def describe_reorder(reorder: Reorder) -> str:
    """Says the order of the baseline's values in the candidate, and whose shards they are."""
    text = f"candidate has {_describe_order(reorder.order, _name_indices(reorder.dim))}"
    match reorder.holders:
        case MisplacedShards(places=places):
            return f"{text}: {_describe_misplaced(places)}"
        case WrongCut() as cut:
            return f"{text}: {_describe_cut(cut)}"
        case None:
            return text


def _describe_form(residual: Residual) -> str:
    value = residual.value
    match residual.detail:
        case OneElement() as one:
            return _describe_one(one, residual)
        case Zero(side=side):
            other = "candidate" if side == "baseline" else "baseline"
            return f"{side} is zero, {other} is not"
        case Multiple() as multiple:
            return _describe_multiple(multiple, value)
        case ElementBlock() as block:
            return _describe_block(block, residual.kind)
        case PartialSums() as sums:
            return _describe_partial_sums(sums, is_missing=residual.kind == "missing part")
        case UnreducedCopies() as copies:
            return _describe_unreduced(copies, value)
        case WrongCopies(right=right, wrong=wrong):
            return f"copies at {', '.join(right)} are the baseline's, and those at {', '.join(wrong)} are not"
        case Shift(dim=dim):
            return f"candidate is the baseline shifted by {int(value):+d} along the {_name_indices(dim)}"
        case Reorder() as reorder:
            return describe_reorder(reorder)
        case Narrowed(num_bits=num_bits):
            return f"candidate is {describe_narrowing(int(value))}, baseline has {num_bits} bits"
        case OtherChoice() as choice:
            return _describe_choice(choice, int(value))
        case None if residual.kind == "left over":
            return (
                f"candidate is the baseline plus {value:.4g} times the tensor of the update before, as a buffer that "
                "was not cleared leaves it"
            )
        case None if residual.kind == "decay":
            less = "less" if value > 0 else "more"
            return f"candidate decays by {abs(value):.4g} of the parameter {less} than the baseline: weight decay"
        case None if residual.kind == "constant":
            return f"candidate is the baseline {'plus' if value > 0 else 'minus'} {abs(value):.6g}"
        case None:
            return _WHOLE[residual.kind]


def _describe_choice(choice: OtherChoice, num_other: int) -> str:
    lost, gained = (
        f"expert{'s' * (len(side) > 1)} {', '.join(map(str, side))}" for side in (choice.lost, choice.gained)
    )
    change = f"lost {lost}" if not choice.gained else f"got {gained}{f' in place of {lost}' if choice.lost else ''}"
    fewer = f" ({choice.num_fewer:,} to fewer)" if choice.num_fewer else ""
    return (
        f"{num_other:,} of {count_of(choice.num_tokens, 'token')} go to other experts{fewer}; the first, "
        f"{f'sample {choice.sample}, ' if choice.sample else ''}token {choice.position}, {change}"
    )


def _describe_one(one: OneElement, residual: Residual) -> str:
    if one.num_different > 1:
        share = f"{100 * residual.explained:.1f} % of the difference"
        return f"one of {one.num_elements:,} elements holds {share}: {residual.value:.6g}"
    return f"one of {one.num_elements:,} elements differs, by {residual.value:.6g}"


def _describe_multiple(multiple: Multiple, ratio: float) -> str:
    text = f"candidate is {format_ratio(ratio, multiple.error)} times the baseline"
    if multiple.num_gradients:
        return f"{text} but for rounding, as the median of the {multiple.num_gradients} gradients of the update is"
    rest = "" if multiple.rest == "nothing" else f" but for {multiple.rest}"
    return f"{text}{rest}{f': {multiple.factor}' if multiple.factor else ''}"


def _describe_block(block: ElementBlock, kind: ResidualKind) -> str:
    elements = f"in {count_of(block.num_inside, 'element')} of {block.num_elements:,}"
    if block.zero_side == "candidate":
        return f"candidate is zero {elements}"
    if block.zero_side == "baseline":
        return f"baseline is zero, candidate is not, {elements}"
    return f"{_BLOCKS[kind]} {elements}"


def _describe_partial_sums(sums: PartialSums, *, is_missing: bool) -> str:
    which = ", ".join(sums.parts)
    noun, verb = ("part", "is") if len(sums.parts) == 1 else ("parts", "are")
    what = f"the {noun} of {which}" if sums.num_parts is None else f"{noun} {which} of {sums.num_parts}"
    return f"{what} {verb} missing from the candidate" if is_missing else f"{what} {verb} in the candidate once more"


def _describe_unreduced(copies: UnreducedCopies, scale: float) -> str:
    axes = " and ".join(copies.axes)
    what = f"each {axes} rank holds its own part"
    if copies.reduction == "mean":
        return f"not averaged over {axes}: {what}, and their mean is the baseline"
    if copies.reduction == "sum":
        return f"not summed over {axes}: {what}, and their sum is the baseline"
    return f"not summed over {axes}: {what}, and their sum is {scale:.4g} times the baseline: {copies.factor}"


def _describe_order(order: BlockOrder, noun: str) -> str:
    match order.form:
        case "reversed":
            return f"the {noun} of the baseline reversed"
        case "exchanged":
            return f"{noun} {' and '.join(_describe_run(*run) for run in order.runs)} of the baseline exchanged"
        case "rotated":
            begins = f"it begins with {order.first:,} of {order.num_indices:,}"
            return f"the {noun} of the baseline rotated: {begins}"
        case "interleaved":
            what = noun if order.block_size == 1 else f"blocks of {order.block_size:,} {noun}"
            return f"{what} of the baseline interleaved, one of each of its {order.num_parts:,} parts in turn"
        case "other":
            by = f", in blocks of {order.block_size:,}" if order.block_size > 1 else ""
            return f"{order.num_moved:,} of {order.num_indices:,} {noun} of the baseline in another order{by}"


def _describe_run(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _describe_misplaced(places: Sequence[tuple[str, str]]) -> str:
    if len(places) == 2:
        first, second = (name for name, _ in places)
        return f"the shards of {first} and {second} are swapped, each holds the other's part"
    named = [f"{name} that of {source}" for name, source in places]
    return f"shards are at the wrong rank, {list_some(named, _NUM_NAMED, ', ')}"


def _describe_cut(cut: WrongCut) -> str:
    if not cut.is_whole:
        return f"{cut.num_parts} parts of it were each cut over {cut.axis}, where it is cut in one piece"
    parts = " and ".join(cut.part_names) if cut.part_names else f"its {cut.num_parts} parts"
    return f"it was cut over {cut.axis} in one piece, where {parts} are each cut over {cut.axis}"


def _describe_pieces(locality: Locality) -> str:
    if locality.num_pieces:
        just = "the piece of one rank" if locality.num_pieces == 1 else f"{locality.num_pieces} pieces of ranks"
        return f": just {just}"
    match locality.edge:
        case "begins":
            return ": from where a rank's piece begins"
        case "ends":
            return ": up to where a rank's piece ends"
        case None:
            return ""


def _describe_sample(sample: Sample | None) -> str:
    return "" if sample is None else f" (seen in {sample.num_seen:,} of {sample.num_elements:,} elements)"


def _name_indices(dim: DimName | Literal["batch row"] | int) -> str:
    if dim == "batch row":
        return "rows of the batch"
    return f"indices of dimension {dim}" if isinstance(dim, int) else f"{_NOUNS.get(dim, dim)}s"
