import dataclasses
import hashlib
import math
import random
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.batch import RolloutBatch, SampleIdentity, SamplingParams, Trajectory, compute_prompt_digest
from mock_scheduler.batch.columns import JsonColumn, Ragged, RowValue, TensorColumn
from mock_scheduler.batch.trajectory import build_identities, count_groups, partial_group_problems
from mock_scheduler.errors import BatchError
from tests.batches import SAMPLING, make_batch, make_row, make_rows


def build(rows: Sequence[Trajectory], group_size: int | None = None) -> RolloutBatch:
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=group_size)


def test_rows_are_in_identity_order_whatever_their_arrival_order() -> None:
    rows = make_rows(3, 2)
    shuffled = rows.copy()
    random.Random(1).shuffle(shuffled)
    assert [row.identity for row in shuffled] != [row.identity for row in rows]
    assert build(shuffled, 2).is_identical(build(rows, 2))
    assert [(i.group_id, i.env_id) for i in build(shuffled).identities] == [(g, e) for g in range(3) for e in range(2)]


def test_jagged_content_is_the_rows_one_after_another() -> None:
    batch = build(
        [
            make_row(
                0, 1, tokens=(7, 8, 9), response=(False, False, True), rollout_logprobs=(-2.0,), turn_rewards=(0.5,)
            ),
            make_row(0, 0),
        ]
    )
    assert batch.tokens.tolist() == [1, 2, 3, 4, 7, 8, 9]
    assert batch.row_offsets.tolist() == [0, 4, 7]
    assert batch.lengths.tolist() == [4, 3]
    assert batch.response_mask.tolist() == [False, False, True, True, False, False, True]
    assert batch.rollout_logprobs.tolist() == [-0.5, -0.25, -2.0]
    assert batch.response_offsets.tolist() == [0, 2, 3]
    assert batch.turn_rewards.tolist() == [0.0, 1.0, 0.5]
    assert batch.turn_offsets.tolist() == [0, 2, 3]
    assert batch.rewards.tolist() == [1.0, 0.5]
    assert batch.prompt_digests[1] == compute_prompt_digest(torch.tensor([7, 8], dtype=torch.int32))
    assert batch.prompt_digests[1] == hashlib.sha256(struct.pack("<2i", 7, 8)).hexdigest()
    assert len(batch) == 2


def test_total_reward_does_not_depend_on_the_order_of_the_turns() -> None:
    # Added one after another in float32 these give 0; the exact sum is 1.
    batch = build([make_row(turn_rewards=(1e8, 1.0, -1e8)), make_row(0, 1, turn_rewards=(1.0, 1e8, -1e8))])
    assert batch.rewards.tolist() == [1.0, 1.0]


def test_a_total_reward_that_was_given_is_kept_through_select_and_concat() -> None:
    rows = [dataclasses.replace(make_row(0, env), reward=0.1 * env) for env in range(3)]
    batch = build(rows)
    expected = torch.tensor([0.0, 0.1, 0.2], dtype=torch.float32)
    assert torch.equal(batch.rewards, expected)
    parts = [batch.select([2]), batch.select([0, 1])]
    assert torch.equal(RolloutBatch.concat(parts).rewards, expected)


def test_all_problems_of_a_batch_are_listed_at_once() -> None:
    rows = [
        make_row(0, 0),
        make_row(0, 0),
        make_row(1, 0, rollout_logprobs=(-0.5,)),
        make_row(1, 1, turn_rewards=(float("nan"),)),
        make_row(2, 0, response=(False, True, True, False)),
    ]
    with pytest.raises(BatchError) as caught:
        build(rows, 2)
    assert str(caught.value) == (
        "rollout batch has 6 problems:\n"
        "  - default/group 1/episode 0/env 0/turn 0: rollout_logprobs has 1 entries, response_mask marks 2 tokens\n"
        "  - default/group 1/episode 0/env 1/turn 0: turn_rewards is not finite: [nan]\n"
        "  - default/group 2/episode 0/env 0/turn 0: response_mask is True inside the prompt of 2 tokens\n"
        "  - default/group 0/episode 0/env 0/turn 0: duplicated identity\n"
        "  - default/group 0/episode 0: 1 of 2 trajectories\n"
        "  - default/group 2/episode 0: 1 of 2 trajectories"
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"tokens": torch.tensor([1, 2, 3, 4])},
            "tokens is torch.int64 [4] on cpu; expected torch.int32 with 1 dimension on cpu",
        ),
        ({"response_mask": torch.ones(5, dtype=torch.bool)}, "response_mask has 5 entries, the row has 4 tokens"),
        ({"policy_versions": torch.zeros(3, dtype=torch.int32)}, "turn_rewards has 2 turns, policy_versions has 3"),
        ({"prompt_length": 5}, "prompt_length is 5, the row has 4 tokens"),
        ({"tokens": torch.tensor([1, -2, 3, 4], dtype=torch.int32)}, "token id -2 is negative"),
        ({"rollout_logprobs": torch.tensor([0.0, float("-inf")])}, "rollout_logprobs is not finite: [-inf]"),
        ({"reward": float("inf")}, "reward is not finite: inf"),
        (
            {
                "tokens": torch.tensor([], dtype=torch.int32),
                "response_mask": torch.tensor([], dtype=torch.bool),
                "rollout_logprobs": torch.tensor([]),
                "prompt_length": 0,
            },
            "it has no tokens",
        ),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(BatchError) as caught:
        build([dataclasses.replace(make_row(), **changes)])
    assert f"  - default/group 0/episode 0/env 0/turn 0: {problem}" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rewards": torch.tensor([0.0, float("nan")])}, "env 1/turn 0: reward is not finite: nan"),
        (
            {"rewards": torch.zeros(2, dtype=torch.float64)},
            "rewards is torch.float64 [2] on cpu; expected torch.float32 with 1 dimension on cpu",
        ),
        ({"row_offsets": torch.tensor([0, 9, 8])}, "row_offsets must rise from 0 to 8"),
        ({"row_offsets": torch.tensor([0, 8, 8])}, "env 1/turn 0: it has no tokens"),
        ({"row_offsets": torch.tensor([0, 8])}, "row_offsets has 2 entries; expected 3"),
        (
            {"terminations": torch.tensor([0, 3], dtype=torch.uint8)},
            "env 1/turn 0: termination is 3; expected 0 to 2",
        ),
        (
            {"prompt_lengths": torch.tensor([2, 5], dtype=torch.int32)},
            "env 1/turn 0: prompt_length is 5, the row has 4 tokens",
        ),
        (
            {"prompt_lengths": torch.tensor([2, -1], dtype=torch.int32)},
            "env 1/turn 0: prompt_length is -1, the row has 4 tokens",
        ),
        (
            {"prompt_lengths": torch.tensor([3, 2], dtype=torch.int32)},
            "env 0/turn 0: response_mask is True inside the prompt of 3 tokens",
        ),
        (
            {"prompt_lengths": torch.tensor([2, 4], dtype=torch.int32)},
            "env 1/turn 0: response_mask is True inside the prompt of 4 tokens",
        ),
        (
            {"rollout_logprobs": torch.tensor([0.0, -1.0, -1.0, float("inf")])},
            "env 1/turn 0: rollout_logprobs is not finite: [inf]",
        ),
        ({"tags": ("a",)}, "tags has 1 entries; expected 2"),
        ({"group_size": 3}, "default/group 0/episode 0: 2 of 3 trajectories"),
        ({"extras": {"a": TensorColumn(values=torch.zeros(3))}}, "extra 'a' has 3 rows; expected 2"),
        ({"extras": {"a b": JsonColumn(items=(1, 2))}}, "extra 'a b': a name has up to 128 letters, digits and"),
        ({"meta": {"cost": float("nan")}}, "meta 'cost' is nan; JSON has no NaN and no infinity"),
    ],
)
def test_a_batch_made_by_its_constructor_is_checked_too(changes: dict[str, object], problem: str) -> None:
    batch = build([make_row(0, 0), make_row(0, 1)], 2)
    with pytest.raises(BatchError, match="problem") as caught:
        dataclasses.replace(batch, **changes)
    assert problem in str(caught.value)


def test_identities_out_of_order_are_refused() -> None:
    batch = build([make_row(0, 0), make_row(0, 1)])
    with pytest.raises(BatchError, match="identities are not in increasing order"):
        dataclasses.replace(batch, identities=batch.identities[::-1])


def test_a_long_list_of_problems_is_cut() -> None:
    rows = [dataclasses.replace(make_row(0, env), prompt_length=9) for env in range(23)]
    with pytest.raises(BatchError) as caught:
        build(rows)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rollout batch has 23 problems:"
    assert lines[1] == "  - default/group 0/episode 0/env 0/turn 0: prompt_length is 9, the row has 4 tokens"
    assert lines[20:] == [
        "  - default/group 0/episode 0/env 19/turn 0: prompt_length is 9, the row has 4 tokens",
        "  and 3 more",
    ]


def test_a_long_list_of_values_is_cut() -> None:
    row = make_row(tokens=range(9), response=[False, False] + [True] * 7, rollout_logprobs=[float("nan")] * 7)
    with pytest.raises(BatchError, match=r"rollout_logprobs is not finite: \[nan, nan, nan, nan, …\] \(7 values\)"):
        build([row])


def test_an_identity_number_must_be_an_int() -> None:
    with pytest.raises(BatchError) as caught:
        SampleIdentity(scheduler_id="a", group_id=0, episode_id=-1, env_id=0, turn=0)
    assert str(caught.value) == "sample identity: episode_id is -1; expected an int of 0 to 2**63 - 1"


def test_groups_are_numbered_in_row_order() -> None:
    batch = build(make_rows(3, 2))
    assert batch.group_index.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.num_groups == 3
    assert batch.select([2, 5]).group_index.tolist() == [0, 1]


def test_rows_without_response_are_allowed_and_counted() -> None:
    row = make_row(0, 1, response=(False,) * 4, rollout_logprobs=(), turn_rewards=(), prompt_length=4)
    batch = build([make_row(0, 0), row])
    assert batch.num_rows_without_response == 1
    assert batch.response_lengths.tolist() == [2, 0]
    assert batch.rewards.tolist() == [1.0, 0.0]


def test_rows_of_identical_content_are_named_with_the_row_they_repeat() -> None:
    batch = build([make_row(0, 0), make_row(0, 1), make_row(0, 2, tag="other"), make_row(1, 0)])
    pairs = [(later.trajectory_key, first.trajectory_key) for later, first in batch.duplicate_rows()]
    assert pairs == [
        (("default", 0, 0, 1), ("default", 0, 0, 0)),
        (("default", 1, 0, 0), ("default", 0, 0, 0)),
    ]
    assert batch.num_duplicate_rows == 2


@pytest.mark.parametrize(
    ("name", "values", "num_duplicates"),
    [
        ("scalar", [torch.tensor(float("nan")), torch.tensor(float("nan"))], 1),
        ("scalar", [torch.tensor(0.0), torch.tensor(-0.0)], 0),
        ("ragged", [Ragged(torch.tensor([1])), Ragged(torch.tensor([1, 1]))], 0),
        ("json", [{"a": [1]}, {"a": [2]}], 0),
        ("json", [{"a": 1, "b": 2}, {"b": 2, "a": 1}], 1),
        ("identity/env", [1, 2], 1),
    ],
)
def test_extras_are_part_of_a_rows_content(name: str, values: list[RowValue], num_duplicates: int) -> None:
    rows = [dataclasses.replace(make_row(0, env), extras={name: value}) for env, value in enumerate(values)]
    assert build(rows).num_duplicate_rows == num_duplicates


def test_groups_that_are_not_whole_are_listed() -> None:
    batch = make_batch(3, 2)
    assert batch.partial_groups(2) == []
    assert batch.select([0, 1, 3]).partial_groups(2) == ["default/group 1/episode 0: 1 of 2 trajectories"]
    assert batch.select([0]).partial_groups(8) == ["default/group 0/episode 0: 1 of 8 trajectories"]


def rows_with_extras(num_rows: int = 4) -> list[Trajectory]:
    return [
        dataclasses.replace(
            make_row(env // 2, env % 2),
            extras={
                "score": torch.tensor(float(env), dtype=torch.float64),
                "image": torch.full((2, 3), env, dtype=torch.uint8),
                "experts": Ragged(torch.full((env, 2), env, dtype=torch.bfloat16)),
                "info": {"env": env, "text": "é"},
            },
        )
        for env in range(num_rows)
    ]


def test_extras_go_with_their_rows() -> None:
    rows = rows_with_extras()
    batch = RolloutBatch.from_trajectories(rows[::-1], sampling=SAMPLING, group_size=2, meta={"epoch": 1, "b": None})
    assert list(batch.extras) == ["experts", "image", "info", "score"]
    assert list(batch.meta) == ["b", "epoch"]
    experts = batch.extras["experts"]
    assert isinstance(experts, TensorColumn)
    assert experts.offsets is not None
    assert experts.offsets.tolist() == [0, 0, 1, 3, 6]
    assert experts.values.tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0], [3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    chosen = batch.select([1, 3])
    assert [row.extras["info"] for row in chosen.rows()] == [{"env": 1, "text": "é"}, {"env": 3, "text": "é"}]
    assert chosen.extras["score"].row(1) == torch.tensor(3.0, dtype=torch.float64)
    last = chosen.rows()[1].extras["experts"]
    assert isinstance(last, Ragged)
    assert last.values.tolist() == [[3.0, 3.0]] * 3
    assert chosen.meta == {"b": None, "epoch": 1}
    parts = [batch.select([2, 3]), batch.select([0, 1])]
    assert RolloutBatch.concat(parts).is_identical(dataclasses.replace(batch, group_size=None))


def test_an_empty_selection_keeps_the_columns() -> None:
    batch = build(rows_with_extras()).select([])
    assert len(batch) == 0
    assert [len(column) for column in batch.extras.values()] == [0, 0, 0, 0]
    assert batch.rows() == []
    assert list(RolloutBatch.concat([batch, batch]).extras) == ["experts", "image", "info", "score"]


def test_rows_give_the_batch_again() -> None:
    batch = build(rows_with_extras())
    assert build(batch.rows()).is_identical(batch)


def test_the_digest_covers_extras_and_meta() -> None:
    batch = build(rows_with_extras())
    changed = torch.tensor([0.0, 1.0, 2.0, 3.5], dtype=torch.float64)
    others = [
        dataclasses.replace(batch, extras={**batch.extras, "score": TensorColumn(values=changed)}),
        dataclasses.replace(batch, extras={name: c for name, c in batch.extras.items() if name != "score"}),
        dataclasses.replace(batch, extras={**batch.extras, "info": JsonColumn(items=(1, 2, 3, 4))}),
        dataclasses.replace(batch, meta={"epoch": 1}),
    ]
    assert len({batch.digest(), *(other.digest() for other in others)}) == 5


def test_extras_that_not_all_rows_have_are_refused() -> None:
    rows = rows_with_extras(2)
    rows[1] = dataclasses.replace(rows[1], extras={"score": rows[1].extras["score"]})
    with pytest.raises(BatchError) as caught:
        build(rows)
    assert str(caught.value) == (
        "rollout batch has 1 problem:\n"
        "  - default/group 0/episode 0/env 1/turn 0: extras are ['score']; the first row, "
        "default/group 0/episode 0/env 0/turn 0, has ['experts', 'image', 'info', 'score']"
    )


def test_extras_of_different_kinds_are_refused() -> None:
    rows = rows_with_extras(2)
    changed = {"score": torch.tensor(1.0), "info": torch.tensor(1), "experts": Ragged(torch.zeros(1, 3))}
    rows[1] = dataclasses.replace(rows[1], extras={**rows[1].extras, **changed})
    with pytest.raises(BatchError) as caught:
        build(rows)
    hint = "all rows must be of one kind (wrap tensors whose first dimension varies in Ragged)"
    assert str(caught.value) == (
        "rollout batch has 3 problems:\n"
        "  - extra 'score': row 0 is torch.float64 [] on cpu, row 1 is torch.float32 [] on cpu; " + hint + "\n"
        "  - extra 'experts': row 0 is Ragged torch.bfloat16 [n, 2], row 1 is Ragged torch.float32 [n, 3]; "
        + hint
        + "\n  - extra 'info': row 0 is dict, row 1 is torch.int64 [] on cpu; "
        + hint
    )


def test_concat_of_any_split_is_the_whole() -> None:
    batch = make_batch(3, 2)
    whole_groups = [batch.select([4, 5]), batch.select([0, 1, 2, 3])]
    assert RolloutBatch.concat(whole_groups).is_identical(dataclasses.replace(batch, group_size=None))


def test_concat_joins_the_columns_of_any_order_of_rows() -> None:
    batch = make_batch(3, 2)
    extras = {
        "dense": TensorColumn(values=torch.arange(12, dtype=torch.uint8).view(torch.float16).reshape(6, 1)),
        "ragged": TensorColumn(values=torch.arange(9).bfloat16(), offsets=torch.tensor([0, 1, 3, 3, 6, 7, 9])),
        "json": JsonColumn(items=tuple({"row": row} for row in range(6))),
    }
    batch = dataclasses.replace(batch, extras=extras, group_size=None)
    empty = batch.select([])
    joined = RolloutBatch.concat([empty, batch.select([1, 3, 4]), batch.select([0, 2, 5])])
    assert joined.is_identical(batch)
    assert RolloutBatch.concat([empty, empty]) is empty
    last = batch.select([5])
    other = dataclasses.replace(last, extras={**last.extras, "dense": last.extras["json"]})
    with pytest.raises(BatchError, match=r"extra 'dense': row 0 is torch\.float16"):
        RolloutBatch.concat([batch.select([0, 1]), other])


def test_the_constructor_takes_no_arrays() -> None:
    batch = make_batch(1, 2)
    changes: dict[str, Any] = {"tokens": batch.arrays["tokens"]}
    with pytest.raises(BatchError, match=r"tokens is of type ndarray; expected a tensor of torch\.int32"):
        dataclasses.replace(batch, **changes)
    column = TensorColumn.of_given(torch.zeros(2), np.array([0.0, 1.0, 2.0]))
    with pytest.raises(BatchError, match=r"extra 'a': offsets are float64 \[3\]; expected int64 \[3\] on cpu"):
        dataclasses.replace(batch, extras={"a": column})


def test_arrays_share_the_memory_of_the_tensors() -> None:
    batch = make_batch(2, 2)
    for name, tensor in batch.tensors().items():
        assert batch.arrays[name].ctypes.data == tensor.data_ptr()
    assert batch.arrays["lengths"].tolist() == batch.lengths.tolist() == batch.row_offsets.diff().tolist()
    assert batch.arrays["num_turns"].tolist() == batch.turn_offsets.diff().tolist()
    assert batch.response_lengths.tolist() == batch.response_offsets.diff().tolist()
    assert batch.with_group_size(None).group_size is None
    with pytest.raises(BatchError, match="2 of 3 trajectories"):
        batch.with_group_size(3)


def test_concat_checks_groups_and_identities_anew() -> None:
    batch = make_batch(1, 2)
    with pytest.raises(BatchError, match="group 0/episode 0/env 1/turn 0: duplicated identity"):
        RolloutBatch.concat([batch, batch])
    with pytest.raises(BatchError, match=r"batch 1 has .* group_size None, batch 0 has .* group_size 2"):
        RolloutBatch.concat([batch, dataclasses.replace(batch, group_size=None)])
    with pytest.raises(BatchError, match=r"concat: batch 1 has meta {'epoch': 1}, batch 0 has {}"):
        RolloutBatch.concat([batch, dataclasses.replace(batch, meta={"epoch": 1})])
    with pytest.raises(BatchError, match="no batches were given"):
        RolloutBatch.concat([])


def test_select_refuses_other_orders() -> None:
    with pytest.raises(BatchError) as caught:
        make_batch().select([1, 0])
    assert str(caught.value) == "select: rows [1, 0] are not strictly increasing numbers of 0 to 3"


def test_pad_places_every_value_and_fills_the_rest() -> None:
    row = make_row(0, 1, tokens=(7, 8, 9), response=(False, True, False), rollout_logprobs=(-2.0,), prompt_length=1)
    padded = build([make_row(0, 0), row]).pad(5, pad_id=99)
    assert padded.tokens.dtype == torch.int64
    assert padded.tokens.tolist() == [[1, 2, 3, 4, 99], [7, 8, 9, 99, 99]]
    assert padded.response_mask.tolist() == [[False, False, True, True, False], [False, True, False, False, False]]
    assert padded.rollout_logprobs.tolist() == [[0.0, 0.0, -0.5, -0.25, 0.0], [0.0, -2.0, 0.0, 0.0, 0.0]]
    assert padded.lengths.tolist() == [4, 3]


def test_pad_names_rows_that_are_too_long() -> None:
    with pytest.raises(BatchError) as caught:
        build([make_row(3, 1)]).pad(3)
    assert str(caught.value) == ("pad: 1 rows are longer than 3: default/group 3/episode 0/env 1/turn 0: 4 tokens")


def test_negative_zero_is_a_difference() -> None:
    plus, minus = build([make_row(rollout_logprobs=(0.0, -0.25))]), build([make_row(rollout_logprobs=(-0.0, -0.25))])
    assert torch.equal(plus.rollout_logprobs, minus.rollout_logprobs)
    assert not plus.is_identical(minus)


def test_an_empty_batch_is_a_batch() -> None:
    batch = build([], 2)
    assert (len(batch), batch.num_groups, batch.num_duplicate_rows) == (0, 0, 0)
    assert batch.pad(4).tokens.shape == (0, 4)
    assert RolloutBatch.concat([batch, make_batch(1, 2)]).is_identical(make_batch(1, 2))


@settings(max_examples=25, deadline=None)
@given(st.permutations(list(range(6))), st.sets(st.integers(0, 5), min_size=1))
def test_any_arrival_order_and_any_split_give_the_same_batch(order: list[int], first: set[int]) -> None:
    rows = make_rows(3, 2)
    batch = build([rows[i] for i in order])
    rest = [i for i in range(6) if i not in first]
    parts = [batch.select(rest), batch.select(sorted(first))]
    assert RolloutBatch.concat(parts).digest() == build(rows).digest()


@given(st.lists(st.tuples(*[st.integers(0, 2**63 - 1)] * 4), max_size=5))
def test_identities_built_by_columns_are_those_built_one_by_one(rows: list[tuple[int, int, int, int]]) -> None:
    names = [f"scheduler-{index % 2}" for index in range(len(rows))]
    expected = tuple(
        SampleIdentity(scheduler_id=name, group_id=a, episode_id=b, env_id=c, turn=d)
        for name, (a, b, c, d) in zip(names, rows, strict=True)
    )
    found = build_identities(names, np.array(rows, dtype=np.int64).reshape(-1, 4))
    assert found == expected
    assert [(hash(identity), repr(identity)) for identity in found] == [(hash(i), repr(i)) for i in expected]


def test_identities_built_by_columns_are_checked() -> None:
    numbers = np.array([[0, 0, 0, 0], [1, 0, -3, 0]])
    with pytest.raises(BatchError, match=r"^sample identity: env_id is -3; expected an int of 0 to 2\*\*63 - 1$"):
        build_identities(["a", "a"], numbers)


@pytest.mark.parametrize("group_size", [1, 3, 4, 8])
def test_groups_of_another_size_are_each_named(group_size: int) -> None:
    batch = make_batch(2, 2)
    expected = [f"default/group {g}/episode 0: 2 of {group_size} trajectories" for g in (0, 1)]
    with pytest.raises(BatchError) as error:
        dataclasses.replace(batch, group_size=group_size)
    assert str(error.value) == "rollout batch has 2 problems:" + "".join(f"\n  - {problem}" for problem in expected)


def test_a_group_that_takes_a_trajectory_from_the_next_is_found() -> None:
    """Three and one make two groups of two only where nobody looks at the ends."""
    keys = [(0, 0), (0, 1), (0, 2), (1, 0)]
    rows = [make_row(group, env) for group, env in keys]
    batch = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=None)
    with pytest.raises(BatchError) as error:
        dataclasses.replace(batch, group_size=2)
    assert [line.split(":")[0] for line in str(error.value).splitlines()[1:]] == [
        "  - default/group 0/episode 0",
        "  - default/group 1/episode 0",
    ]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"tag": None}, "tag is None; expected a text"),
        ({"prompt_length": 2.0}, "prompt_length is 2.0; expected an int"),
        ({"prompt_length": 2**31}, "prompt_length is 2147483648, the row has 4 tokens"),
        ({"termination": 300}, "termination is 300; expected 0 to 2"),
        ({"termination": -1}, "termination is -1; expected 0 to 2"),
        ({"reward": "x"}, "reward is 'x'; expected a number or None"),
        ({"reward": 10**400}, "reward is not finite: it is an integer that float32 cannot hold"),
        (
            {"rollout_logprobs": torch.zeros(2, requires_grad=True)},
            "rollout_logprobs requires grad, which a recording cannot keep: detach it",
        ),
        ({"tokens": [1, 2, 3, 4]}, "tokens is of type list; expected a tensor of torch.int32"),
        (
            {"rollout_logprobs": torch.tensor([0.0, 1.0]).to_sparse()},
            "rollout_logprobs is torch.float32 [2] on cpu, torch.sparse_coo; expected torch.float32 with 1 dimension "
            "on cpu",
        ),
        (
            {"response_mask": torch.tensor([0, 0, 1, 2], dtype=torch.uint8).view(torch.bool)},
            "response_mask holds a byte of 2; expected 0 and 1, as bits are recorded",
        ),
    ],
)
def test_a_value_that_no_file_could_hold_is_refused_by_its_row(changes: dict[str, object], problem: str) -> None:
    """These were raw errors of torch or NumPy, or steps that were written and could not be read."""
    with pytest.raises(BatchError) as caught:
        build([dataclasses.replace(make_row(), **changes)])
    assert str(caught.value) == f"rollout batch has 1 problem:\n  - default/group 0/episode 0/env 0/turn 0: {problem}"


def test_a_reward_of_numpy_is_the_number_it_is() -> None:
    assert build([dataclasses.replace(make_row(), reward=np.float32(0.1))]).rewards.tolist() == [float(np.float32(0.1))]


@pytest.mark.parametrize(
    ("group_size", "shown"), [(np.int64(2), "np.int64(2)"), (2.0, "2.0"), (True, "True"), (0, "0"), (-1, "-1")]
)
def test_a_group_size_that_is_no_positive_int_is_refused(group_size: object, shown: str) -> None:
    for make in (
        lambda: build(make_rows(2, 2), group_size),
        lambda: dataclasses.replace(make_batch(), group_size=group_size),
    ):
        with pytest.raises(BatchError) as caught:
            make()
        assert str(caught.value) == (
            f"rollout batch has 1 problem:\n  - group_size is {shown}; expected an int of 1 or more, or None"
        )


def test_sampling_holds_plain_finite_numbers() -> None:
    """A NumPy number ended the writer's thread with a TypeError, NaN with a ValueError."""
    with pytest.raises(BatchError) as caught:
        SamplingParams(temperature=np.float32(1), top_p=float("nan"), top_k=None, logprobs_mode="x")
    assert str(caught.value) == (
        "sampling: temperature is np.float32(1.0); expected a finite float or int of 0 or more; top_p is nan; expected "
        "a float or int of 0 to 1; top_k is None; expected an int; logprobs_mode is 'x'; expected 'processed' or 'raw'"
    )


@pytest.mark.parametrize(
    ("temperature", "top_p"),
    [(-1, 1.0), (-1e-9, 1.0), (math.inf, 1.0), (1.0, -1), (1.0, 1.5), pytest.param(10**400, 1, id="huge"), (True, 1)],
)
def test_no_tokens_were_sampled_so(temperature: float, top_p: float) -> None:
    """A training service took datums sampled at temperature -1."""
    with pytest.raises(BatchError, match=r"^sampling: (temperature|top_p) is "):
        SamplingParams(temperature=temperature, top_p=top_p, top_k=0, logprobs_mode="processed")
    assert SamplingParams(temperature=0, top_p=0.0, top_k=-1, logprobs_mode="raw").temperature == 0


def test_an_identity_of_no_text_is_refused() -> None:
    with pytest.raises(BatchError, match=r"^sample identity: scheduler_id is 5; expected a text$"):
        SampleIdentity(scheduler_id=5, group_id=0, episode_id=0, env_id=0, turn=0)


def test_prompt_digests_are_those_of_the_prompts() -> None:
    """Any texts were taken: upper case came back as lower case, others ended the writer's thread."""
    batch = make_batch(1, 2)
    first, second = batch.prompt_digests
    for wrong in (first.upper(), "0" * 64, "zz", "", None, second):
        with pytest.raises(BatchError) as caught:
            dataclasses.replace(batch, prompt_digests=(wrong, second))
        assert str(caught.value) == (
            "rollout batch has 1 problem:\n  - default/group 0/episode 0/env 0/turn 0: "
            f"prompt_digest is {wrong!r}; that of its prompt is {first!r}"
        )


def test_meta_that_would_come_back_otherwise_is_refused() -> None:
    rows = make_rows(1, 1)
    for meta, problem in (
        ({"a": {1: 2}}, "meta 'a': key 1 is int; JSON has text keys only"),
        ({"a": (1,)}, "meta 'a' is a tuple, which would come back as a list; make it one"),
        ({1: 2}, "meta: key 1 is int; JSON has text keys only"),
    ):
        with pytest.raises(BatchError) as caught:
            RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=1, meta=meta)
        assert str(caught.value) == f"rollout batch has 1 problem:\n  - {problem}"


def test_a_copy_is_equal_and_shares_nothing() -> None:
    rows = [
        dataclasses.replace(row, extras={"x": torch.ones(2), "r": Ragged(torch.zeros(1)), "j": {"a": [1]}})
        for row in make_rows(2, 2)
    ]
    batch = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=2, meta={"m": [1]})
    copied, digest = batch.copy(), batch.digest()
    assert copied.is_identical(batch)
    for tensor in batch.tensors().values():
        tensor.zero_()
    for column in batch.extras.values():
        if isinstance(column, TensorColumn):
            column.values.fill_(7)
        else:
            column.items[0]["a"].append(2)
    batch.meta["m"].append(2)
    assert copied.digest() == digest


def test_groups_are_counted_in_one_place() -> None:
    keys = [("b", 0, 0, 0), ("a", 1, 0, 0), ("a", 1, 0, 1), ("a", 1, 0, 1)]
    sizes = count_groups(keys)
    assert list(sizes.items()) == [(("b", 0, 0), 1), (("a", 1, 0), 2)]
    assert partial_group_problems(sizes, 2) == ["b/group 0/episode 0: 1 of 2 trajectories"]
