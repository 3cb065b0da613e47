"""The losses under rollout correction: verl's own numbers, values and gradients by hand, and what masks leave out."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.correction.config.rules import Denominator, LossType
from pipelines.algorithm.geometric_loss import compute_geometric_loss
from pipelines.algorithm.losses import (
    METRIC_SUMS,
    PolicyLossConfig,
    PolicyLossInputs,
    PolicyLossOutput,
    compute_metric_means,
    compute_policy_loss,
)
from pipelines.batching.plan import LossAggMode, MicroBatch
from pipelines.config.training import TrainingConfig
from tests.batches import SAMPLING, make_row
from tests.pipelines.step_plans import build_step_plan

LOSS_TYPES: tuple[LossType, ...] = ("ppo_clip", "reinforce", "ratio")
F, T = False, True
LossFunction = Callable[[PolicyLossInputs, PolicyLossConfig], PolicyLossOutput]


def row(values: Sequence[float], *, grad: bool = False) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64, requires_grad=grad)


def bools(values: Sequence[bool]) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.bool)


def loss_inputs(
    ratios: Sequence[float],
    advantages: Sequence[float],
    *,
    mask: Sequence[bool] | None = None,
    kept: Sequence[bool] | None = None,
    weights: Sequence[float] | None = None,
    loss_weights: Sequence[float] | None = None,
    **others: torch.Tensor | None,
) -> PolicyLossInputs:
    """One line of tokens whose old logprobs are -1, and whose entropy is 0."""
    inputs = PolicyLossInputs(
        new_logprobs=row([-1.0 + math.log(ratio) for ratio in ratios], grad=True),
        entropy=row([0.0] * len(ratios), grad=True),
        old_logprobs=row([-1.0] * len(ratios)),
        ref_logprobs=None,
        advantages=row(advantages),
        response_mask=bools([True] * len(ratios) if mask is None else mask),
        kept_mask=None if kept is None else bools(kept),
        weights=None if weights is None else row(weights),
        loss_weights=None if loss_weights is None else row(loss_weights),
    )
    return replace(inputs, **others)  # type: ignore[arg-type]


def named(output: PolicyLossOutput) -> dict[str, float]:
    return dict(zip(METRIC_SUMS, output.metrics.tolist(), strict=True))


def gradient_of(inputs: PolicyLossInputs, config: PolicyLossConfig, loss: LossFunction = compute_policy_loss) -> Any:
    """Of the total with respect to the new logprobs, as a list."""
    (gradient,) = torch.autograd.grad(loss(inputs, config).total, inputs.new_logprobs)
    return gradient[0].tolist()


# verl 0.9.1, run on CPU

GOLDEN = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[2] / "golden" / "rollout_correction.json").read_text())["cases"]
    if case["id"].startswith("v091_loss_")
}
LENGTHS = (4, 3, 2)


def golden_tensor(case: dict[str, Any], name: str) -> torch.Tensor:
    """As the log-probabilities of the case, with NaN where the response has ended."""
    values = torch.tensor(case["inputs"][name], dtype=torch.float32)
    return torch.where(torch.tensor(case["inputs"]["response_mask"]) > 0, values, torch.nan)


def golden_batch(
    *, weights: torch.Tensor | None, kept: Sequence[bool], loss_agg_mode: LossAggMode, rs_denominator: Denominator
) -> MicroBatch:
    """The three sequences of the golden cases as one micro-batch; ``kept``: by sequence."""
    rows = [
        make_row(
            0,
            env_id,
            tokens=range(length + 1),
            response=[F] + [T] * length,
            rollout_logprobs=[-1.0] * length,
            prompt_length=1,
        )
        for env_id, length in enumerate(LENGTHS)
    ]
    batch = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=3)
    nothing = torch.zeros(sum(LENGTHS))
    plan = build_step_plan(
        batch,
        nothing,
        nothing,
        TrainingConfig(micro_batch_size=3, global_batch_size=3, sequence_multiple_of=1),
        count_multiple=1,
        dtype=torch.float32,
        token_weights=None if weights is None else weights[~weights.isnan()],
        token_kept=torch.tensor(kept).repeat_interleave(torch.tensor(LENGTHS)),
        loss_agg_mode=loss_agg_mode,
        rs_denominator=rs_denominator,
    )
    (micro_batch,) = plan.micro_batches
    return micro_batch


def per_sequence(values: Sequence[float]) -> torch.Tensor:
    """Of each sequence's tokens, NaN after them."""
    spread = torch.tensor(values)[:, None].expand(3, 4)
    return torch.where(torch.arange(4) < torch.tensor(LENGTHS)[:, None], spread, torch.nan)


def golden_weights(case: dict[str, Any]) -> torch.Tensor | None:
    """The importance weights of a case, by hand, without those of ppo_clip in bypass, which verl measures only."""
    old, rollout = golden_tensor(case, "old_log_prob"), golden_tensor(case, "rollout_log_prob")
    ratio = (old - rollout).exp()
    if "tokenTIS" in case["id"]:
        return ratio.clamp(max=2.0)
    if "seqMIS" in case["id"]:
        # Sums of old - rollout: 0.7, -0.125, -0.25; only the first exceeds 2.
        return per_sequence([2.0, math.exp(-0.125), math.exp(-0.25)])
    if "icepop" in case["id"]:
        return torch.where(ratio.isnan() | ((ratio >= 0.8) & (ratio <= 1.5)), ratio, 0.0)
    if "reinforce" in case["id"]:
        return (golden_tensor(case, "log_prob") - rollout).exp().clamp(max=1.2)
    return None


GOLDEN_KEPT = {
    # Products of old / rollout 2.01, 0.88 and 0.78, within [0.75, 1.33].
    "v091_loss_vanilla_seqMIS_token-mean": [F, T, T],
    "v091_loss_vanilla_seqMIS_fixed_denominator": [F, T, T],
    # Mean k3 of new / rollout 0.070, 0.031 and 0.119, up to 0.04.
    "v091_loss_bypass_ppo_clip_k3rs": [F, T, F],
    "v091_loss_all_rejected": [F, F, F],
}


@pytest.mark.parametrize("case_id", GOLDEN)
def test_golden_losses_are_verls(case_id: str) -> None:
    case = GOLDEN[case_id]
    params, expected, is_geometric = case["params"], case["expected"], "geo_mean" in case_id
    weights = golden_weights(case)
    part = golden_batch(
        weights=weights,
        kept=GOLDEN_KEPT.get(case_id, [T, T, T]),
        # verl's geo_mean is a mean over sequences, whatever its mode says.
        loss_agg_mode="seq-mean-token-sum" if is_geometric else params["loss_agg_mode"],
        rs_denominator="original" if "fixed_denominator" in case_id else "kept",
    )

    def with_last_column(name: str) -> torch.Tensor:
        return torch.nn.functional.pad(golden_tensor(case, name), (0, 1), value=torch.nan)

    new_logprobs = with_last_column("log_prob").requires_grad_()
    inputs = PolicyLossInputs(
        new_logprobs=new_logprobs,
        entropy=torch.zeros_like(new_logprobs),
        old_logprobs=with_last_column("rollout_log_prob" if params["bypass"] else "old_log_prob"),
        ref_logprobs=None,
        advantages=with_last_column("advantages"),
        response_mask=part.response_mask,
        weights=None if weights is None else part.weights,
        kept_mask=part.kept_mask,
        loss_weights=part.loss_weights,
    )
    config = PolicyLossConfig(
        pg_clip=params["clip_ratio"],
        dual_clip=params["clip_ratio_c"],
        loss_type="reinforce" if "reinforce" in case_id else "ppo_clip",
        rs_denominator="original" if "fixed_denominator" in case_id else "kept",
    )
    output = (
        compute_geometric_loss(inputs, config, zero_weight_floor=1e-10)
        if is_geometric
        else compute_policy_loss(inputs, config)
    )
    loss = output.total / max(int(output.num_tokens), 1)
    loss.backward()
    right = case.get("recommended_expected", expected)
    gradient = torch.zeros(3, 4) if right["grad_log_prob"] == "zeros" else torch.tensor(right["grad_log_prob"])
    assert loss.item() == pytest.approx(right["loss"], rel=1e-5, abs=1e-6)
    assert new_logprobs.grad is not None
    torch.testing.assert_close(new_logprobs.grad[:, :4], gradient, rtol=1e-5, atol=1e-6)
    means = compute_metric_means(named(output))
    assert means["total_loss"] == pytest.approx(loss.item(), rel=1e-6)
    if "actor/pg_clipfrac" in expected["metrics"]:
        assert means["clip_frac"] == pytest.approx(expected["metrics"]["actor/pg_clipfrac"], rel=1e-6)
        assert means["dual_clip_frac"] == 0.0


# Values and gradients by hand


@pytest.mark.parametrize(
    ("loss_type", "ratio", "advantage", "loss", "gradient"),
    [
        # w = 1/2, ε = 0.2, c = 3; d r / d new = r.
        ("ppo_clip", 1.1, 2.0, 0.5 * -2.2, 0.5 * -2.2),
        ("ppo_clip", 1.5, 2.0, 0.5 * -2.4, 0.0),  # the weight comes after the clip
        ("ppo_clip", 0.5, -2.0, 0.5 * 1.6, 0.0),
        ("ppo_clip", 5.0, -2.0, 0.5 * 6.0, 0.0),  # and after the limit of the dual clip
        ("reinforce", 1.5, 2.0, -0.5 * 2.0 * (-1.0 + math.log(1.5)), -0.5 * 2.0),
        ("reinforce", 0.5, -2.0, 0.5 * 2.0 * (-1.0 - math.log(2.0)), 0.5 * 2.0),
        ("ratio", 5.0, 2.0, -0.5 * 10.0, -0.5 * 10.0),  # nothing is clipped
        ("ratio", 0.5, -2.0, 0.5 * 1.0, 0.5 * 1.0),
    ],
)
def test_each_loss_has_its_value_and_gradient(
    loss_type: LossType, ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    inputs = loss_inputs([ratio], [advantage], weights=[0.5])
    config = PolicyLossConfig(pg_clip=0.2, dual_clip=3.0, loss_type=loss_type)
    output = compute_policy_loss(inputs, config)
    assert output.total.item() == pytest.approx(loss, rel=1e-14)
    assert output.terms["pg_loss"].item() == output.total.item() == named(output)["pg_loss"]
    assert output.terms["ratio"].item() == pytest.approx(ratio, rel=1e-14)
    assert gradient_of(inputs, config) == pytest.approx([gradient], rel=1e-14)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_gradient_is_that_of_finite_differences(loss_type: LossType) -> None:
    """Off the clips' corners, with a rejected token, an entropy bonus, a reference and τ; weights are constants."""
    base = loss_inputs(
        [1.1, 0.7, 1.4, 3.5, 1.0],
        [1.5, -0.5, 2.0, -1.0, 1.0],
        weights=[0.3, 2.0, 1.0, 0.5, 1.0],
        kept=[T, T, T, T, F],
        loss_weights=[0.5, 0.5, 0.5, 2.0, 2.0],
        ref_logprobs=row([-1.2, -0.7, -1.1, -0.2, -3.0]),
        rollout_logprobs=row([-1.1, -0.4, -1.3, -0.6, -2.0]),
    )
    config = PolicyLossConfig(
        pg_clip=0.2,
        pg_clip_high=0.3,
        dual_clip=3.0,
        entropy_loss_coef=0.1,
        kl_loss_coef=0.3,
        loss_type=loss_type,
        term_mask="response",
        rollout_kl_coef=0.2,
    )

    def total(new_logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return compute_policy_loss(replace(base, new_logprobs=new_logprobs, entropy=entropy), config).total

    assert torch.autograd.gradcheck(total, (base.new_logprobs, base.entropy))


@pytest.mark.parametrize("loss", [compute_policy_loss, compute_geometric_loss])
def test_weights_carry_no_gradient(loss: LossFunction) -> None:
    """Weights made of the policy under training, as in bypass, weigh like the same numbers without a graph."""
    inputs = loss_inputs([1.5, 0.9], [2.0, 2.0])
    config = PolicyLossConfig(pg_clip=0.2, loss_type="reinforce")
    weights = (inputs.new_logprobs - inputs.old_logprobs).exp()
    with_graph = gradient_of(replace(inputs, weights=weights), config, loss)
    assert with_graph == gradient_of(replace(inputs, weights=weights.detach()), config, loss)
    leaf = row([1.5, 0.9], grad=True)
    loss(replace(inputs, weights=leaf), config).total.backward()
    assert leaf.grad is None
    if loss is compute_policy_loss:
        assert with_graph == pytest.approx([-1.5 * 2.0, -0.9 * 2.0], rel=1e-14)


def test_a_wider_clip_above_lets_more_gain_count() -> None:
    """r = 1.25 within [0.8, 1.28], and cut at 1.2 without an upper clip of its own."""
    inputs = loss_inputs([1.25], [2.0])
    assert gradient_of(inputs, PolicyLossConfig(pg_clip=0.2)) == [0.0]
    assert gradient_of(inputs, PolicyLossConfig(pg_clip=0.2, pg_clip_high=0.28)) == pytest.approx([-2.5], rel=1e-14)


# Which tokens count, and for what


def test_a_rejected_token_is_in_no_term_of_three_policies_and_in_the_original_denominator() -> None:
    inputs = loss_inputs(
        [1.0, 1.0, 1.0], [1.0, 2.0, 4.0], kept=[T, F, T], entropy=row([1.0, 2.0, 4.0]), ref_logprobs=row([-1.0] * 3)
    )
    config = PolicyLossConfig(pg_clip=0.2, entropy_loss_coef=0.5, kl_loss_coef=0.5)
    output = compute_policy_loss(inputs, config)
    sums = named(output)
    assert (sums["pg_loss"], sums["entropy"], sums["total_loss"]) == (-5.0, 5.0, -7.5)
    assert (sums["kept_tokens"], sums["num_tokens"], output.num_tokens.item()) == (2.0, 3.0, 3)
    assert output.terms["total_loss"].tolist() == [[-1.5, 0.0, -6.0]]
    of_kept = compute_policy_loss(inputs, replace(config, rs_denominator="kept"))
    assert of_kept.num_tokens.item() == 2
    assert of_kept.total.item() == -7.5


def test_entropy_and_kl_of_two_policies_are_means_over_all_response_tokens() -> None:
    """ref - new = ln 2 everywhere: k3 = 1 - ln 2. pg of the two kept tokens; 2 / 3 makes terms over 3 tokens means."""
    kl = 1.0 - math.log(2.0)
    inputs = loss_inputs(
        [1.0, 1.0, 1.0, 1.0],
        [1.0, 2.0, 4.0, 9.0],
        mask=[T, T, T, F],
        kept=[T, F, T, T],
        entropy=row([1.0, 2.0, 4.0, 9.0]),
        ref_logprobs=row([-1.0 + math.log(2.0)] * 4),
    )
    config = PolicyLossConfig(
        pg_clip=0.2,
        entropy_loss_coef=0.5,
        kl_loss_coef=0.25,
        term_mask="response",
        rs_denominator="kept",
        term_scale=2 / 3,
    )
    output = compute_policy_loss(inputs, config)
    means = compute_metric_means(named(output))
    assert output.num_tokens.item() == 2
    assert means["pg_loss"] == -5.0 / 2
    assert means["entropy"] == pytest.approx(7.0 / 3, rel=1e-14)
    assert means["kl_loss"] == pytest.approx(kl, rel=1e-14)
    assert output.total.item() / 2 == pytest.approx(-2.5 - 0.5 * 7.0 / 3 + 0.25 * kl, rel=1e-14)


def test_the_squared_distance_to_the_rollout_policy_is_over_all_response_tokens() -> None:
    """new - rollout = 0.5, -1, 2: gradient 2τ times it. A rejected token counts, one of unknown logprob does not."""
    inputs = loss_inputs(
        [1.0] * 5,
        [0.0] * 5,
        mask=[T, T, T, T, F],
        kept=[T, F, T, F, F],
        rollout_logprobs=row([-1.5, 0.0, -3.0, math.nan, math.nan]),
        loss_weights=[1.0, 1.0, 0.5, 1.0, 1.0],
    )
    config = PolicyLossConfig(pg_clip=0.2, rollout_kl_coef=0.25)
    output = compute_policy_loss(inputs, config)
    assert output.total.item() == 0.25 * (0.25 + 1.0 + 0.5 * 4.0)
    assert named(output)["rollout_kl_loss"] == 3.25
    assert output.terms["rollout_kl_loss"].tolist() == [[0.25, 1.0, 2.0, 0.0, 0.0]]
    assert gradient_of(inputs, config) == [0.25, -0.5, 0.5, 0.0, 0.0]
    half = compute_policy_loss(inputs, replace(config, term_scale=0.5))
    assert half.total.item() == 0.5 * output.total.item()


def test_loss_weights_scale_every_term_and_no_fraction() -> None:
    inputs = loss_inputs(
        [1.5, 1.0], [2.0, 1.0], entropy=row([1.0, 2.0]), ref_logprobs=row([-1.0, -1.0]), loss_weights=[0.5, 3.0]
    )
    config = PolicyLossConfig(pg_clip=0.2, entropy_loss_coef=0.5, kl_loss_coef=1.0)
    output = compute_policy_loss(inputs, config)
    kl = math.expm1(-math.log(1.5)) + math.log(1.5)
    sums = named(output)
    assert sums["pg_loss"] == pytest.approx(0.5 * -2.4 + 3.0 * -1.0, rel=1e-14)
    assert sums["entropy"] == 0.5 * 1.0 + 3.0 * 2.0
    assert sums["kl_loss"] == pytest.approx(0.5 * kl, rel=1e-14)
    assert sums["total_loss"] == pytest.approx(sums["pg_loss"] - 0.5 * 6.5 + 0.5 * kl, rel=1e-14)
    assert (sums["clip_frac"], sums["num_tokens"]) == (1.0, 2.0)


def test_fractions_are_of_kept_tokens_and_the_loss_of_the_denominator() -> None:
    """Two of four tokens kept, one of them clipped; the rejected ones would be."""
    inputs = loss_inputs([1.5, 1.5, 1.0, 1.5], [2.0, 2.0, 1.0, 2.0], kept=[T, F, T, F])
    means = compute_metric_means(named(compute_policy_loss(inputs, PolicyLossConfig(pg_clip=0.2))))
    assert means["clip_frac"] == 0.5
    assert means["approx_kl"] == pytest.approx((0.5 - math.log(1.5)) / 2, rel=1e-14)
    assert means["pg_loss"] == pytest.approx((-2.4 - 1.0) / 4, rel=1e-14)
    assert set(means) == set(METRIC_SUMS) - {"response_tokens", "kept_tokens", "num_tokens"}
    assert set(compute_metric_means(dict.fromkeys(METRIC_SUMS, 0.0)).values()) == {0.0}


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("distance", [1000.0, -1000.0, math.inf])
def test_a_ratio_beyond_all_bounds_is_cut_at_exp_20(loss_type: LossType, distance: float) -> None:
    """As verl bounds it; unbounded, inf times an advantage of 0 was NaN. Without gradient where r makes the loss."""
    inputs = loss_inputs([1.0, 1.0], [-1.0, 0.0], old_logprobs=row([-1.0 - distance, -1.0 - distance]))
    output = compute_policy_loss(inputs, PolicyLossConfig(pg_clip=0.2, loss_type=loss_type))
    ratio = math.exp(math.copysign(20.0, distance))
    assert output.terms["ratio"][0].tolist() == pytest.approx([ratio, ratio], rel=1e-14)
    expected = {"ppo_clip": max(ratio, 0.8), "ratio": ratio, "reinforce": -1.0}[loss_type]
    assert output.total.item() == pytest.approx(expected, rel=1e-12)
    gradient = gradient_of(inputs, PolicyLossConfig(pg_clip=0.2, loss_type=loss_type))
    assert gradient == [1.0 if loss_type == "reinforce" else 0.0, 0.0]


# What masks leave out

LOSSES: list[LossFunction] = [compute_policy_loss, compute_geometric_loss]
NOWHERE = [math.nan, math.inf, -math.inf, 3e38, -3e38, 100.0, 0.0]


@settings(deadline=None, max_examples=60)
@given(
    loss=st.sampled_from(LOSSES),
    loss_type=st.sampled_from(LOSS_TYPES),
    term_mask=st.sampled_from(["kept", "response"]),
    rollout_kl_coef=st.sampled_from([0.0, 0.1]),
    fills=st.lists(st.sampled_from(NOWHERE), min_size=8, max_size=8),
    states=st.lists(st.sampled_from(["kept", "rejected", "masked"]), min_size=0, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_nothing_under_the_masks_enters_a_value_or_a_gradient(
    loss: LossFunction,
    loss_type: LossType,
    term_mask: Any,
    rollout_kl_coef: float,
    fills: list[float],
    states: list[str],
    dtype: torch.dtype,
) -> None:
    """Neither into padding nor, for what a rejected token is not asked for, into a response token."""
    size = len(states)
    generator = torch.Generator().manual_seed(size)
    names = ("new_logprobs", "entropy", "old_logprobs", "ref_logprobs", "advantages", "weights")
    names += ("loss_weights", "rollout_logprobs")
    sound = dict(zip(names, torch.rand(8, 1, size, generator=generator, dtype=dtype).unbind(), strict=True))
    mask, kept = bools([state != "masked" for state in states]), bools([state == "kept" for state in states])
    # The policy's own entropy is measured over all response tokens.
    of_rejected = {"loss_weights", "entropy"} | ({"new_logprobs", "ref_logprobs"} if term_mask == "response" else set())
    of_rejected |= {"new_logprobs", "rollout_logprobs"} if rollout_kl_coef else set()
    config = PolicyLossConfig(
        pg_clip=0.2,
        dual_clip=2.0,
        entropy_loss_coef=0.1,
        kl_loss_coef=0.1,
        loss_type=loss_type,
        term_mask=term_mask,
        rollout_kl_coef=rollout_kl_coef,
    )

    def result(tensors: dict[str, torch.Tensor], kept_mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = {name: tensors[name].clone().requires_grad_() for name in ("new_logprobs", "entropy")}
        inputs = PolicyLossInputs(**{**tensors, **leaves}, response_mask=mask, kept_mask=kept_mask)
        output = loss(inputs, config)
        gradients = torch.autograd.grad(output.total, tuple(leaves.values()))
        return output.total.detach(), output.metrics, output.num_tokens, *gradients, *output.terms.values()

    spoilt = {}
    for (name, values), fill in zip(sound.items(), fills, strict=True):
        spoilt[name] = torch.where(mask if name in of_rejected else kept, values, fill)
    # The mask of what is kept may say anything on padding.
    for found, expected in zip(result(spoilt, kept | ~mask), result(sound, kept), strict=True):
        assert torch.equal(found, expected)
        assert bool(found.isfinite().all())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
@pytest.mark.parametrize("is_response", [False, True])
def test_without_tokens_that_count_the_loss_is_0_with_a_live_graph(
    loss: LossFunction, loss_type: LossType, shape: tuple[int, int], is_response: bool
) -> None:
    """Empty, padding alone, and all rejected, where verl divides by 0 or raises; everything else is NaN."""
    leaf = torch.full(shape, math.nan, requires_grad=True)
    weight = torch.ones(shape, requires_grad=True)
    nan = torch.full(shape, math.nan)
    inputs = PolicyLossInputs(
        new_logprobs=leaf * weight,
        entropy=leaf * weight,
        old_logprobs=nan,
        ref_logprobs=nan,
        advantages=nan,
        response_mask=torch.full(shape, is_response),
        weights=nan,
        kept_mask=torch.zeros(shape, dtype=torch.bool),
        loss_weights=torch.zeros(shape),
    )
    config = PolicyLossConfig(pg_clip=0.2, kl_loss_coef=0.1, loss_type=loss_type, rs_denominator="kept")
    output = loss(inputs, config)
    assert output.total.requires_grad
    output.total.backward()
    assert output.total.item() == 0.0
    assert leaf.grad is not None
    assert leaf.grad.tolist() == torch.zeros(shape).tolist()
    assert output.num_tokens.item() == 0
    sums = named(output)
    assert sums.pop("response_tokens") == (leaf.numel() if is_response else 0)
    if is_response:
        del sums["policy_entropy"]  # of all response tokens, and therefore NaN here
    assert set(sums.values()) == {0.0}


def test_what_is_missing_or_of_another_shape_is_named() -> None:
    inputs = loss_inputs([1.0, 1.0], [1.0, 1.0])
    wrong = replace(inputs, weights=row([1.0]), kept_mask=bools([T]), loss_weights=row([1.0] * 3))
    message = (
        r"^policy loss: weights has shape \[1, 1\], response_mask has \[1, 2\]; kept_mask has shape \[1, 1\], "
        r"response_mask has \[1, 2\]; loss_weights has shape \[1, 3\], response_mask has \[1, 2\]$"
    )
    for loss in LOSSES:
        with pytest.raises(ValueError, match=message):
            loss(wrong, PolicyLossConfig(pg_clip=0.2))
        with pytest.raises(
            ValueError, match=r"^policy loss: rollout_kl_coef is 0.1, and rollout_logprobs are missing$"
        ):
            loss(inputs, PolicyLossConfig(pg_clip=0.2, rollout_kl_coef=0.1))


# GMPO


def test_the_geometric_loss_by_hand() -> None:
    """Old logprobs -1, ε = ln 1.25. A = 2: ratios 2 and 0.5 count as 1.25 and 0.5; a rejected token has no part.

    exp of the mean: √(1.25 · 0.5); weights 4 and 1: their geometric mean 2. d / d new of an unclipped token: loss / 2.
    """
    inputs = loss_inputs([2.0, 9.0, 0.5], [2.0, 2.0, 2.0], kept=[T, F, T], weights=[4.0, 7.0, 1.0])
    config = PolicyLossConfig(pg_clip=math.log(1.25))
    output = compute_geometric_loss(inputs, config)
    loss = -2.0 * math.sqrt(1.25 * 0.5) * 2.0
    assert output.total.item() == pytest.approx(loss, rel=1e-14)
    assert output.terms["pg_loss"].tolist() == [pytest.approx([loss / 2, 0.0, loss / 2], rel=1e-14)]
    assert gradient_of(inputs, config, compute_geometric_loss) == pytest.approx([0.0, 0.0, loss / 2], rel=1e-14)
    sums = named(output)
    assert (sums["clip_frac"], sums["kept_tokens"], sums["num_tokens"]) == (1.0, 2.0, 3.0)


def test_the_geometric_clip_is_on_the_side_that_would_gain() -> None:
    """A = -2, ε = ln 1.25 below and ln 1.5 above: a ratio of 2 is not clipped, and one of 0.5 counts as 0.8."""
    inputs = loss_inputs([2.0, 0.5], [-2.0, -2.0])
    config = PolicyLossConfig(pg_clip=math.log(1.25), pg_clip_high=math.log(1.5))
    loss = 2.0 * math.sqrt(2.0 * 0.8)
    assert compute_geometric_loss(inputs, config).total.item() == pytest.approx(loss, rel=1e-14)
    assert gradient_of(inputs, config, compute_geometric_loss) == pytest.approx([loss / 2, 0.0], rel=1e-14)
    gains = loss_inputs([2.0, 0.5], [2.0, 2.0])
    assert compute_geometric_loss(gains, config).total.item() == pytest.approx(-2.0 * math.sqrt(1.5 * 0.5), rel=1e-14)


@pytest.mark.parametrize(
    ("weights", "floor", "weight"),
    [
        ([4.0, 1.0], None, 2.0),
        ([4.0, 0.0], None, 4.0),
        ([0.0, 0.0], None, 0.0),
        ([4.0, 0.0], 1e-10, math.sqrt(4.0 * 1e-10)),
    ],
)
def test_a_weight_of_zero_leaves_the_geometric_mean(weights: list[float], floor: float | None, weight: float) -> None:
    """One zero made verl's weight of the whole sequence 1e-10^(1/T) times as large."""
    inputs = loss_inputs([1.0, 1.0], [1.0, 1.0], weights=weights)
    output = compute_geometric_loss(inputs, PolicyLossConfig(pg_clip=0.2), zero_weight_floor=floor)
    assert output.total.item() == pytest.approx(-weight, rel=1e-9)


def test_the_geometric_gradient_is_that_of_finite_differences() -> None:
    """Two lines of different lengths off the clips' corners, one with a mean of advantages."""
    generator = torch.Generator().manual_seed(2)
    new, old, weights = torch.rand(3, 2, 4, generator=generator, dtype=torch.float64).unbind()
    inputs = PolicyLossInputs(
        new_logprobs=new.requires_grad_(),
        entropy=torch.zeros_like(new),
        old_logprobs=old,
        ref_logprobs=None,
        advantages=torch.tensor([[1.0, 2.0, 3.0, 9.0], [-1.0] * 4], dtype=torch.float64),
        response_mask=torch.tensor([[T, T, T, F], [T, F, T, T]]),
        weights=weights,
    )

    def total(new_logprobs: torch.Tensor) -> torch.Tensor:
        return compute_geometric_loss(replace(inputs, new_logprobs=new_logprobs), PolicyLossConfig(pg_clip=0.3)).total

    assert torch.autograd.gradcheck(total, (inputs.new_logprobs,))


# A loss that is a sum over tokens divided by their number is the mean asked for, however it is split


def direct_mean(sequences: list[list[float]], counted: list[list[float]], mode: LossAggMode) -> float:
    """The mean of these losses; ``counted``: 1 on tokens in the denominator."""
    lengths = [sum(tokens) for tokens in counted]
    if mode == "token-mean":
        return sum(map(sum, sequences)) / sum(lengths)
    sums = [sum(tokens) / (length if mode == "seq-mean-token-mean" else 1.0)
            for tokens, length in zip(sequences, lengths, strict=True) if length]  # fmt: skip
    return sum(sums) / len(sums)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=2), min_size=1, max_size=4),
    mode=st.sampled_from(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]),
    rs_denominator=st.sampled_from(["original", "kept"]),
    size=st.integers(1, 3),
    data=st.data(),
)
def test_parts_of_any_split_sum_to_the_mean_over_sequences(
    lengths: list[list[int]],
    mode: Any,
    rs_denominator: Any,
    size: int,
    data: st.DataObject,
) -> None:
    """Trajectories of one or two rows. Advantages 1, 2, …, and ratios of 1: the loss of token k is -k."""
    rows = [
        make_row(
            0,
            env_id,
            turn=turn,
            tokens=range(n + 1),
            response=[F] + [T] * n,
            rollout_logprobs=[-1.0] * n,
            prompt_length=1,
        )
        for env_id, turns in enumerate(lengths)
        for turn, n in enumerate(turns)
    ]
    batch = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=len(lengths))
    num_tokens = sum(map(sum, lengths))
    kept = torch.tensor(data.draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens)), dtype=torch.bool)
    values = torch.arange(1, num_tokens + 1, dtype=torch.float64)
    plan = build_step_plan(
        batch,
        values,
        values,
        TrainingConfig(micro_batch_size=size, global_batch_size=len(lengths), sequence_multiple_of=1),
        count_multiple=2,
        dtype=torch.float64,
        token_kept=kept,
        loss_agg_mode=mode,
        rs_denominator=rs_denominator,
    )
    total, divisor = 0.0, 0
    for part in plan.micro_batches:
        zeros = torch.zeros_like(part.advantages)
        inputs = PolicyLossInputs(
            new_logprobs=zeros,
            entropy=zeros,
            old_logprobs=zeros,
            ref_logprobs=None,
            advantages=part.advantages,
            response_mask=part.response_mask,
            weights=part.weights,
            kept_mask=part.kept_mask,
            loss_weights=part.loss_weights,
        )
        output = compute_policy_loss(inputs, PolicyLossConfig(pg_clip=0.2, rs_denominator=rs_denominator))
        total, divisor = total + output.total.item(), divisor + int(output.num_tokens)
    by_sequence = [sum(turns) for turns in lengths]
    losses = [part.tolist() for part in (-values * kept).split(by_sequence)]
    counted = [part.tolist() for part in (kept if rs_denominator == "kept" else values > 0).double().split(by_sequence)]
    assert divisor == sum(map(sum, counted))
    expected = direct_mean(losses, counted, mode) if divisor else 0.0
    assert total / max(divisor, 1) == pytest.approx(expected, rel=1e-12, abs=1e-12)
