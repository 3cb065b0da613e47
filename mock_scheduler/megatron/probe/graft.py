"""Puts a reference's tensors into a run: in one update, the named modules give, or get back, the trace's tensors.

Contract: a ``GraftProbe`` stands before the tracing probe, so the run's trace shows the graft. In the forward pass the
module's output has the reference's bits and the graph of its own (its gradient goes on unchanged); in the backward pass
the gradient arriving at the output is replaced, and everything computed before stays. With recomputation both runs of a
module get the same. Padding keeps its own values. Tokens are found by row identity and position, and each rank cuts its
own part out of the whole tensor by the probe's ``ShardSpec``.

A traced gradient is of the sum over all ranks (``shares.gradient_scale``), so a grafted one is multiplied by dp · cp
where each rank's loss is a mean: exact where dp · cp is a power of two, else within one rounding.

The choice of experts cannot be put in, since experts have built tables from it by then; the router's logits can.
Tensors by chosen expert are put in only where both runs chose the same.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.errors import TraceError
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.probe.graft_source import GraftSource, Reference
from mock_scheduler.megatron.probe.interface import StepRows, TrainingProbe
from mock_scheduler.megatron.probe.observed import ObservedOutput, observed_outputs
from mock_scheduler.megatron.probe.shares import Share, ShareBook, TokenIndex, element_places, gradient_scale
from mock_scheduler.megatron.probe.watches import Gather, See
from mock_scheduler.megatron.ranks import ModelRanks
from mock_scheduler.megatron.step_tokens import MetRows, MicroBatchTokens
from mock_scheduler.support.text import bullet_list
from mock_scheduler.trace.shards import cut_shard


class GraftProbe(TrainingProbe):
    """Puts the tensors into the steps' one update. Every rank makes one for that step."""

    def __init__(self, ranks: ModelRanks, source: GraftSource) -> None:
        self._ranks = ranks
        self._source = source
        self._config = source.config
        self._book: ShareBook | None = None
        self._order: torch.Tensor | None = None
        self._current: Share | None = None
        self._is_watching = False
        self._is_bypassed = False
        self._open: Counter[str] = Counter()
        #: How many passes of a module got the reference's tensor, by name.
        self.fired: Counter[str] = Counter()

    def start_step(self, rows: StepRows, batches: Sequence[MicroBatchTokens], models: Sequence[ObservedModel]) -> None:
        """Find the batch's tokens in the trace. Raises ``TraceError`` where it has other rows."""
        if isinstance(rows, MetRows):
            self.start_rows(self._source.index(rows), None)
        else:
            self.start_rows(TokenIndex(rows.lengths), self._source.order(rows))

    def start_rows(self, index: TokenIndex, order: torch.Tensor | None) -> None:
        """A step with these tokens begins; ``order``: where they are among the trace's tokens."""
        self._book, self._order = ShareBook(self._ranks, index), order

    @contextmanager
    def watching(self, model: ObservedModel, update: int) -> Iterator[None]:
        """Grafts the model's tensors in the block, where it is the configured update.

        Raises:
            TraceError: a tensor cannot be put in, or an awaited gradient did not arrive.
        """
        if update != self._config.update:
            yield
            return
        if self._book is None:
            raise TraceError("an update was announced before its step: call start_step first")
        wanted = [output for output in observed_outputs(model) if output.name in self._config.names]
        scale = gradient_scale(model)
        with ExitStack() as stack:
            for output in wanted:
                reference = self._source.load(output, self._order, self._book.num_tokens)
                if "slot" in output.form.dims:
                    self._check_choices(model, output, stack)
                stack.enter_context(output.row.watch(output.watched, self._see(output, reference, scale)))
            self._is_watching = True
            try:
                yield
            finally:
                self._is_watching = False
        lost = sorted(name for name, count in self._open.items() if count)
        if lost:
            raise TraceError(f"graft: no gradient arrived in some passes through these modules:{bullet_list(lost)}")

    @contextmanager
    def computing(self, own: MicroBatchTokens) -> Iterator[None]:
        """The block is one forward pass of one chunk over this share."""
        if self._is_watching:
            assert self._book is not None  # watching has asked for it
            self._current = self._book.share(own)
        try:
            yield
        finally:
            self._current = None

    @contextmanager
    def bypassing(self) -> Iterator[None]:
        """The block is a forward pass that no update trains on: nothing is put in."""
        self._is_bypassed = True
        try:
            yield
        finally:
            self._is_bypassed = False

    def check_fired(self, ranks: RankGroup) -> None:
        """Refuses a step without a graft of some named tensor on any rank. Collective, over all ranks.

        Raises:
            TraceError: on every rank, with all such names.
        """
        payloads = ranks.gather(json.dumps(dict(self.fired)).encode())
        fired: Counter[str] = Counter()
        for payload in payloads:
            fired.update(json.loads(payload))
        config = self._config
        silent = [name for name in config.names if not fired[name]]
        if silent:
            raise TraceError(
                f"graft: nothing was put in at step {config.step}, update {config.update}, for these names, since no "
                f"module that ran there shows them:{bullet_list(silent)}"
            )

    def _see(self, output: ObservedOutput, reference: Reference, scale: float) -> See:
        """Builds the receiver of a module's tensors, of a first pass and of one that recomputes it."""
        waiting: deque[Share] = deque()
        is_value = self._config.kind == "activation"

        def see(tensor: torch.Tensor, gather: Gather | None) -> torch.Tensor | None:
            if self._is_bypassed:
                return None
            has_graph = tensor.requires_grad and torch.is_grad_enabled()
            share = self._current
            if share is None:  # the backward pass runs the module again
                if not has_graph or not waiting:
                    return None
                share = waiting.popleft()
            elif not has_graph:
                waiting.append(share)
            found = self._find_elements(output, share, tensor, gather)
            if found is None:
                return None
            places, is_there = found
            book = self._book
            assert book is not None
            values = reference.cut(book, output, share.of(output.form), tensor)[is_there]
            if is_value:
                self.fired[output.name] += 1
                grafted: torch.Tensor = _Grafted.apply(tensor, places, values)
                return grafted
            if has_graph:
                return self._await_gradient(output.name, tensor, places, values if scale == 1.0 else values / scale)
            return None

        return see

    def _await_gradient(
        self, name: str, tensor: torch.Tensor, places: tuple[torch.Tensor, ...], values: torch.Tensor
    ) -> torch.Tensor:
        """Returns a copy to go on with: a module within may show the same tensor, and gets the new gradient too."""
        self._open[name] += 1

        def replace(gradient: torch.Tensor) -> torch.Tensor:
            self._open[name] -= 1
            self.fired[name] += 1
            return put_elements(gradient, places, values)

        copy = tensor.clone()
        copy.register_hook(replace)
        return copy

    def _find_elements(
        self, output: ObservedOutput, share: Share, tensor: torch.Tensor, gather: Gather | None
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor] | None:
        """The indices, one tensor for each dimension, of the share's elements, and which of them the tensor has.

        ``None`` where it has none.
        """
        with torch.no_grad():
            places = element_places(output, tensor, gather, share.of(output.form))
            if places is None:
                return None
            is_there = places >= 0
            return torch.unravel_index(places[is_there], tensor.shape), is_there

    def _check_choices(self, model: ObservedModel, output: ObservedOutput, stack: ExitStack) -> None:
        """Refuses a tensor by chosen expert where a token chose other experts than in the reference."""
        name = f"{output.name.partition('.mlp.')[0]}.mlp.router.chosen_experts"
        choice = next(item for item in observed_outputs(model) if item.name == name)
        expected = self._source.choice(name, self._order)

        def see(routing_map: torch.Tensor, gather: Gather | None) -> None:
            share, book = self._current, self._book
            if share is None or gather is None or book is None:
                return
            tokens = share.of(choice.form)
            chosen = gather(routing_map, tokens.places).cpu()
            differs = (chosen != cut_shard(expected, book.spec(choice, tokens))).any(dim=1)
            if bool(differs.any()):
                raise TraceError(
                    f"graft: {int(differs.sum())} of {len(chosen)} tokens of a micro-batch chose other experts than in "
                    f"the reference, so {output.name} cannot be put in: graft {name.rpartition('.')[0]}.logits"
                )

        stack.enter_context(choice.row.watch(choice.watched, see))


def put_elements(tensor: torch.Tensor, places: tuple[torch.Tensor, ...], values: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, laid out in memory as it is, with these values at these indices."""
    result = tensor.detach().clone()
    return result.index_put_(places, values)


class _Grafted(torch.autograd.Function):
    """The tensor with the reference's elements; its gradient goes on as that of the tensor, unchanged."""

    @staticmethod
    def forward(
        ctx: object, tensor: torch.Tensor, places: tuple[torch.Tensor, ...], values: torch.Tensor
    ) -> torch.Tensor:
        """Returns ``put_elements``, bit for bit."""
        return put_elements(tensor, places, values)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Returns the gradient itself."""
        return gradients[0], None, None
