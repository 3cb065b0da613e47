"""The instruments of one observed step: trace and graft, told of what the training computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import torch

from mock_scheduler.config.attached import AttachedRun
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.errors import TraceError
from mock_scheduler.megatron.attached.call_inputs import CallInputs
from mock_scheduler.megatron.attached.optimizer_hook import UpdateResult
from mock_scheduler.megatron.attached.tokens import TokenFinder
from mock_scheduler.megatron.micro_batches import TokenBatch
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.probe.graft import GraftProbe, GraftSource
from mock_scheduler.megatron.probe.interface import combine
from mock_scheduler.megatron.probe.selection_checks import check_patterns
from mock_scheduler.megatron.probe.step_probe import StepProbe
from mock_scheduler.support.clock import Clock
from mock_scheduler.support.run_files import TRACE_FOLDER


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
            self.trace = StepProbe(model.ranks, trace_dir, step=step, config=run.trace, clock=clock)
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


def token_loss(output: object) -> torch.Tensor | None:
    """Gives the loss of each token, ``[b, s]``, where a chunk's output is that."""
    is_loss = isinstance(output, torch.Tensor) and output.dim() == 2 and output.is_floating_point()
    return output if is_loss and isinstance(output, torch.Tensor) else None
