"""What ``rollout_correction`` cannot mean beside keys of the run's algorithm; imports no torch."""

from __future__ import annotations

from mock_scheduler.config.problems import Problem
from mock_scheduler.correction.config.algorithm import AlgorithmConfig

_KEY = "algorithm.rollout_correction"


def combination_problems(
    algorithm: AlgorithmConfig,
    *,
    adv_estimator: str,
    reward_normalization: str,
    dual_clip: float | None,
    pg_clip_high: float | None,
) -> list[Problem]:
    """Every key that would have no effect beside the others, with its dotted key; empty where correction is off."""
    section = algorithm.rollout_correction
    if section is None:
        return []
    problems: list[Problem] = []
    loss_type = section.loss_type
    problems += [
        (name, f"is {value:g} and has no effect: {_KEY}.loss_type {loss_type} has no clip; leave it out")
        for name, value in {"dual_clip": dual_clip, "pg_clip_high": pg_clip_high}.items()
        if value is not None and loss_type != "ppo_clip"
    ]
    has_baseline = adv_estimator == "rloo" or reward_normalization != "none"
    about_baseline = {
        "exclude_rejected_from_baseline": (section.exclude_rejected_from_baseline, True),
        "lone_survivor": (section.lone_survivor, "reward"),
    }
    problems += [
        (
            f"{_KEY}.{name}",
            f"has no effect: adv_estimator {adv_estimator} with reward_normalization.method none compares no rewards",
        )
        for name, (value, default) in about_baseline.items()
        if value != default and not has_baseline
    ]
    return problems
