"""Rejected trajectories are in no baseline, rejected tokens in no whitening, and rewards are of whole trajectories."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.correction.config.rules import LoneSurvivor
from pipelines.algorithm.advantages import AdvantageConfig, AdvantageInputs, compute_advantages
from pipelines.algorithm.training_values import prepare_advantages
from pipelines.config.schema import PipelineConfig
from tests.batches import SAMPLING, make_row

F, T = False, True
CASES = json.loads((Path(__file__).parents[2] / "golden" / "rollout_correction.json").read_text())["cases"]
LEAK = next(case for case in CASES if case["id"] == "v091_grpo_baseline_leak")


def inputs_of(
    rewards: list[float],
    kept: list[list[bool]] | None,
    *,
    groups: list[int] | None = None,
    sizes: list[int] | None = None,
    values: list[float] | None = None,
) -> AdvantageInputs:
    """Trajectories of one turn each. kept: by trajectory and response token; sizes: the tokens, without ``kept``."""
    lengths = sizes if kept is None else [len(tokens) for tokens in kept]
    assert lengths is not None
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return AdvantageInputs(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_index=torch.tensor(groups or [0] * len(rewards)),
        turn_rewards=torch.tensor(rewards, dtype=torch.float64),
        turn_offsets=torch.arange(len(rewards) + 1),
        token_offsets=offsets,
        turn_ends=offsets[1:],
        values=None if values is None else torch.tensor(values, dtype=torch.float64),
        kept=None if kept is None else torch.tensor([token for tokens in kept for token in tokens], dtype=torch.bool),
    )


def advantages_of(inputs: AdvantageInputs, **config: Any) -> list[float]:
    return compute_advantages(
        inputs, AdvantageConfig(**{"adv_estimator": "grpo", "method": "mean", **config})
    ).advantages.tolist()


# Baselines


@pytest.mark.parametrize(
    ("exclude_rejected", "expected"),
    [(False, LEAK["expected"]["advantages"]), (True, LEAK["recommended_expected"]["advantages"])],
)
def test_golden_v091_grpo_baseline_leak(exclude_rejected: bool, expected: list[list[float]]) -> None:
    """verl's own number with the rejected reward in the baseline; by default what is left keeps its reward."""
    rewards = [sum(row) for row in LEAK["inputs"]["token_level_rewards"]]
    inputs = inputs_of(rewards, [[bool(token) for token in row] for row in LEAK["inputs"]["response_mask"]])
    assert advantages_of(inputs, exclude_rejected=exclude_rejected) == [value for row in expected for value in row]


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_a_rejected_trajectory_is_in_no_mean_and_has_advantage_0(estimator: str) -> None:
    """Rewards 100 (rejected), 1, 2, 6 and, in a group of its own, 4 and 8: means 3 and 6."""
    inputs = inputs_of(
        [100.0, 1.0, 4.0, 2.0, 6.0, 8.0], [[F, F], [T], [T], [T, F], [T], [T]], groups=[0, 0, 1, 0, 0, 1]
    )
    by_estimator = {
        "grpo": [0.0, 0.0, -2.0, -2.0, -1.0, 0.0, 3.0, 2.0],
        # 1 - (2 + 6) / 2, 4 - 8, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2, 8 - 4.
        "rloo": [0.0, 0.0, -3.0, -4.0, -1.5, 0.0, 4.5, 4.0],
    }
    method = "mean" if estimator == "grpo" else "none"
    assert advantages_of(inputs, adv_estimator=estimator, method=method) == by_estimator[estimator]


@pytest.mark.parametrize("grouping", ["traj_group_id", "batch"])
def test_the_deviation_is_that_of_trajectories_with_a_token_that_is_kept(grouping: str) -> None:
    """Rewards 1 and 3: mean 2, unbiased deviation √2. One without response tokens is not rejected, and counts."""
    inputs = inputs_of([1.0, -50.0, 3.0], [[T], [F, F], [F, T]])
    unit = 1.0 / (math.sqrt(2.0) + 1e-6)
    expected = [-unit, 0.0, 0.0, 0.0, unit]
    assert advantages_of(inputs, method="mean_std", grouping=grouping) == pytest.approx(expected, rel=1e-14)
    without_tokens = inputs_of([1.0, -50.0, 3.0], [[T], [], [T]])
    assert advantages_of(without_tokens, method="mean") == pytest.approx([1.0 + 46 / 3, 3.0 + 46 / 3], rel=1e-14)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize("method", ["none", "mean", "mean_std"])
@pytest.mark.parametrize("lone_survivor", ["reward", "zero"])
def test_the_only_one_left_of_a_group_keeps_its_reward_or_gets_0(
    estimator: str, method: str, lone_survivor: LoneSurvivor
) -> None:
    """Neither is divided by a deviation. A group that has one trajectory by configuration stays at 0."""
    inputs = inputs_of([9.0, 4.0, 7.0], [[F], [T, T], [T]], groups=[0, 0, 1])
    found = advantages_of(inputs, adv_estimator=estimator, method=method, lone_survivor=lone_survivor)
    # grpo without normalisation compares nothing.
    left = 4.0 if lone_survivor == "reward" or (estimator, method) == ("grpo", "none") else 0.0
    alone = 7.0 if (estimator, method) == ("grpo", "none") else 0.0
    assert found == [0.0, left, left, alone]


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gae", "reinforce_plus_plus"])
@pytest.mark.parametrize("method", ["none", "mean", "mean_std"])
@pytest.mark.parametrize("whiten_advantages", [False, True])
def test_with_everything_rejected_all_advantages_are_0(estimator: str, method: str, whiten_advantages: bool) -> None:
    values = [1.0, 2.0, 3.0] if estimator == "gae" else None
    inputs = inputs_of([1.0, 5.0], [[F, F], [F]], values=values)
    config = {"adv_estimator": estimator, "method": method, "whiten_advantages": whiten_advantages}
    assert advantages_of(inputs, **config) == [0.0, 0.0, 0.0]


# Whitening


def test_whitening_is_over_kept_tokens() -> None:
    """Advantages 1, 3 and, rejected, 100 and 1: mean 2, unbiased deviation √2; the rejected ones stay at 0."""
    inputs = inputs_of([1.0, 100.0, 3.0], [[T, F], [F], [T]])
    unit = 1.0 / (math.sqrt(2.0) + 1e-8)
    found = advantages_of(inputs, method="none", whiten_advantages=True)
    assert found == pytest.approx([-unit, 0.0, 0.0, unit], rel=1e-14)
    plus_plus = advantages_of(inputs, method="none", adv_estimator="reinforce_plus_plus")
    assert plus_plus == pytest.approx([-unit, 0.0, 0.0, unit], rel=1e-14)


# A reward is of the trajectory, whichever of its tokens are rejected


def test_a_rejected_last_token_does_not_take_the_reward_with_it() -> None:
    """Rewards 5 and 1 land on the last tokens, of which that of the first trajectory is rejected.

    grpo: mean 3. gae with γ = λ = 1: reward to go - value. reinforce_plus_plus: G = 5 and 1, 1 over three kept tokens,
    whose mean is 7/3 and whose unbiased variance (64/9 + 16/9 + 16/9) / 2 = 16/3.
    """
    kept = [[T, F], [T, T]]
    assert advantages_of(inputs_of([5.0, 1.0], kept)) == [2.0, 0.0, -2.0, -2.0]
    gae = inputs_of([5.0, 1.0], kept, values=[1.0, 1.0, 2.0, 3.0])
    assert advantages_of(gae, adv_estimator="gae", method="none") == [4.0, 0.0, -1.0, -2.0]
    returns = compute_advantages(gae, AdvantageConfig(adv_estimator="gae", method="none")).returns
    assert returns.tolist() == [5.0, 5.0, 1.0, 1.0]
    plus_plus = advantages_of(inputs_of([5.0, 1.0], kept), adv_estimator="reinforce_plus_plus", method="none")
    root = math.sqrt(16 / 3) + 1e-8
    assert plus_plus == pytest.approx([(8 / 3) / root, 0.0, (-4 / 3) / root, (-4 / 3) / root], rel=1e-14)


# Properties


@st.composite
def rejections(draw: st.DrawFn) -> AdvantageInputs:
    """A few trajectories in a few groups, each with up to three tokens of which any are rejected."""
    kept = draw(st.lists(st.lists(st.booleans(), max_size=3), min_size=1, max_size=6))
    number = st.integers(-8, 8).map(float)
    rewards = draw(st.lists(number, min_size=len(kept), max_size=len(kept)))
    groups = draw(st.lists(st.integers(0, 1), min_size=len(kept), max_size=len(kept)))
    return inputs_of(rewards, kept, groups=[sorted(set(groups)).index(group) for group in groups])


@settings(deadline=None)
@given(
    inputs=rejections(),
    estimator=st.sampled_from(["grpo", "rloo", "reinforce_plus_plus"]),
    method=st.sampled_from(["none", "mean", "mean_std"]),
    grouping=st.sampled_from(["traj_group_id", "batch"]),
    reward=st.sampled_from([-1e6, 0.0, 1e6]),
)
def test_the_reward_of_a_rejected_trajectory_changes_nothing(
    inputs: AdvantageInputs,
    estimator: Any,
    method: Any,
    grouping: Any,
    reward: float,
) -> None:
    rejected = inputs.rejected_trajectories()
    assert rejected is not None
    other = torch.where(rejected, reward, inputs.rewards)
    config = AdvantageConfig(adv_estimator=estimator, method=method, grouping=grouping)
    found = compute_advantages(inputs, config).advantages
    changed = compute_advantages(replace(inputs, rewards=other, turn_rewards=other), config).advantages
    assert torch.equal(found, changed)
    assert inputs.kept is not None
    assert not found[~inputs.kept].any()
    assert bool(found.isfinite().all())


@settings(deadline=None)
@given(inputs=rejections(), estimator=st.sampled_from(["grpo", "rloo", "reinforce_plus_plus"]))
def test_keeping_every_token_is_the_same_as_correcting_nothing(inputs: AdvantageInputs, estimator: Any) -> None:
    assert inputs.kept is not None
    config = AdvantageConfig(adv_estimator=estimator, whiten_advantages=True, lone_survivor="zero")
    all_kept = compute_advantages(replace(inputs, kept=torch.ones_like(inputs.kept)), config)
    none = compute_advantages(replace(inputs, kept=None), config)
    assert torch.equal(all_kept.advantages, none.advantages)
    assert torch.equal(all_kept.returns, none.returns)


# Of a batch


def test_a_trajectory_of_several_rows_is_rejected_as_a_whole() -> None:
    """Two rows of one trajectory with reward 1 + 2, one of them rejected, beside reward 5; then both."""
    rows = [
        make_row(
            0,
            env_id,
            turn=turn,
            tokens=[1, 2],
            response=[F, T],
            rollout_logprobs=[-1.0],
            turn_rewards=[reward],
            prompt_length=1,
        )
        for env_id, turn, reward in ((0, 0, 1.0), (0, 1, 2.0), (1, 0, 5.0))
    ]
    batch = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=None)
    config = PipelineConfig(exp_name="x", reward_normalization={"method": "mean"})

    def prepared(kept: list[bool] | None, **arguments: Any) -> tuple[list[float], dict[str, float]]:
        found, metrics = prepare_advantages(
            batch,
            config,
            kl_penalty=None,
            values=None,
            kept=None if kept is None else torch.tensor(kept),
            **arguments,
        )
        return found.advantages.tolist(), metrics

    assert prepared(None)[0] == [-1.0, -1.0, 1.0]
    in_part, metrics = prepared([F, T, T])
    assert in_part == [0.0, -1.0, 1.0]
    assert (metrics["advantage_mean"], metrics["advantage_min"], metrics["return_mean"]) == (0.0, -1.0, 4.0)
    assert metrics["groups_without_variance"] == 0.0
    assert prepared([F, F, T])[0] == [0.0, 0.0, 5.0]
    assert prepared([F, F, T])[1]["groups_without_variance"] == 1.0
    assert prepared([F, F, T], lone_survivor="zero")[0] == [0.0, 0.0, 0.0]
    assert prepared([F, F, T], exclude_rejected=False)[0] == [0.0, 0.0, 1.0]
    all_rejected, metrics = prepared([F, F, F])
    assert all_rejected == [0.0, 0.0, 0.0]
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_kept_mask_of_another_size_or_type_is_named() -> None:
    inputs = inputs_of([1.0, 2.0], None, sizes=[1, 2])
    message = (
        r"^advantage inputs: kept has shape \[2\]; expected \[3\], one per response token; "
        r"kept is torch.float32; expected torch.bool$"
    )
    with pytest.raises(ValueError, match=message):
        replace(inputs, kept=torch.ones(2))
