"""KL estimators against exact sums over a small vocabulary, and the adaptive coefficient by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from pipelines.algorithm.kl import AdaptiveKl, compute_kl_penalty, estimate_kl

Q = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
P = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
#: Σ q log(q / p) = 0.5 ln 2 + 0 - 0.25 ln 2, and Σ p log(p / q) the same by symmetry.
KL_OF_Q_FROM_P = 0.25 * math.log(2.0)


@pytest.mark.parametrize(
    ("estimator", "at_ln_2", "at_minus_ln_2"),
    [
        ("k1", -math.log(2.0), math.log(2.0)),
        ("k2", 0.5 * math.log(2.0) ** 2, 0.5 * math.log(2.0) ** 2),
        ("k3", 1.0 - math.log(2.0), math.log(2.0) - 0.5),
    ],
)
def test_estimators_of_a_single_token(estimator: str, at_ln_2: float, at_minus_ln_2: float) -> None:
    log_ratio = torch.tensor([math.log(2.0), -math.log(2.0), 0.0], dtype=torch.float64)
    found = estimate_kl(log_ratio, estimator)
    assert found.tolist() == pytest.approx([at_ln_2, at_minus_ln_2, 0.0], rel=1e-15)
    assert found.dtype is torch.float64


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_of_k1_and_k3_is_the_kl(estimator: str) -> None:
    mean = (Q * estimate_kl(P.log() - Q.log(), estimator)).sum().item()
    assert mean == pytest.approx(KL_OF_Q_FROM_P, rel=1e-14)


def kl_of_softmax(logits: torch.Tensor, *, is_reverse: bool) -> torch.Tensor:
    log_q = logits.log_softmax(0)
    return (P * (P.log() - log_q)).sum() if is_reverse else (log_q.exp() * (log_q - P.log())).sum()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_mean_gradient_is_nothing_for_k1_the_kl_s_for_k2_and_the_reverse_kl_s_for_k3(estimator: str) -> None:
    """E_q of the estimate's gradient, with the weights q held fixed as a sampled batch holds them."""
    logits = Q.log().clone().requires_grad_()
    estimate = (Q * estimate_kl(P.log() - logits.log_softmax(0), estimator)).sum()
    (found,) = torch.autograd.grad(estimate, logits)
    expected = torch.zeros(3, dtype=torch.float64)
    if estimator != "k1":
        (expected,) = torch.autograd.grad(kl_of_softmax(logits, is_reverse=estimator == "k3"), logits)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-15)
    assert (expected.abs().max().item() > 0.05) == (estimator != "k1")


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^KL estimator is 'k4'; expected 'k1', 'k2' or 'k3'$"):
        estimate_kl(torch.zeros(1), "k4")


def test_the_penalty_is_the_coefficient_times_the_estimate_in_float64() -> None:
    """old - ref = ln 2 and -ln 2: k1 gives these themselves."""
    old = torch.tensor([-1.0, -1.0 - math.log(2.0)], dtype=torch.float64)
    ref = torch.tensor([-1.0 - math.log(2.0), -1.0], dtype=torch.float64)
    found = compute_kl_penalty(old, ref, estimator="k1", coef=0.1)
    assert found.tolist() == pytest.approx([0.1 * math.log(2.0), -0.1 * math.log(2.0)], rel=1e-15)
    narrow = compute_kl_penalty(old.float(), ref.float(), estimator="k3", coef=0.1)
    assert narrow.dtype is torch.float64


def test_the_penalty_refuses_other_shapes() -> None:
    message = r"^KL penalty: ref_logprobs has shape \[2\], old_logprobs has \[3\]$"
    with pytest.raises(ValueError, match=message):
        compute_kl_penalty(torch.zeros(3), torch.zeros(2), estimator="k1", coef=0.1)


@pytest.mark.parametrize(
    ("measured_kl", "num_samples", "coef"),
    [
        (0.11, 10, 0.2 * (1 + 0.1 * 0.1)),  # 10 % above the target, a tenth of the horizon
        (0.09, 10, 0.2 * (1 - 0.1 * 0.1)),
        (0.1, 10, 0.2),
        (5.0, 10, 0.2 * (1 + 0.2 * 0.1)),  # the error is clipped at 0.2
        (-5.0, 10, 0.2 * (1 - 0.2 * 0.1)),
        (5.0, 1000, 0.2 * 1.2),  # more samples than the horizon count as the horizon
        (-5.0, 1000, 0.2 * 0.8),
    ],
)
def test_the_coefficient_follows_the_measured_kl(measured_kl: float, num_samples: int, coef: float) -> None:
    controller = AdaptiveKl(coef=0.2, target=0.1, horizon=100)
    after = controller.update(measured_kl=measured_kl, num_samples=num_samples)
    assert after.coef == pytest.approx(coef, rel=1e-14)
    assert (after.target, after.horizon) == (0.1, 100)
    assert controller.coef == 0.2


def test_a_controller_without_target_stays() -> None:
    fixed = AdaptiveKl(coef=0.2)
    assert fixed.update(measured_kl=math.nan, num_samples=10) == fixed


@pytest.mark.parametrize("controller", [AdaptiveKl(coef=0.2), AdaptiveKl(coef=0.3, target=0.1, horizon=100)])
def test_the_state_comes_back_from_json(controller: AdaptiveKl) -> None:
    assert AdaptiveKl.from_state_dict(json.loads(json.dumps(controller.state_dict()))) == controller


def test_a_kl_that_is_not_finite_is_refused() -> None:
    message = "^KL controller: measured_kl is nan; a log-probability of the policy or of the reference is not finite$"
    with pytest.raises(ValueError, match=message):
        AdaptiveKl(coef=0.2, target=0.1, horizon=100).update(measured_kl=math.nan, num_samples=1)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"coef": 0.1}, r"state has \['coef'\]; expected coef, horizon and target"),
        ({"coef": None, "target": 0.1, "horizon": 10}, "coef is None and horizon is 10; expected a number, and an int"),
        ({"coef": 0.1, "target": 0.1, "horizon": 1.5}, "coef is 0.1 and horizon is 1.5; expected a number, and an int"),
        ({"coef": -0.1, "target": 0.1, "horizon": 10}, "coef is -0.1; expected a finite number of 0 or more"),
        ({"coef": math.nan, "target": 0.1, "horizon": 10}, "coef is nan; expected a finite number of 0 or more"),
        ({"coef": 0.1, "target": 0.0, "horizon": 10}, "target is 0.0; expected a finite number above 0"),
        ({"coef": 0.1, "target": 0.1, "horizon": 0}, "horizon is 0; expected an int above 0"),
        ({"coef": 0.1, "target": 0.1, "horizon": None}, "target is 0.1 and horizon is None: set both, or neither"),
    ],
)
def test_a_state_that_cannot_be_is_refused(state: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^KL controller: {message}$"):
        AdaptiveKl.from_state_dict(state)
