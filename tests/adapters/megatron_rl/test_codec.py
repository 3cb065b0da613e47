"""Rollouts of megatron/rl come back from a recording with every class, field and bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from mock_scheduler.adapters.megatron_rl.codec import GroupedRolloutsCodec
from mock_scheduler.batch import RolloutBatch, SamplingParams, Termination
from mock_scheduler.errors import BatchError
from mock_scheduler.recording.step.step_file import decode_step, encode_step
from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.scheduler import RolloutRequest
from tests.adapters.bits import bits
from tests.adapters.megatron_rl import rl_utils
from tests.adapters.megatron_rl.rl_utils import FinishedRequestRecord, Rollout, RolloutGroup, TokenRollout

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="raw")
REQUEST = RolloutRequest(global_step=5, batch_size=8, policy_version=5)


def find_class(name: str) -> Any:
    return getattr(rl_utils, name, None)


CODEC = GroupedRolloutsCodec(sampling=SAMPLING, find_class=find_class)


def taken_apart(value: Any) -> Any:
    """Classes, the names of the fields that were set, and all fields, for ``bits``."""
    if isinstance(value, BaseModel):
        fields = {**vars(value), **(value.__pydantic_extra__ or {})}
        own = {name: taken_apart(item) for name, item in fields.items()}
        return [type(value).__name__, sorted(value.model_fields_set), own]
    if isinstance(value, FinishedRequestRecord):
        return ["record", vars(value)]
    if isinstance(value, dict):
        return {name: taken_apart(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(taken_apart(item) for item in value)
    return value


def check(native: Any, codec: GroupedRolloutsCodec = CODEC) -> RolloutBatch:
    """Encodes, writes, reads, decodes and compares; gives the batch."""
    before = bits(taken_apart(native))
    batch = codec.encode(native, REQUEST)
    info = StepInfo(step=5, mode="train", scheduler_id="default", run_id="r", policy_version=5)
    stored, _ = decode_step(encode_step(batch, info).to_bytes())
    assert bits(taken_apart(codec.decode(stored))) == before
    assert bits(taken_apart(native)) == before
    return batch


def token_rollout(**fields: Any) -> TokenRollout:
    given = {
        "trajectory": [[1, 2, 3, 4]],
        "reward": 1.0,
        "generation_mask": [[False, False, True, True]],
        "logprobs": [[-0.5, -0.25]],
        **fields,
    }
    return TokenRollout.model_construct(_fields_set=set(given), **given)


_LOGPROBS = st.floats(-20, 0, width=32) | st.floats(-20, 0) | st.sampled_from([math.nan, -math.inf, -0.0, 1e300])
_EXTRAS = st.dictionaries(
    st.sampled_from(["images", "advantage_override", "golden"]),
    st.none() | st.floats() | st.text(max_size=3) | st.binary(max_size=3) | st.just(torch.rand(2, 2)),
)


@st.composite
def turns(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), max_size=20))
    mask = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    short = draw(st.integers(0, min(1, sum(mask))))
    logprobs = draw(st.lists(_LOGPROBS, min_size=sum(mask) - short, max_size=sum(mask) - short))
    if draw(st.booleans()) and draw(st.booleans()):  # megatron/rl takes one-dimensional tensors, too
        return torch.tensor(tokens, dtype=torch.int64), torch.tensor(mask, dtype=torch.bool), torch.tensor(logprobs)
    return tokens, mask, logprobs


@st.composite
def rollouts(draw: st.DrawFn) -> TokenRollout | Rollout:
    if draw(st.integers(0, 5)) == 0:
        text = draw(st.lists(st.text(max_size=3), max_size=2))
        return Rollout.model_construct(trajectory=text, reward=draw(st.none() | st.floats()))
    parts = draw(st.lists(turns(), max_size=4))
    columns: list[Any] = [list(column) for column in zip(*parts, strict=True)] or [[], [], []]
    fields: dict[str, Any] = {
        "trajectory": columns[0],
        "generation_mask": draw(st.sampled_from([columns[1], None])),
        "reward": draw(st.floats() | st.integers(0, 3) | st.lists(st.floats(), max_size=len(parts))),
        "env_id": draw(st.sampled_from(["", "math"])),
        "rollout_status": draw(st.sampled_from(["ok", "placeholder", "masked", "graded"])),
        **draw(_EXTRAS),
    }
    fields["logprobs"] = columns[2] if fields["generation_mask"] is not None else None
    if draw(st.booleans()):  # as releases before the ledger had them
        bounds = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 7)), max_size=3)
        for name in ("policy_epoch", "kv_cache_epoch"):
            fields[name] = draw(st.lists(bounds, min_size=len(parts), max_size=len(parts)))
        fields["num_evictions"] = [0] * len(parts)
    fields["completion_ids"] = [f"c{number}" for number in range(len(parts))]
    if draw(st.booleans()):
        return TokenRollout.model_construct(_fields_set={"trajectory"}, **fields)
    return TokenRollout.model_construct(**fields)


@st.composite
def natives(draw: st.DrawFn) -> Any:
    groups: list[Any] = draw(st.lists(st.lists(rollouts(), min_size=1, max_size=3), min_size=1, max_size=3))
    if draw(st.booleans()):
        groups = [
            RolloutGroup.model_construct(rollouts=group, batch_id=number, uid=draw(st.none() | st.text(max_size=2)))
            for number, group in enumerate(groups)
        ]
    bounds = st.none() | st.lists(st.tuples(st.integers(0, 20), st.integers(0, 7)), max_size=2)
    records = st.builds(FinishedRequestRecord, bounds, bounds, st.integers(0, 3))
    ledger = draw(st.none() | st.dictionaries(st.sampled_from(["c0", "c1", "c9"]), records))
    return groups if ledger is None else (groups, ledger)


@settings(max_examples=60, deadline=None)
@given(natives())
def test_rollouts_of_any_form_come_back(native: Any) -> None:
    check(native)


def test_core_fields_are_the_rollouts_own() -> None:
    groups, ledger = rl_utils.play(5, 2, 2)
    batch = check((groups, ledger))
    assert (len(batch), batch.num_groups, batch.group_size, batch.num_trajectories) == (8, 2, 2, 4)
    rows = batch.rows()
    assert rows[1].tokens.tolist() == [1, 2, 10, 11, 3, 25, 0]
    assert rows[1].response_mask.tolist() == [False] * 5 + [True, True]
    assert [row.prompt_length for row in rows[:2]] == [2, 5]
    # The token that the engine ended on has no log-probability.
    assert rows[1].rollout_logprobs.tolist() == [-0.125, 0.0]
    assert rows[0].rollout_logprobs.tolist() == [-0.5, -0.25]
    assert [(row.identity.group_id, row.identity.env_id, row.identity.turn) for row in rows[1:4]] == [
        *((0, 0, 1), (0, 1, 0), (0, 1, 1)),
    ]
    assert batch.rewards.tolist() == [0.0, 0.0, 0.0, 1.0] * 2
    assert set(batch.terminations.tolist()) == {int(Termination.TERMINATED)}


def test_versions_are_read_of_each_token_from_the_ledger_or_from_the_rollout() -> None:
    epochs = [(0, 2), (3, 4)]
    stated = token_rollout(completion_ids=["c"])
    by_ledger = check(([[stated]], {"c": FinishedRequestRecord(epochs, [(0, 4)], 0)}))
    by_rollout = check([[token_rollout(policy_epoch=[epochs], kv_cache_epoch=[[(0, 4)]], num_evictions=[0])]])
    for batch in (by_ledger, by_rollout):
        assert batch.extras["policy_versions_by_token"].row(0).values.tolist() == [2, 4]
        assert batch.policy_versions.tolist() == [2]
    # Of an engine that counts otherwise, the trainer's.
    assert check([[token_rollout(policy_epoch=[[(0, 9)]])]]).policy_versions.tolist() == [5]


def test_an_episode_that_failed_has_a_placeholder() -> None:
    failed = token_rollout(trajectory=[], generation_mask=None, logprobs=None, reward=0.0, failure_reason="timeout")
    batch = check([RolloutGroup(rollouts=[token_rollout(), failed])])
    assert batch.rows()[1].tokens.tolist() == [0]
    assert batch.terminations.tolist() == [int(Termination.TERMINATED), int(Termination.ABORTED)]


@pytest.mark.parametrize(
    ("native", "problem"),
    [
        ([], "there is none"),
        ([[]], "group 0 has no rollout"),
        ([[token_rollout(generation_mask=[[True]])]], "generation_mask has 1 entries, and the turn has 4 tokens"),
        ([[token_rollout(logprobs=[[]])]], "2 tokens were sampled, and 0 have a log-probability"),
        ([[token_rollout(trajectory=[[1, -2, 3, 4]])]], "token ids lie from -2 to 4"),
        ([[token_rollout(trajectory=[[1.5, 2.0, 3.0, 4.0]])]], "trajectory of a turn is of float64"),
        (
            [[token_rollout(image=object())]],
            "row 0: image holds a value of type builtins.object, which cannot be recorded",
        ),
    ],
)
def test_what_cannot_be_recorded_is_named(native: Any, problem: str) -> None:
    with pytest.raises(BatchError, match=problem):
        CODEC.encode(native, REQUEST)


def test_a_class_that_a_replay_could_not_make_is_refused() -> None:
    class Mine(TokenRollout):
        pass

    with pytest.raises(BatchError, match=r"test_codec\.Mine is no class of megatron/rl"):
        CODEC.encode([[Mine(trajectory=[], reward=0.0)]], REQUEST)
    batch = CODEC.encode([[token_rollout()]], REQUEST)
    with pytest.raises(BatchError, match="this release of Megatron-LM has no TokenRollout"):
        GroupedRolloutsCodec(sampling=SAMPLING, find_class=lambda name: None).decode(batch)
    with pytest.raises(BatchError, match="was not recorded from rollouts of megatron/rl"):
        CODEC.decode(RolloutBatch.from_trajectories(batch.rows(), sampling=SAMPLING, group_size=1))
