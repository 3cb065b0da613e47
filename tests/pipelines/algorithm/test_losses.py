"""The policy loss of single tokens against its formula, evaluated by hand, and its gradient."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pipelines.algorithm.losses import (
    METRIC_SUMS,
    PolicyLossConfig,
    PolicyLossInputs,
    PolicyLossOutput,
    compute_policy_loss,
)


def row(values: list[float], *, grad: bool = False) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64, requires_grad=grad)


def loss_inputs(
    ratios: list[float],
    advantages: list[float],
    *,
    entropy: list[float] | None = None,
    ref_log_ratios: list[float] | None = None,
    mask: list[bool] | None = None,
) -> PolicyLossInputs:
    """Old logprobs are -1 everywhere; ``ref_log_ratios``: ref - new."""
    new = [-1.0 + math.log(ratio) for ratio in ratios]
    ref = None if ref_log_ratios is None else [a + b for a, b in zip(new, ref_log_ratios, strict=True)]
    return PolicyLossInputs(
        new_logprobs=row(new, grad=True),
        entropy=row(entropy or [0.0] * len(ratios), grad=True),
        old_logprobs=row([-1.0] * len(ratios)),
        ref_logprobs=None if ref is None else row(ref),
        advantages=row(advantages),
        response_mask=torch.tensor([mask or [True] * len(ratios)]),
    )


def named(output: PolicyLossOutput) -> dict[str, float]:
    return dict(zip(METRIC_SUMS, output.metrics.tolist(), strict=True))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "is_clipped"),
    [
        (1.1, 2.0, -2.2, False),
        (1.5, 2.0, -2.4, True),  # max(-3.0, -1.2 · 2): a gain beyond the clip range counts no further
        (0.5, 2.0, -1.0, False),  # a loss of probability of a good action is never clipped
        (0.5, -2.0, 1.6, True),  # max(1.0, 0.8 · 2)
        (1.5, -2.0, 3.0, False),
    ],
)
def test_clip_takes_the_larger_loss_and_leaves_it_no_gradient(
    ratio: float, advantage: float, loss: float, is_clipped: bool
) -> None:
    """Without clipping d(-r·A)/d new = -r·A, since dr/d new = r."""
    inputs = loss_inputs([ratio], [advantage])
    output = compute_policy_loss(inputs, PolicyLossConfig(pg_clip=0.2))
    output.total.backward()
    assert output.total.item() == pytest.approx(loss, rel=1e-14)
    assert inputs.new_logprobs.grad is not None
    assert inputs.new_logprobs.grad.item() == pytest.approx(0.0 if is_clipped else -ratio * advantage, rel=1e-14)
    assert named(output)["clip_frac"] == float(is_clipped)


def test_total_is_pg_minus_entropy_bonus_plus_reference_kl() -> None:
    """A ratio of 1, advantage 3, entropy 0.5, ref - new = ln 2: pg -3, kl = 2 - 1 - ln 2."""
    kl = 1.0 - math.log(2.0)
    config = PolicyLossConfig(pg_clip=0.2, entropy_loss_coef=0.1, kl_loss_coef=0.25)
    inputs = loss_inputs([1.0], [3.0], entropy=[0.5], ref_log_ratios=[math.log(2.0)])
    output = compute_policy_loss(inputs, config)
    output.total.backward()
    sums = named(output)
    assert output.total.item() == pytest.approx(-3.0 - 0.1 * 0.5 + 0.25 * kl, rel=1e-14)
    assert sums["total_loss"] == output.total.item()
    assert sums["pg_loss"] == -3.0
    assert sums["entropy"] == 0.5
    assert sums["kl_loss"] == pytest.approx(kl, rel=1e-14)
    assert sums["approx_kl"] == 0.0
    # d pg = -r·A = -3; d k3(ref - new) / d new = 1 - exp(ref - new) = -1.
    assert inputs.new_logprobs.grad is not None
    assert inputs.new_logprobs.grad.item() == pytest.approx(-3.0 + 0.25 * -1.0, rel=1e-14)
    assert inputs.entropy.grad is not None
    assert inputs.entropy.grad.item() == -0.1


def test_approx_kl_is_k3_of_the_log_ratio() -> None:
    """k3(ln 2) = 2 - 1 - ln 2 and k3(-ln 2) = 1/2 - 1 + ln 2; both are positive."""
    sums = named(compute_policy_loss(loss_inputs([2.0, 0.5], [0.0, 0.0]), PolicyLossConfig(pg_clip=0.2)))
    assert sums["approx_kl"] == pytest.approx((1.0 - math.log(2.0)) + (math.log(2.0) - 0.5), rel=1e-14)


def test_terms_are_sums_over_response_tokens() -> None:
    inputs = loss_inputs([1.0, 1.0, 1.0], [1.0, 2.0, 4.0], entropy=[1.0, 2.0, 4.0], mask=[True, False, True])
    output = compute_policy_loss(inputs, PolicyLossConfig(pg_clip=0.2))
    assert output.num_tokens.item() == 2
    assert named(output) == {
        "total_loss": -5.0,
        "pg_loss": -5.0,
        "entropy": 5.0,
        "kl_loss": 0.0,
        "rollout_kl_loss": 0.0,
        "approx_kl": 0.0,
        "clip_frac": 0.0,
        "dual_clip_frac": 0.0,
        "policy_entropy": 5.0,
        "response_tokens": 2.0,
        "kept_tokens": 2.0,
        "num_tokens": 2.0,
    }


def test_nan_under_the_mask_enters_neither_value_nor_gradient() -> None:
    nan = math.nan
    inputs = PolicyLossInputs(
        new_logprobs=row([-1.0, nan], grad=True),
        entropy=row([0.5, nan], grad=True),
        old_logprobs=row([-1.0, nan]),
        ref_logprobs=row([-1.0, nan]),
        advantages=row([2.0, nan]),
        response_mask=torch.tensor([[True, False]]),
    )
    config = PolicyLossConfig(pg_clip=0.2, entropy_loss_coef=0.1, kl_loss_coef=0.1)
    output = compute_policy_loss(inputs, config)
    output.total.backward()
    assert output.total.item() == pytest.approx(-2.05, rel=1e-14)
    assert all(math.isfinite(value) for value in named(output).values())
    assert inputs.new_logprobs.grad is not None
    assert inputs.new_logprobs.grad.tolist() == [[-2.0, 0.0]]
    assert inputs.entropy.grad is not None
    assert inputs.entropy.grad.tolist() == [[-0.1, 0.0]]


def test_gradient_is_that_of_finite_differences() -> None:
    """At points off the clip's corners; gradcheck perturbs every input by 1e-6 in float64."""
    base = loss_inputs([1.1, 0.7, 1.4], [1.5, -0.5, 2.0], entropy=[0.3, 0.6, 0.9], ref_log_ratios=[0.2, -0.3, 0.1])
    config = PolicyLossConfig(pg_clip=0.2, entropy_loss_coef=0.1, kl_loss_coef=0.3)

    def total(new_logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        inputs = PolicyLossInputs(
            new_logprobs=new_logprobs,
            entropy=entropy,
            old_logprobs=base.old_logprobs,
            ref_logprobs=base.ref_logprobs,
            advantages=base.advantages,
            response_mask=base.response_mask,
        )
        return compute_policy_loss(inputs, config).total

    assert torch.autograd.gradcheck(total, (base.new_logprobs, base.entropy))


def test_a_micro_batch_without_response_tokens_adds_nothing() -> None:
    inputs = loss_inputs([1.0], [5.0], mask=[False])
    output = compute_policy_loss(inputs, PolicyLossConfig(pg_clip=0.2))
    assert output.total.item() == 0.0
    assert output.metrics.tolist() == [0.0] * len(METRIC_SUMS)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "loss", "gradient", "fractions"),
    [
        # A < 0, c = 3: min(max(r·|A|, clip(r)·|A|), 3·|A|); fractions are (clip_frac, dual_clip_frac).
        (5.0, -2.0, None, 10.0, 10.0, (0.0, 0.0)),
        (5.0, -2.0, 3.0, 6.0, 0.0, (0.0, 1.0)),
        (2.0, -2.0, 3.0, 4.0, 4.0, (0.0, 0.0)),
        (0.5, -2.0, 3.0, 1.6, 0.0, (1.0, 0.0)),
        (1.15, -2.0, 1.1, 2.2, 0.0, (0.0, 1.0)),  # a limit inside the clip range
        (5.0, 2.0, 3.0, -2.4, 0.0, (1.0, 0.0)),  # a positive advantage knows no limit but the clip
        (0.25, 2.0, 3.0, -0.5, -0.5, (0.0, 0.0)),
        (5.0, 0.0, 3.0, 0.0, 0.0, (0.0, 0.0)),
    ],
)
def test_dual_clip_limits_the_loss_of_a_negative_advantage(
    ratio: float,
    advantage: float,
    dual_clip: float | None,
    loss: float,
    gradient: float,
    fractions: tuple[float, float],
) -> None:
    """Where no branch is cut, d(-r·A)/d new = -r·A; else the gradient is 0."""
    inputs = loss_inputs([ratio], [advantage])
    output = compute_policy_loss(inputs, PolicyLossConfig(pg_clip=0.2, dual_clip=dual_clip))
    output.total.backward()
    assert output.total.item() == pytest.approx(loss, rel=1e-14)
    assert inputs.new_logprobs.grad is not None
    assert inputs.new_logprobs.grad.item() == pytest.approx(gradient, rel=1e-14)
    sums = named(output)
    assert (sums["clip_frac"], sums["dual_clip_frac"]) == fractions
    assert sums["pg_loss"] == output.total.item()


@pytest.mark.parametrize(
    ("estimator", "kl", "gradient"),
    [
        ("k1", -math.log(2.0), 1.0),
        ("k2", 0.5 * math.log(2.0) ** 2, -math.log(2.0)),
        ("k3", 1.0 - math.log(2.0), -1.0),
    ],
)
def test_each_kl_estimator_has_its_value_and_gradient(estimator: str, kl: float, gradient: float) -> None:
    """One token with ref - new = ln 2, no advantage and coefficient 1/4."""
    inputs = loss_inputs([1.0], [0.0], ref_log_ratios=[math.log(2.0)])
    config = PolicyLossConfig(pg_clip=0.2, kl_loss_coef=0.25, kl_loss_estimator=estimator)
    output = compute_policy_loss(inputs, config)
    output.total.backward()
    assert named(output)["kl_loss"] == pytest.approx(kl, rel=1e-14)
    assert output.total.item() == pytest.approx(0.25 * kl, rel=1e-14)
    assert inputs.new_logprobs.grad is not None
    assert inputs.new_logprobs.grad.item() == pytest.approx(0.25 * gradient, rel=1e-14)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradient_with_dual_clip_and_kl_is_that_of_finite_differences(estimator: str) -> None:
    """Tokens on both sides of the limit of 1.5, off its corners."""
    base = loss_inputs([1.3, 2.5, 0.7, 1.9], [-1.0, -0.5, -2.0, 1.0], ref_log_ratios=[0.2, -0.3, 0.1, 0.4])
    config = PolicyLossConfig(pg_clip=0.2, dual_clip=1.5, kl_loss_coef=0.3, kl_loss_estimator=estimator)

    def total(new_logprobs: torch.Tensor) -> torch.Tensor:
        return compute_policy_loss(replace(base, new_logprobs=new_logprobs), config).total

    assert torch.autograd.gradcheck(total, (base.new_logprobs,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_limit_that_no_ratio_reaches_changes_no_bit(dtype: torch.dtype) -> None:
    """Neither of the loss nor of its gradient, against the formula without the limit written out."""
    generator = torch.Generator().manual_seed(5)
    new, old, ref, advantages, entropy = torch.randn(5, 4, 9, generator=generator, dtype=dtype).unbind()
    mask = torch.rand(4, 9, generator=generator) < 0.7
    results = []
    for dual_clip in (None, 1e9):
        leaf = new.clone().requires_grad_()
        inputs = PolicyLossInputs(
            new_logprobs=leaf,
            entropy=entropy,
            old_logprobs=old,
            ref_logprobs=ref,
            advantages=advantages,
            response_mask=mask,
        )
        config = PolicyLossConfig(pg_clip=0.2, dual_clip=dual_clip, entropy_loss_coef=0.1, kl_loss_coef=0.3)
        output = compute_policy_loss(inputs, config)
        (gradient,) = torch.autograd.grad(output.total, leaf)
        results.append((output.total.detach(), output.metrics, gradient))

    kept = [torch.where(mask, values, 0.0) for values in (new, old, ref, advantages, entropy)]
    ratio = (kept[0] - kept[1]).exp()
    surrogate = torch.maximum(-ratio * kept[3], -ratio.clamp(1.0 - 0.2, 1.0 + 0.2) * kept[3])
    kl = torch.expm1(kept[2] - kept[0]) - (kept[2] - kept[0])
    expected = ((surrogate - 0.1 * kept[4] + 0.3 * kl) * mask).sum()
    for total, metrics, gradient in results:
        assert total.dtype is dtype
        assert torch.equal(total, expected)
        assert torch.equal(metrics, results[0][1])
        assert torch.equal(gradient, results[0][2])


def test_other_shapes_are_refused_by_name() -> None:
    inputs = loss_inputs([1.0, 1.0], [1.0, 1.0], ref_log_ratios=[0.0, 0.0])
    wrong = replace(inputs, advantages=row([1.0]), ref_logprobs=row([1.0, 2.0, 3.0]))
    message = (
        r"^policy loss: advantages has shape \[1, 1\], response_mask has \[1, 2\]; "
        r"ref_logprobs has shape \[1, 3\], response_mask has \[1, 2\]$"
    )
    with pytest.raises(ValueError, match=message):
        compute_policy_loss(wrong, PolicyLossConfig(pg_clip=0.2))
