"""Traces the modules' outputs: activations, routers, logits, and the gradients of the loss with respect to them.

Hooks are on a model's modules only within ``watching``. An output is taken when it is computed, in the forward pass
announced by ``computing``; its gradient when the backward pass reaches it. With recomputation a module runs again in
the backward pass: values come from the first run, and the gradient from the run with a graph. A second run must give
the bits of the first; where its fingerprint is another, its values are written as well, as ``recomputed``. Nobody names
the micro-batch of a second run, but the backward passes of a chunk come in the order of its forward passes, so the
first waiting one is meant.

An output that the backward pass of its micro-batch does not reach, as one that is detached, has a gradient of 0: the
loss does not depend on it. Where no gradient is asked for, as before the first trainable parameter, there is none.

A gradient is of the loss whose gradients all ranks add up: with ``calculate_per_token_loss`` the sum over the update's
response tokens, undivided, so micro-batches do not show; without it the mean over the update's micro-batches of each
one's mean over its tokens. Tensor parallelism leaves none of them partial: a column-parallel layer reduces its input's
gradient before the hook on the module before it sees it; heads, channels and vocabulary on one rank alone have all of
theirs there. Under context parallelism keys and values get theirs back by reduce-scatter, and under expert parallelism
tokens come back to their rank. Losses of routers are part of it, from ``mlp.router.logits`` on; with ``moe_router_impl:
megatron`` some releases scale them by tp and cp, and the trace shows it (``docs/layouts.md``).

Reading changes no bit: outputs are detached and copied, and wrapped methods return their own results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.errors import TraceError
from mock_scheduler.megatron.followable import find_captured
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.probe.observed import ObservedOutput, observed_outputs, unobserved_outputs
from mock_scheduler.megatron.probe.shares import Share, ShareBook, TokenIndex, gradient_scale, select_tokens
from mock_scheduler.megatron.probe.watches import Gather, See
from mock_scheduler.megatron.ranks import ModelRanks
from mock_scheduler.megatron.step_tokens import MicroBatchTokens
from mock_scheduler.support.text import bullet_list
from mock_scheduler.trace.entries import TraceEntry, Unobserved
from mock_scheduler.trace.selection import TraceSelection
from mock_scheduler.trace.sketch.sketch import sketch_piece

_GRADIENT: TraceKind = "activation_gradient"
_RECOMPUTED: TraceKind = "recomputed"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Tap:
    """An output under observation, its traced tensors (value, gradient), and the passes that wait for a second run.

    ``first``: of the passes without a graph, the fingerprints of what they computed; ``None`` for padding alone.
    """

    output: ObservedOutput
    has_value: bool
    has_gradient: bool
    is_compared: bool
    waiting: deque[Share] = field(default_factory=deque)
    first: deque[tuple[Share, int | None]] = field(default_factory=deque)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Pass:
    """An output with a graph, whose gradient has not come."""

    output: ObservedOutput
    share: Share
    gather: Gather | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class ModuleProbe:
    """The probe of one rank; it never communicates. ``emit`` takes each piece at once and copies all it keeps.

    selection: kinds and names. ``watching`` names an update's model, ``computing`` its micro-batches. aside: a context
    around all computation for the trace alone, such as its timing.
    """

    def __init__(
        self,
        ranks: ModelRanks,
        selection: TraceSelection,
        emit: Callable[[TraceEntry], None],
        *,
        aside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._ranks = ranks
        self._selection = selection
        self._emit = emit
        self._aside = aside
        self._shares: ShareBook | None = None
        self._unobserved: dict[Unobserved, None] = {}
        self._update = 0
        self._gradient_scale = 1.0
        self._current: Share | None = None
        self._is_bypassed = False
        self._open: dict[int, _Pass] = {}
        self._reached: set[Share] = set()

    @property
    def unobserved(self) -> tuple[Unobserved, ...]:
        """Lists the selected outputs that the watched models do not show; the same on every rank."""
        return tuple(self._unobserved)

    def start_step(self, index: TokenIndex) -> None:
        """A step with these tokens begins; the indices of its micro-batches are unique within it."""
        self._shares = ShareBook(self._ranks, index)

    @contextmanager
    def watching(self, model: ObservedModel, update: int) -> Iterator[None]:
        """Traces the model in the block: all forward and backward passes of one update.

        Raises:
            TraceError: the model is not as the tables say, or a forward pass had no backward pass.
        """
        captured = [path for chunk in model.chunks for path in find_captured(chunk)]
        if captured:
            raise TraceError(f"captured in a CUDA graph, so no hook sees their outputs:{bullet_list(captured)}")
        taps = self._taps(model)
        self._update = update
        self._gradient_scale = gradient_scale(model)
        self._open.clear()
        self._reached.clear()
        with ExitStack() as stack:
            for tap in taps:
                stack.enter_context(tap.output.row.watch(tap.output.watched, self._see(tap)))
            yield
            self._close_passes(update)

    @contextmanager
    def computing(self, own: MicroBatchTokens) -> Iterator[None]:
        """The block is one forward pass of one chunk over this share."""
        if self._shares is None:
            raise TraceError("a forward pass was announced before the step: call start_step first")
        with self._aside():
            self._current = self._shares.share(own)
        try:
            yield
        finally:
            self._current = None

    @contextmanager
    def bypassing(self) -> Iterator[None]:
        """The block is a forward pass that no update trains on: nothing of it is traced."""
        self._is_bypassed = True
        try:
            yield
        finally:
            self._is_bypassed = False

    def _taps(self, model: ObservedModel) -> list[_Tap]:
        wants = self._selection.wants
        for absent in unobserved_outputs(model):
            if wants(absent.kind, absent.name):
                self._unobserved[absent] = None
        taps = []
        for output in observed_outputs(model):
            has_value = wants(output.row.kind, output.name)
            has_gradient = output.row.has_gradient and wants(_GRADIENT, output.name)
            is_compared = wants(_RECOMPUTED, output.name)
            if has_value or has_gradient or is_compared:
                tap = _Tap(output=output, has_value=has_value, has_gradient=has_gradient, is_compared=is_compared)
                taps.append(tap)
        return taps

    def _see(self, tap: _Tap) -> See:
        """Builds the receiver of a tap's tensors, of a first pass and of one that recomputes it."""

        def see(tensor: torch.Tensor, gather: Gather | None) -> None:
            if self._is_bypassed:
                return
            # A layer's output requires a gradient in any case: Megatron adds its residual with gradients enabled.
            share, has_graph = self._current, tensor.requires_grad and torch.is_grad_enabled()
            if tap.is_compared:
                self._compare_passes(tap, tensor, gather)
            if share is not None:
                if tap.has_value:
                    self._add(tap.output, tap.output.row.kind, share, tensor, gather)
                if tap.has_gradient and not has_graph:
                    tap.waiting.append(share)
            elif tap.has_gradient and has_graph:
                if not tap.waiting:
                    raise TraceError(f"{tap.output.name}: a pass that no forward pass was announced for")
                share = tap.waiting.popleft()
            if tap.has_gradient and has_graph and share is not None:
                self._await_gradient(tap.output, share, tensor, gather)

        return see

    def _compare_passes(self, tap: _Tap, tensor: torch.Tensor, gather: Gather | None) -> None:
        """Remembers the fingerprint of a pass that will be recomputed, or hands on values that are other ones then."""
        if self._current is not None and not torch.is_grad_enabled():
            tap.first.append((self._current, self._fingerprint(tap.output, self._current, tensor, gather)))
        elif self._current is None and torch.is_grad_enabled() and tap.first:
            share, before = tap.first.popleft()
            if self._fingerprint(tap.output, share, tensor, gather) != before:
                self._add(tap.output, _RECOMPUTED, share, tensor, gather)

    def _fingerprint(
        self, output: ObservedOutput, share: Share, tensor: torch.Tensor, gather: Gather | None
    ) -> int | None:
        with self._aside(), torch.no_grad():
            tokens = share.of(output.form)
            local = select_tokens(output, tensor.detach(), gather, tokens)
            if local is None:
                return None
            assert self._shares is not None
            return sketch_piece(local, self._shares.spec(output, tokens), num_buckets=1).fingerprint

    def _close_passes(self, update: int) -> None:
        """Hands on 0 as the gradient of outputs that the backward pass of their micro-batch did not reach."""
        lost = {item.output.name for item in self._open.values() if item.share not in self._reached}
        if lost:
            raise TraceError(
                f"update {update} ended without the backward pass of a forward pass through these modules:"
                f"{bullet_list(sorted(lost))}"
            )
        for item in self._open.values():
            zeros = torch.zeros(item.shape, dtype=item.dtype, device=item.device)
            self._add(item.output, _GRADIENT, item.share, zeros, item.gather)

    def _await_gradient(
        self, output: ObservedOutput, share: Share, tensor: torch.Tensor, gather: Gather | None
    ) -> None:
        scale = self._gradient_scale
        item = _Pass(
            output=output, share=share, gather=gather, shape=tensor.shape, dtype=tensor.dtype, device=tensor.device
        )
        self._open[id(item)] = item

        def take(gradient: torch.Tensor) -> None:
            self._open.pop(id(item), None)
            self._reached.add(share)
            self._add(output, _GRADIENT, share, gradient, gather, scale=scale)

        tensor.register_hook(take)

    def _add(
        self,
        output: ObservedOutput,
        kind: TraceKind,
        share: Share,
        tensor: torch.Tensor,
        gather: Gather | None,
        *,
        scale: float = 1.0,
    ) -> None:
        """Hands on a tensor's part for the share's tokens; nothing where it is all padding."""
        tokens = share.of(output.form)
        with self._aside(), torch.no_grad():
            local = select_tokens(output, tensor.detach(), gather, tokens)
            if local is None:
                return
            local = local if scale == 1.0 else local * scale
            assert self._shares is not None
            spec = self._shares.spec(output, tokens)
            dims = ("token", *output.form.dims)
            self._emit(TraceEntry(update=self._update, kind=kind, spec=spec, tensor=local, dims=dims))
