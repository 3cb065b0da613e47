import dataclasses
import re
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from mock_scheduler.adapters.padded import AREAL, ROLL_AGENTIC, ROLL_RLVR, VERL, PaddedCodec
from mock_scheduler.adapters.padded.columns import VALUES_COLUMN
from mock_scheduler.batch import RolloutBatch, SampleIdentity, compute_prompt_digest
from mock_scheduler.batch.columns import JsonColumn, Ragged, TensorColumn
from mock_scheduler.batch.engine_columns import ROUTED_EXPERTS_COLUMN
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import BatchCodec
from tests.adapters.padded_cases import REQUEST, SAMPLING, assert_same, codec

PAD = 99


def objects(values: list[object]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def roll_agentic() -> dict[str, object]:
    """Two trajectories of one group, in arrival order: env 1 with two turns, env 0 with one."""
    return {
        "input_ids": torch.tensor([[11, 12, 21, 22, 31, 41, PAD, PAD], [11, 12, 51, PAD, PAD, PAD, PAD, PAD]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0]]),
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 0, 0], [0, 1, 2, 0, 0, 0, 0, 0]]),
        "response_mask": torch.tensor([[0, 0, 1, 1, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]]).bool(),
        "prompt_mask": torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]]).bool(),
        "scores": torch.tensor([[0, 0, 0, 0, 0, 0.75, 0, 0], [0, 0, -1, 0, 0, 0, 0, 0]]),
        "infer_logprobs": torch.tensor([[0, -0.5, -0.25, 0, -2, 0, 0], [0, -1.5, 0, 0, 0, 0, 0]]),
        "env_ids": objects([1, 0]),
        "group_ids": objects([6, 6]),
        "tags": objects(["Frozen_Lake", "Frozen_Lake"]),
        "step_scores": objects([[0.25, 0.5], [-1.0]]),
        "episode_scores": objects([0.75, -1.0]),
        "traj_group_id": objects(["Frozen_Lake_6_2_123", "Frozen_Lake_6_2_123"]),
        "traj_id": objects(["Frozen_Lake_6_2_123_1", "Frozen_Lake_6_2_123_0"]),
        "meta_info": {"metrics": {"env/score": [0.75, -1.0]}, "get_batch_return_start_time": 12.5},
    }


def test_a_roll_agentic_batch_becomes_typed_rows_in_identity_order() -> None:
    native = roll_agentic()
    batch = codec(ROLL_AGENTIC, group_size=2).encode(native, REQUEST)
    assert [str(identity) for identity in batch.identities] == [
        "default/group 6/episode 2/env 0/turn 0",
        "default/group 6/episode 2/env 1/turn 0",
    ]
    assert batch.tokens.tolist() == [11, 12, 51, 11, 12, 21, 22, 31, 41]
    assert batch.row_offsets.tolist() == [0, 3, 9]
    assert batch.response_mask.tolist() == [False, False, True, False, False, True, True, False, True]
    assert batch.rollout_logprobs.tolist() == [-1.5, -0.5, -0.25, -2.0]
    assert batch.turn_offsets.tolist() == [0, 1, 3]
    assert batch.turn_rewards.tolist() == [-1.0, 0.25, 0.5]
    assert batch.rewards.tolist() == [-1.0, 0.75]
    assert batch.policy_versions.tolist() == [5, 5, 5]
    assert batch.prompt_lengths.tolist() == [2, 2]
    assert batch.prompt_digests == (compute_prompt_digest(torch.tensor([11, 12], dtype=torch.int32)),) * 2
    assert batch.tags == ("Frozen_Lake", "Frozen_Lake")
    assert (batch.group_size, batch.sampling) == (2, SAMPLING)
    assert batch.meta["metrics"] == {"env/score": [0.75, -1.0]}
    scores = batch.extras["native/episode_scores"]
    assert isinstance(scores, JsonColumn)
    assert scores.items == (-1.0, 0.75)
    assert_same(codec(ROLL_AGENTIC).decode(batch), native)


def test_the_reward_of_a_token_belongs_to_the_last_turn_that_has_begun() -> None:
    native = roll_agentic()
    del native["step_scores"]
    native["scores"] = torch.tensor([[1.0, 0, 0, 2, 4, 8, 0, 0], [0, 0, -1, 0, 0, 0, 0, 64]])
    batch = codec(ROLL_AGENTIC).encode(native, REQUEST)
    assert batch.turn_rewards.tolist() == [-1.0, 7.0, 8.0]
    assert batch.rewards.tolist() == [-1.0, 15.0]
    assert batch.meta["padded"]["absent"] == ["turn_rewards"]


def test_a_roll_row_per_turn_is_identified_by_its_step() -> None:
    native = roll_agentic()
    native["env_ids"], native["step"] = objects([0, 0]), objects([1, 0])
    batch = codec(ROLL_AGENTIC).encode(native, REQUEST)
    assert [identity.turn for identity in batch.identities] == [0, 1]
    assert batch.num_trajectories == 1


def test_rows_that_differ_in_their_identity_alone_are_duplicates() -> None:
    native = roll_agentic()
    for value in native.values():
        if isinstance(value, torch.Tensor):
            value[0] = value[1]
    native["step_scores"], native["episode_scores"] = objects([[-1.0], [-1.0]]), objects([-1.0, -1.0])
    assert codec(ROLL_AGENTIC).encode(native, REQUEST).num_duplicate_rows == 1


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([7, -(2**63)], TensorColumn),
        ([7, 2**63], JsonColumn),
        ([7, True], JsonColumn),
        ([7, None], JsonColumn),
        (["a", "b"], JsonColumn),
        (objects([7, 5]), TensorColumn),
        ((7, 5), TensorColumn),
    ],
)
def test_a_field_that_says_which_row_it_is_comes_back_with_its_types(values: object, kept: type) -> None:
    native = {**roll_agentic(), "traj_id": values}
    batch = codec(ROLL_AGENTIC, group_size=2).encode(native, REQUEST)
    assert type(batch.extras["identity/native/traj_id"]) is kept
    assert_same(codec(ROLL_AGENTIC).decode(batch), native)


def roll_rlvr() -> dict[str, object]:
    return {
        "prompts": torch.tensor([[PAD, 17, 12], [18, 16, 13]]),
        "responses": torch.tensor([[21, 29, PAD, PAD], [23, 26, 20, PAD]]),
        "input_ids": torch.tensor([[17, 12, 21, 29, PAD, PAD, PAD], [18, 16, 13, 23, 26, 20, PAD]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]]),
        "position_ids": torch.tensor([[0, 1, 2, 3, 3, 3, 3], [0, 1, 2, 3, 4, 5, 5]]),
        "response_mask": torch.tensor([[0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 0]]),
        "infer_logprobs": torch.tensor([[0, -0.5, -0.25, 0, 0, 0], [0, 0, -1.0, -2.0, -3.0, 0]]),
        "prompt_id": torch.tensor([4, 5]),
        "scores": torch.tensor([0.5, 1.0], dtype=torch.float16),
        "domain": objects(["math", "code"]),
    }


def test_a_roll_rlvr_batch_keeps_prompts_and_responses_as_the_rows_own_tokens() -> None:
    native = roll_rlvr()
    batch = codec(ROLL_RLVR).encode(native, REQUEST)
    assert batch.tokens.tolist() == [17, 12, 21, 29, 18, 16, 13, 23, 26, 20]
    assert batch.prompt_lengths.tolist() == [2, 3]
    assert batch.rollout_logprobs.tolist() == [-0.5, -0.25, -1.0, -2.0, -3.0]
    assert batch.rewards.tolist() == [0.5, 1.0]
    assert [identity.group_id for identity in batch.identities] == [4, 5]
    assert batch.tags == ("math", "code")
    assert_same(codec(ROLL_RLVR).decode(batch), native)
    column = batch.extras["padded.values"]
    assert isinstance(column, TensorColumn)
    row = column.row(0)
    assert isinstance(row, Ragged)
    kept = row.values.numpy().tobytes()
    # Of prompts, responses and input_ids, the padding and none of the row's tokens.
    counts = [kept.count(value.to_bytes(8, "little")) for value in (PAD, 17, 12, 21, 29)]
    assert counts == [3, 0, 0, 0, 0]


def verl() -> dict[str, object]:
    return {
        "prompts": torch.tensor([[PAD, 11, 12], [PAD, PAD, 13]]),
        "responses": torch.tensor([[21, 31, 22, PAD], [23, PAD, PAD, PAD]]),
        "input_ids": torch.tensor([[PAD, 11, 12, 21, 31, 22, PAD], [PAD, PAD, 13, 23, PAD, PAD, PAD]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0]]),
        "position_ids": torch.tensor([[0, 0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3, 4]]),
        "response_mask": torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0]]),
        "rollout_log_probs": torch.tensor([[-0.5, 0, -0.25, -1], [-2, -1, -1, -1]]),
        "token_level_scores": torch.tensor([[0, 0, 1.0, 0], [0.5, 0, 0, 0]]),
        "uid": objects(["b-uuid", "a-uuid"]),
        "data_source": objects(["gsm8k", "math"]),
        "reward_model": objects([{"ground_truth": "4", "style": "rule"}, {"ground_truth": "5", "style": "rule"}]),
    }


def test_a_verl_batch_is_cut_out_of_both_paddings() -> None:
    native = verl()
    batch = codec(VERL).encode(native, REQUEST)
    assert batch.tokens.tolist() == [11, 12, 21, 31, 22, 13, 23]
    assert batch.row_offsets.tolist() == [0, 5, 7]
    assert batch.prompt_lengths.tolist() == [2, 1]
    assert batch.response_mask.tolist() == [False, False, True, False, True, False, True]
    assert batch.rollout_logprobs.tolist() == [-0.5, -0.25, -2.0]
    assert batch.turn_rewards.tolist() == [0.0, 1.0, 0.5]
    assert batch.tags == ("gsm8k", "math")
    assert [identity.group_id for identity in batch.identities] == [0, 1]
    assert_same(codec(VERL).decode(batch), native)


def areal() -> dict[str, object]:
    return {
        "input_ids": torch.tensor([[11, 12, 21, 22, 23, 31, 24], [11, 12, 25, 0, 0, 0, 0]], dtype=torch.int32),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]]).bool(),
        "loss_mask": torch.tensor([[0, 0, 1, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0, 0]], dtype=torch.int32),
        "logprobs": torch.tensor([[0, 0, -0.5, -0.25, -1, 0, -2], [0, 0, -3, 0, 0, 0, 0]]),
        "versions": torch.tensor([[-1, -1, 7, 7, 8, -1, 9], [-1, -1, 8, 0, 0, 0, 0]], dtype=torch.int32),
        "rewards": torch.tensor([1.0, 0.25]),
    }


def test_an_areal_batch_gives_each_turn_its_oldest_policy_version() -> None:
    native = areal()
    batch = codec(AREAL, group_size=2).encode(native, REQUEST)
    assert batch.policy_versions.tolist() == [7, 9, 8]
    assert batch.rollout_logprobs.tolist() == [-0.5, -0.25, -1.0, -2.0, -3.0]
    assert batch.rewards.tolist() == [1.0, 0.25]
    assert batch.turn_rewards.tolist() == [0.0, 1.0, 0.25]
    assert [identity.numbers for identity in batch.identities] == [(0, 0, 0, 0), (0, 0, 1, 0)]
    assert_same(codec(AREAL).decode(batch), native)


def test_routed_experts_are_a_field_of_their_own_and_are_stored_once() -> None:
    experts = torch.tensor([[[4, 1]], [[2, 0]], [[1, 3]]], dtype=torch.int16)
    native = {
        "input_ids": torch.tensor([[0, 7, 8, 9], [5, 6, 0, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]),
        "prompts": torch.tensor([[0, 7], [5, 6]]),
        "responses": torch.tensor([[8, 9], [0, 0]]),
        "response_mask": torch.tensor([[1, 1], [0, 0]]),
        "routed_experts": torch.zeros(2, 4, 1, 2, dtype=torch.int16),
    }
    native["routed_experts"][0, 1:3] = experts[:2]  # the last token was not read
    native["routed_experts"][1, 0:2] = experts[1:]
    batch = codec(VERL).encode(native, REQUEST)
    column = batch.extras[ROUTED_EXPERTS_COLUMN]
    assert isinstance(column, TensorColumn)
    assert column.offsets is not None
    assert column.values.tolist() == [*experts[:2].tolist(), *experts[1:].tolist()]
    assert (column.values.dtype, column.offsets.tolist()) == (torch.int16, [0, 2, 4])
    without = codec(dataclasses.replace(VERL, routed_experts=None)).encode(native, REQUEST)
    values, raw = (one.extras[VALUES_COLUMN] for one in (batch, without))
    assert isinstance(values, TensorColumn)
    assert isinstance(raw, TensorColumn)
    assert len(raw.values) - len(values.values) == 2 * 2 * (3 + 2)  # two int16 for each token of the two rows
    assert_same(codec(VERL).decode(batch), native)


def test_routed_experts_of_another_form_are_refused() -> None:
    native = {name: torch.ones(1, 3, dtype=torch.int64) for name in ("input_ids", "attention_mask", "loss_mask")}
    for routing, words in (
        (torch.zeros(1, 3, 2, dtype=torch.int16), "'routed_experts' is torch.int16 [1, 3, 2]"),
        (torch.zeros(1, 3, 2, 2), "'routed_experts' is torch.float32 [1, 3, 2, 2]"),
        (torch.zeros(1, 2, 2, 2, dtype=torch.int16), "'routed_experts' has 2 columns; expected 3"),
        (torch.full((1, 3, 2, 2), 5, dtype=torch.int16), "token 0, layer 0 of its layers, has experts [5, 5]"),
    ):
        with pytest.raises(BatchError, match=re.escape(words)):
            codec(AREAL).encode({**native, "routed_experts": routing}, REQUEST)


def test_it_is_a_batch_codec() -> None:
    used: BatchCodec = codec(AREAL)
    assert_same(used.decode(used.encode(areal(), REQUEST)), areal())


def test_what_a_framework_does_not_say_is_zero_and_named_as_absent() -> None:
    native = areal()
    for name in ("logprobs", "rewards", "versions"):
        del native[name]
    batch = codec(AREAL).encode(native, REQUEST)
    assert batch.rollout_logprobs.tolist() == [0.0] * 5
    assert batch.rewards.tolist() == [0.0, 0.0]
    assert batch.policy_versions.tolist() == [5, 5, 5]
    assert batch.meta["padded"]["absent"] == ["rollout_logprobs", "rewards", "policy_versions"]


def test_logprobs_of_other_dtypes_become_float32_and_come_back() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        native = {**areal(), "logprobs": areal()["logprobs"].to(dtype)}
        batch = codec(AREAL).encode(native, REQUEST)
        assert batch.rollout_logprobs.tolist() == [-0.5, -0.25, -1.0, -2.0, -3.0]
        assert_same(codec(AREAL).decode(batch), native)


def test_bits_that_processors_signal_on_are_kept_in_the_padding() -> None:
    """A signalling NaN becomes a quiet one, with a warning, wherever it is converted rather than copied."""
    native = {**areal(), "logprobs": areal()["logprobs"].double()}
    native["logprobs"].view(torch.int64)[1, 5] = 0x7FF0_0000_0000_0001
    assert_same(codec(AREAL).decode(codec(AREAL).encode(native, REQUEST)), native)


def test_a_row_without_any_token_keeps_its_first_column() -> None:
    native = areal()
    native["attention_mask"][1] = False
    batch = codec(AREAL).encode(native, REQUEST)
    assert batch.lengths.tolist() == [7, 1]
    assert_same(codec(AREAL).decode(batch), native)


def test_groups_come_from_the_field_or_function_that_is_given() -> None:
    native = {**areal(), "query": ["q1", "q1"]}
    by_field = codec(AREAL, group_ids="query", scheduler_id="math").encode(native, REQUEST)
    assert [str(identity) for identity in by_field.identities] == [
        "math/group 0/episode 0/env 0/turn 0",
        "math/group 0/episode 0/env 1/turn 0",
    ]

    def identify(fields: Mapping[str, object], row: int) -> SampleIdentity:
        assert fields is native
        return SampleIdentity(scheduler_id="x", group_id=9 - row, episode_id=1, env_id=0, turn=0)

    by_function = codec(AREAL, group_ids=identify).encode(native, REQUEST)
    assert [identity.group_id for identity in by_function.identities] == [8, 9]


def test_groups_must_be_whole_where_their_size_is_known() -> None:
    with pytest.raises(BatchError, match="default/group 0/episode 0: 2 of 3 trajectories"):
        codec(AREAL, group_size=3).encode(areal(), REQUEST)
    with pytest.raises(BatchError, match="2 of 4 trajectories"):
        codec(AREAL).encode(areal(), dataclasses.replace(REQUEST, group_size=4))


def test_parts_that_were_recorded_apart_join() -> None:
    def shard(index: int) -> RolloutBatch:
        def identify(native: object, row: int) -> SampleIdentity:
            return SampleIdentity(scheduler_id="x", group_id=index, episode_id=0, env_id=row, turn=0)

        native = areal()
        native["input_ids"][:, 5:] = index  # another padding on each rank
        return codec(AREAL, group_ids=identify).encode(native, REQUEST)

    joined = RolloutBatch.concat([shard(1), shard(0)])
    found = codec(AREAL).decode(joined)
    assert found["input_ids"][:, 6].tolist() == [0, 1, 0, 1]


def test_rows_of_different_widths_do_not_join() -> None:
    wide, narrow = areal(), areal()
    narrow = {name: value[:, :3] if value.dim() == 2 else value for name, value in narrow.items()}

    def identified(group: int) -> PaddedCodec:
        return codec(
            AREAL,
            group_ids=lambda _, row: SampleIdentity(scheduler_id="x", group_id=group, episode_id=0, env_id=row, turn=0),
        )

    joined = RolloutBatch.concat([identified(0).encode(wide, REQUEST), identified(1).encode(narrow, REQUEST)])
    with pytest.raises(BatchError) as caught:
        codec(AREAL).decode(joined)
    assert str(caught.value) == (
        "padded batch: rows of one width cannot be told: full, prompt and response columns found are 3, 0, 0; 7, 0, 0. "
        "Decode rows that were recorded together."
    )


def test_a_batch_of_another_kind_is_not_decoded() -> None:
    batch = dataclasses.replace(codec(AREAL).encode(areal(), REQUEST), meta={})
    with pytest.raises(BatchError) as caught:
        codec(AREAL).decode(batch)
    assert str(caught.value) == (
        "batch was not recorded from padded tensors: meta 'padded' has version None; expected 1. Replay it with the "
        "codec that recorded it."
    )


def refusal(native: object, layout_codec: PaddedCodec | None = None) -> str:
    with pytest.raises(BatchError) as caught:
        (layout_codec or codec(AREAL)).encode(native, REQUEST)
    return str(caught.value)


def test_missing_tensors_are_named_with_what_was_found() -> None:
    native = areal()
    del native["loss_mask"]
    native["attention_mask"] = torch.ones(2)
    assert refusal(native) == (
        "batch of layout 'areal' cannot be recorded:\n"
        "  - 'attention_mask' has shape [2]; expected [rows, columns]\n"
        "  - 'loss_mask' is absent; expected a tensor\n"
        "  - fields found: 'attention_mask', 'input_ids', 'logprobs', 'rewards', 'versions'"
    )


def test_all_fields_that_cannot_be_kept_are_named() -> None:
    native = {
        **areal(),
        "logprobs": torch.zeros(2, 6),
        "three": torch.zeros(3, 7),
        "cost": 0.5,
        "names": ["a"],
        "sparse": torch.zeros(2, 7).to_sparse(),
        "meta_info": [1],
    }
    assert refusal(native) == (
        "batch of layout 'areal' cannot be recorded:\n"
        "  - 'logprobs' has 6 columns; expected 7, as full tensors have where 'input_ids' has 7\n"
        "  - 'three' has shape [3, 7]; expected 2 rows\n"
        "  - 'sparse' is torch.float32 [2, 7] on cpu, torch.sparse_coo; expected a dense tensor of values\n"
        "  - 'cost' is of type float; expected a tensor, an array or a list with one entry per row (what concerns the "
        "whole batch belongs in 'meta_info')\n"
        "  - 'names' has 1 entries; expected 2 rows\n"
        "  - 'meta_info' is of type list; expected a dict"
    )


def test_what_is_no_mapping_is_refused() -> None:
    assert refusal([1]) == (
        "batch of layout 'areal' is a list; expected a mapping of its fields such as {**data.batch, "
        "**data.non_tensor_batch, 'meta_info': data.meta_info}"
    )


def test_logprobs_that_are_not_finite_on_response_tokens_are_refused() -> None:
    native = areal()
    native["logprobs"][0, 3] = float("nan")
    native["logprobs"][0, 6] = float("inf")
    assert refusal(native) == (
        "batch of layout 'areal' cannot be recorded:\n"
        "  - 'logprobs' is not finite on response tokens in row 0 (default/group 0/episode 0/env 0/turn 0): 2 of 7 "
        "tokens, the first token 3, nan\n"
        "Set 'loss_mask' to 0 on these tokens, or keep the tensor bit for bit without using it: "
        "dataclasses.replace(layout, rollout_logprobs=None)."
    )
    layout = dataclasses.replace(AREAL, rollout_logprobs=None)
    assert_same(codec(layout).decode(codec(layout).encode(native, REQUEST)), native)


def test_rewards_that_are_not_finite_are_refused() -> None:
    native = {**areal(), "rewards": torch.tensor([float("nan"), 1e39], dtype=torch.float64)}
    assert refusal(native) == (
        "batch of layout 'areal' cannot be recorded:\n"
        "  - 'rewards' is not finite in row 0 (default/group 0/episode 0/env 0/turn 0): nan\n"
        "  - 'rewards' is not finite in row 1 (default/group 1/episode 0/env 0/turn 0): 1e+39\n"
        "Keep the tensor bit for bit without using it: dataclasses.replace(layout, rewards=None)."
    )


def test_token_ids_outside_of_int32_are_refused() -> None:
    native = areal()
    native["input_ids"] = native["input_ids"].long()
    native["input_ids"][1, 1] = 2**31
    native["input_ids"][1, 6] = -5  # in the padding: that may be anything
    assert refusal(native) == (
        "batch of layout 'areal' cannot be recorded:\n"
        "  - 'input_ids' is no token id (0 to 2**31 - 1) in row 1 (default/group 1/episode 0/env 0/turn 0): 1 of 3 "
        "tokens, the first token 1, 2147483648\n"
        "Correct the ids."
    )


def test_tokens_must_be_integers() -> None:
    assert refusal({**areal(), "input_ids": torch.zeros(2, 7)}) == (
        "batch of layout 'areal' cannot be recorded:\n  - 'input_ids' is torch.float32; expected integers"
    )


def test_an_identity_text_of_another_form_is_refused() -> None:
    native = {**roll_agentic(), "traj_group_id": objects(["lake", "lake_6_x_1"])}
    assert refusal(native, codec(ROLL_AGENTIC)) == (
        "batch of layout 'roll-agentic' cannot be recorded:\n"
        "  - 'traj_group_id' is 'lake' in row 0; expected '{tag}_{group}_{episode}_{seed}'\n"
        "  - 'traj_group_id' is 'lake_6_x_1' in row 1; expected '{tag}_{group}_{episode}_{seed}'\n"
        "Give the codec a function for the identities: group_ids=lambda native, row: SampleIdentity(…)."
    )


def test_a_group_field_that_is_absent_is_refused() -> None:
    assert refusal({**areal(), "uid": [1, 2]}, codec(AREAL, group_ids="gid")) == (
        "batch of layout 'areal' cannot be recorded:\n"
        "  - group field 'gid' is absent; fields found: 'attention_mask', 'input_ids', 'logprobs', 'loss_mask', "
        "'rewards', 'uid', 'versions'"
    )


def test_rows_with_one_identity_are_refused() -> None:
    native = {**roll_agentic(), "env_ids": objects([0, 0])}
    assert "default/group 6/episode 2/env 0/turn 0: duplicated identity" in refusal(native, codec(ROLL_AGENTIC))


def test_values_that_cannot_be_recorded_are_named_with_field_and_row() -> None:
    native = {**areal(), "image": [b"x", object()]}
    assert refusal(native).startswith("field 'image', row 1, holds a value of type builtins.object, which cannot")


def test_meta_must_not_use_our_key() -> None:
    assert refusal({**areal(), "meta_info": {"padded": 1, 2: 3}}) == (
        "'meta_info' has the keys ['padded', 2]; expected texts other than 'padded'"
    )


def test_a_long_list_of_rows_is_cut() -> None:
    native = {name: value.repeat_interleave(12, dim=0) for name, value in areal().items()}
    native["logprobs"][:, 2] = float("nan")
    lines = refusal(native).splitlines()
    assert len(lines) == 1 + 20 + 1 + 1
    assert lines[-2] == "  and 4 more"


def test_what_a_long_padding_costs_does_not_depend_on_its_length() -> None:
    def size_of(width: int) -> int:
        native = roll_agentic()
        for name, value in native.items():
            if isinstance(value, torch.Tensor):
                fill = torch.full((2, width), PAD if name == "input_ids" else 0).to(value.dtype)
                native[name] = torch.cat([value, fill], dim=1)
        batch = codec(ROLL_AGENTIC).encode(native, REQUEST)
        assert_same(codec(ROLL_AGENTIC).decode(batch), native)
        columns = [column for column in batch.extras.values() if isinstance(column, TensorColumn)]
        return sum(column.values.nbytes for column in columns)

    assert size_of(10) == size_of(10_000)
    assert size_of(10) < 2 * 400


def test_position_ids_of_several_axes_are_kept_short() -> None:
    """verl's ``[B, 3, width]`` of a vision-language model was refused."""
    native = verl()
    single = native["position_ids"]
    assert isinstance(single, torch.Tensor)
    num_rows, width = single.shape
    own = codec(VERL)
    for axes in (
        torch.stack([single, single + 7, single * 2], dim=1),
        single[:, None, None].expand(num_rows, 2, 2, width).clone(),
        torch.arange(num_rows * width * 3).reshape(num_rows, width, 3),
        torch.arange(num_rows * 3 * (width + 1)).reshape(num_rows, 3, width + 1),  # of no frame
    ):
        batch = own.encode({**native, "position_ids": axes}, REQUEST)
        assert_same(own.decode(batch), {**native, "position_ids": axes})
        order = list(range(len(batch)))
        assert_same(
            own.decode(RolloutBatch.concat([batch.select(order[1:]), batch.select(order[:1])])),
            {**native, "position_ids": axes},
        )
    plain = own.encode({**native, "position_ids": torch.stack([single] * 3, dim=1)}, REQUEST)
    assert plain.meta["padded"]["fields"]["position_ids"] == {
        "kind": "framed",
        "dtype": "int64",
        "frame": "full",
        "shape": [],
        "leading": [3],
        "is_array": False,
    }


def test_a_field_of_a_role_has_its_two_dimensions() -> None:
    native = verl()
    logprobs = native["rollout_log_probs"]
    assert isinstance(logprobs, torch.Tensor)
    native["rollout_log_probs"] = logprobs[:, None].expand(-1, 3, -1)
    assert "'rollout_log_probs' has 3 columns; expected" in refusal(native, codec(VERL))


@pytest.mark.parametrize("shape", [(2, 7), (2,), (2, 3)])
def test_numpy_views_with_negative_strides_are_kept(shape: tuple[int, ...]) -> None:
    """torch refuses them with a ValueError."""
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)[..., ::-1]
    native = {**areal(), "x": values}
    own = codec(AREAL)
    assert_same(own.decode(own.encode(native, REQUEST)), native)


def test_tensors_without_values_and_fields_without_a_text_are_refused() -> None:
    """These were a NotImplementedError of torch and a TypeError of json."""
    assert "\n  - field name 3 is no text\n" in refusal({**areal(), 3: torch.zeros(2)})
    assert "- 'x' is torch.float32 [2, 7] on meta; expected a dense tensor of values" in refusal(
        {**areal(), "x": torch.empty(2, 7, device="meta")}
    )
