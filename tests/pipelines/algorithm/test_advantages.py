"""Advantages of every estimator against numbers worked out by hand, and against the definitions written out."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.batch import RolloutBatch, Trajectory
from pipelines.algorithm.advantages import (
    AdvantageConfig,
    AdvantageInputs,
    TokenAdvantages,
    compute_advantages,
    compute_rloo_advantages,
    compute_token_rewards,
    whiten,
)
from pipelines.algorithm.rewards import normalize_rewards
from pipelines.algorithm.training_values import prepare_advantages
from pipelines.config.schema import PipelineConfig
from tests.batches import SAMPLING, make_batch, make_row

# What `grpo` gives every response token of a trajectory.
normalize_by_group = partial(normalize_rewards, grouping="traj_group_id")

F, T = False, True


def test_mean_std_divides_by_the_unbiased_deviation_plus_epsilon() -> None:
    """Rewards 0, 1, 1, 2: mean 1, deviations -1, 0, 0, 1, unbiased variance 2 / 3."""
    advantages = normalize_by_group(torch.tensor([0.0, 1.0, 1.0, 2.0]), torch.tensor([0, 0, 0, 0]), method="mean_std")
    unit = 1.0 / (math.sqrt(2.0 / 3.0) + 1e-6)
    assert advantages.dtype is torch.float64
    assert advantages.tolist() == [-unit, 0.0, 0.0, unit]


def test_mean_only_centres() -> None:
    advantages = normalize_by_group(torch.tensor([0.0, 1.0, 3.0, 4.0]), torch.tensor([0, 0, 0, 0]), method="mean")
    assert advantages.tolist() == [-2.0, -1.0, 1.0, 2.0]


def test_groups_do_not_see_each_other_wherever_their_rows_are() -> None:
    rewards = torch.tensor([1.0, 10.0, 3.0, 30.0])
    advantages = normalize_by_group(rewards, torch.tensor([0, 1, 0, 1]), method="mean")
    assert advantages.tolist() == [-1.0, -10.0, 1.0, 10.0]


def test_equal_rewards_give_advantage_zero_and_no_nan() -> None:
    advantages = normalize_by_group(torch.tensor([0.5, 0.5, 0.5]), torch.tensor([0, 0, 0]), method="mean_std")
    assert advantages.tolist() == [0.0, 0.0, 0.0]


def test_a_group_of_one_has_advantage_zero() -> None:
    advantages = normalize_by_group(torch.tensor([7.0, 1.0, 3.0]), torch.tensor([0, 1, 1]), method="mean_std")
    assert advantages[0].item() == 0.0
    assert advantages[1].item() == -1.0 / (math.sqrt(2.0) + 1e-6)


def test_no_rows_give_no_advantages() -> None:
    advantages = normalize_by_group(torch.empty(0), torch.empty(0, dtype=torch.int64), method="mean_std")
    assert advantages.tolist() == []


def inputs_of(
    trajectories: list[list[tuple[float, int]]],
    *,
    groups: list[int] | None = None,
    rewards: list[float] | None = None,
    values: list[float] | None = None,
    kl_penalty: list[float] | None = None,
) -> AdvantageInputs:
    """Trajectories as lists of turns, each with its reward and number of response tokens."""
    turns = [turn for trajectory in trajectories for turn in trajectory]
    turn_rewards = torch.tensor([reward for reward, _ in turns], dtype=torch.float64)
    turn_ends = torch.tensor([size for _, size in turns], dtype=torch.int64).cumsum(0)
    turn_offsets = torch.tensor([0, *(len(trajectory) for trajectory in trajectories)]).cumsum(0)
    sizes = [sum(size for _, size in trajectory) for trajectory in trajectories]
    totals = [sum(reward for reward, _ in trajectory) for trajectory in trajectories]
    return AdvantageInputs(
        rewards=torch.tensor(totals if rewards is None else rewards, dtype=torch.float64),
        group_index=torch.tensor([0] * len(trajectories) if groups is None else groups, dtype=torch.int64),
        turn_rewards=turn_rewards,
        turn_offsets=turn_offsets,
        token_offsets=torch.tensor([0, *sizes]).cumsum(0),
        turn_ends=turn_ends,
        kl_penalty=None if kl_penalty is None else torch.tensor(kl_penalty, dtype=torch.float64),
        values=None if values is None else torch.tensor(values, dtype=torch.float64),
    )


def both(result: TokenAdvantages) -> tuple[list[float], list[float]]:
    return result.advantages.tolist(), result.returns.tolist()


def test_every_response_token_of_a_trajectory_has_its_grpo_advantage() -> None:
    """Rewards 1 and 3, of two and three tokens."""
    inputs = inputs_of([[(1.0, 2)], [(1.0, 1), (2.0, 2)]])
    result = compute_advantages(inputs, AdvantageConfig(adv_estimator="grpo", method="mean"))
    assert both(result) == ([-1.0, -1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 3.0, 3.0, 3.0])


def test_grpo_without_normalisation_takes_the_reward_itself() -> None:
    inputs = inputs_of([[(1.0, 1)], [(3.0, 1)]])
    result = compute_advantages(inputs, AdvantageConfig(adv_estimator="grpo", method="none"))
    assert result.advantages.tolist() == [1.0, 3.0]


@pytest.mark.parametrize("adv_estimator", ["grpo", "rloo"])
def test_gamma_discounts_turns_and_not_tokens(adv_estimator: str) -> None:
    """gamma 1/2. Turns 4, 2 of many tokens: 4 + 1 = 5. One turn 3: 3. A total 6 with turns 1, 1: 1 + 5 / 2 = 3.5."""
    inputs = inputs_of([[(4.0, 3), (2.0, 2)], [(3.0, 1)], [(1.0, 1), (1.0, 1)]], rewards=[6.0, 3.0, 6.0])
    config = AdvantageConfig(adv_estimator=adv_estimator, method="none", gamma=0.5)
    result = compute_advantages(inputs, config)
    assert result.returns.tolist() == [5.0] * 5 + [3.0] + [3.5] * 2
    expected = [5.0, 3.0, 3.5] if adv_estimator == "grpo" else [5.0 - 3.25, 3.0 - 4.25, 3.5 - 4.0]
    assert result.advantages[[0, 5, 6]].tolist() == expected


def test_a_trajectory_without_turns_keeps_its_total_under_gamma() -> None:
    inputs = inputs_of([[], [(2.0, 1)]], rewards=[7.0, 2.0])
    result = compute_advantages(inputs, AdvantageConfig(adv_estimator="grpo", method="mean", gamma=0.5))
    assert result.advantages.tolist() == [2.0 - 4.5]


@pytest.mark.parametrize("adv_estimator", ["grpo", "rloo"])
def test_the_kl_penalty_is_taken_off_the_trajectory_before_normalisation_and_after_the_clip(
    adv_estimator: str,
) -> None:
    """Rewards 9 and 1, clipped to 2 and 1; penalties 1/2 + 1/4 and 1/4: 1.25 and 0.75."""
    inputs = inputs_of([[(9.0, 2)], [(1.0, 1)]], kl_penalty=[0.5, 0.25, 0.25])
    config = AdvantageConfig(adv_estimator=adv_estimator, method="mean", reward_clip=2.0)
    result = compute_advantages(inputs, config)
    unit = 0.25 if adv_estimator == "grpo" else 0.5
    assert both(result) == ([unit, unit, -unit], [1.25, 1.25, 0.75])


@pytest.mark.parametrize(
    ("rewards", "groups", "expected"),
    [
        # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2; another group of two; a group of one.
        ([1.0, 2.0, 6.0], [0, 0, 0], [-3.0, -1.5, 4.5]),
        ([1.0, 5.0, 2.0, 6.0], [0, 1, 0, 1], [-1.0, -1.0, 1.0, 1.0]),
        ([7.0, 1.0, 3.0], [0, 1, 1], [0.0, -2.0, 2.0]),
        ([], [], []),
    ],
)
def test_rloo_takes_off_the_mean_of_the_others(rewards: list[float], groups: list[int], expected: list[float]) -> None:
    advantages = compute_rloo_advantages(torch.tensor(rewards), torch.tensor(groups, dtype=torch.int64))
    assert advantages.tolist() == expected
    assert advantages.dtype is torch.float64


@pytest.mark.parametrize("method", ["none", "mean"])
def test_centring_before_does_not_change_rloo(method: str) -> None:
    inputs = inputs_of([[(1.0, 1)], [(2.0, 1)], [(6.0, 1)]])
    result = compute_advantages(inputs, AdvantageConfig(adv_estimator="rloo", method=method))
    assert result.advantages.tolist() == [-3.0, -1.5, 4.5]


def test_gae_by_hand_over_two_turns() -> None:
    """γ = 1/2, λ = 1/2; rewards 0, 1 (turn 0) and 0, 4 (turn 1); values 1, 2, 3, 4.

    δ = 0 + 2/2 - 1, 1 + 3/2 - 2, 0 + 4/2 - 3, 4 + 0 - 4 = 0, 0.5, -1, 0. Backwards with γλ = 1/4:
    A = 0, -1 + 0, 0.5 - 1/4, 0 + 1/16.
    """
    inputs = inputs_of([[(1.0, 2), (4.0, 2)]], values=[1.0, 2.0, 3.0, 4.0])
    config = AdvantageConfig(adv_estimator="gae", method="none", gamma=0.5, lambd=0.5)
    advantages = [0.0625, 0.25, -1.0, 0.0]
    assert both(compute_advantages(inputs, config)) == (advantages, [1.0625, 2.25, 2.0, 4.0])


def test_gae_does_not_see_the_next_trajectory() -> None:
    """γ = λ = 1: A = reward to go - value, in each trajectory alone; the one in the middle has no tokens."""
    inputs = inputs_of([[(1.0, 1)], [(5.0, 0)], [(2.0, 1), (3.0, 1)]], values=[10.0, 20.0, 30.0])
    result = compute_advantages(inputs, AdvantageConfig(adv_estimator="gae", method="none"))
    assert both(result) == ([-9.0, -15.0, -27.0], [1.0, 5.0, 3.0])


def test_reinforce_plus_plus_by_hand() -> None:
    """γ = 1/2, rewards 0, 2 and 4 with penalties 1, 0 and 0: G = -1 + 1, 2 and 4.

    Mean 2, deviations -2, 0, 2, unbiased deviation 2.
    """
    inputs = inputs_of([[(2.0, 2)], [(4.0, 1)]], kl_penalty=[1.0, 0.0, 0.0])
    config = AdvantageConfig(adv_estimator="reinforce_plus_plus", method="none", gamma=0.5)
    unit = 2.0 / (2.0 + 1e-8)
    assert both(compute_advantages(inputs, config)) == ([-unit, 0.0, unit], [0.0, 2.0, 4.0])


def test_reinforce_plus_plus_is_whitened_once() -> None:
    inputs = inputs_of([[(2.0, 2)], [(4.0, 1)]])
    once, twice = (
        compute_advantages(
            inputs,
            AdvantageConfig(adv_estimator="reinforce_plus_plus", method="none", whiten_advantages=whiten_advantages),
        )
        for whiten_advantages in (False, True)
    )
    assert torch.equal(once.advantages, twice.advantages)


@pytest.mark.parametrize(
    ("trajectories", "rewards", "method", "clip", "expected"),
    [
        ([[(1.0, 2), (4.0, 1)]], None, "none", None, [0.0, 1.0, 4.0]),
        # What the stored total has beyond its turns: 7 - 5.
        ([[(1.0, 2), (4.0, 1)]], [7.0], "none", None, [0.0, 1.0, 6.0]),
        # The clip takes 5 - 3 off.
        ([[(1.0, 2), (4.0, 1)]], None, "none", 3.0, [0.0, 1.0, 2.0]),
        # Totals 5 and 1, mean 3.
        ([[(1.0, 2), (4.0, 1)], [(1.0, 2)]], None, "mean", None, [0.0, 1.0, 1.0, 0.0, -2.0]),
        # Totals 5 and 1 normalised: ± 2 / √8, at the ends only.
        (
            [[(1.0, 2), (4.0, 1)], [(1.0, 2)]],
            None,
            "mean_std",
            None,
            [0.0, 0.0, 2.0 / (8.0**0.5 + 1e-6), 0.0, -2.0 / (8.0**0.5 + 1e-6)],
        ),
        # A turn without tokens passes its reward to the one before; one before all tokens has nobody to reward.
        ([[(1.0, 1), (4.0, 0)]], None, "none", None, [5.0]),
        ([[(4.0, 0), (1.0, 1)]], None, "none", None, [1.0]),
        ([[(1.0, 1)], [(4.0, 0), (1.0, 1)]], None, "none", None, [1.0, 1.0]),
        ([[(4.0, 0)], [(1.0, 1)]], None, "none", None, [1.0]),
    ],
)
def test_rewards_land_on_the_last_token_of_their_turn(
    trajectories: list[list[tuple[float, int]]],
    rewards: list[float] | None,
    method: str,
    clip: float | None,
    expected: list[float],
) -> None:
    config = AdvantageConfig(adv_estimator="gae", method=method, reward_clip=clip)
    found = compute_token_rewards(inputs_of(trajectories, rewards=rewards), config).tolist()
    assert found == pytest.approx(expected, rel=1e-15)


def test_totals_that_are_nearly_equal_do_not_blow_up_the_rewards_of_turns() -> None:
    """Totals 1 and 1 + 1e-9 with turns of ± 1: divided by their deviation, a turn's reward would be near 1e6."""
    inputs = inputs_of([[(1.0, 1), (0.0, 1)], [(0.0, 1), (1.0 + 1e-9, 1)]], values=[0.0] * 4)
    result = compute_advantages(inputs, AdvantageConfig(adv_estimator="gae"))
    assert result.advantages.abs().max().item() < 1e-3


TURNS = st.lists(st.tuples(st.integers(-4, 4).map(float), st.integers(0, 4)), max_size=4)


@given(
    trajectories=st.lists(TURNS, max_size=5),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lambd=st.sampled_from([0.0, 0.95, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_gae_and_returns_equal_the_double_sum_of_the_definition(
    trajectories: list[list[tuple[float, int]]], gamma: float, lambd: float, seed: int
) -> None:
    """A_t = Σ_l (γλ)^l δ_{t+l} and G_t = Σ_l γ^l r_{t+l}, token by token in plain Python."""
    num_tokens = sum(size for trajectory in trajectories for _, size in trajectory)
    generator = torch.Generator().manual_seed(seed)
    values, penalty = torch.randn(2, num_tokens, generator=generator, dtype=torch.float64).tolist()
    inputs = inputs_of(trajectories, values=values, kl_penalty=penalty)
    expected_advantages: list[float] = []
    expected_returns: list[float] = []
    start = 0
    for trajectory in trajectories:
        size = sum(tokens for _, tokens in trajectory)
        rewards = [-value for value in penalty[start : start + size]]
        seen = 0
        for reward, tokens in trajectory:
            seen += tokens
            if seen:
                rewards[seen - 1] += reward
        own = [*values[start : start + size], 0.0]
        deltas = [rewards[t] + gamma * own[t + 1] - own[t] for t in range(size)]
        expected_advantages += [sum((gamma * lambd) ** k * deltas[t + k] for k in range(size - t)) for t in range(size)]
        expected_returns += [sum(gamma**k * rewards[t + k] for k in range(size - t)) for t in range(size)]
        start += size
    config = AdvantageConfig(adv_estimator="gae", method="none", gamma=gamma, lambd=lambd)
    found = compute_advantages(inputs, config)
    assert found.advantages.tolist() == pytest.approx(expected_advantages, abs=1e-12)
    assert found.returns.tolist() == pytest.approx(
        [a + v for a, v in zip(expected_advantages, values, strict=True)], abs=1e-12
    )
    plain = compute_advantages(
        replace(inputs, values=None), replace(config, adv_estimator="reinforce_plus_plus", lambd=1.0)
    )
    assert plain.returns.tolist() == pytest.approx(expected_returns, abs=1e-12)
    assert bool(torch.isfinite(plain.advantages).all())


def test_whitening_by_hand() -> None:
    """1, 2, 6: mean 3, deviations -2, -1, 3, unbiased variance 7."""
    unit = 1.0 / (math.sqrt(7.0) + 1e-8)
    assert whiten(torch.tensor([1.0, 2.0, 6.0])).tolist() == pytest.approx([-2 * unit, -unit, 3 * unit], rel=1e-15)


@pytest.mark.parametrize("values", [[], [5.0], [0.5, 0.5, 0.5]])
def test_whitening_of_values_that_do_not_vary_gives_zero(values: list[float]) -> None:
    assert whiten(torch.tensor(values)).tolist() == [0.0] * len(values)


def test_the_clip_comes_after_whitening() -> None:
    """Advantages -1 and 1 whiten to ± 1 / √2; a clip to 1/2 before would give ± 1 / √2 again."""
    inputs = inputs_of([[(1.0, 1)], [(3.0, 1)]])
    config = AdvantageConfig(adv_estimator="grpo", method="mean", whiten_advantages=True, advantage_clip=0.5)
    assert compute_advantages(inputs, config).advantages.tolist() == [-0.5, 0.5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_index": torch.zeros(3, dtype=torch.int64)}, r"group_index has shape \[3\]; expected \[2\], one per "),
        ({"turn_offsets": torch.tensor([0, 1])}, r"turn_offsets has shape \[2\]; expected \[3\]"),
        ({"turn_offsets": torch.tensor([0, 2, 1])}, "turn_offsets must rise from 0 to 2"),
        ({"token_offsets": torch.tensor([1, 2, 3])}, "token_offsets must rise from 0 to 3"),
        ({"turn_ends": torch.tensor([1])}, r"turn_ends has shape \[1\]; expected \[2\], one per turn"),
        (
            {"kl_penalty": torch.zeros(2), "values": torch.zeros(3, 1)},
            r"kl_penalty has shape \[2\]; expected \[3\], one per response token; "
            r"values has shape \[3, 1\]; expected \[3\], one per response token",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(changes: dict[str, torch.Tensor], message: str) -> None:
    inputs = inputs_of([[(1.0, 2)], [(3.0, 1)]])
    with pytest.raises(ValueError, match=f"^advantage inputs: {message}"):
        replace(inputs, **changes)


@pytest.mark.parametrize(
    ("estimator", "changes", "message"),
    [
        ("gae", {}, "values are missing: gae needs the critic's value of every response token"),
        (
            "rloo",
            {"values": torch.zeros(1)},
            "values are given, which this estimator has no use for; leave them out, or use gae",
        ),
        (
            "reinforce_plus_plus",
            {"turn_ends": None},
            "turn_ends are missing: the reward of a turn lands on its last response token",
        ),
    ],
)
def test_what_is_missing_or_has_no_effect_is_refused(
    estimator: str, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    inputs = replace(inputs_of([[(1.0, 1)]]), **changes)
    with pytest.raises(ValueError, match=f"^adv_estimator {estimator}: {message}$"):
        compute_advantages(inputs, AdvantageConfig(adv_estimator=estimator, method="none"))


def config_of(**keys: object) -> PipelineConfig:
    return PipelineConfig(exp_name="x", **keys)


def batch_of(*rows: Trajectory) -> RolloutBatch:
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=None)


def turn_row(env_id: int, mask: list[bool], turn_rewards: list[float], *, turn: int = 0) -> Trajectory:
    return make_row(
        0,
        env_id,
        turn=turn,
        tokens=range(len(mask)),
        response=mask,
        rollout_logprobs=[-1.0] * sum(mask),
        turn_rewards=turn_rewards,
        prompt_length=0,
    )


@pytest.mark.parametrize("method", ["mean", "mean_std"])
def test_grpo_by_default_is_the_formula_to_the_bit(method: str) -> None:
    """The formula written out with torch, group by group, on rewards of 32 random rows in groups of 4."""
    batch = make_batch(8, 4, seed=7)
    expected = []
    for rewards in batch.rewards.double().split(4):
        scale = rewards.std() + 1e-6 if method == "mean_std" else 1.0
        expected.append((rewards - rewards.mean()) / scale)
    config = config_of(reward_normalization={"method": method})
    found, _ = prepare_advantages(batch, config, kl_penalty=None, values=None)
    assert torch.equal(found.advantages, torch.cat(expected).repeat_interleave(batch.response_lengths))


STEP_FORM = (
    turn_row(0, [F, T, T], [1.0], turn=0),
    turn_row(0, [F, T], [2.0], turn=1),
    turn_row(1, [F, T], [5.0], turn=0),
)
TRAJECTORY_FORM = (turn_row(0, [F, T, T, F, T], [1.0, 2.0]), turn_row(1, [F, T], [5.0]))


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gae", "reinforce_plus_plus"])
@pytest.mark.parametrize("method", ["none", "mean", "mean_std"])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_a_trajectory_in_several_rows_has_the_advantages_of_the_same_in_one(
    estimator: str, method: str, gamma: float
) -> None:
    config = config_of(adv_estimator=estimator, reward_normalization={"method": method}, gamma=gamma)
    values = torch.tensor([0.5, 1.5, 2.5, 3.5], dtype=torch.float64) if estimator == "gae" else None
    (by_step, step_metrics), (whole, metrics) = (
        prepare_advantages(batch_of(*rows), config, kl_penalty=None, values=values)
        for rows in (STEP_FORM, TRAJECTORY_FORM)
    )
    assert torch.equal(by_step.advantages, whole.advantages)
    assert torch.equal(by_step.returns, whole.returns)
    assert step_metrics == metrics


def test_metrics_by_hand() -> None:
    """Rewards 3 and 5 of three tokens and one: advantages -1, -1, -1, 1, of mean -1/2 and variance 3/4."""
    config = config_of(reward_normalization={"method": "mean"}, kl_in_reward={"coef": 0.1})
    penalty = torch.tensor([0.25, -0.25, 0.0, 0.0], dtype=torch.float64)
    _, metrics = prepare_advantages(batch_of(*STEP_FORM), config, kl_penalty=penalty, values=None)
    root = math.sqrt(0.75)
    assert metrics == pytest.approx(
        {
            "advantage_mean": -0.5,
            "advantage_std": root,
            "advantage_min": -1.0,
            "advantage_max": 1.0,
            "return_mean": 3.5,
            "return_std": root,
            "return_min": 3.0,
            "return_max": 5.0,
            "groups_without_variance": 0.0,
            "kl_in_reward": 0.0,
        }
    )


def test_groups_without_variance_are_counted_after_the_clip() -> None:
    """Groups of rewards (1, 1), (3, 4) clipped to 2, (1, 2), and one trajectory alone."""
    rewards = [(0, 1.0), (0, 1.0), (1, 3.0), (1, 4.0), (2, 1.0), (2, 2.0), (3, 1.0)]
    rows = [make_row(group, env, turn_rewards=[reward]) for env, (group, reward) in enumerate(rewards)]
    _, metrics = prepare_advantages(batch_of(*rows), config_of(reward_clip=2.0), kl_penalty=None, values=None)
    assert metrics["groups_without_variance"] == 0.75


@pytest.mark.parametrize(("estimator", "fraction"), [("grpo", 0.0), ("rloo", 0.0), ("reinforce_plus_plus", 1.0)])
def test_groups_without_variance_are_those_of_the_rewards_that_are_compared(estimator: str, fraction: float) -> None:
    """Equal totals with rewards at different turns: discounted by turn they differ."""
    rows = (turn_row(0, [F, T, F, T], [2.0, 0.0]), turn_row(1, [F, T, F, T], [0.0, 2.0]))
    config = config_of(adv_estimator=estimator, gamma=0.5)
    _, metrics = prepare_advantages(batch_of(*rows), config, kl_penalty=None, values=None)
    assert metrics["groups_without_variance"] == fraction


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gae", "reinforce_plus_plus"])
@pytest.mark.parametrize("whiten_advantages", [False, True])
@pytest.mark.parametrize("rows", [(), (turn_row(0, [F, F], [1.0, 2.0]), turn_row(1, [F], []))])
def test_a_batch_without_response_tokens_has_no_advantages_and_finite_metrics(
    estimator: str, whiten_advantages: bool, rows: tuple[Trajectory, ...]
) -> None:
    config = config_of(
        adv_estimator=estimator, whiten_advantages=whiten_advantages, reward_normalization={"method": "mean"}
    )
    values = torch.empty(0, dtype=torch.float64) if estimator == "gae" else None
    result, metrics = prepare_advantages(batch_of(*rows), config, kl_penalty=None, values=values)
    assert both(result) == ([], [])
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gae", "reinforce_plus_plus"])
def test_rows_without_turns_or_tokens_make_no_nan(estimator: str) -> None:
    rows = (turn_row(0, [F, T], [1.0]), turn_row(1, [F, F], [2.0]), turn_row(2, [F], []), turn_row(3, [F, T, T], []))
    config = config_of(adv_estimator=estimator, whiten_advantages=True, gamma=0.5)
    values = torch.zeros(3) if estimator == "gae" else None
    result, metrics = prepare_advantages(batch_of(*rows), config, kl_penalty=None, values=values)
    assert len(result.advantages) == 3
    assert bool(torch.isfinite(result.advantages).all())
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(
    ("coef", "penalty", "message"),
    [
        (0.1, None, "coef is 0.1, and kl_penalty is missing; give it exactly where coef > 0"),
        (0.0, torch.zeros(4), "coef is 0.0, and kl_penalty is given; give it exactly where coef > 0"),
    ],
)
def test_a_penalty_that_contradicts_its_coefficient_is_refused(
    coef: float, penalty: torch.Tensor | None, message: str
) -> None:
    config = config_of(kl_in_reward={"coef": coef})
    with pytest.raises(ValueError, match=f"^kl_in_reward: {message}$"):
        prepare_advantages(batch_of(*STEP_FORM), config, kl_penalty=penalty, values=None)


def test_turns_that_cannot_be_told_apart_matter_only_where_they_are_needed() -> None:
    batch = batch_of(turn_row(0, [F, T, T], [1.0, 2.0]))
    config = config_of(adv_estimator="reinforce_plus_plus", reward_normalization={"method": "none"})
    with pytest.raises(ValueError, match=r"^response_mask does not tell the turns of 1 rows apart"):
        prepare_advantages(batch, config, kl_penalty=None, values=None)
    prepare_advantages(batch, config_of(), kl_penalty=None, values=None)
