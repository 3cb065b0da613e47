"""Observes a training step by step, ends it after the last step that is asked for, and leaves its files.

Contract: between the boundaries of updates nothing communicates, but for messages about rows through the store. At a
boundary all ranks gather, and an error of one of them ends all. Where a step is not due, a forward pass costs a count.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mock_scheduler.config.instruments import AttachedRun
from mock_scheduler.determinism.agreement import RankGroup, do_together, share
from mock_scheduler.determinism.environment import check_unchanged
from mock_scheduler.determinism.guard import check_took_effect, read_back
from mock_scheduler.determinism.settings import is_deterministic_mode
from mock_scheduler.errors import MockSchedulerError, SchedulerError
from mock_scheduler.megatron.attached import TrainingHandle
from mock_scheduler.megatron.attached.hooks import CallInputs, ForwardPasses, UpdateResult, check_counts, watch_updates
from mock_scheduler.megatron.attached.row_exchange import RowExchange, shared_store
from mock_scheduler.megatron.attached.run_files import COMPLETED, RunFiles, edge
from mock_scheduler.megatron.attached.statements import Statements
from mock_scheduler.megatron.attached.step import OperationLogs, StepInstruments, StepNotes, token_loss
from mock_scheduler.megatron.attached.tokens import TokenFinder
from mock_scheduler.megatron.emulation.follow import TrainingOrder
from mock_scheduler.megatron.observed_model import ObservedModel, layout_of
from mock_scheduler.megatron.probe.graft_source import GraftSource
from mock_scheduler.megatron.start import apply_start
from mock_scheduler.support.digests import JSON, compute_json_digest
from mock_scheduler.support.run_output import Clock
from mock_scheduler.trace.stated_steps import StatedSteps


@dataclass(frozen=True, kw_only=True, slots=True)
class Attachment:
    """What a training was attached with.

    order: in which it adds. settings: determinism settings as they were read back. statements: what the run says about
    itself beside its trace. started_s: when it was attached, in seconds since the epoch.
    """

    run: AttachedRun
    model: ObservedModel
    order: TrainingOrder
    ranks: RankGroup
    files: RunFiles
    settings: Mapping[str, str]
    statements: Statements
    started_s: float


class AttachedTraining(TrainingHandle):
    """A training under observation, on one rank. Every rank has one."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._run, self._model, self._ranks = attachment.run, attachment.model, attachment.ranks
        self._clock = Clock()
        self._next_step = self._run.begins_at
        self._is_started = self._run.first_step == self._run.begins_at
        self._notes: StepNotes | None = None
        self._written_last: tuple[StepNotes, list[tuple[float, float]]] | None = None
        self._instruments: StepInstruments | None = None
        self._bypass: AbstractContextManager[None] = nullcontext()
        self._graft = None if self._run.graft.trace_dir is None else GraftSource(self._run.graft)
        self._are_patterns_checked = False
        self._batches: dict[str, str] = {}
        self._num_repeated = 0
        self._num_steps = 0
        self._is_over = False
        gpts = list(self._model.gpts())
        self._embeds = [bool(gpt.pre_process) for gpt in gpts]
        self._has_loss = [bool(gpt.post_process) for gpt in gpts]
        self._loss_masks: list[torch.Tensor | None] = [None] * len(gpts)
        self._exchange = RowExchange(shared_store(self._run, self._model.prefix), self._model.ranks)
        self._operations = OperationLogs(self._run, self._model, attachment.settings)
        self._passes = ForwardPasses(gpts, self)
        assert self._model.optimizer is not None  # attach has checked it
        watch_updates(self._model.optimizer, before=self._update_begins, after=self._update_ends)
        atexit.register(self._at_exit)

    # --- What the training may say ----------------------------------------------------------------------------------

    @contextmanager
    def step(self, number: int | None = None, rows: Sequence[str | int] | None = None) -> Iterator[None]:
        """Works as ``TrainingHandle.step``."""
        number = self._next_step if number is None else number
        if self._is_over:
            yield
            return
        with self._edge():
            if self._notes is not None:
                raise SchedulerError(f"run.step({number}) begins while step {self._notes.number} is not ended")
            if number < self._next_step:
                raise SchedulerError(
                    f"run.step({number}): its number must be at least {self._next_step}; steps only grow"
                )
            self._start_before(number)
            self._begin_step(
                StepNotes(number=number, is_grouped=True, ids=None if rows is None else list(map(str, rows)))
            )
        self._operations.begin(number)
        yield
        self._operations.end()
        with self._edge():
            self._end_step()

    def log(self, metrics: Mapping[str, float]) -> None:
        """Works as ``TrainingHandle.log``."""
        notes = self._notes or (None if self._written_last is None else self._written_last[0])
        if notes is not None:
            notes.logged.update({name: float(value) for name, value in metrics.items()})

    def end(self) -> None:
        """Works as ``TrainingHandle.end``."""
        if not self._is_over:
            self._is_over = True
            atexit.unregister(self._at_exit)
            self._operations.abandon()
            with self._edge():
                self._leave()

    # --- Forward passes ---------------------------------------------------------------------------------------------

    def pass_begins(self, chunk: int, number: int, call: CallInputs) -> None:
        """Works as ``PassListener`` says."""
        if self._is_over:
            return
        self._tell_pass(chunk, number, call)
        self._operations.begin(self._next_step if self._notes is None else self._notes.number)

    def _tell_pass(self, chunk: int, number: int, call: CallInputs) -> None:
        with self._edge():
            notes = self._notes or self._begin_step(StepNotes(number=self._next_step))
            self._loss_masks[chunk] = call.loss_mask
            if not self._is_instrumented(notes.number):
                return
            if self._instruments is None:
                self._instruments = self._instrument(notes)
            self._instruments.pass_begins(number, call, has_embedding=self._embeds[chunk])

    def pass_ends(self, chunk: int, output: object) -> None:
        """Works as ``PassListener`` says."""
        if self._is_over:
            return
        with self._edge():
            loss = token_loss(output) if self._has_loss[chunk] else None
            if loss is not None and self._notes is not None and self._run.observes(self._notes.number):
                self._notes.add_loss(loss, self._loss_masks[chunk])
            if self._instruments is not None:
                self._instruments.pass_ends(loss)

    def bypass_begins(self) -> None:
        """Works as ``PassListener`` says."""
        if self._instruments is not None:
            self._bypass = self._instruments.bypass()
            self._bypass.__enter__()

    def bypass_ends(self) -> None:
        """Works as ``PassListener`` says."""
        bypass, self._bypass = self._bypass, nullcontext()
        bypass.__exit__(None, None, None)

    # --- Updates ----------------------------------------------------------------------------------------------------

    def _update_begins(self) -> None:
        with self._edge():
            self._attachment.order.before_step()
            if self._is_over:
                return
            notes = self._notes or self._begin_step(StepNotes(number=self._next_step))
            if not self._is_instrumented(notes.number):
                return
            error = None
            try:
                if self._instruments is None:
                    self._instruments = self._instrument(notes)
                self._instruments.gradients_are_ready()
            except MockSchedulerError as raised:
                error = raised
            own = {"replica": self._model.ranks.dp_rank, "passes": self._passes.counts}
            check_counts(share(self._ranks, own, error), notes.number)

    def _update_ends(self, result: UpdateResult) -> None:
        if self._is_over:
            return
        if self._notes is not None and not self._notes.is_grouped:
            self._operations.end()
        with self._edge():
            notes = self._notes
            assert notes is not None  # the update has begun
            notes.results.append(result)
            self._passes.start_update()
            if self._instruments is not None:
                do_together(self._ranks, lambda: self._updated(result))
            if not notes.is_grouped:
                self._end_step()

    def _updated(self, result: UpdateResult) -> None:
        if self._instruments is not None:
            self._instruments.updated(result)

    # --- Steps ------------------------------------------------------------------------------------------------------

    def _is_instrumented(self, step: int) -> bool:
        has_graft = self._graft is not None and step == self._run.graft.step
        return self._run.observes(step) and (self._run.trace.is_due(step) or has_graft)

    def _begin_step(self, notes: StepNotes) -> StepNotes:
        self._write_metrics()
        self._notes = notes
        return notes

    def _instrument(self, notes: StepNotes) -> StepInstruments:
        finder = TokenFinder(
            self._exchange,
            self._model.ranks,
            step=notes.number,
            ids=notes.ids,
            pad_token_id=self._run.pad_token_id,
        )
        graft = self._graft if notes.number == self._run.graft.step else None
        return StepInstruments(self._run, self._model, finder, step=notes.number, graft=graft, clock=self._clock)

    def _end_step(self) -> None:
        notes, self._notes = self._notes, None
        assert notes is not None  # it has begun
        instruments, self._instruments = self._instruments, None
        self._next_step = notes.number + 1
        if self._run.observes(notes.number):
            self._close(notes, instruments)
        if self._run.last_step is not None and notes.number >= self._run.last_step:
            self._finish()
        self._start_before(self._next_step)

    def _start_before(self, step: int) -> None:
        """Gives the run its start where its first observed step comes next. Collective, and at a boundary alone."""
        if not self._is_started and step >= self._run.first_step:
            self._is_started = True
            apply_start(self._model, self._run, self._ranks)

    def _close(self, notes: StepNotes, instruments: StepInstruments | None) -> None:
        """Ends the files of a step on all ranks. Collective."""
        error, names = None, list[str]()
        if instruments is not None:
            try:
                instruments.end()
            except MockSchedulerError as raised:
                error = raised
            if instruments.finder.is_naming:
                names = instruments.finder.rows.identities
        ranks = self._model.ranks
        loss = notes.loss_sum() if ranks.tp_rank == 0 else (0.0, 0)
        gathered = share(self._ranks, {"loss": loss, "rows": names}, error)
        if instruments is not None:
            all_names = sorted(name for item in gathered for name in item["rows"])
            self._batches[str(notes.number)] = compute_json_digest(list(all_names))
            self._num_repeated += sum("~" in name for name in all_names)
            instruments.check(self._ranks, patterns=not self._are_patterns_checked)
            self._are_patterns_checked |= instruments.trace is not None
        self._num_steps += 1
        self._written_last = notes, [(total, count) for total, count in (item["loss"] for item in gathered)]

    def _write_metrics(self) -> None:
        """Writes the line of the step that ended last, so late that ``run.log`` behind ``optimizer.step`` counts."""
        last, self._written_last = self._written_last, None
        if last is not None:
            notes, losses = last
            self._attachment.files.write_metrics(notes.number, notes.metrics(losses))

    # --- The end ----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Leaves every file of the run, then ends this process. Collective."""

        def write() -> None:
            self._check_settings()
            self._write_metrics()
            self._write_end(COMPLETED)

        # No rank ends before all files are there.
        do_together(self._ranks, write)
        self._is_over = True
        # Threads of a living group end the process by SIGABRT; a training may still destroy it on its way out.
        atexit.register(_leave_group)
        raise SystemExit(0)

    def _check_settings(self) -> None:
        settings = read_back(os.environ)
        check_unchanged(self._attachment.settings, settings)
        check_took_effect(settings, deterministic=is_deterministic_mode(self._run.system_envs))

    def _at_exit(self) -> None:
        """The process exits; other ranks may be gone, so that nothing communicates."""
        self._leave()

    def _leave(self) -> None:
        """The training ended by itself: says so."""
        if self._instruments is not None:
            self._instruments.abandon()
        self._write_metrics()
        last = self._run.last_step
        # What Python leaves of an error that ended the program.
        if "last_value" in vars(sys):
            status = f"failed after step {self._next_step - 1}: {type(sys.last_value).__name__}"
        elif last is not None:
            status = f"ended by itself after step {self._next_step - 1}, before its last step {last}"
        else:
            status = COMPLETED
        self._write_end(status)

    def _write_end(self, status: str) -> None:
        facts: dict[str, JSON] = {
            "num_steps": self._num_steps,
            "steps": StatedSteps.of(self._run.trace, first=self._run.first_step, last=self._run.last_step).as_json(),
            "precision": self._run.precision,
            "train_s": self._clock.total.get("train", 0.0),
            "trace_s": self._clock.total.get("trace", 0.0),
            "batches": dict(self._batches),
            "repeated_rows": self._num_repeated,
            "forward_passes": {"trained": self._passes.num_counted, "others": self._passes.num_bypasses},
            **self._attachment.statements.as_json(),
            "not_followed": list(self._attachment.order.facts.not_followed),
            "assumed": list(self._attachment.order.facts.assumed),
            "settings": dict(self._attachment.settings),
        }
        self._attachment.files.end(
            status=status,
            layout=layout_of(self._model).describe(),
            world_size=self._model.ranks.world_size,
            facts=facts,
        )

    @contextmanager
    def _edge(self) -> Iterator[None]:
        try:
            with edge(self._run, self._ranks.global_rank, self._attachment.started_s), self._operations.aside():
                yield
        except SystemExit:
            atexit.unregister(self._at_exit)
            self._operations.abandon()
            if self._instruments is not None:
                self._instruments.abandon()
            raise


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
