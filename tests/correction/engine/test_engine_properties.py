"""What holds for every batch and every list of rules: shifts, order, layout, splits, and what masked positions hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.correction import (
    CorrectionInputs,
    CorrectionResult,
    CorrectionStates,
    compute_correction,
    correction_metrics,
)
from mock_scheduler.correction.config.rules import CorrectionSpec, Rule
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from tests.correction.engine.batches import NAN, Batch, random_batch, random_spec

SEEDS = st.integers(0, 10**6)
WILD = (NAN, float("inf"), -float("inf"), 1e30, -1e30)
#: Every kind of unit and estimator at once.
EVERYTHING = RolloutCorrectionConfig.model_validate(
    {
        "rollout_is": "sequence",
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": True,
        "rollout_rs": "token_k1,seq_sum_k2,seq_mean_k3,seq_max_k3",
        "rollout_rs_threshold": "0.5_2.0,1.5,0.4,3.5",
        "rollout_token_veto_threshold": 1e-4,
        "rules": [
            {"level": "segment", "action": "reject_token", "aggregation": "mean", "lower": 0.5, "upper": 2.0},
            {"level": "geometric", "action": "zero_weight", "upper": 2.0},
            {"level": "token", "action": "reject_sequence", "estimator": "prob_diff", "upper": 0.9},
            {
                "level": "segment",
                "action": "reject_sequence",
                "estimator": "k1",
                "upper": 3.0,
                "when": "negative_advantage",
            },
        ],
    }
).spec


def run(batch: Batch, spec: CorrectionSpec) -> CorrectionResult:
    return compute_correction(batch.inputs(), spec)


def assert_same(first: CorrectionResult, second: CorrectionResult, spec: CorrectionSpec) -> None:
    """Weights, masks and metrics, to the bit."""
    assert (first.weights is None) == (second.weights is None)
    if first.weights is not None and second.weights is not None:
        assert torch.equal(first.weights, second.weights)
    assert torch.equal(first.mask, second.mask)
    assert correction_metrics(first.states, spec) == correction_metrics(second.states, spec)


def without_prob_diff(spec: CorrectionSpec) -> CorrectionSpec:
    return replace(spec, rules=tuple(rule for rule in spec.rules if rule.estimator != "prob_diff"))


@settings(max_examples=25)
@given(batch_seed=SEEDS, spec_seed=SEEDS, steps=st.integers(-256, 0))
def test_a_constant_added_to_both_policies_changes_no_ratio(batch_seed: int, spec_seed: int, steps: int) -> None:
    """Weights, masks and every metric but those of the policies' own probabilities."""
    spec = without_prob_diff(random_spec(spec_seed))
    batch = random_batch(batch_seed)
    shift = steps / 64
    moved = replace(batch, train=batch.train + shift, rollout=batch.rollout + shift)
    before, after = run(batch, spec), run(moved, spec)
    assert (before.weights is None) == (after.weights is None)
    if before.weights is not None and after.weights is not None:
        assert torch.equal(before.weights, after.weights)
    assert torch.equal(before.mask, after.mask)
    absolute = ("training_", "rollout_ppl", "rollout_log_ppl", "probs_", "log_ppl", "ppl_ratio")
    left, right = (
        {
            name: value
            for name, value in correction_metrics(result.states, spec).items()
            if not name.split("/")[1].removeprefix("mismatch_").startswith(absolute)
        }
        for result in (before, after)
    )
    assert left == right


@settings(max_examples=25)
@given(batch_seed=SEEDS, spec_seed=SEEDS, order=st.permutations(range(5)))
def test_the_order_of_sequences_does_not_count(batch_seed: int, spec_seed: int, order: list[int]) -> None:
    spec = random_spec(spec_seed)
    batch = random_batch(batch_seed, num_rows=5, unknown_share=0.05)
    result, moved = run(batch, spec), run(batch.rows(order), spec)
    if result.weights is not None and moved.weights is not None:
        assert torch.equal(result.weights[order], moved.weights)
    assert torch.equal(result.mask[order], moved.mask)
    assert correction_metrics(result.states, spec) == correction_metrics(moved.states, spec)


@settings(max_examples=25)
@given(batch_seed=SEEDS, spec_seed=SEEDS, has_turns=st.booleans())
def test_padded_is_packed(batch_seed: int, spec_seed: int, has_turns: bool) -> None:
    """To the bit, also where a sequence is empty when packed."""
    spec = random_spec(spec_seed)
    batch = random_batch(batch_seed, width=23, unknown_share=0.05)
    padded = compute_correction(batch.inputs(has_turns=has_turns), spec)
    packed = compute_correction(batch.packed(has_turns=has_turns), spec)
    inside = batch.mask.flip(1).cummax(1).values.flip(1)
    if padded.weights is not None and packed.weights is not None:
        assert torch.equal(padded.weights[inside], packed.weights)
    assert torch.equal(padded.mask[inside], packed.mask)
    assert torch.equal(padded.kept, packed.kept)
    assert correction_metrics(padded.states, spec) == correction_metrics(packed.states, spec)


@pytest.mark.parametrize("seed", range(4))
def test_padded_is_packed_for_every_kind_of_rule_at_once(seed: int) -> None:
    """Turns are runs of the mask here, and sequences end with a response token when packed."""
    batch = random_batch(seed, width=23)
    padded = compute_correction(batch.inputs(has_turns=False), EVERYTHING)
    packed = compute_correction(batch.packed(has_turns=False), EVERYTHING)
    assert torch.equal(padded.kept, packed.kept)
    assert correction_metrics(padded.states, EVERYTHING) == correction_metrics(packed.states, EVERYTHING)


@pytest.mark.parametrize("width", [129, 1000, 8193])
def test_padded_is_packed_for_long_sequences(width: int) -> None:
    """Sums over more tokens than one block of numpy's pairwise summation, with values that are on no grid."""
    generator = torch.Generator().manual_seed(width)
    batch = random_batch(1, num_rows=3, width=width)
    noise = torch.rand(batch.train.shape, generator=generator, dtype=torch.float64) / 1000
    batch = replace(batch, train=batch.rollout + noise)
    spec = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="geometric", rollout_rs_threshold=1.0006).spec
    padded, packed = run(batch, spec), compute_correction(batch.packed(), spec)
    inside = batch.mask.flip(1).cummax(1).values.flip(1)
    assert padded.weights is not None
    assert packed.weights is not None
    assert torch.equal(padded.weights[inside], packed.weights)
    assert correction_metrics(padded.states, spec) == correction_metrics(packed.states, spec)
    alone = run(batch.rows([1]), spec)
    assert alone.weights is not None
    assert torch.equal(alone.weights[0], padded.weights[1])


@settings(max_examples=25)
@given(batch_seed=SEEDS, spec_seed=SEEDS, owners=st.lists(st.integers(0, 3), min_size=6, max_size=6), turn=SEEDS)
def test_any_split_into_micro_batches_gives_the_same(
    batch_seed: int, spec_seed: int, owners: list[int], turn: int
) -> None:
    """To the bit, in whatever order states are merged, also in two steps, and with micro-batches of other widths.

    Weights that are divided by their mean over a micro-batch differ, of course: that mean is of ``batch_group``.
    """
    spec = random_spec(spec_seed, batch_normalize=False)
    batch = random_batch(batch_seed, num_rows=6, unknown_share=0.05)
    whole = run(batch, spec)
    groups = [[row for row, owner in enumerate(owners) if owner == part] for part in range(4)]
    parts = []
    for rows in groups:
        part = batch.rows(rows)
        width = batch.mask.shape[1]
        used = 1 + max((column for column in range(width) if part.mask[:, column].any()), default=-1)
        narrow = CorrectionInputs(**{name: tensor[:, :used] for name, tensor in part.inputs().tensors().items()})
        result = compute_correction(narrow, spec)
        assert torch.equal(result.mask, whole.mask[rows][:, :used])
        if result.weights is not None and whole.weights is not None:
            assert torch.equal(result.weights, whole.weights[rows][:, :used])
        parts.append(result.states)
    parts = parts[turn % 4 :] + parts[: turn % 4]
    expected = correction_metrics(whole.states, spec)
    assert correction_metrics(CorrectionStates.merge(parts), spec) == expected
    in_steps = CorrectionStates.merge([CorrectionStates.merge(parts[:1]), CorrectionStates.merge(parts[1:])])
    assert correction_metrics(in_steps, spec) == expected


@settings(max_examples=25)
@given(batch_seed=SEEDS, spec_seed=SEEDS, ranks=st.lists(st.integers(0, 2), min_size=12, max_size=12))
def test_shards_of_sequences_add_up_where_no_unit_is_shared(batch_seed: int, spec_seed: int, ranks: list[int]) -> None:
    """Rules of tokens need nothing of other ranks; those of sequences are tested with a real group."""
    spec = random_spec(spec_seed, batch_normalize=False, levels=("token",))
    spec = replace(spec, rules=tuple(rule for rule in spec.rules if rule.action != "reject_sequence"))
    batch = random_batch(batch_seed, width=12, unknown_share=0.05)
    whole = run(batch, spec)
    positions = (batch.mask.cumsum(1) - 1).clamp(min=0)
    states = []
    for rank in range(3):
        columns = [column for column, owner in enumerate(ranks) if owner == rank]
        tensors = {name: tensor[:, columns] for name, tensor in batch.inputs().tensors().items()}
        shard = compute_correction(CorrectionInputs(**tensors, positions=positions[:, columns]), spec)
        assert torch.equal(shard.mask, whole.mask[:, columns])
        if shard.weights is not None and whole.weights is not None:
            assert torch.equal(shard.weights, whole.weights[:, columns])
        states.append(shard.states)
    found = correction_metrics(CorrectionStates.add(states), spec)
    assert found == pytest.approx(correction_metrics(whole.states, spec), rel=1e-12, abs=1e-12) or _only_deviations(
        found, correction_metrics(whole.states, spec)
    )


def _only_deviations(found: dict[str, float], expected: dict[str, float]) -> bool:
    """A deviation of nearly equal values is the root of what cancels."""
    far = {name for name, value in found.items() if value != pytest.approx(expected[name], rel=1e-12, abs=1e-12)}
    return found.keys() == expected.keys() and all(
        name.endswith("_std") and found[name] == pytest.approx(expected[name], abs=1e-7) for name in far
    )


@settings(max_examples=25)
@given(batch_seed=SEEDS, spec_seed=SEEDS, fills=st.lists(st.sampled_from(WILD), min_size=6, max_size=6))
def test_what_masked_positions_hold_changes_nothing(batch_seed: int, spec_seed: int, fills: list[float]) -> None:
    spec = random_spec(spec_seed)
    batch = random_batch(batch_seed)
    outside = ~batch.mask
    train, rollout, advantages = batch.train.clone(), batch.rollout.clone(), batch.advantages.clone()
    for number, tensor in enumerate((train, rollout, advantages)):
        tensor[outside] = fills[number]
        tensor[:, ::2][outside[:, ::2]] = fills[number + 3]
    turns, versions = batch.turns.clone(), batch.versions.clone()
    turns[outside] = -(10**12)
    versions[outside] = -(10**12)
    filled = replace(batch, train=train, rollout=rollout, advantages=advantages, turns=turns, versions=versions)
    assert_same(run(batch, spec), run(filled, spec), spec)


@settings(max_examples=25)
@given(batch_seed=SEEDS, spec_seed=SEEDS)
def test_equal_policies_are_not_corrected(batch_seed: int, spec_seed: int) -> None:
    """Weights are exactly 1, KL exactly 0 and the sample size exactly 1, and all is kept: 1 and 0 are within bounds."""
    spec = random_spec(spec_seed)
    batch = random_batch(batch_seed)
    batch = replace(batch, train=batch.rollout)
    result = run(batch, spec)
    assert torch.equal(result.mask, batch.mask)
    if result.weights is not None:
        assert torch.equal(result.weights, batch.mask.double())
    metrics = correction_metrics(result.states, spec)
    if not batch.mask.any():
        return
    for name in ("kl", "k3_kl", "log_ppl_diff", "chi2_token", "chi2_seq", "probs_diff_max", "all_rejected"):
        assert metrics[f"rollout_corr/{name}"] == 0.0
    ones = ["kept_fraction", "ppl_ratio"]
    if spec.weight is not None:
        ones += ["rollout_is_eff_sample_size", "rollout_is_raw_eff_sample_size", "rollout_is_applied_eff_sample_size"]
        ones += ["rollout_is_mean", "rollout_is_max", "rollout_is_min", "rollout_is_p99"]
    for name in ones:
        assert metrics[f"rollout_corr/{name}"] == 1.0


def _empty_batches() -> dict[str, CorrectionInputs]:
    def inputs(*shape: int, mask: float = 0.0, train: float = -1.0, **more: torch.Tensor) -> CorrectionInputs:
        tensors = {
            "train_logprobs": torch.full(shape, train),
            "rollout_logprobs": torch.full(shape, -1.0),
            "response_mask": torch.full(shape, mask),
            "advantages": torch.full(shape, -1.0),
            "versions_behind": torch.zeros(shape, dtype=torch.int64),
        }
        return CorrectionInputs(**tensors, **more)

    def offsets(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return {
        "no rows": inputs(0, 5),
        "no columns": inputs(3, 0),
        "nothing at all": inputs(0, 0),
        "all masked": inputs(2, 4),
        "all masked NaN": inputs(2, 4, train=NAN),
        "all unknown": inputs(2, 4, mask=1.0, train=NAN),
        "all rejected": inputs(2, 4, mask=1.0, train=-90.0),
        "packed no sequences": inputs(0, cu_seqlens=offsets(0)),
        "packed empty sequences": inputs(0, cu_seqlens=offsets(0, 0, 0)),
        "packed between empty ones": inputs(4, mask=1.0, cu_seqlens=offsets(0, 0, 4, 4)),
        "packed all masked": inputs(4, cu_seqlens=offsets(0, 2, 4)),
        "packed all unknown": inputs(4, mask=1.0, train=NAN, cu_seqlens=offsets(0, 4)),
        "far apart": inputs(1, 3, mask=1.0, train=-1e30),
        "no log-probabilities": inputs(1, 3, mask=1.0, train=1e30),
    }


@pytest.mark.parametrize("has_turn_ids", [True, False])
@pytest.mark.parametrize("name", _empty_batches())
def test_nothing_raises_or_warns_however_little_there_is(name: str, has_turn_ids: bool) -> None:
    inputs = _empty_batches()[name]
    if has_turn_ids:
        inputs = replace(inputs, turn_ids=torch.zeros(inputs.response_mask.shape, dtype=torch.int32))
    result = compute_correction(inputs, EVERYTHING)
    assert result.weights is not None
    assert result.weights.shape == result.mask.shape == inputs.response_mask.shape
    assert result.weights.isfinite().all()
    num_tokens = float((inputs.response_mask != 0).sum())
    is_kept = name == "packed between empty ones"
    assert float(result.mask.sum()) == (num_tokens if is_kept else 0.0)
    metrics = correction_metrics(CorrectionStates.merge([result.states, result.states]), EVERYTHING)
    assert metrics["rollout_corr/num_tokens"] == 2.0 * num_tokens
    assert metrics["rollout_corr/all_rejected"] == float(num_tokens > 0 and not is_kept)
    assert metrics["rollout_corr/kept_fraction"] == float(is_kept)


def test_rules_of_one_label_are_apart_in_metrics() -> None:
    """prime-rl's older rules have the token's ratio twice; the second would have hidden the first."""
    spec = RolloutCorrectionConfig(
        rules=[
            Rule(level="token", action="reject_token", upper=1.1),
            Rule(level="token", action="reject_sequence", upper=1.3),
        ]
    ).spec
    inputs = CorrectionInputs(
        train_logprobs=torch.tensor([[0.0, 0.2], [0.0, 0.5]]),
        rollout_logprobs=torch.zeros(2, 2),
        response_mask=torch.ones(2, 2),
    )
    metrics = correction_metrics(compute_correction(inputs, spec).states, spec)
    assert metrics["rollout_corr/rollout_rs_token_ratio_masked_fraction"] == 0.5
    assert metrics["rollout_corr/rollout_rs_token_ratio_2_masked_fraction"] == 0.5
    assert metrics["rollout_corr/rollout_rs_token_ratio_fraction_low"] == 0.5
    assert metrics["rollout_corr/rollout_rs_token_ratio_2_fraction_low"] == 0.25
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.75
