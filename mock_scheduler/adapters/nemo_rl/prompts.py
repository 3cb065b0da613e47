"""The prompts that NeMo-RL drew for a rollout, as plain values that a replay compares.

Contract: a prompt is copied before it is played, since NeMo-RL adds to its messages. Images, audio and video are left
out of it; their places in the text and among the tokens are compared.
"""

from __future__ import annotations

from typing import Any

import torch

from mock_scheduler.adapters.plain_values import to_json
from mock_scheduler.errors import BatchError

#: Of a row, beside its messages: what the environment is asked with, and which prompt it is.
_FIELDS = ("task_name", "idx", "extra_env_info", "stop_strings", "loss_multiplier", "length")


def read_prompts(batch: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - NeMo-RL's
    """Read what each row of NeMo-RL's batch asks to be played."""
    rows = []
    for number in range(batch.size):
        row: dict[str, Any] = {}
        if "message_log" in batch:
            messages = batch["message_log"][number]
            row["content"] = [_describe_content(message.get("content")) for message in messages]
            row["token_ids"] = [_as_list(message.get("token_ids")) for message in messages]
        row |= {name: _plain(batch[name][number]) for name in _FIELDS if name in batch}
        rows.append(row)
    return rows


def _describe_content(content: object) -> Any:  # noqa: ANN401 - a text, or parts
    if not isinstance(content, list):
        return content
    return [part.get("text", part.get("type")) if isinstance(part, dict) else str(type(part)) for part in content]


def _as_list(tokens: object) -> object:
    return tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens


def _plain(value: object) -> object:
    """A value of its own, as JSON; None where it is no plain one."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    try:
        return to_json(value, "prompt")
    except BatchError:
        return None
