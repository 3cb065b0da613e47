"""The engine's numbers by hand: clamps, bounds, turns, means of weights, the veto, unknown values and dtypes."""

from __future__ import annotations

import math

import pytest
import torch

from mock_scheduler.correction import CorrectionInputs, compute_correction, correction_metrics
from mock_scheduler.correction.config.rules import Level
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from mock_scheduler.errors import CorrectionError
from tests.correction.engine.batches import NAN, random_batch, rule_fields


def section(**values: object) -> RolloutCorrectionConfig:
    return RolloutCorrectionConfig.model_validate(values)


def one_row(train: list[float], rollout: list[float] | None = None, **tensors: torch.Tensor) -> CorrectionInputs:
    """One sequence, all of it response; the rollout policy's log-probabilities are 0 by default."""
    return CorrectionInputs(
        train_logprobs=torch.tensor([train], dtype=torch.float64),
        rollout_logprobs=torch.tensor([rollout or [0.0] * len(train)], dtype=torch.float64),
        response_mask=torch.ones(1, len(train), dtype=torch.bool),
        **tensors,
    )


def test_sequence_weights_are_of_the_sum_clamped_once() -> None:
    """ℓ = −60, 20, 20, 20: the product is 1, as 0.6.1 has it; clamped by token the sum is 40, as 0.7.1 and later."""
    inputs = one_row([-60.0, 20.0, 20.0, 20.0])
    spec = section(rollout_is="sequence", rollout_rs="sequence", rollout_rs_threshold=2.0).spec
    result = compute_correction(inputs, spec)
    assert result.weights is not None
    assert torch.equal(result.weights, torch.ones(1, 4, dtype=torch.float64))
    assert result.mask.all()
    newer = compute_correction(inputs, section(rollout_rs="seq_sum_k1", rollout_rs_threshold=2.0).spec)
    assert not newer.mask.any()


def test_bounds_are_inclusive_in_the_dtype_of_the_inputs() -> None:
    """ln 2 in float32 is 0.69314718..., whose ratio is not above 2; one step further is."""
    at = torch.tensor([[math.log(2.0)]], dtype=torch.float32)
    beyond = torch.nextafter(at, at + 1.0)
    spec = section(rollout_rs="token", rollout_rs_threshold=2.0).spec
    for train, is_kept in ((at, True), (beyond, False), (-at, True), (-beyond, False)):
        inputs = CorrectionInputs(
            train_logprobs=train, rollout_logprobs=torch.zeros(1, 1), response_mask=torch.ones(1, 1)
        )
        assert bool(compute_correction(inputs, spec).mask) is is_kept


def test_turns_are_runs_of_the_mask_or_as_given() -> None:
    """Log ratios 0.5 | gap | 0.25, 0.25 | gap | −1: runs have the sums 0.5, 0.5 and −1."""
    train = torch.tensor([[0.5, 9.0, 0.25, 0.25, 9.0, -1.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0, 1, 1, 0, 1]])
    spec = section(rollout_is="segment", rollout_is_threshold="inf").spec

    def weights(turn_ids: torch.Tensor | None) -> list[float]:
        inputs = CorrectionInputs(
            train_logprobs=train, rollout_logprobs=torch.zeros_like(train), response_mask=mask, turn_ids=turn_ids
        )
        result = compute_correction(inputs, spec)
        assert result.weights is not None
        return result.weights[0].tolist()

    half, one = math.exp(0.5), math.exp(1.0)
    assert weights(None) == pytest.approx([half, 0.0, half, half, 0.0, 1.0 / one], rel=1e-15)
    # Turn 0 goes on after the gap; the numbers of what is no response do not count.
    turn_ids = torch.tensor([[0, -7, 0, 0, 7, 3]])
    assert weights(turn_ids) == pytest.approx([one, 0.0, one, one, 0.0, 1.0 / one], rel=1e-15)


@pytest.mark.parametrize("is_packed", [False, True])
def test_turns_of_neighbouring_sequences_are_apart(is_packed: bool) -> None:
    """The last token of one and the first of the next are neighbours when packed."""
    shape = (4,) if is_packed else (2, 2)
    inputs = CorrectionInputs(
        train_logprobs=torch.tensor([0.5, 0.5, 0.25, 0.25]).reshape(shape),
        rollout_logprobs=torch.zeros(shape),
        response_mask=torch.ones(shape),
        cu_seqlens=torch.tensor([0, 2, 4]) if is_packed else None,
    )
    weights = compute_correction(inputs, section(rollout_is="segment", rollout_is_threshold="inf").spec).weights
    assert weights is not None
    expected = [math.exp(1.0)] * 2 + [math.exp(0.5)] * 2
    assert weights.flatten().tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("level", "factor"),
    [
        # (1 + 1 + 1 + 3) / 4 tokens; and (1 + (1 + 3) / 2) / 2 sequences with tokens, of which the last has none.
        ("token", 1.5),
        ("segment", 1.5),
        # The second sequence's weight is 3.
        ("sequence", 2.0),
    ],
)
def test_weights_are_divided_by_their_mean(level: str, factor: float) -> None:
    log3 = math.log(3.0)
    inputs = CorrectionInputs(
        train_logprobs=torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, log3], [0.0, 0.0, 0.0]], dtype=torch.float64),
        rollout_logprobs=torch.zeros(3, 3, dtype=torch.float64),
        response_mask=torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]]),
    )
    spec = section(rollout_is=level, rollout_is_threshold="inf", rollout_is_batch_normalize=True).spec
    result = compute_correction(inputs, spec)
    assert result.weights is not None
    first = 3.0 if level == "sequence" else 1.0
    expected = torch.tensor([[1.0, 1.0, 0.0], [first, 0.0, 3.0], [0.0, 0.0, 0.0]], dtype=torch.float64) / factor
    torch.testing.assert_close(result.weights, expected, rtol=1e-15, atol=0.0)
    metrics = correction_metrics(result.states, spec)
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(factor, rel=1e-15)


def test_weights_that_are_nearly_0_are_not_divided() -> None:
    """All weights are 0 by IcePop: the factor is 1, as in verl, and nothing is divided by 0."""
    spec = section(rollout_is="token", rollout_is_threshold="0.9_1.1", rollout_is_batch_normalize=True).spec
    result = compute_correction(one_row([1.0, 1.0]), spec)
    assert result.weights is not None
    assert not result.weights.any()
    metrics = correction_metrics(result.states, spec)
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1.0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0


def test_sequences_that_are_not_known_are_not_in_the_mean_of_weights() -> None:
    """Their weight is 0 for want of one: counted, it would raise the weights of all others."""
    inputs = CorrectionInputs(
        train_logprobs=torch.tensor([[math.log(3.0), 0.0], [NAN, 0.0], [0.0, 0.0]], dtype=torch.float64),
        rollout_logprobs=torch.zeros(3, 2, dtype=torch.float64),
        response_mask=torch.ones(3, 2),
    )
    spec = section(rollout_is="sequence", rollout_is_threshold="inf", rollout_is_batch_normalize=True).spec
    weights = compute_correction(inputs, spec).weights
    assert weights is not None
    torch.testing.assert_close(
        weights, torch.tensor([[1.5, 1.5], [0.0, 0.0], [0.5, 0.5]], dtype=torch.float64), rtol=1e-15, atol=0.0
    )


def test_veto_rejects_the_sequence_of_a_token_below_it() -> None:
    """Below, not at: ln(1e-4) itself is kept. A token above 1e4 is, too."""
    at = math.log(1e-4)
    inputs = CorrectionInputs(
        train_logprobs=torch.tensor([[0.0, at], [0.0, math.nextafter(at, -10.0)], [0.0, 12.0]], dtype=torch.float64),
        rollout_logprobs=torch.zeros(3, 2, dtype=torch.float64),
        response_mask=torch.ones(3, 2, dtype=torch.int64),
    )
    spec = section(rollout_token_veto_threshold=1e-4).spec
    result = compute_correction(inputs, spec)
    assert result.mask.tolist() == [[1, 1], [0, 0], [1, 1]]
    metrics = correction_metrics(result.states, spec)
    assert metrics["mismatch/rollout_is_veto_fraction"] == pytest.approx(1.0 / 3.0)
    assert metrics["mismatch/rollout_is_catastrophic_token_fraction"] == pytest.approx(1.0 / 6.0)


_UNKNOWN = one_row([-0.5, NAN, -0.5, -0.25], [-0.25, -0.5, float("-inf"), -0.25])


def test_nan_policy_reject_takes_what_is_not_known_out_of_the_mask() -> None:
    """And the weight of a sequence with such a token is 0, since nobody knows it; metrics are of the other tokens."""
    for level, weights in (("token", [math.exp(-0.25), 0.0, 0.0, 1.0]), ("sequence", [0.0] * 4)):
        spec = section(rollout_is=level, rollout_is_threshold="inf").spec
        result = compute_correction(_UNKNOWN, spec)
        assert result.weights is not None
        assert result.weights[0].tolist() == pytest.approx(weights, rel=1e-15)
        assert result.mask.tolist() == [[True, False, False, True]]
        metrics = correction_metrics(result.states, spec)
        assert metrics["rollout_corr/rollout_nan_fraction"] == 0.5
        assert metrics["rollout_corr/num_tokens"] == 4.0
        assert metrics["rollout_corr/kl"] == 0.125
    sequence_rule = section(rollout_rs="geometric", rollout_rs_threshold=5.0).spec
    assert not compute_correction(_UNKNOWN, sequence_rule).mask.any()


def test_nan_policy_ratio_one_takes_the_log_probability_that_is_known_for_both() -> None:
    """So the perplexity of either policy has no token of probability 1 that nobody sampled."""
    spec = section(rollout_is="sequence", rollout_is_threshold="inf", nan_policy="ratio_one").spec
    result = compute_correction(_UNKNOWN, spec)
    assert result.mask.all()
    assert result.weights is not None
    assert result.weights[0].tolist() == pytest.approx([math.exp(-0.25)] * 4, rel=1e-15)
    metrics = correction_metrics(result.states, spec)
    assert metrics["rollout_corr/rollout_nan_fraction"] == 0.5
    assert metrics["rollout_corr/training_log_ppl"] == pytest.approx((0.5 + 0.5 + 0.5 + 0.25) / 4)
    assert metrics["rollout_corr/rollout_log_ppl"] == pytest.approx((0.25 + 0.5 + 0.5 + 0.25) / 4)


def test_nan_policy_error_says_how_many_and_which_is_the_first() -> None:
    spec = section(nan_policy="error").spec
    with pytest.raises(CorrectionError) as raised:
        compute_correction(_UNKNOWN, spec)
    assert str(raised.value) == (
        "rollout correction: 2 of 4 response tokens have no finite log-probability, the first at row 0, column 1 "
        "(training nan, rollout -0.5); find out why, or set rollout_correction.nan_policy to reject or ratio_one"
    )
    masked = CorrectionInputs(
        train_logprobs=_UNKNOWN.train_logprobs,
        rollout_logprobs=_UNKNOWN.rollout_logprobs,
        response_mask=torch.tensor([[1, 0, 0, 1]]),
    )
    assert compute_correction(masked, spec).mask.tolist() == [[1, 0, 0, 1]]


def test_a_filler_that_is_not_valid_is_not_read() -> None:
    """The engine gave no log-probability for the second token and 0, probability 1, in its place."""
    valid = torch.tensor([[True, False]])
    spec = section(rollout_is="token", rollout_is_threshold="inf").spec
    rejected = compute_correction(one_row([-1.0, -5.0], [-1.0, 0.0], logprob_valid=valid), spec)
    assert rejected.mask.tolist() == [[True, False]]
    assert rejected.weights is not None
    assert rejected.weights.tolist() == [[1.0, 0.0]]
    assumed = section(rollout_is="token", rollout_is_threshold="inf", nan_policy="ratio_one").spec
    kept = compute_correction(one_row([-1.0, -5.0], [-1.0, 0.0], logprob_valid=valid), assumed)
    assert kept.weights is not None
    assert kept.weights.tolist() == [[1.0, 1.0]]
    assert correction_metrics(kept.states, assumed)["rollout_corr/rollout_log_ppl"] == 3.0


def test_too_many_rejected_tokens_are_an_error() -> None:
    rule = {**rule_fields("token", "ratio"), "action": "reject_token"}
    inputs = one_row([0.0, 0.0, 0.5, 0.5])
    spec = section(rules=[rule], max_rejected_fraction=0.5).spec
    assert compute_correction(inputs, spec).mask.tolist() == [[True, True, False, False]]
    with pytest.raises(CorrectionError) as raised:
        compute_correction(inputs, section(rules=[rule], max_rejected_fraction=0.49).spec)
    assert str(raised.value) == (
        "rollout correction rejects 2 of 4 response tokens, 50.0%, above rollout_correction.max_rejected_fraction "
        "0.49: the rollout and the training policy differ too much to train on; look at `mock-scheduler correction`"
    )
    release = section(rollout_rs="token_k1", rollout_rs_threshold=1.19, max_rejected_fraction=0.49, verl_compat="0.9.1")
    with pytest.raises(CorrectionError, match="rejects 2 of 4 response tokens"):
        compute_correction(inputs, release.spec)


def test_rules_need_the_advantages_whose_sign_they_ask_for() -> None:
    rule = {**rule_fields("token", "ratio"), "action": "reject_token", "when": "negative_advantage"}
    with pytest.raises(CorrectionError) as raised:
        compute_correction(one_row([0.0]), section(rules=[rule]).spec)
    assert str(raised.value) == "rollout correction: a rule asks for the sign of advantages, and none are given"


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.float32, torch.float32), torch.float32),
        ((torch.bfloat16, torch.bfloat16), torch.float32),
        ((torch.float16, torch.float16), torch.float32),
        ((torch.float64, torch.float32), torch.float64),
        ((torch.bfloat16, torch.float64), torch.float64),
    ],
)
def test_weights_are_float32_or_wider(dtypes: tuple[torch.dtype, torch.dtype], expected: torch.dtype) -> None:
    """exp(15) is infinite in float16; differences are taken in float64, so 1/128 is not lost in bfloat16."""
    train = torch.tensor([[-1.0, -1.0 + 2**-7]]).to(dtypes[0])
    rollout = torch.tensor([[-16.0, -1.0]]).to(dtypes[1])
    inputs = CorrectionInputs(train_logprobs=train, rollout_logprobs=rollout, response_mask=torch.ones(1, 2))
    weights = compute_correction(inputs, section(rollout_is="token", rollout_is_threshold="inf").spec).weights
    assert weights is not None
    assert weights.dtype == expected
    exact = torch.tensor([[math.exp(15.0), math.exp(2**-7)]], dtype=torch.float64).to(expected)
    assert torch.equal(weights, exact)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_the_mask_keeps_its_dtype(dtype: torch.dtype) -> None:
    inputs = CorrectionInputs(
        train_logprobs=torch.tensor([[0.0, 1.0, 0.0]]),
        rollout_logprobs=torch.zeros(1, 3),
        response_mask=torch.tensor([[1, 1, 0]]).to(dtype),
    )
    mask = compute_correction(inputs, section(rollout_rs="token", rollout_rs_threshold=2.0).spec).mask
    assert mask.dtype == dtype
    assert mask.tolist() == [[1, 0, 0]]


def test_nothing_has_a_gradient_and_inputs_are_as_they_were() -> None:
    train = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    rollout = torch.tensor([[-1.5, -1.0]], requires_grad=True)
    mask = torch.ones(1, 2)
    inputs = CorrectionInputs(train_logprobs=train, rollout_logprobs=rollout, response_mask=mask)
    spec = section(rollout_is="token", rollout_is_threshold=1.2, rollout_rs="token", rollout_rs_threshold=1.5).spec
    result = compute_correction(inputs, spec)
    assert result.weights is not None
    assert not result.weights.requires_grad
    assert not result.mask.requires_grad
    assert train.requires_grad
    assert (train.grad, rollout.grad) == (None, None)
    assert train.tolist() == [[-1.0, -2.0]]
    assert mask.tolist() == [[1.0, 1.0]]
    assert result.mask.tolist() == [[0.0, 0.0]]
    # A gradient of the loss therefore passes through the policy alone.
    (result.weights * train).sum().backward()  # type: ignore[no-untyped-call]
    assert train.grad is not None
    assert train.grad.tolist() == result.weights.tolist()


def test_a_release_has_its_own_weights_and_mask_and_states_without_rules() -> None:
    """k1 inverted: of the ratios 0.5, 0.6, 1 and 2 verl 0.9.1 keeps those in [1/1.9, 1/0.55]."""
    train = [math.log(0.5), math.log(0.6), 0.0, math.log(2.0)]
    values = {"rollout_is": "sequence", "rollout_is_threshold": 2.0, "rollout_rs": "token_k1"}
    values["rollout_rs_threshold"] = "0.55_1.9"
    spec = section(**values, verl_compat="0.9.1").spec
    result = compute_correction(one_row(train), spec)
    assert result.mask.tolist() == [[False, True, True, False]]
    assert result.weights is not None
    torch.testing.assert_close(result.weights, torch.full((1, 4), 0.6, dtype=torch.float64), rtol=1e-12, atol=0.0)
    assert result.release_metrics is not None
    assert result.release_metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(0.5)
    metrics = correction_metrics(result.states, spec)
    assert metrics["rollout_corr/kept_fraction"] == 0.5
    assert metrics["rollout_corr/rollout_is_raw_mean"] == pytest.approx(0.6)
    assert not [name for name in metrics if "rollout_rs" in name]
    ours = compute_correction(one_row(train), section(**values).spec)
    assert ours.mask.tolist() == [[False, True, True, False]]


@pytest.mark.parametrize("level", [None, "token", "sequence"])
def test_a_release_gives_the_same_for_packed_inputs(level: Level | None) -> None:
    batch = random_batch(5)
    values = {"rollout_is": level, "rollout_rs": "token_k3", "rollout_rs_threshold": 0.02}
    compat = section(**values, verl_compat="0.9.1").spec
    padded, packed = compute_correction(batch.inputs(), compat), compute_correction(batch.packed(), compat)
    inside = batch.mask.flip(1).cummax(1).values.flip(1)
    assert (padded.weights is None, packed.weights is None) == (level is None, level is None)
    if padded.weights is not None and packed.weights is not None:
        assert torch.equal(padded.weights[inside], packed.weights)
    assert 0 < padded.kept.sum() < len(padded.kept)
    assert torch.equal(padded.mask[inside], packed.mask)
    assert padded.release_metrics == packed.release_metrics
    assert correction_metrics(padded.states, compat) == correction_metrics(packed.states, compat)
