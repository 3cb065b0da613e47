"""A reward for verl's ``reward.custom_reward_function.path``, with further values of several kinds."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_options: Any
) -> dict[str, Any]:
    """A reward of the letters."""
    kinds = len(set(solution_str))
    return {"score": kinds / 7 + 0.1 * (ground_truth in solution_str), "kinds": kinds, "note": solution_str[:3]}
