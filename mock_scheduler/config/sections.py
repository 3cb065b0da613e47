"""Alignment and checkpoints as sections of a run's configuration; importing this imports no torch."""

from __future__ import annotations

from pydantic import Field

from mock_scheduler.config.base import ConfigSection, NonNegativeFloat, NonNegativeInt


class ToleranceConfig(ConfigSection):
    """How far a candidate may be from the baseline and still be called ``rounding``; the defaults are for float32.

    ``metric``: largest |a - b| / max(|a|, |b|, metric_floor) of a logged metric.
    ``activation``: largest ||a - b|| / ||a|| of anything that the forward pass computes, from inputs to losses.
    ``gradient``: the same of a main gradient, an activation's gradient, the gradients' norm and the optimizer's state.
    ``update``: largest ||d_a - d_b|| / ||d_a|| of the change d that one update made to a parameter, beyond rounding.
    ``ulp``: where no element differs by more units in the last place than this, reports say so; it decides nothing.
    """

    metric: NonNegativeFloat = 1e-4
    metric_floor: NonNegativeFloat = 1e-3
    activation: NonNegativeFloat = 1e-4
    gradient: NonNegativeFloat = 1e-4
    update: NonNegativeFloat = 5e-3
    ulp: NonNegativeInt = 4


# float64 leaves 1e-14 of gradients under any layout, after several updates too (docs/layouts.md), and more of an
# update's change, which Adam makes as large where a gradient is nearly 0.
FLOAT64_TOLERANCE = ToleranceConfig(metric=1e-11, activation=1e-11, gradient=1e-11, update=1e-8)


class CandidateConfig(ConfigSection):
    """One candidate of an alignment run: what makes it differ from the baseline.

    ``overrides``: configuration overrides. ``entry``: the Python module that runs it in the pipeline's place, for a
    change that is code: one that puts another kernel in, say, and then calls ``pipelines.agentic.main``.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    overrides: list[str] = Field(default=[])
    entry: str = "pipelines.agentic"


class AlignConfig(ConfigSection):
    """``mock-scheduler align``: what the baseline and each candidate override, and the stated tolerance.

    ``tolerance``: ``None`` is ``ToleranceConfig``'s own for float32 and ``FLOAT64_TOLERANCE`` for float64; bfloat16 has
    no default, so it must be stated.
    """

    output_dir: str | None = None
    baseline: list[str] = Field(default=[])
    candidates: list[CandidateConfig] = Field(default=[])
    tolerance: ToleranceConfig | None = None


class CheckpointConfig(ConfigSection):
    """Where checkpoints go; ``None`` is ``{output_dir}/checkpoints``."""

    output_dir: str | None = None
