"""Bounds from theory alone: of a model as deep as the names of its tensors say, whatever they say."""

from __future__ import annotations

import pytest

from mock_scheduler.comparison.noise.theory import TheoryBounds, count_layers
from mock_scheduler.comparison.thresholds import SAFETY, THEORY_FACTOR, THEORY_GROWTH
from mock_scheduler.trace.entries import TraceKey


@pytest.mark.parametrize(
    ("name", "num_layers"),
    [
        ("decoder.layers.3.mlp.weight", 4),
        ("decoder.layers.999999999.mlp.weight", 1_000_000_000),
        (f"decoder.layers.{'9' * 20}.mlp.weight", 0),
        (f"mtp.layers.{'9' * 5_000}", 0),
    ],
)
def test_a_name_of_any_layer_has_a_bound(name: str, num_layers: int) -> None:
    """A tensor of layer 10^20 ended the comparison in an OverflowError."""
    assert count_layers([name, "embedding.weight"]) == num_layers
    bounds = TheoryBounds(num_layers=num_layers, epsilon=1e-7, distances={})
    for kind in ("activation", "gradient"):
        found = bounds.tensor(TraceKey(step=0, update=0, kind=kind, name=name)).relative  # type: ignore[arg-type]
        assert 0.0 < found <= 1.001 * SAFETY * THEORY_FACTOR * THEORY_GROWTH**500 * 1e-7
