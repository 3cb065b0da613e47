"""Rows of a TransferQueue, and a fake one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from mock_scheduler.adapters.transfer_queue.codec import QueueRows
from mock_scheduler.adapters.transfer_queue.columns import QueueColumn

TAG = {"status": "success", "global_steps": 1, "min_global_steps": 0, "max_global_steps": 0, "is_padding": False}


def field(prompt: Sequence[int], response: Sequence[int], **changes: object) -> dict[str, object]:
    """The fields of one row as verl's agent loops write them; the reward is on the last token."""
    ids = torch.tensor([*prompt, *response], dtype=torch.int64)
    mask = torch.ones(len(response), dtype=torch.int64)
    scores = torch.zeros(len(response))
    if len(response):
        scores[-1] = 0.5
    return {
        "prompts": ids[: len(prompt)],
        "responses": ids[len(prompt) :],
        "input_ids": ids,
        "position_ids": torch.arange(len(ids)),
        "response_mask": mask,
        "loss_mask": mask.clone(),
        "rollout_log_probs": -torch.ones(len(response)),
        "rm_scores": scores,
        "raw_prompt": [{"role": "user", "content": str(list(prompt))}],
        "uid": "u",
        "data_source": "toy",
        "num_turns": 2,
        **changes,
    }


def queue_rows(
    rows: Mapping[str, Mapping[str, object]], tags: Sequence[Mapping[str, Any]] | None = None, **notes: object
) -> QueueRows:
    """Rows by their keys."""
    names = next(iter(rows.values()))
    columns = {name: column([row[name] for row in rows.values()]) for name in names}
    return QueueRows(
        partition="train", keys=list(rows), tags=tags or [dict(TAG) for _ in rows], columns=columns, notes=notes
    )


def column(values: Sequence[object]) -> QueueColumn:
    is_tensor = all(isinstance(value, torch.Tensor) and value.dim() for value in values)
    return QueueColumn(kind="jagged" if is_tensor else "stack", rows=values)


class FakeQueue:
    """Keeps rows by their batch, as ``mock_scheduler.adapters.transfer_queue.queue`` does in the real one."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, ...], QueueRows] = {}
        self.num_fetched = 0

    def put(self, rows: QueueRows) -> SimpleNamespace:
        self.held[tuple(rows.keys)] = rows
        return SimpleNamespace(keys=list(rows.keys), tags=[dict(tag) for tag in rows.tags], partition_id=rows.partition)

    def fetch(self, batch: SimpleNamespace, notes: Mapping[str, object]) -> QueueRows:
        self.num_fetched += 1
        rows = self.held[tuple(batch.keys)]
        return QueueRows(partition=rows.partition, keys=rows.keys, tags=rows.tags, columns=rows.columns, notes=notes)
