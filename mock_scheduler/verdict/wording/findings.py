"""Says why tensors could not be compared, and where calls differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mock_scheduler.comparison.findings import (
    CopiesDiffer,
    Fact,
    FewerBits,
    Finding,
    InputsNotCompared,
    KindNotCompared,
    LacksParameter,
    LacksTokens,
    LedgerNotCompared,
    NarrowedState,
    NonFinite,
    NormCount,
    NotCompared,
    Note,
    NotFinite,
    NotLogged,
    NotSelected,
    NotShown,
    NotTraced,
    NotWritten,
    OnlyIn,
    OtherClip,
    OtherCount,
    OtherDtype,
    OtherInput,
    OtherLengths,
    OtherNorm,
    OtherNumUpdates,
    OtherPlaces,
    OtherRecomputation,
    OtherShape,
    OtherStart,
    OtherUpdateRows,
    OtherWeight,
    PartlyWritten,
    RoundedOtherwise,
    RoundingRule,
    RowsOnlyIn,
    SketchTokensNotCompared,
    SketchWeightsNotCompared,
    Unmatched,
    other_side,
)
from mock_scheduler.comparison.pairing.selection import Selection
from mock_scheduler.comparison.tensors import LedgerComparison, LedgerDifference
from mock_scheduler.config.instruments import LEDGER_KINDS, TRACE_KINDS
from mock_scheduler.support.text import count_of, in_words, list_some
from mock_scheduler.trace.entries import LedgerCall, TraceKey
from mock_scheduler.trace.names import CLIP
from mock_scheduler.verdict.wording.residuals import describe_narrowing, describe_residual

_NUM_NAMED = 3
_SAME_START = "both runs must start from the same weights, to the last bit"


def describe_finding(finding: Finding) -> str:
    """Says what is missing or cannot be subtracted, and where: ``gradient of w at step 0, update 0 has shape …``."""
    fact = finding.fact
    match fact:
        case RowsOnlyIn() | OtherLengths() | OtherNumUpdates() | OtherUpdateRows():
            return _describe_rows(fact, finding.step)
        case NotLogged():
            return _describe_not_logged(fact, finding)
        case NotSelected(side=side, num_tensors=count, reason=reason):
            what = count_of(count, f"tensor of kind {finding.kind}", f"tensors of kind {finding.kind}")
            verb = "is" if count == 1 else "are"
            return f"{what} of the {other_side(side)} {verb} not traced by the {side}: {_describe_setting(reason)}"
        case LacksTokens(missing=missing):
            return f"{_name_subject(finding)}: {missing}"
        case _:
            return f"{_name_subject(finding)} {_describe_fact(fact)}"


def describe_note(note: Note) -> str:
    """Says how a comparison is limited."""
    match note:
        case InputsNotCompared():
            return (
                "no input (tokens, labels, loss_mask) is in both traces, so rows are known to be the same by their "
                "identities alone: add input to trace.kinds"
            )
        case LedgerNotCompared(kind=kind, only=only, has_other_settings=has_other_settings):
            other = "settings, which may change them" if has_other_settings else "layouts"
            why = f"the two runs have different {other}" if only is None else f"only the {only} traced it"
            return f"the ledger of {kind} calls was not compared: {why}"
        case PartlyWritten(key=key, places=places):
            return f"{key.describe()} {_describe_places(places)}, as some ranks wrote no trace"
        case FewerBits() as fewer:
            times = f", times {fewer.divisor}," if fewer.divisor > 1 else ""
            of = f"of {fewer.only} at" if fewer.only else "of"
            return (
                f"gradients {of} step {fewer.step}, update {fewer.update}{times} have a mantissa of "
                f"{fewer.num_bits:.1f} bits in the mean, in the baseline {fewer.baseline_bits:.1f}: they are sums of "
                "coarser numbers, as where a buffer is rounded to a narrower type before its reduction, or of fewer"
            )
        case SketchTokensNotCompared(step=step):
            return f"step {step}: sketches of tokens were not compared, as the rows are not in the same order"
        case SketchWeightsNotCompared():
            return "weights are not compared at level sketch: their rounding is judged bit by bit"
        case KindNotCompared(kind=kind, names=names):
            verb = "is" if len(names) == 1 else "are"
            listed = list_some(names, _NUM_NAMED, ", ")
            return f"no {in_words(kind)} was compared at all: {listed} {verb} not shown by both runs"


def describe_reasons(item: NotCompared) -> str:
    """Says why a tensor was not compared."""
    return "; ".join(_describe_absence(reason) for reason in item.reasons)


def describe_ledger(ledger: LedgerComparison) -> str:
    """Says the first unequal call; empty where all are equal."""
    found = ledger.difference
    if found is None:
        return ""
    if found.group:
        names = [place.describe() for place in found.places]
        return f"step {ledger.step}: {_describe_calls(f'group {list(found.group)}, collective', found, names)}"
    text = _describe_calls(f"{ledger.kind} call", found, ("the baseline", "the candidate"))
    return f"step {ledger.step}, {found.places[0].describe()}: {text}"


def describe_selection(selection: Selection) -> str:
    """Says the selection of tensors: ``steps 5, kinds logits, names decoder.*``; empty where it is everything."""
    parts = [] if selection.steps is None else [f"steps {selection.steps}"]
    if selection.kinds is not None:
        kinds = (kind for kind in (*TRACE_KINDS, *LEDGER_KINDS) if kind in selection.kinds)
        parts.append(f"kinds {', '.join(kinds)}")
    if selection.patterns != ("*",):
        parts.append(f"names {', '.join(selection.patterns)}")
    return ", ".join(parts)


def describe_unmatched(unmatched: Sequence[Unmatched]) -> str:
    """Returns ``nothing of both sides is chosen by pattern 'decoder.layer.*'; the nearest are decoder.layers.0.…``."""
    texts = []
    for item in unmatched:
        have = "the nearest are" if item.what == "pattern" else "they have"
        nearest = f"; {have} {', '.join(item.nearest)}" if item.nearest else ""
        texts.append(f"nothing of both sides is chosen by {item.what} {item.chosen!r}{nearest}")
    return "; ".join(texts)


def _name_subject(finding: Finding) -> str:
    kind = next((kind for kind in TRACE_KINDS if kind == finding.kind), None)
    if isinstance(finding.fact, OtherClip):
        model = finding.name.removesuffix(CLIP).removesuffix(".")
        return f"clip of the gradients{f' of {model}' if model else ''} at step {finding.step}, update {finding.update}"
    if kind is None or finding.update is None:
        return f"metric {finding.name} at step {finding.step}" if finding.kind == "metric" else finding.name
    return TraceKey(step=finding.step, update=finding.update, kind=kind, name=finding.name).describe()


def _describe_fact(fact: Fact) -> str:
    match fact:
        case OnlyIn(side=side):
            return f"was traced by the {side} but not by the {other_side(side)}"
        case OtherShape(baseline=mine, candidate=other):
            return f"has shape {list(mine)} in the baseline and {list(other)} in the candidate"
        case OtherDtype(baseline=mine, candidate=other):
            return f"has dtype {mine} in the baseline and {other} in the candidate"
        case OtherCount(baseline=mine, candidate=other):
            return f"has {mine:,} elements in the baseline and {other:,} in the candidate"
        case OtherPlaces() as places:
            return _describe_places(places)
        case NotFinite() as broken:
            return _describe_broken(broken)
        case CopiesDiffer(side=side, conflict=conflict):
            return f"has copies in the {side} that differ: {conflict.describe()}"
        case OtherInput() as other:
            return _describe_input(other)
        case OtherStart(rounded=RoundedOtherwise() as rounded):
            return _describe_rounded(rounded)
        case OtherStart() as start:
            return f"differs: {_describe_start(start)}{_SAME_START}"
        case LacksParameter(needed_by="update"):
            return "was traced without the parameter before it, so its update cannot be judged"
        case LacksParameter():
            return "was traced without the parameter that it is rounded from"
        case OtherWeight(side=side, is_of_before=True):
            return (
                f"is the rounded parameter of before the update in the {side}: what the optimizer updated was not "
                "copied to the model, or to another rank's shard of it"
            )
        case OtherWeight(side=side):
            return f"is not the rounded parameter in the {side}: the model computes with other weights"
        case OtherNorm() as norm:
            return _describe_norm(norm)
        case OtherClip() as clip:
            return _describe_clip(clip)
        case OtherRecomputation() as other:
            return _describe_recomputation(other)
        case NarrowedState(num_bits=bits, baseline_bits=mine, num_tensors=count):
            more = f", as are {count - 1} more of its kind" if count > 1 else ""
            return f"is {describe_narrowing(bits)} in the candidate{more}; the baseline has {mine} bits"
    raise TypeError(f"{type(fact).__name__} is no fact of one tensor")


def _describe_clip(clip: OtherClip) -> str:
    times = f"{clip.factor:.6g} times"
    if clip.place:
        return (
            f"has no one coefficient in the candidate: by the moments, the ranks at {clip.place} multiply by {times} "
            f"what those at {clip.than} do"
        )
    if clip.names:
        names = list_some(list(clip.names), _NUM_NAMED)
        return f"has no one coefficient in the candidate: by the moments, {names} have {times} that of the others"
    return (
        f"is not that of their norm in the candidate: by the moments, the coefficient is {times} what the baseline's "
        "clip makes of such a norm"
    )


def _describe_recomputation(other: OtherRecomputation) -> str:
    said = "differs from its first pass in the candidate: the backward pass computed it again and got other values"
    if other.relative is None:
        return said
    elements = f"{other.num_different:,} of {count_of(other.num_elements, 'element')}"
    micro_batch = f"micro-batch {other.micro_batch}, " if other.micro_batch is not None else ""
    place = f", first in {micro_batch}sample {other.sample}, token {other.position}" if other.sample else ""
    return f"{said} ({elements}, by {other.relative:.3g} of their size{place})"


def _describe_places(places: OtherPlaces) -> str:
    mine = count_of(places.num_baseline, places.what)
    return (
        f"is defined at other {places.what}s: {mine} only in the baseline, {places.num_candidate} only in the candidate"
    )


def _describe_norm(norm: OtherNorm) -> str:
    times = f"{norm.stated / norm.made:.6g} times it" if norm.made else "not 0"
    said = (
        f"is {norm.stated:.7g} in the candidate, whose own gradients have the norm {norm.made:.7g} ({times}); the "
        "baseline's is the norm of its gradients"
    )
    return said if norm.count is None else f"{said}. {_describe_count(norm.count)}"


def _describe_count(count: NormCount) -> str:
    names = list_some(list(count.names), _NUM_NAMED)
    match count.form:
        case "copies":
            which = names or "what they hold as copies"
            return f"It counts {which} once for each of the {count.place} ranks"
        case "part":
            return f"It is the norm of what the ranks at {count.place} hold: nothing was added over the others"
        case "without":
            return f"It leaves out {names}"


def _describe_broken(broken: NotFinite) -> str:
    mine, other = (_count_broken(side) for side in (broken.baseline, broken.candidate))
    if mine == other:
        return f"has {mine} in both runs"
    if mine and other:
        return f"has {mine} in the baseline and {other} in the candidate"
    return f"has {mine} in the baseline" if mine else f"has {other} in the candidate"


def _count_broken(side: NonFinite | None) -> str:
    if side is None:
        return ""
    counts = (("NaN", side.num_nan), ("infinity", side.num_infinite))
    return " and ".join(f"{what} in {count} of {side.num_elements} elements" for what, count in counts if count)


def _describe_rounded(rounded: RoundedOtherwise) -> str:
    how = _ROUNDED[rounded.how]
    count = f"{rounded.num_different:,} of {count_of(rounded.num_elements, 'element')}"
    return (
        f"is not the {other_side(rounded.side)}'s, rounded to {rounded.dtype}, in the {rounded.side}: {count} differ, "
        f"{how}; a run in {rounded.dtype} must start from the same weights, rounded to nearest"
    )


_ROUNDED: Mapping[RoundingRule, str] = {
    "towards zero": "all cut off towards zero",
    "to a neighbour": "each by the spacing of two numbers",
    "other values": "some by more than any rounding",
}


def _describe_start(start: OtherStart) -> str:
    if start.residual is not None:
        return f"{describe_residual(start.residual)}; "
    return f"candidate is the baseline's {start.same_as}; " if start.same_as is not None else ""


def _describe_not_logged(fact: NotLogged, finding: Finding) -> str:
    sides = f"was logged by the {other_side(fact.absent)} but not by the {fact.absent}"
    if fact.num_missing is None:
        return f"{finding.name} {sides}"
    steps = f"at {fact.num_missing} of {count_of(fact.num_steps, 'step')}, first at step {finding.step}"
    return f"metric {finding.name} {sides} {steps}"


def _describe_rows(fact: RowsOnlyIn | OtherLengths | OtherNumUpdates | OtherUpdateRows, step: int) -> str:
    match fact:
        case RowsOnlyIn(side=side, num_rows=count, num_all=total, first=first):
            verb = "is" if count == 1 else "are"
            rows = f"{count_of(count, 'row')} of {total} of step {step} {verb} in the {side} only"
            return f"{rows}: {_list_first(first, count)}"
        case OtherLengths(num_rows=count, first=first):
            named = [f"{row.identity} has {_describe_lengths(row.baseline, row.candidate)}" for row in first]
            verb = "has" if count == 1 else "have"
            rows = f"{count_of(count, 'row')} of step {step} {verb} another length"
            return f"{rows}: {_list_first(named, count)}; their first tokens are compared"
        case OtherNumUpdates(baseline=mine, candidate=other):
            return f"step {step} has {count_of(mine, 'update')} in the baseline and {other} in the candidate"
        case OtherUpdateRows(update=update, num_baseline=mine, num_candidate=other):
            sides = f"{mine} only in the baseline, {other} only in the candidate"
            example = f", the first is {fact.first}" if fact.first else ""
            return f"update {update} of step {step} trains on other rows: {sides}{example}"


def _describe_input(other: OtherInput) -> str:
    if not other.row:
        return "differs; which rows, whole tensors alone tell: trace.level=full"
    values = f"{other.baseline} in the baseline and {other.candidate} in the candidate"
    place = f"position {other.position} of row {other.row}"
    return f"differs at {count_of(other.num_tokens, 'token')}, first at {place}: {values}"


def _describe_lengths(mine: int, other: int) -> str:
    return f"{mine} tokens in the baseline and {other} in the candidate"


def _list_first(first: Sequence[str], count: int) -> str:
    more = count - len(first)
    return "; ".join([*first, *([f"and {more:,} more"] if more else [])])


def _describe_absence(reason: NotShown | NotWritten) -> str:
    if isinstance(reason, NotShown):
        return reason.reason
    return f"only global ranks {', '.join(map(str, reason.ranks))} wrote this trace"


def _describe_setting(reason: NotTraced) -> str:
    verb = "is" if reason.setting == "exclude" else "are"
    return f"its trace.{reason.setting} {verb} {', '.join(reason.values)}"


def _describe_calls(what: str, found: LedgerDifference, names: Sequence[str]) -> str:
    """Says ``collective 3 is all_reduce of 64 float32 over ranks 0, 1 in …, and absent (2 in all) in …``."""
    sides = [
        f"absent ({count} in all)" if call is None else _describe_call(call)
        for call, count in zip(found.calls, found.num_calls, strict=True)
    ]
    return f"{what} {found.position} is {sides[0]} in {names[0]}, and {sides[1]} in {names[1]}"


def _describe_call(call: LedgerCall) -> str:
    group = f" over ranks {', '.join(map(str, call.group))}" if call.group else ""
    return f"{call.operation} of {call.num_elements:,} {call.dtype}{group}"
