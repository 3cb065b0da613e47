"""The learning rate of every update, worked out by hand, also after a resume."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pipelines.config.schema import PipelineConfig
from pipelines.megatron.trained_model import LearningRateSchedule, build_lr_schedule


def schedule_of(**training: object) -> LearningRateSchedule:
    """Over 4 updates: two steps of two, at rates up to 0.8."""
    config = PipelineConfig.model_validate(
        {"exp_name": "x", "max_steps": 2, "rollout_batch_size": 128}
        | {"training": {"global_batch_size": 64, "lr": 0.8, **training}}
    )
    optimizer = SimpleNamespace(param_groups=[{"lr": None, "weight_decay": None}])
    return build_lr_schedule(config, optimizer)  # type: ignore[arg-type]


def next_rates(schedule: LearningRateSchedule, num_updates: int) -> list[float]:
    """What the optimizer would use: each update takes the rate that stands, then the schedule goes on."""
    rates = []
    for _ in range(num_updates):
        rates.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.step(increment=1)
    return rates


CASES = [
    ({"lr_decay_style": "linear"}, [0.8, 0.6, 0.4, 0.2, 0.0]),
    ({"lr_decay_style": "linear", "min_lr": 0.4}, [0.8, 0.7, 0.6, 0.5, 0.4]),
    ({"lr_decay_style": "linear", "lr_warmup_iters": 2}, [0.4, 0.8, 0.8, 0.4, 0.0]),
    ({"lr_decay_style": "linear", "lr_decay_iters": 2}, [0.8, 0.4, 0.0, 0.0, 0.0]),
    # 0.4 · (1 + cos(k · π / 4)): cos = 1, √½, 0, -√½, -1
    ({"lr_decay_style": "cosine"}, [0.8, 0.682842712474619, 0.4, 0.117157287525381, 0.0]),
    # one update of warm-up, then 0.2 + 0.3 · (1 + cos(j · π / 3)): cos = 1, ½, -½
    ({"lr_decay_style": "cosine", "lr_warmup_iters": 1, "min_lr": 0.2}, [0.8, 0.8, 0.65, 0.35, 0.2]),
    ({"lr_decay_style": "constant", "lr_warmup_iters": 2}, [0.4, 0.8, 0.8, 0.8, 0.8]),
    ({"lr_decay_style": "constant", "lr_warmup_iters": 8}, [0.1, 0.2, 0.3, 0.4, 0.5]),
    ({}, [0.8] * 5),
]


@pytest.mark.parametrize(("training", "expected"), CASES)
def test_every_update_has_the_rate_of_the_formula(training: dict[str, object], expected: list[float]) -> None:
    """The schedule ran one ahead, so that the last update of a decay had a rate of 0 and changed nothing."""
    assert next_rates(schedule_of(**training), 5) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("num_before", [1, 2, 3])
@pytest.mark.parametrize(("training", "expected"), CASES)
def test_a_resumed_run_goes_on_with_the_next_rate(
    training: dict[str, object], expected: list[float], num_before: int
) -> None:
    first, second = schedule_of(**training), schedule_of(**training)
    next_rates(first, num_before)
    second.load_state_dict(first.state_dict())
    assert next_rates(second, 5 - num_before) == pytest.approx(expected[num_before:], rel=1e-12, abs=1e-15)
