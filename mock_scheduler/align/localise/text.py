"""What localisation found, in words: the one sentence, what each graft showed, and the command that opens the traces.

Contract: pure; every number and name comes from the comparisons.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from mock_scheduler.align.localise.decisions import Differing, GraftWalk, PassName, pass_of
from mock_scheduler.compare.tensors import TensorComparison, TensorDifference
from mock_scheduler.support.text import count_of, list_some
from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.kinds import TraceKind
from mock_scheduler.verdict.proofs import GraftedModule
from mock_scheduler.verdict.wording.residuals import describe_locality, describe_residual

#: In which of its parts a step is, as a sentence says it: main gradients are made in the backward pass.
_SAID: dict[PassName, str] = {"gradient": "backward", "loss": "forward"}
_NOUNS: dict[TraceKind, str] = {
    "initial": "before the step",
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
#: How near to 1 a cosine is of a tensor that is another one times a number.
_PARALLEL = 1e-9


def said_pass(key: TraceKey) -> str:
    """``forward``, ``backward``, ``update``; ``start`` and ``inputs`` for what stands before them."""
    name = pass_of(key)
    return _SAID.get(name, name)


def describe_place(key: TraceKey) -> str:
    """``step 3, backward``; the update where it is not the first."""
    return ", ".join([f"step {key.step}", *([f"update {key.update}"] if key.update else []), said_pass(key)])


def describe_subject(key: TraceKey) -> str:
    """``decoder.layers.1.input_layernorm.weight gradient``."""
    noun = _NOUNS.get(key.kind, key.kind)
    return f"{key.name} {noun}".strip()


def describe_look(item: Differing) -> str:
    """What a difference looks like, where it lies, or at least how large it is."""
    difference = item.difference
    if difference is None:
        return item.problem
    details = [] if difference.residual is None else [describe_residual(difference.residual)]
    if not details and not difference.bit_equal:
        details = [_describe_size(difference)]
    details += [describe_locality(difference.localities[0])] if difference.localities else []
    return ", ".join(details) or item.problem


def describe_sentence(
    origin: Differing,
    differing: Sequence[Differing],
    comparison: TensorComparison,
    *,
    walk: GraftWalk | None,
    reductions: Sequence[Differing],
    is_exact: bool,
) -> str:
    """The one sentence. differing, comparison: of the origin's step without a graft. walk: of the origin's pass;
    ``None`` where nothing can be put in. reductions: main gradients that differ by themselves, behind the grafts."""
    key, equal = origin.key, "equal" if is_exact else "within their bounds"
    causes = walk.causes if walk is not None else []
    place, name = describe_place(key), pass_of(key)
    if len(causes) > 1:
        listed = " and ".join(f"{describe_subject(item.key)} ({describe_look(item)})" for item in causes)
        subject = f"{len(causes)} causes: {listed}"
    else:
        subject = f"{describe_subject(key)}: {describe_look(origin)}{_describe_maker(key, comparison)}"
    if walk is not None and causes:
        rest = _describe_walk(walk, comparison, key, equal)
        rest += _describe_reductions(reductions)
    elif name == "gradient":
        rest = _describe_gradients(origin, differing, comparison, equal)
    else:
        rest = _describe_others(origin, differing, comparison, equal)
        if walk is not None and walk.ended:
            rest += f"; no graft: {walk.ended}"
    return f"{place}, {subject}; {rest}"


def describe_causes(walk: GraftWalk, *, is_exact: bool) -> tuple[GraftedModule, ...]:
    """Each cause, and what its graft healed."""
    equal = "equal" if is_exact else "within their bounds"
    modules: list[GraftedModule] = []
    for item, healed in zip(walk.causes, walk.healed, strict=True):
        put_in = " with the causes before it put right" if modules else ""
        text = f"{describe_look(item)}; all before it is {equal}{put_in}"
        if healed:
            verb = "is" if len(healed) == 1 else "are"
            text += f", and with the reference's tensor in its place {count_of(len(healed), 'tensor')} behind it {verb}"
        else:
            text += ", and nothing behind it is mended by the reference's tensor in its place"
        modules.append(GraftedModule(name=item.key.name, kind=walk.kind, is_cause=True, text=text))
    return tuple(modules)


def describe_amplifiers(walk: GraftWalk) -> tuple[GraftedModule, ...]:
    """Whatever was mended by a graft before it, in order, with how it compares with the cause."""
    modules = []
    for cause, healed in zip(walk.causes, walk.healed, strict=True):
        for item in healed:
            text = f"only passes on what {cause.key.name} does{_describe_growth(cause, item)}"
            modules.append(GraftedModule(name=item.key.name, kind=walk.kind, is_cause=False, text=text))
    return tuple(modules)


def compare_command(trace_dirs: tuple[Path, Path], step: int) -> str:
    """What opens the two traces."""
    return shlex.join(["mock-scheduler", "compare", *map(str, trace_dirs), "--steps", str(step)])


def _describe_size(difference: TensorDifference) -> str:
    figures = difference.figures
    if figures is not None and abs(figures.cosine - 1.0) < _PARALLEL:
        return f"candidate is {figures.slope:.6g} times the baseline (relative difference {difference.relative:.3g})"
    return f"differs by {difference.relative:.3g}"


def _describe_maker(key: TraceKey, comparison: TensorComparison) -> str:
    """Of a gradient at an output: which module's backward pass comes before it, whose own gradient is still equal."""
    if pass_of(key) != "backward":
        return ""
    keys = [item.key for item in comparison.differences if pass_of(item.key) == "backward"]
    same = [other for other in keys if (other.step, other.update) == (key.step, key.update)]
    place = same.index(key) if key in same else 0
    return f", made by the backward pass behind {same[place - 1].name}" if place else ", made by that of the loss"


def _describe_growth(cause: Differing, item: Differing) -> str:
    if cause.relative is None or item.relative is None or not cause.relative:
        return ""
    times = f"{item.relative / cause.relative:.2g}"
    growth = "as it is" if times == "1" else f"{times} times its relative difference"
    return f": {item.relative:.3g}, {growth}"


def _describe_walk(walk: GraftWalk, comparison: TensorComparison, key: TraceKey, equal: str) -> str:
    what = "activations" if walk.kind == "activation" else "activation gradients"
    both = "it" if len(walk.causes) == 1 else "them"
    num_others = len(walk.before) - len(walk.causes)
    before = _count_before(comparison, key)
    parts = [f"the {count_of(before, 'tensor')} before it {_be(before)} {equal}" if before else "nothing before it"]
    if walk.is_explained:
        if num_others:
            others = count_of(num_others, "other tensor")
            passes = "it passes" if num_others == 1 else "they pass"
            parts.append(
                f"with the reference's {what} in the place of {both}, the {others} of the pass that differed "
                f"{_be(num_others)} {equal}: {passes} it on"
            )
        else:
            parts.append("nothing else of the pass differs")
    else:
        names = list_some([item.key.name for item in walk.remaining], _NUM_NAMED, ", ")
        parts.append(f"with the reference's {what} in the place of {both}, {names} still differ: {walk.ended}")
    return "; ".join(parts)


def _describe_reductions(reductions: Sequence[Differing]) -> str:
    if not reductions:
        return ""
    names = list_some([item.key.name for item in reductions], _NUM_NAMED, ", ")
    return f"; then gradients of {names} still differ, {describe_look(reductions[0])}: their own reduction"


def _describe_gradients(
    origin: Differing, differing: Sequence[Differing], comparison: TensorComparison, equal: str
) -> str:
    key = origin.key
    others = [item for item in differing if pass_of(item.key) == "gradient" and item.key.update == key.update][1:]
    parts = []
    if others:
        alike = all(describe_look(item) == describe_look(origin) for item in others if _has_residual(item))
        names = list_some([item.key.name for item in others], _NUM_NAMED, ", ")
        word = f"so {_be(len(others))}" if alike and _has_residual(origin) else "also"
        parts.append(f"{word} {count_of(len(others), 'other')}: {names}")
    return "; ".join([*parts, _describe_equal(origin, differing, comparison, equal)])


def _describe_others(
    origin: Differing, differing: Sequence[Differing], comparison: TensorComparison, equal: str
) -> str:
    same = [item for item in differing if pass_of(item.key) == pass_of(origin.key)][1:]
    parts = []
    if same:
        parts.append(f"then {list_some([item.key.name for item in same], _NUM_NAMED, ', ')}")
    return "; ".join([*parts, _describe_equal(origin, differing, comparison, equal)])


def _describe_equal(origin: Differing, differing: Sequence[Differing], comparison: TensorComparison, equal: str) -> str:
    """How much of the same update and before is equal, and what comes later."""
    key = origin.key
    bad = {item.key for item in differing}
    upto = [item.key for item in comparison.differences if _is_upto(item.key, key)]
    good = [other for other in upto if other not in bad]
    later = [item for item in differing if not _is_upto(item.key, key)]
    text = f"every other tensor {equal}" + (f" ({len(good)} up to the end of that pass)" if good else "")
    if later:
        text += f"; {count_of(len(later), 'later tensor')} {'follows' if len(later) == 1 else 'follow'} from it"
    return text


def _is_upto(key: TraceKey, origin: TraceKey) -> bool:
    """Whether a tensor is of the origin's pass or one before it, of the origin's step and update."""
    place = (key.update, _ORDER.index(pass_of(key)))
    return key.step == origin.step and place <= (origin.update, _ORDER.index(pass_of(origin)))


#: In the order of a step.
_ORDER: tuple[PassName, ...] = get_args(PassName)


def _count_before(comparison: TensorComparison, key: TraceKey) -> int:
    """Tensors of the step that were compared before this one."""
    keys = [item.key for item in comparison.differences if item.key.step == key.step]
    return keys.index(key) if key in keys else 0


def _has_residual(item: Differing) -> bool:
    return item.difference is not None and item.difference.residual is not None


def _be(count: int) -> str:
    return "is" if count == 1 else "are"
