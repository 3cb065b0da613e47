"""One of two gloo processes of ``test_context_parallel``: every check is an assertion here, and ends both."""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mock_scheduler.correction import (
    CorrectionInputs,
    CorrectionResult,
    CorrectionStates,
    compute_correction,
    correction_metrics,
)
from mock_scheduler.correction.config.rules import CorrectionSpec
from mock_scheduler.correction.config.section import RolloutCorrectionConfig
from mock_scheduler.errors import CorrectionError
from tests.correction.engine.batches import Batch, random_batch, random_spec, rule_fields

NUM_RANKS = 2


def run(rank: int, folder: str) -> None:
    """All checks, with a group that is made for them and is not the default one."""
    torch.set_num_threads(1)
    store = f"file://{Path(folder) / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)
    try:
        group = dist.new_group([0, 1])
        assert group is not None
        _check_every_level(rank, group)
        for seed in range(12):
            _check_shards(rank, group, random_batch(seed, width=12, unknown_share=0.03 * (seed % 3)), random_spec(seed))
        _check_batch_group(rank, group)
        _check_errors(rank, group)
        _check_groups_of_one(rank)
        (Path(folder) / f"rank{rank}.done").touch()
    finally:
        dist.destroy_process_group()


def _shard(batch: Batch, columns: list[int]) -> CorrectionInputs:
    """These tokens of every sequence, with the numbers of their turns and their positions in the whole."""
    tensors = {name: tensor[:, columns] for name, tensor in batch.inputs().tensors().items()}
    positions = (batch.mask.cumsum(1) - 1).clamp(min=0)
    return CorrectionInputs(**tensors, positions=positions[:, columns])


def _columns(width: int, seed: int, rank: int) -> list[int]:
    """Halves, the pairs of chunks of load-balanced attention, any token anywhere, and nothing at all on one rank."""
    chunk = width // 4
    owners = {
        0: [column // (2 * chunk) for column in range(width)],
        1: [0 if column < chunk or column >= 3 * chunk else 1 for column in range(width)],
        2: [random.Random(seed + column).randint(0, 1) for column in range(width)],
        3: [0] * width,
    }[seed % 4]
    return [column for column, owner in enumerate(owners) if owner == rank]


def _check_shards(
    rank: int, group: dist.ProcessGroup, batch: Batch, spec: CorrectionSpec, *, seed: int = 2
) -> CorrectionResult:
    whole = compute_correction(batch.inputs(), spec)
    columns = _columns(batch.mask.shape[1], seed, rank)
    shard = compute_correction(_shard(batch, columns), spec, context_group=group)
    assert torch.equal(shard.mask, whole.mask[:, columns]), (seed, spec)
    if whole.weights is not None:
        assert shard.weights is not None
        # Log ratios on the grid of 1/64 have exact sums; means of weights, by which they are divided, have not.
        bound = 1e-14 if spec.batch_normalize else 0.0
        torch.testing.assert_close(shard.weights, whole.weights[:, columns], rtol=bound, atol=0.0)
    gathered: list[CorrectionStates | None] = [None] * NUM_RANKS
    dist.all_gather_object(gathered, shard.states, group=group)
    found = correction_metrics(CorrectionStates.add([states for states in gathered if states is not None]), spec)
    expected = correction_metrics(whole.states, spec)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # A deviation of nearly equal values is the root of what cancels.
        bound = 1e-7 if name.endswith("_std") else 1e-12
        assert found[name] == pytest.approx(value, rel=1e-12, abs=bound), (name, seed)
    return whole


def _check_every_level(rank: int, group: dist.ProcessGroup) -> None:
    """Weights and one rule of each level; the rule must act, or nothing was shown."""
    actions = ("reject_token", "reject_sequence", "zero_weight")
    for level in ("token", "segment", "sequence", "geometric"):
        for number, action in enumerate(actions):
            acted = 0
            for seed in (number, number + 1):
                rule = {**rule_fields(level, "ratio", "mean" if level == "segment" else "sum"), "action": action}
                if level == "geometric":
                    rule.pop("aggregation")
                values = {"rollout_is": level, "rollout_is_threshold": 1.17, "rules": [rule]}
                spec = RolloutCorrectionConfig.model_validate(values).spec
                batch = random_batch(100 + seed, width=12, distance=60)
                whole = _check_shards(rank, group, batch, spec, seed=seed)
                assert whole.weights is not None
                acted += int((~whole.mask[batch.mask] | (whole.weights[batch.mask] == 0.0)).sum())
            assert acted > 0, (level, action)


def _check_batch_group(rank: int, group: dist.ProcessGroup) -> None:
    """Each rank has other sequences; the mean is of all, so weights are those of the whole batch."""
    for level in ("token", "segment", "sequence", "geometric"):
        values = {"rollout_is": level, "rollout_is_threshold": 1.17, "rollout_is_batch_normalize": True}
        spec = RolloutCorrectionConfig.model_validate(values).spec
        batch = random_batch(7, num_rows=5, width=12)
        rows = [[0, 1, 2], [3, 4]][rank]
        whole, own = (compute_correction(part.inputs(), spec) for part in (batch, batch.rows(rows)))
        shared = compute_correction(batch.rows(rows).inputs(), spec, batch_group=group)
        assert whole.weights is not None
        assert own.weights is not None
        assert shared.weights is not None
        torch.testing.assert_close(shared.weights, whole.weights[rows], rtol=1e-14, atol=0.0)
        assert not torch.allclose(own.weights, shared.weights, rtol=1e-6)
        merged: list[CorrectionStates | None] = [None] * NUM_RANKS
        dist.all_gather_object(merged, shared.states, group=group)
        found = correction_metrics(CorrectionStates.merge([states for states in merged if states is not None]), spec)
        assert found == pytest.approx(correction_metrics(whole.states, spec), rel=1e-12, abs=1e-12)
        # A group of all: the ranks of one context group count each sequence as often as every other.
        columns = _columns(batch.mask.shape[1], 0, rank)
        both = compute_correction(_shard(batch, columns), spec, context_group=group, batch_group=group)
        assert both.weights is not None
        torch.testing.assert_close(both.weights, whole.weights[:, columns], rtol=1e-14, atol=0.0)


def _check_errors(rank: int, group: dist.ProcessGroup) -> None:
    """Every rank raises what one of them would: none waits for the other."""
    batch = random_batch(11, width=12)
    # What one rank alone has: a log-probability that is not finite, and a turn below 0.
    shard = _shard(batch, _columns(12, 0, rank))
    assert shard.turn_ids is not None
    has_nan = replace(shard, train_logprobs=torch.full_like(shard.train_logprobs, torch.nan)) if rank == 0 else shard
    below = replace(shard, turn_ids=shard.turn_ids - 100) if rank == 1 else shard
    strict = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold="inf", nan_policy="error").spec
    of_turns = RolloutCorrectionConfig(rollout_is="segment", rollout_is_threshold="inf").spec
    for inputs, spec, guilty, words in ((has_nan, strict, 0, "no finite"), (below, of_turns, 1, "turn_ids")):
        with pytest.raises(CorrectionError, match=words if rank == guilty else "another rank"):
            compute_correction(inputs, spec, context_group=group)
    without = replace(_shard(batch, _columns(12, 0, rank)), turn_ids=None)
    segments = RolloutCorrectionConfig(rollout_is="segment", rollout_is_threshold="inf").spec
    with pytest.raises(CorrectionError) as raised:
        compute_correction(without, segments, context_group=group)
    assert str(raised.value) == (
        "rollout correction: rules of level segment need turn_ids where ranks share sequences, since no rank sees all "
        "of them"
    )
    # All that is rejected is on rank 1: half of its two tokens is a quarter of all four.
    train = torch.tensor([[0.0, 0.0, 0.0, 1.0]])[:, 2 * rank : 2 * rank + 2]
    inputs = CorrectionInputs(
        train_logprobs=train, rollout_logprobs=torch.zeros_like(train), response_mask=torch.ones_like(train)
    )
    rule = {"level": "token", "action": "reject_token", "upper": 2.0}
    for limit in (0.25, 0.2):
        values = {"rules": [rule], "max_rejected_fraction": limit}
        spec = RolloutCorrectionConfig.model_validate(values).spec
        if limit == 0.25:
            assert compute_correction(inputs, spec, context_group=group).mask.sum() == 2 - rank
            continue
        with pytest.raises(CorrectionError, match="rejects 1 of 4 response tokens"):
            compute_correction(inputs, spec, context_group=group)
    compat = RolloutCorrectionConfig(rollout_is="token", verl_compat="0.9.1").spec
    with pytest.raises(CorrectionError, match=r"verl_compat 0\.9\.1 computes on whole batches of one process"):
        compute_correction(inputs, compat, context_group=group)


def _check_groups_of_one(rank: int) -> None:
    """A group of one rank is no group: runs of the mask are turns, and nothing is exchanged."""
    groups = [dist.new_group([member]) for member in range(NUM_RANKS)]
    own = groups[rank]
    assert own is not None
    batch = random_batch(13)
    spec = RolloutCorrectionConfig(rollout_is="segment", rollout_is_batch_normalize=True).spec
    alone = compute_correction(batch.inputs(has_turns=False), spec)
    grouped = compute_correction(batch.inputs(has_turns=False), spec, context_group=own, batch_group=own)
    assert alone.weights is not None
    assert grouped.weights is not None
    assert torch.equal(alone.weights, grouped.weights)


if __name__ == "__main__":
    run(int(os.environ["RANK"]), sys.argv[1])
