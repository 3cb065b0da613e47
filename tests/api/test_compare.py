"""Options of ``ms.compare`` and ``ms.open_trace`` as one writes them in Python: one or several, and wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mock_scheduler as ms
from mock_scheduler.trace.entries import TraceEntry
from mock_scheduler.trace.shards import whole
from tests.rank_traces import save_rank_trace

NAMES = ("decoder.final_layernorm.weight", "output_layer.weight")


@pytest.fixture
def traces(tmp_path: Path) -> tuple[Path, Path]:
    """Two traces of steps 0 and 1; the second differs in the second gradient of step 1."""
    for run in ("baseline", "candidate"):
        for step in (0, 1):
            values = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
            if run == "candidate" and step == 1:
                values[1] += 0.5
            save_rank_trace(
                tmp_path / run,
                step=step,
                global_rank=0,
                world_size=1,
                coordinates={"tp": 0},
                entries=[
                    TraceEntry(update=0, kind="gradient", spec=whole(name, (2,)), tensor=value)
                    for name, value in zip(NAMES, values, strict=True)
                ],
            )
    return tmp_path / "baseline", tmp_path / "candidate"


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "suspect"),
        ({"steps": 0}, "identical"),
        ({"steps": 1}, "suspect"),
        ({"steps": [0]}, "identical"),
        ({"steps": "0-"}, "suspect"),
        ({"patterns": "decoder.*"}, "identical"),
        ({"patterns": ["decoder.*", "output_layer.*"]}, "suspect"),
        ({"kinds": "gradient"}, "suspect"),
        ({"tolerance": {"gradient": 1.0}}, "rounding"),
    ],
)
def test_one_value_means_the_same_as_a_list_of_it(
    traces: tuple[Path, Path], options: dict[str, Any], kind: str
) -> None:
    assert ms.compare(*traces, **options).kind == kind


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0.1}, "tolerance: expected a mapping"),
        ({"steps": -1}, "steps: "),
        ({"kinds": "gradients"}, "gradients"),
    ],
)
def test_a_wrong_option_is_named(traces: tuple[Path, Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ms.ConfigError, match=message):
        ms.compare(*traces, **options)


def test_a_step_without_a_trace_is_named_with_the_traced_ones(traces: tuple[Path, Path]) -> None:
    with ms.open_trace(traces[0]) as trace:
        assert {key.name for key in trace.keys(1)} == set(NAMES)
        with pytest.raises(ms.TraceError, match="step 7 is not traced; traced steps: 0, 1"):
            trace.keys(7)
