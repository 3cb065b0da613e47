"""What NeMo-RL logs of its training data becomes a recording: rows of a batch of one, padded, in JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mock_scheduler.errors import BatchError, ForeignFileError
from tests.adapters.imports.importing import imported, lacks, write

THIRD = float(np.float32(-1 / 3))


def row(**changes: Any) -> dict[str, Any]:
    """A line of ``log_batched_dict_as_jsonl`` (7ea279abf): two tokens of a prompt, two sampled, one of padding."""
    return {
        "content": [["1 + 1?", "2\n"]],
        "rewards": [0.5],
        "input_lengths": [4],
        "token_ids": [[5, 6, 7, 8, 95]],
        "token_loss_mask": [[0, 0, 1, 1, 0]],
        "sample_loss_mask": [1.0],
        "advantages": [[0.0, 0.0, 1.5, 1.5, 0.0]],
        "generation_logprobs": [[0.0, 0.0, -0.25, THIRD, 0.0]],
        "prev_logprobs": [[0.0, -1.0, -0.25, -0.5, 0.0]],
        "idx": 0,
        **changes,
    }


def lines(*rows: dict[str, Any]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def test_rows_come_back_without_their_padding(tmp_path: Path) -> None:
    more = row(rewards=[1.0], input_lengths=[5], token_loss_mask=[[0, 1, 0, 1, 1]], idx=1)
    write(tmp_path / "logs/exp_001/train_data_step12.jsonl", lines(row(), more))
    batch = imported("nemo-rl", tmp_path / "logs", group_size=2)[12]
    assert [one.tokens.tolist() for one in batch.rows()] == [[5, 6, 7, 8], [5, 6, 7, 8, 95]]
    assert [one.response_mask.int().tolist() for one in batch.rows()] == [[0, 0, 1, 1], [0, 1, 0, 1, 1]]
    assert batch.rollout_logprobs.tolist() == [-0.25, THIRD, 0.0, THIRD, 0.0]
    assert (batch.rewards.tolist(), batch.num_groups, batch.prompt_lengths.tolist()) == ([0.5, 1.0], 1, [2, 1])
    assert lacks(batch) == ["policy_versions", "terminations"]
    alone = imported("nemo-rl", tmp_path / "logs/exp_001/train_data_step12.jsonl")[12]
    assert (lacks(alone), alone.num_groups) == (["policy_versions", "terminations", "groups"], 2)


@pytest.mark.parametrize(
    ("content", "kind", "problem"),
    [
        (b"", BatchError, "holds no row"),
        (b"{", ForeignFileError, "line 1, is not JSON"),
        (lines(row(token_ids=[5, 6])), ForeignFileError, "line 1, is no row with token_ids, token_loss_mask"),
        (lines(row(), row(input_lengths=[9])), BatchError, "row 1: input_lengths is 9, and the row has 5 tokens"),
        (lines(row(token_loss_mask=[[0, 0, 0, 0, 1]])), BatchError, "row 0: token_loss_mask has sampled tokens behind"),
        (lines(row(generation_logprobs=[[0.0]])), BatchError, "generation_logprobs has 1 entries"),
        (lines(row(rewards=["1"])), BatchError, "row 0: rewards is '1'; expected a number"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: bytes, kind: type[Exception], problem: str) -> None:
    write(tmp_path / "logs/train_data_step1.jsonl", content)
    with pytest.raises(kind, match=problem):
        imported("nemo-rl", tmp_path / "logs")
