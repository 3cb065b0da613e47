"""Puts a localisation into words: the one sentence, each graft's finding, and the command to open the traces."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from mock_scheduler.comparison.tensors import TensorDifference
from mock_scheduler.comparison.thresholds import ENOUGH, PARALLEL
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.support.text import count_of, in_words, list_some
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.verdict.localisation import (
    DifferingTensor,
    GraftedModule,
    GraftEnd,
    GraftEndCause,
    Localisation,
    module_kind,
    pass_of,
)
from mock_scheduler.verdict.wording.findings import describe_finding
from mock_scheduler.verdict.wording.residuals import describe_locality, describe_residual

_NOUNS: Mapping[TraceKind, str] = {
    "initial": "before the step",
    "recomputed": "",
    "activation": "output",
    "router": "",
    "logits": "output",
    "output": "",
    "score": "before the first update",
    "activation_gradient": "gradient at its output",
    "gradient_norm": "",
    "loss": "",
    "input": "",
    "advantage": "",
}
_NUM_NAMED = 3
_NUM_AMPLIFIERS = 5


def describe_localisation(found: Localisation) -> str:
    """The one sentence: the place, the tensor, its look, and how far the rest follows from it."""
    place = [f"step {found.step}", *([f"update {found.update}"] if found.update else []), found.phase]
    if found.num_alike:
        subject = _describe_alike(found)
    elif len(found.causes) > 1:
        subject = _describe_causes(found.causes)
    else:
        subject = (
            f"{_describe_subject(found.origin.key)}: {describe_look(found.origin)}{_describe_maker(found.made_by)}"
        )
    return f"{', '.join(place)}, {subject}; {'; '.join(_list_rest(found))}"


def _describe_causes(causes: Sequence[GraftedModule]) -> str:
    """Several causes; those of a backward pass with the modules that make them, which may all be of one kind."""
    kinds = {module_kind(cause.made_by) if cause.made_by else "" for cause in causes}
    kind = kinds.pop() if len(kinds) == 1 else ""
    texts = [
        f"{_describe_subject(cause.tensor.key)} ({describe_look(cause.tensor)}{_describe_maker(cause.made_by)})"
        for cause in causes
        if cause.tensor is not None
    ]
    rest = len(texts) - _NUM_NAMED
    listed = " and ".join((*texts[:_NUM_NAMED], *([f"{rest} more"] if rest > 0 else [])))
    return f"{len(causes)} causes{f', each made behind a {kind}' if kind else ''}: {listed}"


def _describe_alike(found: Localisation) -> str:
    """One cause of all modules of a kind: ``every norm (5), each by itself, first decoder.layers.0.… output``."""
    kind, count = module_kind(found.name), len(found.causes)
    which = f"every {kind} ({count})" if count == found.num_alike else f"{count} of {found.num_alike} {kind}s"
    return f"{which}, each by itself, first {_describe_subject(found.origin.key)}: {describe_look(found.origin)}"


def localisation_rows(found: Localisation | None) -> tuple[tuple[str, str], ...]:
    """Where a divergence begins, its causes, the modules behind them, and the traces, as label and text."""
    if found is None:
        return ()
    rows = [("where", f"step {found.step}, update {found.update}, {found.phase}: {found.name}")]
    rows += [
        ("cause", f"{_name_module(cause)}: {describe_module(cause, found, is_first=number == 0)}")
        for number, cause in enumerate(found.causes)
    ]
    rows += [
        ("passes it on", f"{_name_module(module)}: {describe_module(module, found)}")
        for module in found.amplifiers[:_NUM_AMPLIFIERS]
    ]
    rest = len(found.amplifiers) - _NUM_AMPLIFIERS
    rows += [("", f"and {rest:,} more, in the JSON result")] if rest > 0 else []
    rows.append(("traces", " and ".join(map(str, found.trace_dirs))))
    return tuple(rows)


def describe_module(module: GraftedModule, found: Localisation, *, is_first: bool = True) -> str:
    """The finding of the grafts on one module; ``is_first``: no cause stands before it."""
    if module.tensor is None:
        return f"only passes on what {module.cause} does{_describe_growth(module)}"
    put_right = "" if is_first else " with the causes before it put right"
    look = f"{describe_look(module.tensor)}{_describe_maker(module.made_by)}"
    text = f"{look}; all before it is {_equal(found)}{put_right}"
    if not module.num_healed:
        return f"{text}, and nothing behind it is mended by the reference's tensor in its place"
    healed = f"{count_of(module.num_healed, 'tensor')} behind it {_be(module.num_healed)}"
    return f"{text}, and with the reference's tensor in its place {healed}"


def compare_command(found: Localisation) -> str:
    """Returns the command to open the two traces."""
    return shlex.join(["mock-scheduler", "compare", *map(str, found.trace_dirs), "--steps", str(found.step)])


def describe_look(item: DifferingTensor) -> str:
    """Returns the look and place of a difference, or at least its size."""
    difference = item.difference
    if difference is None or item.finding is not None:
        return _describe_problem(item)
    details = [] if difference.residual is None else [describe_residual(difference.residual)]
    if not details and not difference.bit_equal:
        details = [_describe_size(difference)]
    details += [describe_locality(difference.localities[0])] if difference.localities else []
    return ", ".join(details) or _describe_problem(item)


def _describe_problem(item: DifferingTensor) -> str:
    if item.conflict is not None:
        return f"copies within the candidate differ: {item.conflict.describe()}"
    return "" if item.finding is None else describe_finding(item.finding)


def _describe_size(difference: TensorDifference) -> str:
    figures = difference.figures
    # The ratio must make most of the difference, and direction as well as size fit.
    is_ratio = figures is not None and (figures.slope - 1.0) ** 2 >= ENOUGH * figures.relative**2
    if figures is not None and is_ratio and figures.cosine >= PARALLEL:
        return f"candidate is {figures.slope:.6g} times the baseline (relative difference {difference.relative:.3g})"
    return f"differs by {difference.relative:.3g}"


def _describe_subject(key: TraceKey) -> str:
    """Returns ``decoder.layers.1.input_layernorm.weight gradient``."""
    return " ".join(filter(None, (key.name, _NOUNS.get(key.kind, key.kind))))


def _name_module(module: GraftedModule) -> str:
    kind = "activation gradient" if module.kind == "activation_gradient" else "activation"
    return f"{module.name} ({kind})"


def _describe_maker(made_by: str) -> str:
    """The backward pass behind a gradient at an output; its own gradient is still equal."""
    if not made_by:
        return ""
    behind = "that of the loss" if made_by == "loss" else f"the backward pass behind {made_by}"
    return f", made by {behind}"


def _describe_growth(module: GraftedModule) -> str:
    if module.growth is None or module.relative is None:
        return ""
    times = f"{module.growth:.2g}"
    growth = "as it is" if times == "1" else f"{times} times its relative difference"
    return f": {module.relative:.3g}, {growth}"


def _list_rest(found: Localisation) -> list[str]:
    if found.causes:
        return _list_grafts(found)
    parts = _list_also(found)
    good = f" ({found.num_equal} up to the end of that pass)" if found.num_equal else ""
    parts.append(f"every other tensor {_equal(found)}{good}")
    if found.num_later:
        verb = "follows" if found.num_later == 1 else "follow"
        parts.append(f"{count_of(found.num_later, 'later tensor')} {verb} from it")
    # Behind the only tensor of its pass a graft would show nothing.
    if found.end is None or (found.end.cause is GraftEndCause.NO_GRAFT and not found.also):
        return parts
    return [*parts, f"no graft: {describe_end(found.end)}"]


def _list_grafts(found: Localisation) -> list[str]:
    """How many tensors before the causes are equal, and the rest behind the grafts."""
    what = "activations" if found.causes[0].kind == "activation" else "activation gradients"
    both = "it" if len(found.causes) == 1 else "them"
    put_in = f"with the reference's {what} in the place of {both}"
    parts = ["nothing before it"]
    if found.num_before:
        parts = [f"the {count_of(found.num_before, 'tensor')} before it {_be(found.num_before)} {_equal(found)}"]
    if found.end is not None:
        names = list_some(found.remaining, _NUM_NAMED, ", ")
        parts.append(f"{put_in}, {names} still differ: {describe_end(found.end)}")
    elif found.num_others:
        others = f"the {count_of(found.num_others, 'other tensor')} of the pass that differed"
        passes = "it passes" if found.num_others == 1 else "they pass"
        parts.append(f"{put_in}, {others} {_be(found.num_others)} {_equal(found)}: {passes} it on")
    else:
        parts.append("nothing else of the pass differs")
    if found.reductions:
        names = _list_names(found.reductions)
        look = describe_look(found.reductions[0])
        parts.append(f"then gradients of {names} still differ, {look}: their own reduction")
    return parts


def _list_also(found: Localisation) -> list[str]:
    """The other differing tensors of the same pass, and whether they look as the first one does."""
    if not found.also:
        return []
    names = _list_names(found.also)
    if pass_of(found.origin.key) != "gradient":
        return [f"then {names}"]
    look = describe_look(found.origin)
    is_like = all(describe_look(item) == look for item in found.also if _has_residual(item))
    word = f"so {_be(len(found.also))}" if is_like and _has_residual(found.origin) else "also"
    return [f"{word} {count_of(len(found.also), 'other')}: {names}"]


def describe_end(end: GraftEnd) -> str:
    """Why no further graft was made."""
    name = end.key.name
    match end.cause:
        case GraftEndCause.STILL_DIFFERS:
            return f"{name} differs although the reference's tensor was put in"
        case GraftEndCause.TOKENS_NOWHERE:
            return (
                f"tokens of {name} are held by no rank, so there is nothing in whose place the reference's could be "
                "put; the cause lies in which rows the ranks were given, not in a module"
            )
        case GraftEndCause.NO_GRAFT:
            return f"{name} ({in_words(end.key.kind)}) is nothing that can be put in"
        case GraftEndCause.NOT_TRACED:
            return f"{name} is not in the reference's trace, which has the first that differ alone"
        case GraftEndCause.RUNS_SPENT:
            return f"no further run was made after {end.num_runs}; the next cause would be {name}"
        case GraftEndCause.RUN_FAILED:
            return f"the graft could not be made: {end.error}"


def _list_names(items: Sequence[DifferingTensor]) -> str:
    return list_some([item.key.name for item in items], _NUM_NAMED, ", ")


def _has_residual(item: DifferingTensor) -> bool:
    return item.difference is not None and item.difference.residual is not None


def _equal(found: Localisation) -> str:
    return "equal" if found.is_exact else "within their bounds"


def _be(count: int) -> str:
    return "is" if count == 1 else "are"
