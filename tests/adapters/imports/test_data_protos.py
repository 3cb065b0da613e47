"""Batches that verl and ROLL dump, and trajectories of AReaL, become recordings that say what these do not hold."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mock_scheduler.adapters.padded import ROLL_AGENTIC, PaddedCodec
from mock_scheduler.errors import RecordingError
from tests.adapters.imports.forging import (
    consolidated,
    plain_tensordict,
    roll_proto,
    torch_bytes,
    verl_proto,
)
from tests.adapters.imports.importing import imported, lacks, write


def verl_fields() -> dict[str, torch.Tensor]:
    return {
        "prompts": torch.tensor([[0, 1, 2], [3, 4, 5]] * 2),
        "responses": torch.tensor([[6, 7, 0], [8, 9, 10]] * 2),
        "input_ids": torch.tensor([[0, 1, 2, 6, 7, 0], [3, 4, 5, 8, 9, 10]] * 2),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0], [1] * 6] * 2),
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 1]] * 2),
        "rollout_log_probs": torch.tensor([[-0.5, -0.25, 7.0], [-1.0, 0.0, -2.0]] * 2),
        "rm_scores": torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, -1.0]] * 2),
        "h": torch.rand(4, 2).bfloat16(),
    }


def verl_numpy(fields: dict[str, torch.Tensor]) -> object:
    items = {
        name: (str(tensor.dtype).removeprefix("torch."), tensor.shape, tensor.flatten().view(torch.uint8).numpy())
        for name, tensor in fields.items()
    }
    return ((4,), None, items)


@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_verls_skipped_batches_are_read(tmp_path: Path, form: str) -> None:
    fields = verl_fields()
    batch = torch_bytes(consolidated(fields)) if form == "torch" else verl_numpy(fields)
    arrays = {"__num_turns__": np.array([2] * 4, dtype=np.int32), "x": np.array([{"a": [1]}] * 4, dtype=object)}
    data = verl_proto(batch, arrays, {"timing": {"s": np.float64(1.5)}})
    write(tmp_path / "GBS2_N2_in3_out3/1/gen_batch.dp", data)
    (found,) = imported("verl-v0", tmp_path / "GBS2_N2_in3_out3").values()
    assert [identity.numbers[:3] for identity in found.identities] == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
    assert found.rollout_logprobs.tolist() == [-0.5, -0.25, -1.0, -2.0] * 2
    assert found.rewards.tolist() == [1.0, -1.0] * 2
    assert lacks(found) == ["policy_versions", "terminations"]
    native = PaddedCodec(ROLL_AGENTIC, sampling=found.sampling).decode(found)
    assert native["rollout_log_probs"].tolist() == fields["rollout_log_probs"].tolist()  # padding that is not 0
    assert torch.equal(native["h"], fields["h"])
    assert native["x"].tolist() == [{"a": [1]}] * 4
    assert native["meta_info"] == {"timing": {"s": 1.5}}


def jagged(*rows: list[Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, in torch's words
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def v1_content(keys: list[str]) -> dict[str, Any]:
    fields = {
        "input_ids": jagged([1, 2, 4, 5, 6], [3, 7]),
        "responses": jagged([4, 5, 6], [7]),
        "response_mask": jagged([1, 0, 1], [1]),
        "rollout_log_probs": jagged([-0.5, 0.0, -0.25], [-1.0]),
        "rm_scores": jagged([0.0, 0.0, 1.0], [0.5]),
        "extra_fields": [{"a": 1}, {"a": 2}],
        "data_source": "gsm",
    }
    tags = [{"min_global_steps": 3}, {"min_global_steps": 4}]
    return {"tensordict": plain_tensordict(fields, 2), "tags": tags, "keys": keys, "global_steps": 5}


def test_verls_batches_of_a_transfer_queue_are_read(tmp_path: Path) -> None:
    write(tmp_path / "GBS/5/0/tq_batch.pt", torch_bytes(v1_content(["u_0_0", "u_0_1"])))
    write(tmp_path / "GBS/5/1/tq_batch.pt", torch_bytes(v1_content(["u_1_0", "w_0_0"])))
    found = imported("verl-v1", tmp_path / "GBS")[5]
    assert [identity.numbers for identity in found.identities] == [
        (0, 0, 0, 0),
        (0, 0, 0, 1),
        (0, 0, 1, 0),
        (1, 0, 0, 0),
    ]
    assert found.rollout_logprobs.tolist() == [-0.5, -0.25, -1.0] * 2
    assert found.rewards.tolist() == [1.0, 0.5] * 2
    assert found.policy_versions.tolist() == [3, 3, 4] * 2
    assert found.tags == ("gsm",) * 4
    assert found.extras["native/extra_fields"].row(1) == {"a": 2}
    assert lacks(found) == ["terminations"]


def test_rolls_dumps_are_read(tmp_path: Path) -> None:
    fields = {
        "input_ids": torch.tensor([[1, 2, 3, 4, 0]] * 2),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0]] * 2),
        "response_mask": torch.tensor([[0, 0, 1, 1, 0]] * 2),
        "infer_logprobs": torch.tensor([[9.0, -0.5, -0.25, 9.0]] * 2),
        "scores": torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0]] * 2),
    }
    arrays = {"group_ids": np.array([4, 4], dtype=object), "env_ids": np.array([0, 1], dtype=object)}
    data = roll_proto(torch_bytes(consolidated(fields)), arrays, {"global_step": 7})
    write(tmp_path / "dumps/train/step_000007.pkl", data)
    (found,) = imported("roll", tmp_path / "dumps").values()
    assert found.rollout_logprobs.tolist() == [-0.5, -0.25] * 2
    assert [identity.group_id for identity in found.identities] == [4, 4]
    assert lacks(found) == ["policy_versions", "terminations"]


def areal_trajectory(rows: int, width: int) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.arange(rows * width, dtype=torch.int32).reshape(rows, width),
        "attention_mask": torch.ones(rows, width, dtype=torch.bool),
        "loss_mask": torch.tensor([[0, 0] + [1] * (width - 2)] * rows, dtype=torch.int32),
        "logprobs": -torch.rand(rows, width),
        "versions": torch.tensor([[-1, -1] + [2] * (width - 3) + [3]] * rows, dtype=torch.int32),
        "rewards": torch.rand(rows),
    }


def test_areals_trajectories_of_several_ranks_are_joined(tmp_path: Path) -> None:
    parts = [areal_trajectory(2, 5), areal_trajectory(2, 7)]
    write(tmp_path / "a/step_000003_dp_0.pt", torch_bytes(parts[:1]))
    write(tmp_path / "a/step_000003_dp_1.pt", torch_bytes(parts[1:]))
    found = imported("areal", tmp_path / "a", group_size=2)[3]
    assert found.lengths.tolist() == [5, 5, 7, 7]
    assert found.rewards.tolist() == [*parts[0]["rewards"].tolist(), *parts[1]["rewards"].tolist()]
    assert found.policy_versions.tolist() == [2] * 4
    assert found.extras["policy_versions_by_token"].row(0).values.tolist() == [2, 2, 3]
    assert lacks(found) == ["terminations"]


def test_areals_text_is_refused_with_the_reason(tmp_path: Path) -> None:
    write(tmp_path / "logs/3/1.jsonl", b'{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(RecordingError, match=r"without tokens, masks and log-probabilities\. It cannot be replayed"):
        imported("areal", tmp_path / "logs")
