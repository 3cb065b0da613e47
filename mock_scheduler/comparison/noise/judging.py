"""All tests for errors within the noise, and the step from which the noise hides everything."""

from __future__ import annotations

from collections.abc import Mapping

from mock_scheduler.comparison.bounds.measured import NoiseBounds
from mock_scheduler.comparison.noise.drift import judge_drifts
from mock_scheduler.comparison.noise.slopes import judge_behind_equal_forward, judge_slopes, summarise_slopes
from mock_scheduler.comparison.noise.suspicions import NoiseVerdict, NoisyPlace, Suspicion, TestSummary
from mock_scheduler.comparison.tensors import JUDGED_KINDS, TensorComparison, TensorDifference
from mock_scheduler.comparison.thresholds import MOST_SUSPICIONS
from mock_scheduler.comparison.walk.metrics import MetricComparison


def judge_noise(metrics: MetricComparison | None, tensors: TensorComparison | None, noise: NoiseBounds) -> NoiseVerdict:
    """Tests slopes, also behind an equal forward pass, places and drifts.

    At level ``sketch``, where tensors have no slopes and places, drifts of metrics.
    """
    differences = () if tensors is None else tensors.differences
    numbers: Mapping[str, float] = {} if tensors is None else tensors.numbers
    # Slopes with measured noise first: they say how far noise would have gone.
    slopes, slope_test = judge_slopes(differences, noise, numbers=numbers)
    # A tensor with another scale is told of once, by the test that needs no equal forward pass.
    told = {(item.step, item.update, item.name) for item in slopes}
    behind = judge_behind_equal_forward(differences, noise, numbers=numbers)
    slopes += [item for item in behind if (item.step, item.update, item.name) not in told]
    places = [_from_place(item) for item in differences if item.localities and not item.exceeds]
    drifts, drift_test = judge_drifts(metrics, summarise_slopes(differences, noise), noise)
    # The earliest suspicion is the likeliest cause of the others.
    in_time = sorted([*slopes, *places[:MOST_SUSPICIONS]], key=lambda item: (item.step or 0, item.update or 0))
    tests = (
        slope_test,
        TestSummary(test="locality", num_looked_at=0 if tensors is None else tensors.num_located),
        drift_test,
    )
    return NoiseVerdict(suspicions=(*in_time, *drifts), tests=tests)


def first_hidden_step(tensors: TensorComparison) -> int | None:
    """Finds the step from which no gradient and no parameter is judged, all being noise; ``None`` for none."""
    hidden: int | None = None
    for step in reversed(tensors.steps):
        items = [item for item in tensors.differences if item.key.step == step and item.key.kind in JUDGED_KINDS]
        # A later step that is judged shows that noise did not hide the earlier one for good.
        if not items or any(item.is_judged for item in items):
            break
        hidden = step
    return hidden


def _from_place(item: TensorDifference) -> Suspicion:
    return Suspicion(
        test="locality",
        step=item.key.step,
        update=item.key.update,
        name=item.key.name,
        value=item.localities[0].share,
        limit=item.localities[0].fraction,
        fact=NoisyPlace(key=item.key, locality=item.localities[0]),
    )
