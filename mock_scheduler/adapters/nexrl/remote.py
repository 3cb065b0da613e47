"""The dump of a run that trains on a remote service: its prepared batch, the datums it sent, and the answer.

Contract: each method writes one file of the step, where ``debug`` asks for it, and else does nothing; call them on one
rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mock_scheduler.adapters.nexrl.config import DebugConfig
from mock_scheduler.adapters.nexrl.files import Content, save_content
from mock_scheduler.adapters.nexrl.names import DumpKind, FileKey
from mock_scheduler.adapters.nexrl.records import group_id_of, spread, trajectory_content
from mock_scheduler.batch import RolloutBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteDump:
    """The files of one step. ``replace``: write over the files of an earlier run a resumed one goes on from."""

    config: DebugConfig
    step: int
    replace: bool = False

    def save_prepared_trajectories(self, batch: RolloutBatch, advantages: torch.Tensor) -> None:
        """advantages: floating ``[R]``, one per response token of the batch, in its order."""
        if self._is_due("prepared_trajectories"):
            content = trajectory_content(batch, step=self.step, token_values={"advantages": advantages})
            self._save("prepared_trajectories", content)

    def save_datums(self, datums: Sequence[Content]) -> None:
        """datums: as sent, made by ``build_datums``, or with other ``loss_fn_inputs``."""
        if self._is_due("datums"):
            self._save("datums", {"step": self.step, "num_datums": len(datums), "datums": list(datums)})

    def save_training_metrics(self, metrics: Mapping[str, float]) -> None:
        """metrics: as the service answered."""
        if self._is_due("training_metrics"):
            self._save("training_metrics", {"step": self.step, "metrics": dict(metrics)})

    def _is_due(self, kind: str) -> bool:
        return self.config.is_due(self.step) and kind in self.config.enabled_remote_options()

    def _save(self, kind: DumpKind, content: Content) -> None:
        config = self.config
        save_content(
            Path(config.dump_dir),
            kind,
            FileKey(step=self.step),
            content,
            dump_format=config.dump_format,
            replace=self.replace,
        )


def build_datums(batch: RolloutBatch, advantages: torch.Tensor) -> list[Content]:
    """Makes a datum of each row of a batch: the tokens a model reads, and for each the facts about the next one.

    advantages: floating ``[R]``, one per response token of the batch. ``loss_fn_inputs`` has ``target_tokens``,
    ``logprobs`` (the rollout's), ``advantages`` and ``mask`` of T - 1 entries each, 0 where the target is no response
    token. A datum says whose row it is: ``sample_id``, ``group_id``, ``run_id``.
    """
    offsets = batch.response_offsets.tolist()
    datums: list[Content] = []
    for index, row in enumerate(batch.rows()):
        mask = row.response_mask
        datums.append(
            {
                "model_input": {"tokens": row.tokens[:-1].tolist()},
                "loss_fn_inputs": {
                    "target_tokens": row.tokens[1:].tolist(),
                    "logprobs": spread(mask, row.rollout_logprobs)[1:],
                    "advantages": spread(mask, advantages[offsets[index] : offsets[index + 1]])[1:],
                    "mask": mask[1:].int().tolist(),
                },
                "sample_id": str(row.identity),
                "group_id": group_id_of(row.identity),
                "run_id": row.identity.env_id,
            }
        )
    return datums
