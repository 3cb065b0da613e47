"""Says the bounds of a comparison, and the errors noise does not explain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mock_scheduler.comparison.bounds.bounds import Bounds, OtherCodeBounds, StatedBounds, UniformBounds, WideBounds
from mock_scheduler.comparison.bounds.measured import NoiseBounds
from mock_scheduler.comparison.bounds.tensor_noise import Pool
from mock_scheduler.comparison.noise.suspicions import (
    Drift,
    NoisyPlace,
    ScaledGradients,
    ScaledTensor,
    Suspicion,
    TestSummary,
)
from mock_scheduler.comparison.noise.theory import TheoryBounds
from mock_scheduler.comparison.thresholds import FEWEST_SERIES, SAFETY, SIGNIFICANT, THEORY_FACTOR, THEORY_GROWTH
from mock_scheduler.support.text import count_of
from mock_scheduler.verdict.wording.residuals import describe_locality

_CALIBRATE = (
    "calibrate, run the baseline again, {how}, with perturbation.seed=1 (2, 3, 4, 5) and give the runs as noise "
    "(--noise); mock-scheduler align does so itself"
)
_EQUAL_FORWARD = (
    "the forward pass before it is equal to the last bit, so that only roundings of the backward pass may differ"
)


def describe_bounds_level(bounds: Bounds) -> str:
    """Says in a few words to which bounds everything is held: ``the noise of 5 perturbed runs``."""
    match bounds:
        case UniformBounds(is_exact=True):
            return "the last bit"
        case UniformBounds():
            return "no bound"
        case NoiseBounds(num_runs=count):
            return f"the noise of {count_of(count, 'perturbed run')}"
        case TheoryBounds():
            return "uncalibrated bounds of theory"
        case OtherCodeBounds(inner=inner):
            return describe_bounds_level(inner)
        case WideBounds(inner=inner):
            return f"{describe_bounds_level(inner)}, made smaller for float64"
        case StatedBounds(otherwise=otherwise):
            if not bounds.states_any:
                return describe_bounds_level(otherwise)
            if bounds.states_all:
                return "the stated bounds"
            return f"the stated bounds and {describe_bounds_level(otherwise)}"
    raise TypeError(f"{type(bounds).__name__} has no words")


def describe_bounds(bounds: Bounds) -> str:
    """Says every bound, with the formula of the bounded figure, in one or two sentences."""
    match bounds:
        case UniformBounds(is_exact=True):
            return "Everything must be equal to the last bit."
        case UniformBounds():
            return "Nothing is bounded."
        case NoiseBounds():
            return _describe_noise(bounds)
        case TheoryBounds():
            return _describe_theory(bounds)
        case OtherCodeBounds(inner=inner):
            return f"{describe_bounds(inner)} Other code may round an update by the spacing of the parameter's numbers."
        case WideBounds(inner=inner, factor=factor):
            return f"{1 / factor:.1e} times less than: {describe_bounds(inner)}"
        case StatedBounds():
            return _describe_stated(bounds)
    raise TypeError(f"{type(bounds).__name__} has no words")


def describe_bounds_advice(bounds: Bounds, *, is_by_content: bool = False) -> str:
    """Says how to get bounds that decide more; empty where all are measured or stated.

    ``is_by_content``: the training has data of its own, and no recording.
    """
    match bounds:
        case TheoryBounds():
            return _CALIBRATE.format(how="on the same rows" if is_by_content else "replaying its recording")
        case WideBounds(inner=inner) | OtherCodeBounds(inner=inner):
            return describe_bounds_advice(inner, is_by_content=is_by_content)
        case StatedBounds(states_all=False, otherwise=otherwise):
            return describe_bounds_advice(otherwise, is_by_content=is_by_content)
    return ""


def describe_suspicion(suspicion: Suspicion) -> str:
    """Says the error a test found within every bound."""
    fact = suspicion.fact
    match fact:
        case NoisyPlace(key=key, locality=locality):
            return f"{key.describe()}: {describe_locality(locality)}"
        case ScaledGradients():
            return _describe_gradients(fact, suspicion)
        case ScaledTensor():
            return _describe_scaled(fact, suspicion)
        case Drift():
            return _describe_drift(fact, suspicion)


def describe_test(summary: TestSummary) -> str:
    """Says the extent of a test and the smallest error it would have found, for a verdict that passes."""
    count = summary.num_looked_at
    match summary.test:
        case "locality":
            if not count:
                return "places were not looked for, which takes whole traces of the perturbed runs"
            return f"no place stands out in {count_of(count, 'tensor')}"
        case "drift":
            if not count:
                return f"drift was not tested, which takes more than {FEWEST_SERIES:g} steps or updates"
            return f"{count_of(count, 'series', 'series')} over steps do not drift"
        case "slope":
            if not count:
                return "no slope was tested"
            limits = [] if summary.together is None else [f"{summary.together:.1e} of all gradients of an update"]
            limits += [] if summary.alone is None else [f"{summary.alone:.1e} of one tensor (median)"]
            return f"an error of scale above {' or '.join(limits)} would have been found"


def _describe_noise(bounds: NoiseBounds) -> str:
    more = _describe_factors(bounds.factors)
    times = f"{SAFETY:g} times{f' ({more})' if more else ''}"
    runs, verb = count_of(bounds.num_runs, "run"), "has" if bounds.num_runs == 1 else "have"
    return (
        f"Each tensor's and metric's own noise: {times} the largest difference that {runs} with weights perturbed by "
        f"{bounds.unit_roundoffs:g} unit roundoff {verb} of the baseline, and at least "
        f"{SAFETY * bounds.smallest:.1e} of its size: "
        "||a-b|| / ||a||, of the change d by an update ||d_a-d_b|| / ||d_a||, of metrics |a-b|; integers equal. a "
        f"is the baseline, b the candidate; NaN equals NaN only.{_describe_held_out(bounds.held_out)}"
    )


def _describe_factors(factors: Mapping[Pool, float]) -> str:
    """Says ``of parameter up to 8.3 times, of loss up to 4.5 times``; empty where there are none."""
    largest: dict[str, float] = {}
    for (kind, *_), factor in factors.items():
        largest[kind] = max(factor, largest.get(kind, 0.0))
    return ", ".join(f"of {kind} up to {factor:.2g} times" for kind, factor in largest.items())


def _describe_held_out(beyond: Sequence[int]) -> str:
    if not beyond:
        return ""
    wrong = [count for count in beyond if count]
    each = f", in {count_of(wrong[0], 'figure')}" if len(wrong) == 1 else f", in {', '.join(map(str, wrong))} figures"
    found = f"{len(wrong)} {'is beyond its' if len(wrong) == 1 else 'are beyond their'} bounds{each}"
    return f" Of these {len(beyond)} runs, each held to the others, {found if wrong else 'none is beyond its bounds'}."


def _describe_theory(bounds: TheoryBounds) -> str:
    return (
        f"Uncalibrated: {SAFETY * THEORY_FACTOR:g} · {THEORY_GROWTH:g}^d · (ε + δ) of ||a-b|| / ||a|| after d of "
        f"{bounds.num_layers} layers, with ε {bounds.epsilon:.1e} and δ the relative distance of the weights before "
        f"the update (arXiv 2506.09280, Theorem 5.3); {SIGNIFICANT:g} times that of the change d by an update; "
        "each beyond rounding; integers equal. a is the baseline, b the candidate; NaN equals NaN only."
    )


def _describe_stated(bounds: StatedBounds) -> str:
    if not bounds.states_any:
        return describe_bounds(bounds.otherwise)
    stated = bounds.tolerance
    rows = (
        ("||a-b|| / ||a|| of what the forward pass computes at most", stated.activation),
        ("of gradients and the optimizer's state", stated.gradient),
        ("of the change d by an update ||d_a-d_b|| / ||d_a||", stated.update),
        (f"metrics |a-b| / max(|a|, |b|, {stated.metric_floor or 0:g})", stated.metric),
    )
    listed = "; ".join(f"{what} {value:g}" for what, value in rows if value is not None)
    rest = "" if bounds.states_all else f" All else: {describe_bounds(bounds.otherwise)}"
    return f"Stated: {listed}; each beyond rounding; integers equal.{rest}"


def _describe_gradients(fact: ScaledGradients, suspicion: Suspicion) -> str:
    ratio = _describe_times(fact.ratio, fact.factor)
    slopes = f"median of {count_of(fact.num_tensors, 'slope')}; z {fact.z:.1f}"
    where = f"step {suspicion.step}, update {suspicion.update}: the candidate's gradients together are {ratio}"
    if fact.noise_z is None:
        return f"{where} ({slopes}); {_EQUAL_FORWARD}"
    noise = f"of perturbed runs at most {fact.noise_z:.1f}"
    return f"{where} ({slopes}, {noise}), where noise makes at most {suspicion.limit:.1e} of it"


def _describe_scaled(fact: ScaledTensor, suspicion: Suspicion) -> str:
    begins, num = f"{fact.key.describe()} is {_describe_times(fact.ratio, fact.factor)}", fact.num_others
    if fact.is_behind_equal_forward:
        others = f"; so {'is' if num == 1 else 'are'} {count_of(num, 'other')}" if num else ""
        return f"{begins} and differs by nothing else{others}; {_EQUAL_FORWARD}"
    others = f"; so is that of {count_of(num, f'more {fact.key.kind} tensor')}" if num else ""
    return f"{begins}: {suspicion.value:.1e} off, where noise makes at most {suspicion.limit:.1e}{others}"


def _describe_times(ratio: float, factor: str | None) -> str:
    return f"{ratio:.6g} times the baseline's{'' if factor is None else f' ({factor})'}"


def _describe_drift(drift: Drift, suspicion: Suspicion) -> str:
    what = f"metric {suspicion.name}" if suspicion.name else "the size of the gradients"
    way = "larger" if drift.sigma > 0 else "smaller"
    return (
        f"{what} is {way} in the candidate at nearly every one of {drift.num_signs} places "
        f"({drift.sigma:+.1f} sigma), on average by {abs(drift.mean):.2g} times its noise, where perturbed runs "
        f"have at most {drift.noise_mean:.2g}: a bias that adds up"
    )
