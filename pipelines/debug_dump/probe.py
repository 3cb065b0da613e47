"""Writes a training step as NexRL's debug dump: each rank's computation of each of its micro-batches.

Contract: a micro-batch's files are written by the ranks with its losses: the last pipeline stage with tensor-parallel
rank 0, each cp rank its own share; ``rank`` in their names is the global rank, ``micro`` the place among the rank's
micro-batches of the update. Parameters and gradients are written by every rank with a part of them. Files of the whole
batch are written by the first rank, in ``save``, which all ranks must call. The critic is not dumped: NexRL has none.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mock_scheduler.adapters.nexrl.config import DumpFormat
from mock_scheduler.adapters.nexrl.files import Content, save_content
from mock_scheduler.adapters.nexrl.names import DumpKind, FileKey
from mock_scheduler.adapters.nexrl.records import trajectory_content
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.probe.interface import StepRows, TrainingProbe
from mock_scheduler.megatron.step_tokens import MicroBatchTokens
from pipelines.batching.plan import MicroBatch
from pipelines.debug_dump.content import (
    ParameterDump,
    ResponseValues,
    batch_inputs,
    forward_content,
    loss_content,
    old_logprobs_content,
    response_part,
    token_table,
)
from pipelines.megatron.places import OwnBatch
from pipelines.megatron.process_of_rank import Runtime

Maker = Callable[[], Content]
"""Makes what a file holds, where anybody wants it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpTarget:
    """A folder to write to, with its format and kinds of files. ``is_due``: whether anything is written of a step."""

    folder: Path
    dump_format: DumpFormat
    kinds: frozenset[str]
    is_due: Callable[[int], bool]


class DebugProbe(TrainingProbe):
    """The dump of one step. ``parameters``: the chosen tensors, where a target wants any.

    divides_by_kept: whether the loss is divided by the tokens kept by rollout correction.
    """

    def __init__(
        self,
        runtime: Runtime,
        batch: RolloutBatch,
        *,
        step: int,
        targets: Sequence[DumpTarget],
        parameters: ParameterDump | None,
        ranks: RankGroup,
        divides_by_kept: bool = False,
    ) -> None:
        self._runtime = runtime
        self._step = step
        self._targets = targets
        self._parameters = parameters
        self._ranks = ranks
        self._divides_by_kept = divides_by_kept
        self._holds_losses = runtime.is_last_stage and runtime.tp_rank == 0
        self._kinds = frozenset().union(*(target.kinds for target in targets))
        self._batch = batch
        self._has_begun = False
        self._owned: dict[int, OwnBatch] = {}
        self._scores: dict[int, torch.Tensor] = {}
        self._advantages: dict[int, torch.Tensor] = {}
        self._outputs: Mapping[str, torch.Tensor] = {}
        self._micros: dict[int, int] = {}
        self._num_passes: dict[int, int] = {}
        self._num_update_tokens = 0

    def start_step(self, rows: StepRows, batches: Sequence[MicroBatchTokens], models: Sequence[ObservedModel]) -> None:
        """Write the trajectories, so that they are there whatever becomes of the step."""
        batch = self._batch
        self._has_begun = True
        self._owned = {own.index: own for own in batches if isinstance(own, OwnBatch)}
        if self._ranks.global_rank == 0:
            self._write("trajectory", FileKey(step=self._step), lambda: trajectory_content(batch, step=self._step))

    def tokens(
        self,
        kind: TraceKind,
        own: MicroBatchTokens,
        values: Mapping[str, torch.Tensor],
        *,
        update: int = 0,
        prefix: str = "",
        of_responses: bool = True,
    ) -> None:
        """Keep scores and advantages; write outputs and losses of the policy."""
        if prefix or not self._holds_losses or not isinstance(own, OwnBatch):
            return
        index = own.index
        if kind == "score" and "old_logprobs" in values:
            self._scores[index] = values["old_logprobs"].detach().cpu().clone()
        elif kind == "advantage":
            self._advantages[index] = values["advantages"].detach().cpu().clone()
        elif kind == "output":
            self._outputs = {name: value.detach().cpu().clone() for name, value in values.items()}
            self._write_micro("forward_data", own, update, lambda: forward_content(self._outputs, own.batch))
        elif kind == "loss":
            self._write_losses(own, values, update)

    def start_update(self, update: int, micro_batches: Sequence[MicroBatchTokens]) -> None:
        """Numbers this rank's micro-batches of the update, and writes the model's inputs."""
        runtime = self._runtime
        own_type = [batch for batch in micro_batches if isinstance(batch, MicroBatch)]
        own = [batch.index for batch in micro_batches[runtime.dp_rank :: runtime.dp_size]]
        self._micros = {index: micro for micro, index in enumerate(own)}
        self._num_update_tokens = sum(
            batch.num_kept_tokens if self._divides_by_kept else batch.num_tokens for batch in own_type
        )
        for index in own:
            self._num_passes[index] = self._num_passes.get(index, 0) + 1
        if self._holds_losses:
            for index in own:
                share = self._owned[index]
                self._write_micro("batch_inputs", share, update, partial(batch_inputs, share))

    def state(self, model: ObservedModel, update: int, kind: TraceKind) -> None:
        """Write the chosen gradients after their reduction, or parameters after the update."""
        dump_kind: DumpKind = "param" if kind == "parameter" else "gradient"
        if self._parameters is None or model.prefix or dump_kind not in self._kinds:
            return
        content = self._parameters.content(model, dump_kind)
        if content is not None:
            key = FileKey(step=self._step, global_rank=self._runtime.global_rank, update=update)
            self._write(dump_kind, key, lambda: {**self._head(), "update": update, **content})

    def save(self) -> None:
        """Writes the files of the whole batch. Collective."""
        batch = self._batch
        if not self._has_begun or not self._kinds & {"trajectory", "old_log_probs"}:
            return
        values = ResponseValues(batch)
        parts = self._ranks.gather(self._own_part() if self._holds_losses else b"")
        if self._ranks.global_rank != 0:
            return
        for part in filter(None, parts):
            values.add(torch.load(io.BytesIO(part), weights_only=True))
        found = values.by_name()
        key = FileKey(step=self._step)
        advantages = {name: value for name, value in found.items() if name == "advantages"}
        self._write(
            "trajectory",
            key,
            lambda: trajectory_content(batch, step=self._step, token_values=advantages),
            replace=True,
        )
        self._write(
            "old_log_probs", key, lambda: {"step": self._step, **old_logprobs_content(batch, found["old_logprobs"])}
        )

    def _own_part(self) -> bytes:
        """Returns this rank's scores and advantages, with the places of their tokens."""
        parts = []
        for index, own in self._owned.items():
            values = {"old_logprobs": self._scores[index], "advantages": self._advantages[index]}
            parts.append(response_part(own.batch, values))
        buffer = io.BytesIO()
        torch.save(parts, buffer)
        return buffer.getvalue()

    def _write_losses(self, own: OwnBatch, terms: Mapping[str, torch.Tensor], update: int) -> None:
        index = own.batch.index
        content = loss_content(
            terms,
            self._outputs,
            own.batch,
            old_logprobs=self._scores[index],
            advantages=self._advantages[index],
            num_update_tokens=self._num_update_tokens,
        )
        self._write_micro("loss", own, update, lambda: content)
        self._write_micro("is_loss_debug", own, update, lambda: content)

    def _write_micro(self, kind: DumpKind, own: OwnBatch, update: int, make: Maker) -> None:
        batch = own.batch
        micro = self._micros[batch.index]
        key = FileKey(step=self._step, global_rank=self._runtime.global_rank, micro=micro, update=update)

        def content() -> Content:
            place = {
                "micro_idx": micro,
                "micro_batch_index": batch.index,
                "update": update,
                "epoch": self._num_passes[batch.index] - 1,
            }
            return {**self._head(), **place, **token_table(batch, self._batch), **make()}

        self._write(kind, key, content)

    def _head(self) -> Content:
        runtime = self._runtime
        return {"step": self._step, "rank": runtime.global_rank, "coordinates": dict(runtime.coordinates)}

    def _write(self, kind: DumpKind, key: FileKey, make: Maker, *, replace: bool = False) -> None:
        """Write a file to every target that wants its kind; it is made only where one does."""
        targets = [target for target in self._targets if kind in target.kinds]
        content = make() if targets else {}
        for target in targets:
            save_content(
                target.folder,
                kind,
                key,
                content,
                dump_format=target.dump_format,
                replace=replace,
            )
