"""What NeMo-RL's rollout functions return comes back from a recording bit for bit, and the core fields say it too."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.adapters.nemo_rl import codec as codec_module
from mock_scheduler.adapters.nemo_rl import values
from mock_scheduler.adapters.nemo_rl.codec import NemoRlCodec, PlayedRollout
from mock_scheduler.batch import RolloutBatch, SamplingParams, Termination
from mock_scheduler.batch.engine_columns import ROUTED_EXPERTS_COLUMN
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import RolloutRequest
from tests.adapters.bits import bits, stored
from tests.adapters.nemo_rl.grpo import BatchedDataDict, PackedTensor

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, logprobs_mode="processed")
CODEC = NemoRlCodec(sampling={"train": SAMPLING, "val": SAMPLING})


def make_packed(state: dict[str, Any]) -> PackedTensor:
    packed = PackedTensor.__new__(PackedTensor)
    vars(packed).update(state)
    return packed


@pytest.fixture(autouse=True, scope="module")
def _classes() -> Any:
    """NeMo-RL is not installed here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_module, "make_batch", BatchedDataDict)
        patch.setattr(values, "make_packed_tensor", make_packed)
        yield


def bits_of(value: Any) -> Any:
    """The bits of a rollout, of packed tensors within it too."""
    if isinstance(value, PlayedRollout):
        return bits_of([dict(value.batch), dict(value.metrics), value.gym])
    if isinstance(value, PackedTensor):
        return ("packed", bits_of(vars(value)))
    if isinstance(value, dict):
        return [(name, bits_of(item)) for name, item in value.items()]
    return [bits_of(item) for item in value] if isinstance(value, list) else bits(value)


def check(fields: dict[str, Any], metrics: dict[str, Any] | None = None, **request: Any) -> RolloutBatch:
    """Encodes, stores, reads, decodes and compares; gives the batch."""
    gym = request.pop("gym", None)
    native = PlayedRollout(batch=BatchedDataDict(fields), metrics=metrics or {}, gym=gym)
    before = bits_of(native)
    batch = CODEC.encode(native, RolloutRequest(global_step=0, batch_size=8, policy_version=7, **request))
    assert bits_of(native) == before
    decoded = CODEC.decode(stored(batch))
    assert type(decoded.batch) is BatchedDataDict
    assert bits_of(decoded) == before
    return batch


def floats(draw: st.DrawFn, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    finite = st.floats(-30, 0, width=32) | st.just(-0.0)
    return torch.tensor(draw(st.lists(finite, min_size=count, max_size=count)), dtype=dtype)


@st.composite
def messages(draw: st.DrawFn, layers: int | None) -> dict[str, Any]:
    """A message: of a prompt, sampled, or of an environment; sometimes empty, or with images."""
    role = draw(st.sampled_from(["system", "user", "assistant", "tool", "environment"]))
    count = draw(st.integers(0, 4))
    token = st.integers(0, 2**31 - 1)
    ids = torch.tensor(draw(st.lists(token, min_size=count, max_size=count)))  # floats where there are none
    content = draw(st.text(max_size=4) | st.none() | st.just([{"type": "text", "text": "look"}, {"type": "image"}]))
    message: dict[str, Any] = {"role": role, "content": content, "token_ids": ids}
    if role == "assistant" and draw(st.booleans()):
        message["generation_logprobs"] = floats(draw, count, draw(st.sampled_from([torch.float32, torch.bfloat16])))
    if draw(st.integers(0, 5)) == 0:
        message["pixel_values"] = PackedTensor([torch.rand(count, 2).to(torch.bfloat16), None], 0)
        message["mm_token_type_ids"] = torch.ones(count, dtype=torch.int8)
    if layers is not None:
        first = draw(st.sampled_from([-1, 0, 3]))  # -1: no route was noted
        experts = torch.full((count, layers, 2), first, dtype=torch.int16)
        experts[..., 1:] += draw(st.integers(0, 1))
        message["routed_experts"] = experts
    order = draw(st.permutations(sorted(message)))
    return {name: message[name] for name in order}


@st.composite
def rollouts(draw: st.DrawFn) -> dict[str, Any]:
    """Any rollout: native or of NeMo Gym, of one reward or several, with every field that a row may have."""
    count = draw(st.integers(1, 5))
    layers = draw(st.none() | st.just(2))
    reward = st.lists(st.floats(width=32), min_size=count, max_size=count)
    truncated = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    fields = {
        "message_log": [draw(st.lists(messages(layers), max_size=5)) for _ in range(count)],
        "total_reward": torch.tensor(draw(reward)),
        "truncated": torch.tensor(truncated) if draw(st.booleans()) else truncated,
        "length": torch.tensor(range(count)),
        "loss_multiplier": torch.ones(count, dtype=torch.float64),
        "idx": list(range(count)),
        "task_name": ["math", "code", "math", "game", "math"][:count],
        "extra_env_info": [draw(st.none() | st.just({"answer": math.nan, "moves": [(1, 2)]})) for _ in range(count)],
        "stop_strings": [None, ["}"], [], None, None][:count],
        "mask_sample": torch.zeros(count, 1, dtype=torch.bool),
        "reward/right": torch.tensor(draw(reward)),
        "reward/short": torch.tensor(draw(reward)),
        "agent_ref": [{"name": "agent", "type": "responses"}] * count,
        "vllm_content": [None, "a", "b", "c", None][:count],
        "scalars": torch.rand(count + 1),
        "whole": {"of the batch": np.arange(3)},
    }
    kept = draw(st.sets(st.sampled_from(sorted(fields)))) | {"message_log", "total_reward"}
    return {name: fields[name] for name in draw(st.permutations(sorted(kept)))}


@settings(max_examples=80, deadline=None)
@given(rollouts(), st.integers(1, 3))
def test_any_rollout_comes_back(fields: dict[str, Any], group_size: int) -> None:
    metrics = {"z": 1, "a": math.nan, "histogram/gen_tokens_length": list(range(40)), "per_worker_token_counts": {0: 3}}
    gym = {"input_ids": torch.tensor([[5, 0]]), "task_index": None} if group_size == 3 else None
    batch = check(fields, metrics, group_size=group_size, gym=gym)
    assert len(batch) == len(fields["message_log"])


def message(role: str, *ids: int, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": role, "token_ids": torch.tensor(ids, dtype=torch.int64), **fields}


def example() -> dict[str, Any]:
    """A row of two turns behind a prompt with an answer in it; one whose response is empty; one without a token."""
    return {
        "message_log": [
            [
                message("user", 1, 2),
                message("assistant", 3),  # of the prompt: nothing is trained on it
                message("assistant", 7, 8, generation_logprobs=torch.tensor([-0.5, -0.25])),
                message("environment", 9),
                message("assistant", 4, generation_logprobs=torch.tensor([-1.0])),
            ],
            [message("user", 5), message("assistant", generation_logprobs=torch.tensor([]))],
            [],
        ],
        "total_reward": torch.tensor([0.25, -1.0, math.inf]),
        "truncated": torch.tensor([False, True, False]),
        "task_name": ["math", "code", "math"],
    }


def test_the_core_fields_say_what_the_rollout_says() -> None:
    batch = check(example(), group_size=2)
    rows = list(batch.rows())
    assert [(row.identity.group_id, row.identity.env_id) for row in rows] == [(0, 0), (0, 1), (1, 0)]
    assert [row.tokens.tolist() for row in rows] == [[1, 2, 3, 7, 8, 9, 4], [5], [0]]
    assert [row.response_mask.int().tolist() for row in rows] == [[0, 0, 0, 1, 1, 0, 1], [0], [0]]
    assert [row.prompt_length for row in rows] == [3, 1, 1]
    assert batch.rollout_logprobs.tolist() == [-0.5, -0.25, -1.0]
    assert batch.rewards.tolist() == [0.25, -1.0, 0.0]
    assert [row.termination for row in rows] == [
        Termination.TERMINATED,
        Termination.TRUNCATED,
        Termination.TERMINATED,
    ]
    assert [row.tag for row in rows] == ["math", "code", "math"]
    assert set(batch.policy_versions.tolist()) == {7}


def test_experts_of_all_tokens_are_the_batchs_own() -> None:
    fields = example()
    for log in fields["message_log"]:
        for one in log:
            one["routed_experts"] = torch.tensor([[[4, 1]]], dtype=torch.int8).expand(len(one["token_ids"]), 1, 2)
    fields["message_log"].pop()
    fields = {name: value[:2] for name, value in fields.items()}
    experts: Any = check(fields).extras[ROUTED_EXPERTS_COLUMN]
    assert experts.row(0).values.tolist() == [[[4, 1]]] * 7


def test_rows_of_a_part_of_a_batch_come_back() -> None:
    part = CODEC.decode(check(example()).select([0, 2])).batch
    whole = example()
    assert bits_of(part["message_log"]) == bits_of([whole["message_log"][row] for row in (0, 2)])
    assert bits_of(part["total_reward"]) == bits_of(whole["total_reward"][[0, 2]])


def test_times_among_the_metrics_are_not_recorded() -> None:
    native = PlayedRollout(batch=BatchedDataDict(example()), metrics={"timing/rollout/total": 3.0, "turns": 2})
    decoded = CODEC.decode(CODEC.encode(native, RolloutRequest(global_step=0, batch_size=3)))
    assert decoded.metrics == {"turns": 2}


def test_images_and_tables_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    drawn = image.frombytes("RGB", (2, 1), bytes(range(6)))
    plain = values.to_plain([{"type": "image", "image": drawn}])
    (part,) = values.from_plain(plain)
    assert (part["image"].mode, part["image"].size, part["image"].tobytes()) == ("RGB", (2, 1), bytes(range(6)))
    table = type("Table", (), {"__module__": "wandb.sdk", "columns": ["full"], "data": [["{}"]]})()
    monkeypatch.setattr(values, "import_module", lambda name: SimpleNamespace(Table=dict) if name == "wandb" else None)
    assert values.from_plain(values.to_plain({"agent/full_result": table})) == {
        "agent/full_result": {"columns": ["full"], "data": [["{}"]]}
    }
    with pytest.raises(BatchError, match=r"a tuple begins with '\$nemo_rl'"):
        values.to_plain([("$nemo_rl", "image")])


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"message_log": None}, "the rollout has no message_log; found: total_reward, truncated, task_name"),
        ({"total_reward": torch.zeros(3, 1)}, "message_log and total_reward must have an entry for each row"),
        ({"message_log": [[message("user", -1)], [], []]}, "row 0: message 0: token ids lie from -1 to -1"),
        (
            {"message_log": [[{"role": "user", "token_ids": torch.tensor([0.5])}], [], []]},
            r"row 0: message 0: token_ids is of torch\.float32; expected whole numbers",
        ),
        ({"message_log": [[{"token_ids": [1]}], [], []]}, r"message 0: token_ids is list; expected a tensor \[T\]"),
        ({"message_log": [[], "text", []]}, "row 1: message_log is a str; expected a list of messages"),
        (
            {"message_log": [[message("assistant", 1, generation_logprobs=torch.tensor([math.nan]))], [], []]},
            "row 0: message 0: generation_logprobs is not finite",
        ),
        (
            {"message_log": [[message("assistant", 1, generation_logprobs=torch.zeros(2))], [], []]},
            r"message 0: generation_logprobs is \[2\]; expected a tensor \[1\], as its tokens",
        ),
        ({"extra_env_info": [object(), None, None]}, "row 0: extra_env_info holds a value of type builtins.object"),
        ({"a/b": [1, 2, 3], "a.b:4": [1, 2, 3]}, "fields are called so alike that one would be lost"),
        ({5: [1, 2, 3]}, "a field is called 5; expected a text"),
    ],
)
def test_what_cannot_be_kept_is_refused(changes: dict[Any, Any], problem: str) -> None:
    fields = {name: value for name, value in {**example(), **changes}.items() if value is not None}
    with pytest.raises(BatchError, match=problem):
        CODEC.encode(
            PlayedRollout(batch=BatchedDataDict(fields), metrics={}), RolloutRequest(global_step=0, batch_size=3)
        )


def test_a_batch_of_another_codec_is_refused() -> None:
    batch = check(example())
    with pytest.raises(BatchError, match="batch was not recorded from NeMo-RL's rollouts: meta 'nemo_rl' is None"):
        CODEC.decode(type(batch).from_trajectories(list(batch.rows()), sampling=SAMPLING, group_size=None))
