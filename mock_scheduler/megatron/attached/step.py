"""One step under observation: its number and metrics so far, and the instruments that the training tells of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mock_scheduler.config.instruments import AttachedRun
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.determinism.operations import OperationLogHeader, recorder
from mock_scheduler.errors import TraceError
from mock_scheduler.megatron.attached.hooks import CallInputs, UpdateResult
from mock_scheduler.megatron.attached.tokens import TokenFinder
from mock_scheduler.megatron.observed_model import ObservedModel, strip_wrappers
from mock_scheduler.megatron.probe.graft import GraftProbe
from mock_scheduler.megatron.probe.graft_source import GraftSource
from mock_scheduler.megatron.probe.interface import combine
from mock_scheduler.megatron.probe.step_probe import StepProbe
from mock_scheduler.megatron.step_tokens import TokenBatch
from mock_scheduler.support.run_files import TRACE_FOLDER
from mock_scheduler.support.run_output import Clock
from mock_scheduler.trace.selection import check_patterns


@dataclass(kw_only=True, slots=True, eq=False)
class StepNotes:
    """One step: the number, and what it has shown so far.

    ids: the caller's, of this replica's rows. is_grouped: it is a block of ``run.step``, and has all updates in it.
    losses: by pass, sum and number of tokens, float64 on the model's device.
    """

    number: int
    is_grouped: bool = False
    ids: Sequence[str] | None = None
    results: list[UpdateResult] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)

    def add_loss(self, loss: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Notes the losses of one pass's tokens, of those with a mask that is not 0; computes no more than sums."""
        with torch.no_grad():
            kept = torch.ones_like(loss, dtype=torch.bool) if mask is None else mask != 0
            self.losses.append(torch.stack((loss.double()[kept].sum(), kept.sum().double())))

    def loss_sum(self) -> tuple[float, float]:
        """Sum and number of the losses of this rank's tokens."""
        # Exactly rounded, so the order of micro-batches does not show.
        sums = torch.stack(self.losses).tolist() if self.losses else []
        return math.fsum(total for total, _ in sums), math.fsum(count for _, count in sums)

    def metrics(self, losses: Sequence[tuple[float, float]]) -> dict[str, float]:
        """The step's metrics: means over its updates, the last learning rate, the mean loss of the ranks' tokens."""
        norms = [result.grad_norm for result in self.results if result.grad_norm is not None]
        rates = [result.learning_rate for result in self.results if result.learning_rate is not None]
        num_tokens = sum(count for _, count in losses)
        known: Mapping[str, float | None] = {
            "grad_norm": sum(norms) / len(norms) if norms else None,
            "lr": rates[-1] if rates else None,
            "lm_loss": math.fsum(total for total, _ in losses) / num_tokens if num_tokens else None,
            "num_updates": float(len(self.results)),
            "skipped_updates": float(sum(not result.succeeded for result in self.results)),
        }
        return {name: value for name, value in known.items() if value is not None} | self.logged


class StepInstruments:
    """One step on one rank, from its first forward pass with gradients on. Every rank has one for the same steps."""

    def __init__(
        self,
        run: AttachedRun,
        model: ObservedModel,
        finder: TokenFinder,
        *,
        step: int,
        graft: GraftSource | None,
        clock: Clock,
    ) -> None:
        self.finder = finder
        self.graft = None if graft is None else GraftProbe(model.ranks, graft)
        self.trace: StepProbe | None = None
        if run.trace.is_due(step):
            trace_dir = Path(run.output_dir) / TRACE_FOLDER
            is_last = step == run.last_step
            self.trace = StepProbe(model.ranks, trace_dir, step=step, config=run.trace, clock=clock, is_last=is_last)
        self._model = model
        self._probe = combine(self.graft, self.trace)
        self._update = 0
        self._watching: ExitStack | None = None
        self._computing: AbstractContextManager[None] | None = None
        self._current: TokenBatch | None = None
        # Parameters of the update before may wait for the first forward pass that needs them.
        model.gather_parameters()
        self._probe.start_step(finder.rows, [], [model])

    def pass_begins(self, number: int, call: CallInputs, *, has_embedding: bool) -> None:
        """A chunk's pass over a micro-batch begins."""
        if self._watching is None:
            self._watching = ExitStack()
            self._watching.enter_context(self._probe.watching(self._model, self._update))
        batch = self._current = self.finder.find(number, call, has_embedding=has_embedding)
        if call.named:
            self._show_inputs(batch, call)
        self._computing = self._probe.computing(batch)
        self._computing.__enter__()

    def pass_ends(self, loss: torch.Tensor | None) -> None:
        """It ended; ``loss``: of each token, where the chunk gave that (``token_loss``)."""
        assert self._computing is not None  # its beginning was told
        assert self._current is not None
        computing, self._computing = self._computing, None
        computing.__exit__(None, None, None)
        if loss is not None and loss.shape == self._current.row_ids.shape:
            values = {"lm_loss": loss.detach()}
            self._probe.tokens("loss", self._current, values, update=self._update, of_responses=False)

    def _show_inputs(self, batch: TokenBatch, call: CallInputs) -> None:
        """Shows the inputs of rows that the step has not shown; each call of a micro-batch may have others of them."""
        named = {name: value for name, value in call.named.items() if value.shape == batch.row_ids.shape}
        for name, value in named.items():
            new = self.finder.take_new(name, batch)
            if new is not None:
                self._probe.tokens("input", new, {name: value}, of_responses=False)

    def bypass(self) -> AbstractContextManager[None]:
        """The block is a pass that no update trains on."""
        return self._probe.bypassing()

    def gradients_are_ready(self) -> None:
        """All passes of the update are done, and the gradients reduced.

        Raises:
            TraceError: there were no passes, or a gradient never came.
        """
        if self._watching is None:
            raise TraceError(
                "optimizer.step was called without a forward pass with gradients since the update before: its "
                "gradients are of no rows. A training that is attached calls it once for each update"
            )
        watching, self._watching = self._watching, None
        watching.close()
        self._probe.start_update(self._update, self.finder.batches)
        self._probe.state(self._model, self._update, "gradient")

    def updated(self, result: UpdateResult) -> None:
        """The update is made."""
        if result.grad_norm is not None:
            self._probe.scalars("gradient_norm", {"grad_norm": result.grad_norm}, update=self._update)
        self._probe.state(self._model, self._update, "parameter")
        self.finder.end_update()
        self._update += 1

    def end(self) -> None:
        """Ends the trace of the step; raises ``TraceError`` where it cannot be written."""
        self.finder.check_ids()
        if self.trace is not None:
            self.trace.save()

    def check(self, ranks: RankGroup, *, patterns: bool) -> None:
        """Refuses a graft that was not put in, and globs without a match. Collective."""
        if self.graft is not None:
            self.graft.check_fired(ranks)
        if patterns and self.trace is not None:
            check_patterns(self.trace.selection, ranks)

    def abandon(self) -> None:
        """Leaves nothing of the step."""
        if self.trace is not None:
            self.trace.abandon()


class OperationLogs:
    """Writes the operations of this rank in each step, from its first forward pass to its last update, where asked."""

    def __init__(self, run: AttachedRun, model: ObservedModel, settings: Mapping[str, str]) -> None:
        self._run = run
        self._settings = settings
        self._ranks = model.ranks
        inner = [strip_wrappers(chunk) for chunk in model.chunks]
        self._modules = {"model" if len(inner) == 1 else f"model.chunk{n}": each for n, each in enumerate(inner)}
        self._open: AbstractContextManager[None] | None = None

    def begin(self, step: int) -> None:
        """The step goes on from here; does nothing where it has begun, or is not to be recorded."""
        if not self._run.trace.operations or self._open is not None or not self._run.observes(step):
            return
        header = OperationLogHeader(
            step=step,
            global_rank=self._ranks.global_rank,
            world_size=self._ranks.world_size,
            settings=dict(self._settings),
        )
        self._open = recorder.record_operations(Path(self._run.output_dir), header, modules=self._modules)
        self._open.__enter__()

    def end(self) -> None:
        """The step's last update is made; raises ``OSError`` where the log cannot be written."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)

    def abandon(self) -> None:
        """Leaves no log of the open step."""
        opened, self._open = self._open, None
        if opened is not None:
            with suppress(TraceError):
                opened.__exit__(TraceError, TraceError("the step was given up"), None)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The block is ours, so nothing in it is recorded."""
        with nullcontext() if self._open is None else _disable_current_modes():
            yield


def token_loss(output: object) -> torch.Tensor | None:
    """Gives the loss of each token, ``[b, s]``, where a chunk's output is that."""
    is_loss = isinstance(output, torch.Tensor) and output.dim() == 2 and output.is_floating_point()
    return output if is_loss and isinstance(output, torch.Tensor) else None
